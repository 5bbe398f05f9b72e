"""What acting and training at the same time on Ray costs, each part beside the plainest way to do the same.

- publication: weights to the state manager, over `ray.put` of the same arrays; MB per CPU second.
- replay: rows from the replay actor, over a gather from arrays in this process; samples per CPU second of the slower of
  the two processes that share the work, which is samples per second where each has a core.
- step: CPU time of a rank's step under the Ray engine, over torchrun's with as many ranks.
- rollouts: steps of a simulator by 2 rollout workers, over a bare loop in 2 processes; steps per CPU second.

Rounds are measured in turns; the median of their ratios counts, and their range is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.spread import Spread

GOALS: dict[str, tuple[str, float]] = {
    "publication": ("at least", 0.9),
    "replay": ("at least", 0.5),
    "step": ("at most", 1.05),
    "rollouts": ("at least", 0.9),
}
WIDTH, DEPTH = 1024, 24
EPISODES, FRAMES, STATE, ACTION, CHUNK, BATCH = 200, 100, 39, 4, 16, 256
STEPS, RANKS, WORKERS = 150, 2, 2
PLAYED = 3


def main(only: list[str] | None = None) -> dict[str, tuple[Spread, bool]]:
    """Print the figures that were asked for; return each with whether it meets its goal."""
    from etude.engines.ray import cluster

    measured: dict[str, Callable[[Path], Spread]] = {"publication": publication, "replay": replay, "rollouts": rollouts}
    names, found = only or list(GOALS), {}
    if "step" in names:
        found["step"] = _tell("step", step())
    if set(names) & measured.keys():
        with cluster.quiet(), cluster.connected(None, WORKERS + 1, False) as folder:
            found |= {name: _tell(name, measured[name](folder / name)) for name in names if name in measured}
    return found


def _tell(name: str, spread: Spread) -> tuple[Spread, bool]:
    word, goal = GOALS[name]
    is_met = spread.median >= goal if word == "at least" else spread.median <= goal
    print(f"ray {name}: {spread}, goal {word} {goal:g}x{'' if is_met else ', missed'}", flush=True)
    return spread, is_met


# -- weights -----------------------------------------------------------------------------------------------------------


def publication(folder: Path, rounds: int = 5) -> Spread:
    import ray

    from etude import Trainer, TrainingConfiguration
    from etude.engines.ray import start_actors
    from etude.engines.ray.publication import Publisher
    from etude.loop.distributed import Group
    from etude.loop.session import Session
    from etude.loop.strategy import make_strategy

    policy = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    data = {"x": torch.zeros(4, WIDTH), "y": torch.zeros(4, WIDTH)}
    config = TrainingConfiguration(training_steps=1, batch_size=2, device="cpu")
    trainer = Trainer(policy, data, config=config, run=False, show_progress=False)
    group = Group()
    actors = start_actors(folder)
    with Session(trainer, group, make_strategy("auto", group, False, True)).running("never") as session:
        publisher = Publisher(actors.policy_state_manager)
        arrays = {name: value.detach().numpy() for name, value in policy.state_dict().items()}
        size = sum(array.nbytes for array in arrays.values())
        ratios, rates, kept = [], [], list[Any]()
        for number in range(rounds + 1):
            plain, ours = [], []
            for turn in range(5):  # the least counts: memory of Ray's store that is new to a process costs three times
                began = time.process_time()
                kept[:] = [ray.put(arrays)]  # the one before is let go of only now, as the publisher does it
                plain.append(time.process_time() - began)
                began, then = time.process_time(), time.perf_counter()
                publisher.publish(session, 5 * number + turn)
                rates.append(size / (time.perf_counter() - then) / 1e6)
                ours.append(time.process_time() - began)
            if number:
                ratios.append(min(plain) / min(ours))
    print(f"weights of {size / 1e6:.0f} MB: {statistics.median(rates):.0f} MB/s published")
    actors.end()
    return Spread.of(ratios)


# -- replay ------------------------------------------------------------------------------------------------------------


def replay(folder: Path, rounds: int = 9, batches: int = 300) -> Spread:
    import ray

    from etude.engines.ray import start_actors
    from etude.engines.ray.online import MOST_AHEAD, DrawnAhead

    draw = np.random.default_rng(0)
    shapes = {"observation.state": (STATE,), "action": (ACTION,)}
    episodes = [
        {name: draw.normal(size=(FRAMES, *shape)).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(EPISODES)
    ]
    columns = {name: np.concatenate([one[name] for one in episodes]) for name in shapes}
    actors = start_actors(max_frames=EPISODES * FRAMES)
    for one in episodes:
        ray.get(actors.replay_buffer.add.remote(one))
    windows = {"action": list(range(CHUNK))}
    ahead = DrawnAhead(actors.replay_buffer, {"batch_size": BATCH, "windows": windows}, MOST_AHEAD)
    for key in range(2 * MOST_AHEAD):
        ahead.take(key, None)
    ratios, rates, spent = [], [], []
    for number in range(rounds):
        began = time.process_time()
        for _ in range(batches):
            _gather(columns, draw)
        bare_s = time.process_time() - began
        began, there, then = time.process_time(), _cpu_s(actors.replay_buffer), time.perf_counter()
        for key in range(batches):
            ahead.take(number * batches + key, None)
        rates.append(batches * BATCH / (time.perf_counter() - then))
        here_s, there_s = time.process_time() - began, _cpu_s(actors.replay_buffer) - there
        ratios.append(bare_s / max(here_s, there_s))
        spent.append((bare_s / batches, here_s / batches, there_s / batches))
    bare, here, there = (1e6 * statistics.median(column) for column in zip(*spent, strict=True))
    print(f"replay of {BATCH} windows of {CHUNK} actions a batch: {statistics.median(rates):.0f} samples/s;")
    print(f"  CPU of a batch: {bare:.0f} us bare, {here:.0f} us in the trainer and {there:.0f} us in the actor")
    actors.end()
    return Spread.of(ratios)


def _gather(columns: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """Draw frames and cut their windows, within their episodes, with no more than NumPy."""
    rows = draw.integers(0, EPISODES * FRAMES, BATCH)
    ends = (rows // FRAMES + 1) * FRAMES - 1
    wanted = rows[:, None] + np.arange(CHUNK)
    inside = np.minimum(wanted, ends[:, None])
    return {
        "observation.state": columns["observation.state"][rows], "action": columns["action"][inside],
        "action_is_pad": inside != wanted,
    }  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------------------

_SCRIPT = """\
import sys
from benchmarks.ray_online import train_ranks
train_ranks(sys.argv[1], sys.argv[2])
"""


def train_ranks(engine: str, said: str) -> None:
    """Train a small model on several ranks, and write down what a step of rank 0 takes of the CPU."""
    from etude import Trainer, TrainingConfiguration
    from etude.callbacks import Callback
    from etude.engines.ray import RayEngine

    class Clock(Callback):
        def __init__(self) -> None:
            self.spent: list[float] = []
            self.last = 0.0

        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            now = time.process_time()
            self.spent.append(now - self.last)
            self.last = now

        def on_fit_end(self, trainer: Any) -> None:
            if trainer.rank == 0:
                Path(said).write_text(json.dumps(self.spent[STEPS // 3 :]))

    torch.manual_seed(0)
    width = 512
    policy = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))
    data = {"x": torch.randn(4096, width), "y": torch.randn(4096, width)}

    def loss(policy: Any, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(policy(batch["x"]), batch["y"])

    config = TrainingConfiguration(training_steps=STEPS, batch_size=128, device="cpu", log_every=50)
    Trainer(
        policy, data, loss, engine=RayEngine(num_workers=RANKS) if engine == "ray" else "torch", config=config,
        run=False, loggers=[], callbacks=[Clock()], show_progress=False,
    ).fit()  # fmt: skip


def step(rounds: int = 3) -> Spread:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            medians = {}
            order = ("torch", "ray") if number % 2 else ("ray", "torch")
            for engine in order:
                said = Path(folder) / f"{engine}-{number}.json"
                script = Path(folder) / "script.py"
                script.write_text(_SCRIPT)
                launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)] if engine == "torch" else []
                command = [sys.executable, *launch, str(script), engine, str(said)]
                env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
                subprocess.run(command, check=True, env=env, timeout=600, stdout=subprocess.DEVNULL)
                medians[engine] = statistics.median(json.loads(said.read_text()))
            ratios.append(medians["ray"] / medians["torch"])
            print(f"a step of {RANKS} ranks: {1e3 * medians['ray']:.2f} ms on Ray, {1e3 * medians['torch']:.2f} ms")
    return Spread.of(ratios)


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _environment() -> str:
    return "metaworld/reach" if find_spec("metaworld") else "gym:Pendulum-v1"


def make_policy(environment: str) -> Any:
    """Return a policy for an environment, as it is before training."""
    from etude.policies import MLP
    from etude.simulation.environments import make_environment

    env = make_environment(environment)
    policy = MLP(hidden=[256, 256], normalization=dict.fromkeys(env.spec.features, "identity"))
    torch.manual_seed(0)
    policy.build(env.spec)
    env.close()
    return policy


def _bare(episodes: int) -> tuple[int, float]:
    """Play episodes in a plain loop; return the steps, and the CPU seconds that they took."""
    from etude.simulation.environments import make_environment
    from etude.simulation.seeds import episode_seed

    torch.set_num_threads(1)
    env, policy = make_environment(_environment()), make_policy(_environment()).eval()
    env.reset(0)
    steps, began = 0, time.process_time()
    with torch.no_grad():
        for number in range(episodes):
            observation, over, taken = env.reset(episode_seed(0, "train", number)), False, 0
            policy.reset()
            while not over:
                seen = {name: torch.from_numpy(np.asarray(value))[None] for name, value in observation.items()}
                outcome = env.step(policy.select_action(seen)[0].numpy())
                observation, taken = outcome.observation, taken + 1
                over = outcome.done or taken >= env.max_steps
            steps += taken
    spent = time.process_time() - began
    env.close()
    return steps, spent


def rollouts(folder: Path, rounds: int = 9) -> Spread:
    import ray

    from etude import Trainer, TrainingConfiguration
    from etude.engines.ray import start_actors
    from etude.engines.ray.mailbox import Mailbox
    from etude.engines.ray.publication import Publisher
    from etude.engines.ray.rollouts import RolloutPlan, RolloutWorker
    from etude.engines.ray.shipping import pack
    from etude.loop.distributed import Group
    from etude.loop.session import Session
    from etude.loop.strategy import make_strategy
    from etude.rollouts.online import OnlineData, OnlineSettings

    untyped: Any = ray
    settings = OnlineSettings(_environment(), keep="all", label="own", workers=WORKERS)
    config = TrainingConfiguration(training_steps=1, batch_size=2, device="cpu")
    data = OnlineData(None, settings, share=None)
    trainer = Trainer(make_policy(_environment()), data, config=config, run=False, show_progress=False)
    actors, group = start_actors(folder), Group()
    mailbox = untyped.remote(num_cpus=0)(Mailbox).remote()
    parcel = pack(trainer, None, ray.put)
    plan = RolloutPlan(trainer.policy, settings, 0)
    parcel = type(parcel)(**{**vars(parcel), "trainer": ray.put(plan)})
    with Session(trainer, group, make_strategy("auto", group, False, True)).running("never") as session:
        Publisher(actors.policy_state_manager).publish(session, 0)
    kind = untyped.remote(num_cpus=1)(RolloutWorker)
    workers = [kind.remote(number, [ray.put(parcel)], actors, mailbox, {}) for number in range(WORKERS)]
    ray.get([worker.run.remote(1) for worker in workers])
    ratios = []
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        list(pool.map(_bare, [1] * WORKERS))
        for _ in range(rounds):
            plain = _rate(list(pool.map(_bare, [PLAYED] * WORKERS)))
            before = ray.get(actors.replay_buffer.counts.remote()).env_steps
            spent = [-_cpu_s(worker) for worker in workers]
            ray.get([worker.run.remote(PLAYED) for worker in workers])
            spent = [total + _cpu_s(worker) for total, worker in zip(spent, workers, strict=True)]
            steps = ray.get(actors.replay_buffer.counts.remote()).env_steps - before
            ours = WORKERS * steps / sum(spent)
            print(f"{_environment()}: {ours:.0f} steps per CPU second of 2 rollout workers, {plain:.0f} bare")
            ratios.append(ours / plain)
    actors.end()
    return Spread.of(ratios)


def _rate(found: list[tuple[int, float]]) -> float:
    return len(found) * sum(steps for steps, _ in found) / sum(spent for _, spent in found)


def _cpu_s(worker: Any) -> float:
    import ray

    return float(ray.get(worker.__ray_call__.remote(lambda _: time.process_time())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GOALS, help="which figures")
    sys.exit(0 if all(is_met for _, is_met in main(parser.parse_args().only).values()) else 1)
