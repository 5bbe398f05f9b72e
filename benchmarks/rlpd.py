"""RLPD: updates per second beside a plain script's, and what it learns in gymnasium's simulators.

Updates are measured in turns, in CPU time on one thread: a step of the torch engine (losses, backward, finite guard,
Adam, targets, metrics) against a script that has nothing but the losses, `backward` and three optimizers, with one
module for each critic. Learning runs the configurations of configs/rl and evaluates them on held-out seeds. Correcting
clones a policy from 5 demonstrations of a Meta-World task, and lets `residual` learn from the task's reward on top.

    python -m benchmarks.rlpd                                                  # updates, and all that learns, seed 0
    python -m benchmarks.rlpd --only updates
    python -m benchmarks.rlpd --only learning --task pendulum --seeds 0 1 2
    python -m benchmarks.rlpd --only correcting --task pick-place --minutes 30
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.spread import Spread
from etude import Callback, Trainer, TrainingConfiguration
from etude.algorithms import RLPD
from etude.data.stream import StreamData
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import SingleProcess
from etude.policies import MLP, ResidualPolicy, SoftActorCritic
from etude.rollouts.explore import EnvironmentRollouts
from etude.types import DataSpec, Feature

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "rl"
GOAL_PER_S = 101.0
"""Updates per second with 5 critics, a batch of 128 and layers of 128 units."""
CRITICS, BATCH, WIDTH, STATE, ACTION = 5, 128, 128, 39, 4
ROUNDS, UPDATES, BATCHES = 7, 100, 16
EPISODES = 100
"""Held-out episodes of each seed of a learning task."""
TASKS = {
    "pendulum": ("pendulum-rlpd", "gym:Pendulum-v1"),
    "hopper": ("hopper-rlpd", "gym:Hopper-v5"),
    "cheetah": ("cheetah-rlpd", "gym:HalfCheetah-v5"),
}


META_WORLD = ("pick-place", "push", "peg-insert-side")
DEMOS, MAX_STEPS, SUCCESSES = 5, 250, 200
"""Demonstrations of a Meta-World task, steps of an episode, and held-out episodes."""
MINUTES = 30.0
"""Of one core, that a correction learns for."""


# ---- updates ---------------------------------------------------------------------------------------------------------


def make_batches() -> list[dict[str, Tensor]]:
    """Return a few batches of transitions that are noise."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "observation.state": torch.randn(BATCH, STATE, generator=draw),
            "next.observation.state": torch.randn(BATCH, STATE, generator=draw),
            "action": torch.rand(BATCH, ACTION, generator=draw) * 2 - 1,
            "reward": torch.randn(BATCH, generator=draw), "discount": torch.full((BATCH,), 0.99),
        }
        for _ in range(BATCHES)
    ]  # fmt: skip


@contextmanager
def etude_updates(batches: list[dict[str, Tensor]]) -> Iterator[Callable[[int], float]]:
    """Yield a function that makes some updates of ours and tells its CPU time."""
    state, action = Feature((STATE,), "float32", "state"), Feature((ACTION,), "float32", "action")
    policy = SoftActorCritic(hidden=[WIDTH, WIDTH], critics=CRITICS)
    policy.build(DataSpec({"observation.state": state, "action": action}))
    config = TrainingConfiguration(
        training_steps=1_000_000, batch_size=BATCH, lr=3e-4, optimizer="adam", clip_norm=None, num_threads=1
    )
    group = Group()
    trainer = Trainer(policy, StreamData(batches, batched=True), RLPD(), config=config, run=False, show_progress=False)
    with Session(trainer, group, SingleProcess(group)).running("never") as session:

        def run(updates: int) -> float:
            started = time.process_time()
            for _ in range(updates):
                session.take_step()
            return time.process_time() - started

        yield run


class Plain:
    """The update as a script has it: one module for each critic, three optimizers, nothing checked or logged."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        torch.manual_seed(0)
        self.batches, self.count = batches, 0
        self.actor = stack(STATE, 2 * ACTION, norm=False)
        self.critics = nn.ModuleList(stack(STATE + ACTION, 1) for _ in range(CRITICS))
        self.targets = nn.ModuleList(stack(STATE + ACTION, 1) for _ in range(CRITICS)).requires_grad_(False)
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.of_critics = torch.optim.Adam(self.critics.parameters(), 3e-4)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), 3e-4)
        self.of_alpha = torch.optim.Adam([self.log_alpha], 3e-4)

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions that are drawn, and how likely they are."""
        mean, log_std = self.actor(state).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-10, 2).exp())
        before = normal.rsample()
        action = before.tanh()
        return action, (normal.log_prob(before) - torch.log(1 - action.square() + 1e-6)).sum(-1)

    def update(self) -> None:
        """Move critics, actor, temperature and targets once."""
        batch = self.batches[self.count % len(self.batches)]
        self.count += 1
        state, later = batch["observation.state"], batch["next.observation.state"]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = self.act(later)
            joined = torch.cat([later, action], 1)
            asked = torch.randperm(CRITICS)[:2]
            least = torch.stack([self.targets[int(i)](joined) for i in asked]).amin(0)[:, 0]
            target = batch["reward"] + batch["discount"] * (least - alpha * log_prob)
        joined = torch.cat([state, batch["action"]], 1)
        loss: Any = sum((critic(joined)[:, 0] - target).square().mean() for critic in self.critics) / CRITICS
        self.of_critics.zero_grad()
        loss.backward()
        self.of_critics.step()
        action, log_prob = self.act(state)
        joined = torch.cat([state, action], 1)
        value: Any = sum(critic(joined)[:, 0] for critic in self.critics) / CRITICS
        self.of_actor.zero_grad()
        (alpha * log_prob - value).mean().backward()
        self.of_actor.step()
        self.of_alpha.zero_grad()
        (self.log_alpha.exp() * (-log_prob.detach() + 0.5 * ACTION).mean()).backward()
        self.of_alpha.step()
        with torch.no_grad():
            for slow, quick in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(quick, 0.005)

    def run(self, updates: int) -> float:
        """Make some updates and tell their CPU time."""
        started = time.process_time()
        for _ in range(updates):
            self.update()
        return time.process_time() - started


def stack(width_in: int, width_out: int, norm: bool = True) -> nn.Sequential:
    """Return a multilayer perceptron of two hidden layers."""
    layers: list[nn.Module] = []
    for width in (width_in, WIDTH):
        layers += [nn.Linear(width, WIDTH), *([nn.LayerNorm(WIDTH)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, width_out))


def measure_updates(rounds: int = ROUNDS) -> bool:
    """Print updates per second of both, and tell whether the goal is met."""
    torch.set_num_threads(1)
    batches = make_batches()
    plain = Plain(batches)
    with etude_updates(batches) as ours:
        contenders: dict[str, Callable[[int], float]] = {"etude": ours, "plain": plain.run}
        spent: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(-1, rounds):
            for name in list(contenders)[:: 1 if number % 2 else -1]:
                seconds = contenders[name](UPDATES)
                if number >= 0:  # the first round warms up
                    spent[name].append(seconds / UPDATES)
    ratios = Spread.of([a / b for a, b in zip(spent["etude"], spent["plain"], strict=True)])
    per_s = {name: 1 / statistics.median(found) for name, found in spent.items()}
    print(
        f"rlpd: updates per second of CPU time, {CRITICS} critics, batch {BATCH}, width {WIDTH}, one thread: "
        f"etude {per_s['etude']:.0f}, plain script {per_s['plain']:.0f}; time over the script's {ratios} "
        f"(goal >= {GOAL_PER_S:.0f} per second)",
        flush=True,
    )
    return per_s["etude"] >= GOAL_PER_S


# ---- learning --------------------------------------------------------------------------------------------------------


def learn(task: str, seed: int, overrides: list[str], episodes: int = EPISODES) -> dict[str, float]:
    """Train a configuration with a seed, play held-out episodes, print a row, and return it."""
    from etude.config.build import build
    from etude.config.load import load
    from etude.simulation.evaluate import evaluate_policy

    name, env = TASKS[task]
    with tempfile.TemporaryDirectory() as folder:
        config = load(CONFIGS / f"{name}.yaml", [f"training.seed={seed}", "callbacks=[]", *overrides])
        trainer = build(config, run=Path(folder) / "run")  # type: ignore[arg-type]
        began = time.process_time()
        trainer.fit()
        spent_s = time.process_time() - began
        found = evaluate_policy(trainer.policy, env, episodes=episodes, seed=seed, options={"render": False})
    earned = np.array([row.reward for row in found.rows])
    half = 1.96 * float(earned.std(ddof=1)) / math.sqrt(len(earned))
    row = {
        "seed": seed, "return": float(earned.mean()), "half": half, "env_steps": trainer.progress.env_steps,
        "cpu_min": spent_s / 60,
    }  # fmt: skip
    print(
        f"rlpd {task}: seed {seed}, {row['env_steps']:,.0f} environment steps, {row['cpu_min']:.1f} CPU minutes: "
        f"return {row['return']:.1f} +- {half:.1f} over {episodes} held-out episodes",
        flush=True,
    )
    return row


# ---- correcting ------------------------------------------------------------------------------------------------------


class StopAfter(Callback):
    """Ends training when this process has worked for so long."""

    def __init__(self, seconds: float) -> None:
        self.until = time.process_time() + seconds

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        """Look at the clock of the process."""
        if time.process_time() > self.until:
            trainer.stop("its time is up")


def clone(task: str, seed: int, folder: Path) -> Path:
    """Record demonstrations, train a policy on them, and return where it is."""
    from etude.data import LeRobotDataModule
    from etude.simulation.record import record

    record(f"metaworld/{task}", folder / "data", episodes=DEMOS, seed=seed)
    config = TrainingConfiguration(training_steps=1500, batch_size=128, lr=1e-3, schedule="cosine", seed=seed)
    data = LeRobotDataModule(root=folder / "data", show_progress=False)
    trainer = Trainer(
        MLP(hidden=[128, 128]), data, config=config, run=folder / "base", loggers=[], show_progress=False,
        eval_data=False,
    )  # fmt: skip
    trainer.fit()
    return folder / "base"


def correct(task: str, seed: int, minutes: float) -> None:
    """Clone a policy and let it be corrected for a while; print both success rates with their intervals."""
    from etude.config.restore import load_policy
    from etude.simulation.evaluate import evaluate_policy

    env, options = f"metaworld/{task}", {"max_steps": MAX_STEPS}
    with tempfile.TemporaryDirectory() as folder:
        base = clone(task, seed, Path(folder))
        start = evaluate_policy(load_policy(base), env, episodes=SUCCESSES, seed=seed, options=options)
        print(f"rlpd {task}: seed {seed}, cloned from {DEMOS} demonstrations: {start.total}", flush=True)
        trainer = Trainer(
            ResidualPolicy(str(base), scale=0.5, hidden=[128, 128]),
            EnvironmentRollouts(env, 4, slots=4, options=options),
            RLPD(gamma=0.98, reward_scale=0.1, reward_shift=-1.0, start_after=2000),
            config=TrainingConfiguration(
                training_steps=1_000_000, batch_size=128, lr=3e-4, optimizer="adam", clip_norm=None, seed=seed
            ),
            run=False, callbacks=[StopAfter(60 * minutes)], show_progress=False,
        )  # fmt: skip
        trainer.fit()
    end = evaluate_policy(trainer.policy, env, episodes=SUCCESSES, seed=seed, options=options)
    spent = f"{minutes:g} CPU minutes and {trainer.progress.env_steps:,} environment steps"
    print(f"rlpd {task}: seed {seed}, corrected for {spent}: {end.total}", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["updates", "learning", "correcting"])
    parser.add_argument("--task", choices=[*sorted(TASKS), *META_WORLD])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the configuration")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only in (None, "updates"):
        measure_updates(given.rounds)
    for task in TASKS if given.only in (None, "learning") else ():
        if given.task in (None, task):
            found = [learn(task, seed, given.set)["return"] for seed in given.seeds]
            if len(found) > 1:
                spread = f"{min(found):.1f} to {max(found):.1f}"
                print(f"rlpd {task}: mean of {len(found)} seeds {statistics.mean(found):.1f} ({spread})")
    for task in META_WORLD if given.only in (None, "correcting") else ():
        if given.task in (None, task):
            for seed in given.seeds:
                correct(task, seed, given.minutes)


if __name__ == "__main__":
    main()
