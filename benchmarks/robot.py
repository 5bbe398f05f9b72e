"""Success of policies learned from demonstrations in simulation: `make bench-robot`.

Every row is one training: so many demonstrations of a task, one preset of a policy, and so many held-out episodes.
Rows are kept in a file as they are made; what is in it already is not made again.

    python -m benchmarks.robot --suite smoke                  # minutes
    python -m benchmarks.robot --suite full --episodes 200    # hours
    python -m benchmarks.robot --tasks pick-place,reach --policies act --demos 5,10
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TASKS = (
    "reach", "push", "pick-place", "door-open", "drawer-open", "button-press-topdown", "window-open", "peg-insert-side",
    "assembly", "basketball", "coffee-pull", "hammer",
)  # fmt: skip
POLICIES = ("act", "diffusion", "flow", "mlp")
MULTI = TASKS[:10]
MAX_STEPS = 300


@dataclass(frozen=True)
class Row:
    """One training to be done."""

    tasks: tuple[str, ...]
    policy: str
    demos: int
    seed: int
    cameras: tuple[str, ...] = ()
    state: str = "full"
    """full, or hand: what cameras see is then not in the state. Without a camera that is the blind control."""

    @property
    def label(self) -> str:
        """A name for the table."""
        name = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        if self.state == "full":
            return name
        return f"{name} ({'+'.join(self.cameras) or 'blind'})"


def suite(name: str, seed: int) -> Iterator[Row]:
    """Yield the rows of a suite."""
    if name == "smoke":
        yield from (Row(("pick-place",), policy, 50, seed) for policy in POLICIES)
        return
    for task in TASKS:
        yield from (Row((task,), policy, 50, seed) for policy in POLICIES)
    for demos in (5, 10):
        yield from (Row(("pick-place",), policy, demos, seed) for policy in POLICIES)
    yield from (Row(MULTI, policy, 50, seed) for policy in ("act", "mlp"))
    for cameras in (("corner2",), ()):
        yield Row(("drawer-open",), "act", 50, seed, cameras, "hand")


def run_row(row: Row, episodes: int, folder: Path, steps: int | None, workers: int) -> dict[str, Any]:
    """Record, train and evaluate; return what came of it."""
    from etude.config import yaml12
    from etude.config.build import build
    from etude.config.load import load
    from etude.rollouts.evaluate import evaluate_policy
    from etude.rollouts.presets import make_config
    from etude.rollouts.record import record

    envs = [f"metaworld/{task}" for task in row.tasks]
    options: dict[str, Any] = {"cameras": list(row.cameras), "size": 96, "state": row.state}
    name = "+".join(row.tasks) if len(row.tasks) < 3 else f"{len(row.tasks)}-tasks"
    kind = "-".join([row.state, *row.cameras])
    dataset = folder / "data" / f"{name}-{row.demos}-{row.seed}-{kind}"
    record(envs, dataset, episodes=row.demos, seed=row.seed, options=options)
    config = make_config(row.policy, str(dataset), seed=row.seed, steps=steps, cameras=bool(row.cameras))
    path = folder / "row.yaml"
    path.write_text(yaml12.write({**config, "loggers": []}))
    trainer = build(load(path), run=None)
    trainer.run_request, trainer.show_progress = False, False
    began, before = time.perf_counter(), _cpu_s()
    result = trainer.fit()
    train_s, train_cpu_s = time.perf_counter() - began, _cpu_s() - before
    found = evaluate_policy(
        trainer.policy, envs, episodes=episodes, seed=row.seed, workers=workers, options={"max_steps": MAX_STEPS},
        tasks={text: index for index, text in enumerate(_tasks(dataset))},
    )  # fmt: skip
    return {
        **asdict(row), "label": row.label, "episodes": found.total.episodes, "successes": found.total.successes,
        "success": found.success, "interval": list(found.interval), "steps": result.steps,
        "train_s": train_s, "train_cpu_s": train_cpu_s, "evaluate_s": found.timing["seconds"],
        "policy_ms": found.timing["policy_ms_mean"],
        "per_task": {rate.name: [rate.successes, rate.episodes] for rate in found.tasks},
    }  # fmt: skip


def _tasks(dataset: Path) -> list[str]:
    from etude.data.lerobot.reader import LeRobotDataset

    return list(LeRobotDataset(dataset, show_progress=False).tasks)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _key(row: Row, episodes: int, steps: int | None) -> str:
    return json.dumps([asdict(row), episodes, steps])


def print_header() -> None:
    print(f"{'task':28} {'policy':10} {'demos':>5} {'seed':>4} {'succeeded':>10} {'rate':>7}  {'95 % interval':17} "
          f"{'steps':>6} {'train min':>9} {'cpu min':>8}", flush=True)  # fmt: skip


def print_row(found: dict[str, Any]) -> None:
    low, high = found["interval"]
    print(f"{found['label']:28} {found['policy']:10} {found['demos']:5d} {found['seed']:4d} "
          f"{found['successes']:4d}/{found['episodes']:<5d} {found['success']:7.1%}  {low:6.1%} to {high:6.1%}  "
          f"{found['steps']:6d} {found['train_s'] / 60:9.2f} {found['train_cpu_s'] / 60:8.2f}", flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("smoke", "full"), default="smoke")
    parser.add_argument("--tasks", help="comma-separated; replaces the suite")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--demos", default="50")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, help="training steps of every row; the preset's unless given")
    parser.add_argument("--minutes", type=float, help="begin no row after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-robot"))
    given = parser.parse_args(arguments)
    rows = list(suite(given.suite, given.seed))
    policies = given.policies.split(",")
    if given.tasks:
        rows = [
            Row((task,), policy, int(demos), given.seed)
            for task in given.tasks.split(",") for demos in given.demos.split(",") for policy in policies
        ]  # fmt: skip
    rows = [row for row in rows if row.policy in policies]
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "rows.jsonl"
    done = {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    began = time.monotonic()
    print_header()
    for row in rows:
        key = _key(row, given.episodes, given.steps)
        if key not in done:
            if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
                print(f"stopped after {given.minutes:g} minutes; the same command goes on", file=sys.stderr)
                return
            done[key] = {"key": key, **run_row(row, given.episodes, given.folder, given.steps, given.workers)}
            with kept.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        print_row(done[key])


if __name__ == "__main__":
    main()
