"""Success of policies that learn while they act, from 5 demonstrations: `make bench-online`.

Every row is one training of a preset in configs/online and so many held-out episodes; `start` is the same policy on the
demonstrations alone. Rows are kept in a file as they are made; what is in it already is not made again, unless the
preset has changed. One core and one process: the CPU minutes are those of updates and simulation together.

    python -m benchmarks.online                                  # every row of three seeds
    python -m benchmarks.online --seeds 0 --tasks pick-place     # some
    python -m benchmarks.online --markdown                       # the rows so far, for the documentation
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.tables import Table

DEMOS = 5
MAX_STEPS = 300
METHODS = {"start": "dagger", "dagger": "dagger", "self-imitation": "self-imitation"}
"""The preset of each method; that of `start` without what is played."""
PEG = "peg-insert-side"
PRESETS = {(PEG, "start"): "dagger-peg", (PEG, "dagger"): "dagger-peg", (PEG, "self-imitation"): "dagger-peg"}
"""Presets of tasks that need others."""
CHANGES = {
    ("push", "self-imitation"): ["training.training_steps=10000"],
    (PEG, "self-imitation"): [
        "online.label=own", "online.share=0.5", "online.start_after=1000", "online.episodes_per_round=10",
        "online.noise=0.2", "online.options.max_steps=200", "training.training_steps=6000",
    ],
}  # fmt: skip
"""What rows change in them."""
TASKS = ("pick-place", "push", PEG)
GOALS = {("pick-place", "dagger"): (0.97, 3.0), ("push", "dagger"): (0.97, 3.0), (PEG, "dagger"): (0.8, 15.0)}
"""What is asked for: success, and CPU minutes."""
BEYOND_START = {("pick-place", "self-imitation"): 30.0, ("push", "self-imitation"): 30.0}
"""Where more is asked for than the 95 % interval of the same seed's start, and in how many CPU minutes."""


@dataclass(frozen=True)
class Row:
    """One training to be done."""

    task: str
    method: str
    seed: int

    @property
    def preset(self) -> str:
        """Which preset it trains."""
        return PRESETS.get((self.task, self.method), METHODS[self.method])

    @property
    def env(self) -> str:
        """Where it acts."""
        return f"metaworld/{self.task}"

    def values(self, steps: int | None) -> dict[str, Any]:
        """Return the configuration without where its demonstrations lie."""
        from etude.config.load import load

        found: dict[str, Any] = load(self.preset, self.overrides("", steps)).raw
        if self.method == "start":
            found.pop("online", None)
        return {name: found[name] for name in ("policy", "algorithm", "online", "training") if name in found}

    def overrides(self, dataset: str, steps: int | None) -> list[str]:
        """Return what the row changes in its preset."""
        changes = [f"data.params.root={dataset or 'data'}", f"training.seed={self.seed}", f"online.env={self.env}"]
        changes += ["callbacks=[]", "loggers=[]", "training.best_metric=eval/loss", "training.best_mode=min"]
        changes += ["training.save_every=null", "run.name=null", *CHANGES.get((self.task, self.method), [])]
        return changes if steps is None else [*changes, f"training.training_steps={steps}"]


def suite(seeds: list[int], tasks: list[str], methods: list[str]) -> Iterator[Row]:
    """Yield the rows, the first seed of everything first."""
    yield from (Row(task, method, seed) for seed in seeds for task in tasks for method in methods)


def run_row(row: Row, episodes: int, folder: Path, steps: int | None) -> dict[str, Any]:
    """Record, train and evaluate; return what came of it."""
    from etude.config.build import build
    from etude.config.load import load
    from etude.reading import yaml12
    from etude.simulation.evaluate import evaluate_policy
    from etude.simulation.record import record

    values = row.values(steps)
    dataset = folder / "data" / f"{row.task}-{DEMOS}-{row.seed}"
    record(row.env, dataset, episodes=DEMOS, seed=row.seed)
    data = {"type": "lerobot", "params": {"root": str(dataset), "show_progress": False}}
    path = folder / "row.yaml"
    path.write_text(yaml12.write({**values, "data": data, "loggers": []}))
    trainer = build(load(path))
    trainer.run_request, trainer.show_progress = False, False
    began, before = time.perf_counter(), cpu_s()
    result = trainer.fit()
    spent = {"steps": result.steps, "train_s": time.perf_counter() - began, "train_cpu_s": cpu_s() - before}
    found = evaluate_policy(
        trainer.policy, row.env, episodes=episodes, seed=row.seed, split="test", options={"max_steps": MAX_STEPS}
    )
    source: Any = getattr(trainer.data, "source", None)
    return {
        **asdict(row), **spent, "env_steps": trainer.progress.env_steps, "played": getattr(source, "played", 0),
        "episodes": found.total.episodes, "successes": found.total.successes, "success": found.success,
        "interval": list(found.interval),
    }  # fmt: skip


def cpu_s() -> float:
    """Return the seconds of a core that this process has taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def row_key(row: Row, episodes: int, steps: int | None) -> str:
    """Return what tells a row from others: everything that its outcome depends on."""
    return json.dumps([asdict(row), episodes, DEMOS, row.values(steps)])


TABLE = Table(
    ("task", "method", "seed", "succeeded", "rate", "95 % interval", "updates", "episodes", "env steps", "CPU min"),
    (-16, -15, 4, 9, 7, -17, 7, 8, 9, 7),
)  # fmt: skip


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table; the minutes are those of updates and simulation, of one core."""
    low, high = found["interval"]
    return (
        found["task"], found["method"], str(found["seed"]), f"{found['successes']}/{found['episodes']}",
        f"{found['success']:.1%}", f"{low:.1%} to {high:.1%}", str(found["steps"]), str(found["played"]),
        str(found["env_steps"]), f"{found['train_cpu_s'] / 60:.2f}",
    )  # fmt: skip


def missed(rows: list[dict[str, Any]], known: Iterable[dict[str, Any]] = ()) -> list[str]:
    """Return the goals that rows have not met, in words; starts may be among other rows that are known."""
    starts = {(found["task"], found["seed"]): found for found in [*known, *rows] if found["method"] == "start"}
    words = []
    for found in rows:
        what = found["task"], found["method"]
        success, minutes = GOALS.get(what, (0.0, BEYOND_START.get(what, float("inf"))))
        asked, is_missed = f"{success:.0%}", found["success"] < success
        if what in BEYOND_START:
            start = starts.get((found["task"], found["seed"]))
            if start is None:
                words.append(f"{', '.join(what)}, seed {found['seed']}: make the row of its start to compare it with")
                continue
            success = start["interval"][1]
            asked, is_missed = f"more than the start's {success:.1%}", found["success"] <= success
        if is_missed or found["train_cpu_s"] > 60 * minutes:
            words.append(
                f"{found['task']}, {found['method']}, seed {found['seed']}: {found['success']:.1%} in "
                f"{found['train_cpu_s'] / 60:.2f} CPU minutes; asked for {asked} in {minutes:g}"
            )
    return words


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--episodes", type=int, default=200, help="held-out episodes of each row")
    parser.add_argument("--steps", type=int, help="updates of every row; the preset's unless given")
    parser.add_argument("--minutes", type=float, help="begin no row after this long")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-online"))
    parser.add_argument("--markdown", action="store_true", help="print the rows that exist")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Make the rows that do not exist, print all of them, and return 1 where a goal was missed."""
    given = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = given.folder / "rows.jsonl"
    done = {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    rows = list(suite([int(s) for s in given.seeds.split(",")], given.tasks.split(","), given.methods.split(",")))
    if given.markdown:
        rows.sort(key=lambda row: (list(TASKS).index(row.task), list(METHODS).index(row.method), row.seed))
        keys = [row_key(row, given.episodes, given.steps) for row in rows]
        TABLE.print_markdown(cells(done[key]) for key in keys if key in done)
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    began, made = time.monotonic(), []
    TABLE.print_line(TABLE.columns)
    for row in rows:
        key = row_key(row, given.episodes, given.steps)
        if key not in done:
            if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
                print(f"stopped after {given.minutes:g} minutes; the same command goes on", file=sys.stderr)
                break
            done[key] = {"key": key, **run_row(row, given.episodes, given.folder, given.steps)}
            with kept.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        made.append(done[key])
        TABLE.print_line(cells(done[key]))
    starts = (row_key(replace(row, method="start"), given.episodes, given.steps) for row in rows)
    for words in (found := missed(made, [done[key] for key in starts if key in done])):
        print(f"missed: {words}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
