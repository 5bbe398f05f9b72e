"""Does it learn, and what does a step cost: `make bench-rl`.

    python -m benchmarks.rl                    # everything that is installed: about ten minutes on one core
    python -m benchmarks.rl --only digits,dpo  # some of it

The comparison with TRL is made where $ETUDE_TRL_PYTHON names a Python that has trl 1.16.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from benchmarks.spread import Spread
from etude import Callback, Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO
from etude.algorithms.preference import DPO
from etude.data.text import TextData
from etude.policies.language import LanguageModel
from etude.rollouts.text import TextRollouts


class Curve(Callback):
    """Keeps the rows of the log, and says the reward of each step."""

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, list[dict[str, float]]()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._began = time.process_time()

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({"step": step, "cpu": time.process_time() - self._began, **metrics})

    def first_above(self, reward: float) -> dict[str, float] | None:
        return next((row for row in self.rows if row["train/reward"] >= reward), None)


def train(policy: Any, data: Any, algorithm: Any, curve: Curve, **config: Any) -> Trainer:
    trainer = Trainer(
        policy, data, algorithm, config=TrainingConfiguration(**{"log_every": 1, **config}), run=False,
        callbacks=[curve], show_progress=False,
    )  # fmt: skip
    trainer.fit()
    return trainer


def digits() -> bool:
    """A tiny model from scratch: reward 0.95 in under 10 s."""
    curve, began = Curve("digits"), time.process_time()
    data = TextRollouts("digits", prompts_per_step=4, group_size=8, max_new_tokens=16)
    train(LanguageModel.tiny(seed=0), data, GRPO(), curve, lr=3e-3, batch_size=32, training_steps=60)
    spent, found = time.process_time() - began, curve.first_above(0.95)
    where = f"at step {found['step']:.0f}, after {found['cpu']:.1f} CPU s" if found else "not reached"
    print(f"digits, tiny model from scratch, GRPO 32 x 16 tokens: reward 0.95 {where} (goal 10 s); "
          f"60 steps in {spent:.1f} CPU s, last reward {curve.rows[-1]['train/reward']:.3f}", flush=True)  # fmt: skip
    return found is not None and found["cpu"] < 10


ADDITION: Any = {"type": "addition", "params": {"low": 1, "high": 9}}


def learn_to_add(steps: int, ahead: Literal[0, 1] = 0, seed: int = 0) -> float | None:
    """Print the rewards of SmolLM2-135M that learns to add; return the step with 0.9 of them, if there is one."""
    curve = Curve("addition")
    data = TextRollouts(ADDITION, prompts_per_step=4, group_size=8, max_new_tokens=4, ahead=ahead)
    train(LanguageModel.smollm2(), data, GRPO(), curve, lr=1e-5, batch_size=32, training_steps=steps, seed=seed)
    rewards = " ".join(f"{row['train/reward']:.2f}" for row in curve.rows)
    how = f"ahead: {ahead}, seed {seed}"
    print(f"addition, SmolLM2-135M, GRPO 32 x 4 tokens, {how}, reward by step: {rewards}", flush=True)
    found = curve.first_above(0.9)
    return found["step"] if found else None


def addition(steps: int = 12) -> bool:
    """SmolLM2-135M learns to add: 0.9 of the reward within 12 steps of 32 completions."""
    began = time.process_time()
    found = learn_to_add(steps)
    where = f"at step {found:.0f}" if found else "not reached"
    print(f"addition: 0.9 of the reward {where} (goal: within 12); "
          f"{(time.process_time() - began) / steps:.1f} CPU s a step", flush=True)  # fmt: skip
    return found is not None


def preference() -> bool:
    """DPO on pairs of a tiny model: the margin on held-out pairs rises."""
    words = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    rows = [{"prompt": f"{greeting} {word}: ", "chosen": str(number), "rejected": word}
            for greeting in ("say", "write", "tell me", "now") for number, word in enumerate(words)]  # fmt: skip
    train_rows, held_out = rows[: 3 * len(words)], rows[3 * len(words) :]
    trainer = Trainer(
        LanguageModel.tiny(seed=0), TextData(train_rows), DPO(beta=0.1), eval_data=TextData(held_out), run=False,
        config=TrainingConfiguration(lr=1e-3, batch_size=10, training_steps=40, evaluate_every=1), show_progress=False,
        callbacks=[margins := Margins()],
    )  # fmt: skip
    trainer.fit()
    print(f"dpo, tiny model, 30 pairs: margin on 10 held-out pairs {margins.found[0]:.3f} after step 1, "
          f"{margins.found[-1]:.3f} after step 40 (goal: rises)", flush=True)  # fmt: skip
    return margins.found[-1] > margins.found[0] > -1


class Margins(Callback):
    """Keeps the margin at every evaluation."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_evaluate_end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.found += [value for name, value in metrics.items() if name.endswith("margin")]


def control(goal: float = 180.0) -> bool:
    """A controller of 9,000 weights balances a pole: mean return 180 of 200 within 60 s."""
    from etude.algorithms.ppo import PPO
    from etude.policies import ActorCritic
    from etude.rollouts.explore import EnvironmentRollouts

    curve, began = Curve("control"), time.process_time()
    data = EnvironmentRollouts("gym:CartPole-v1", 16, options={"render": False, "max_steps": 200})
    algorithm = PPO(gamma=0.99, epochs=4, minibatches=4, value_clip=None)
    train(ActorCritic(), data, algorithm, curve, lr=3e-3, schedule="cosine", batch_size=64, training_steps=24)
    spent, found = time.process_time() - began, curve.first_above(goal)
    rewards = [row["train/reward"] for row in curve.rows]
    where = f"at step {found['step']:.0f}, after {found['cpu']:.1f} CPU s" if found else "not reached"
    print(f"control, CartPole, PPO 16 episodes a step: mean return {rewards[0]:.0f} at first, {goal:.0f} {where} "
          f"(goal 60 s), {statistics.fmean(rewards[-5:]):.0f} over the last 5 steps; "
          f"{data.env_steps} environment steps in {spent:.1f} CPU s", flush=True)  # fmt: skip
    return found is not None and found["cpu"] < 60 and statistics.fmean(rewards[-5:]) > 0.9 * goal


def step_costs(model: str, steps: int) -> dict[str, float]:
    """Return the CPU seconds of a step of ours, in all and by part; `model` is tiny or smollm2."""
    curve = Clock()
    tiny = model == "tiny"
    policy = LanguageModel.tiny(seed=0) if tiny else LanguageModel.smollm2()
    tasks: Any = "digits" if tiny else {"type": "addition", "params": {"low": 1, "high": 9}}
    data = TextRollouts(tasks, prompts_per_step=4, group_size=8, max_new_tokens=16)
    train(policy, data, GRPO(), curve, lr=1e-6, batch_size=32, training_steps=steps + 2)
    kept = curve.costs[2:]
    parts = {name: statistics.median(row[f"time/{name}_ms"] / 1000 for row in curve.rows[2:])
             for name in ("generate", "reward", "prepare", "step")}  # fmt: skip
    tokens = statistics.median(row["train/rollout/tokens"] for row in curve.rows[2:]) * 32
    return {"cpu": statistics.median(kept), "tokens": tokens, **parts}


class Clock(Curve):
    """Measures the CPU time of each step."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.costs: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self._before = time.process_time()

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        self.costs.append(now - self._before)
        self._before = now


TRL_ROUNDS = {"tiny": 5, "smollm2": 3}
"""A round of SmolLM2 takes 90 s."""


def compare_with_trl(model: str, steps: int, goal: float) -> bool | None:
    """Print the cost of a step beside TRL's, in rounds that take turns."""
    from benchmarks.rl_trl import TRL

    trl = TRL.find()
    if trl is None:
        print(f"{model}: no comparison with TRL; name a Python that has trl 1.16 in ETUDE_TRL_PYTHON", flush=True)
        ours = step_costs(model, steps)
    else:
        rounds = [(step_costs(model, steps), trl.step_costs(model, steps)) for _ in range(TRL_ROUNDS[model])]
        ours = min((one for one, _ in rounds), key=lambda found: found["cpu"])
        theirs = min((other for _, other in rounds), key=lambda found: found["cpu"])
    training = ours["step"] - ours["generate"] - ours["reward"] - ours["prepare"]
    other = ours["reward"] / ours["step"]
    print(f"{model}, GRPO 4 prompts x 8 completions x 16 tokens: {ours['cpu']:.3f} CPU s a step "
          f"({ours['generate'] / ours['step']:.0%} generating, {ours['prepare'] / ours['step']:.1%} preparing, "
          f"{training / ours['step']:.0%} training, {other:.1%} rewarding)", flush=True)  # fmt: skip
    if trl is None:
        return None
    ratios = Spread.of([one["cpu"] / other["cpu"] for one, other in rounds])
    speed = ours["tokens"] / ours["generate"], theirs["tokens"] / theirs["generate"]
    print(f"{model}: {ratios} of TRL's CPU time a step, {theirs['cpu']:.3f} s at best (goal {goal}); "
          f"{speed[0]:.0f} against {speed[1]:.0f} tokens/s generated (goal: not fewer)", flush=True)  # fmt: skip
    return ratios.median <= goal


AHEAD_GOAL, AHEAD_ROUNDS, AHEAD_STEPS, AHEAD_SEEDS = 1.4, 5, 4, (0, 1, 2, 3, 4)
"""A round takes about a minute on quiet cores, and so does a seed."""
AHEAD_LATER = 2
"""Steps by which the curve may come later: with 32 completions a step, seeds differ by more than this, so medians."""


def one_step_ahead() -> bool:
    """Drawing beside the training: steps per minute on two cores, and what rollouts one version old cost in steps."""
    settings: dict[str, dict[str, Any]] = {"drawn first": {}, "ahead": {"ahead": 1}, "both cores": {"num_threads": 2}}
    rates: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(AHEAD_ROUNDS):
        for name in sorted(settings, reverse=bool(number % 2)):
            rates[name].append(steps_per_minute(**settings[name]))
        torch.set_num_threads(1)
        print(f"ahead, round {number + 1} of {AHEAD_ROUNDS}, load {os.getloadavg()[0]:.1f}, steps per minute: "
              + ", ".join(f"{name} {found[-1]:.1f}" for name, found in rates.items()), flush=True)  # fmt: skip
    gains, others = ([one / base for one, base in zip(rates[name], rates["drawn first"], strict=True)]
                     for name in ("ahead", "both cores"))  # fmt: skip
    print(f"ahead: SmolLM2-135M, GRPO 2 prompts x 4 completions x 32 tokens: {Spread.of(gains)} of the steps a minute "
          f"of ahead: 0 (goal {AHEAD_GOAL}); two threads without it: {Spread.of(others)}", flush=True)  # fmt: skip
    steps: dict[Literal[0, 1], list[float]] = {0: [], 1: []}
    for seed in AHEAD_SEEDS:
        for ahead, reached in steps.items():
            reached.append(learn_to_add(16, ahead, seed) or math.inf)
    plain, late = (statistics.median(reached) for reached in steps.values())
    listed = " and ".join(", ".join(f"{step:.0f}" for step in reached) for reached in steps.values())
    print(f"ahead: 0.9 of the reward of addition comes at step {plain:.0f} without and {late:.0f} with it, the medians "
          f"of {listed} with seeds {AHEAD_SEEDS} (goal: at most {AHEAD_LATER} steps later)", flush=True)  # fmt: skip
    return statistics.median(gains) >= AHEAD_GOAL and late - plain <= AHEAD_LATER


def steps_per_minute(ahead: Literal[0, 1] = 0, num_threads: int = 1) -> float:
    """Return how many steps of SmolLM2-135M come to a minute, where drawing and training take about as long."""
    clock = WallClock()
    data = TextRollouts(ADDITION, prompts_per_step=2, group_size=4, max_new_tokens=32, ahead=ahead)
    steps: dict[str, Any] = {"training_steps": AHEAD_STEPS + 2, "batch_size": 8, "num_threads": num_threads}
    train(LanguageModel.smollm2(), data, GRPO(), clock, lr=1e-6, **steps)
    return 60 * AHEAD_STEPS / (clock.ends[-1] - clock.ends[1])


class WallClock(Curve):
    """Notes when each step ends."""

    def __init__(self) -> None:
        super().__init__("clock")
        self.ends: list[float] = []

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.ends.append(time.perf_counter())


LONG_GOAL = 1.5
"""Of the floor: half the way to 1 from 2.0, which was measured before completions were packed."""


class TimedRollouts(TextRollouts):
    """Notes the CPU time of drawing and preparing an experience, and how much there is to train on."""

    def take(self, step: int) -> Any:
        began = time.process_time()
        found = super().take(step)
        self.cpu = time.process_time() - began
        self.counted = sum(sum(rollout.loss_mask) for rollout in self.rollouts)
        self.computed = self.counted + sum(len(rollout.tokens) - sum(rollout.loss_mask)
                                           for rollout in self.rollouts if rollout.run_id == 0)  # fmt: skip
        return found


class LongClock(Clock):
    """Notes beside the CPU time of each step what of it was drawing, and what was trained on."""

    def __init__(self, data: TimedRollouts) -> None:
        super().__init__()
        self.data, self.drawn = data, list[tuple[float, int, int]]()

    def on_step_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        super().on_step_end(trainer, metrics)
        self.drawn.append((self.data.cpu, self.data.counted, self.data.computed))


def long_step(steps: int = 1) -> bool:
    """A step with long completions: what training costs beside the matrix products it cannot do without."""
    places = ("a harbour", "the desert", "a small town", "the hills", "a library", "the city", "a forest", "the sea")
    policy: Any = LanguageModel.smollm2()
    data = TimedRollouts(
        [f"Once upon a time, in {place}, there lived" for place in places], lambda task, text: text.count("e") / 64,
        prompts_per_step=8, group_size=8, max_new_tokens=64,
    )  # fmt: skip
    clock, peak = LongClock(data), gemm_peak()
    train(policy, data, GRPO(), clock, lr=1e-6, batch_size=64, training_steps=steps)
    peak = max(peak, gemm_peak())
    head = policy.causal.lm_head.weight.numel()
    layers = sum(value.numel() for value in policy.parameters()) - head
    found = []
    for whole, (drawing, counted, computed) in zip(clock.costs, clock.drawn, strict=True):
        found.append((whole, whole - drawing, 6 * (layers * computed + head * counted) / peak, counted))
    whole, training, floor, counted = min(found)
    print(f"smollm2, GRPO 8 prompts x 8 completions x 64 tokens ({counted} written): {whole:.1f} CPU s a step, "
          f"{training:.1f} of them training: {training / floor:.2f} of the {floor:.1f} s that its products take at the "
          f"measured peak of {peak / 1e9:.0f} GFLOP/s (goal {LONG_GOAL})", flush=True)  # fmt: skip
    return training / floor < LONG_GOAL


def gemm_peak() -> float:
    """Return the operations a second of the best of twenty products of float32 matrices, in CPU time."""
    left, right = torch.randn(2048, 576), torch.randn(1536, 576)
    costs = []
    for _ in range(20):
        began = time.process_time()
        torch.mm(left, right.t())
        costs.append(time.process_time() - began)
    return 2 * 2048 * 576 * 1536 / min(costs)


def redteam() -> bool:
    """The auditor raises the mean score of what it elicits beyond the baseline's interval."""
    from benchmarks import redteam as bench

    found = bench.main()
    return all(row["beyond_baseline"] for row in found)


PARTS: dict[str, Callable[[], bool | None]] = {
    "digits": digits,
    "dpo": preference,
    "control": control,
    "tiny-step": lambda: compare_with_trl("tiny", 8, 0.5),
    "addition": addition,
    "ahead": one_step_ahead,
    "smollm2-step": lambda: compare_with_trl("smollm2", 2, 0.67),
    "long": long_step,
    "redteam": redteam,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"comma-separated: {', '.join(PARTS)}")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",") if given.only else list(PARTS)
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    found = {name: PARTS[name]() for name in wanted}
    missed = [name for name, held in found.items() if held is False]
    print("all goals met" if not missed else f"missed: {', '.join(missed)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
