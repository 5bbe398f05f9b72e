"""Success of policies learned from demonstrations in simulation: `make bench-robot`.

Every row is one training: so many demonstrations of a task, one preset of a policy, and so many held-out episodes.
Rows are kept in a file as they are made; what is in it already is not made again, unless the preset has changed.

    python -m benchmarks.robot --suite smoke                  # minutes
    python -m benchmarks.robot --suite full --episodes 200    # hours
    python -m benchmarks.robot --tasks pick-place,reach --policies act --demos 5,10
    python -m benchmarks.robot --suite full --labels 'pusht,drawer-open (corner2)'  # those of its rows alone
    python -m benchmarks.robot --markdown                     # the rows so far, for the documentation

Rows of lerobot's ACT are made where $ETUDE_LEROBOT_PYTHON names a Python that has lerobot.
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

from benchmarks.robot_lerobot import LeRobotACT, find_python
from benchmarks.tables import Table
from etude.cli.quickstart import read_recipe
from etude.simulation.environments.metaworld_tasks import TASKS as ALL_TASKS

TASKS = (
    "pick-place", "peg-insert-side", "push", "door-open", "drawer-open", "reach", "button-press-topdown", "window-open",
    "assembly", "basketball",
)  # fmt: skip
POLICIES = ("act", "diffusion", "flow")
LEROBOT = "lerobot-act"
COMPONENTS = {
    "naive-flow": "naive_flow_matching_policy", "vfp-single": "vfp_single_expert",
    "vfp-experts": "variational_flow_matching_policy", "cfg-vqvae": "cfg_vqvae_flow_matching",
}  # fmt: skip
"""Presets of policies made of components, by what the table calls them."""
COMPONENT_TASKS = ("drawer-open", "door-open", "pick-place")
COMPONENT_STEPS = 1500
"""As many as the other presets of Meta-World take; the experts need the most time, some 4 CPU minutes."""
FEW, FEW_TASKS = "few", ("pick-place", "push")
"""The preset for few demonstrations, and the tasks of one thing and a goal on which it is measured."""
COMPARED = ("pick-place", "peg-insert-side")
"""Tasks on which lerobot's ACT is trained, too."""
IMAGE_TASKS = {"drawer-open": ("corner2",), "button-press-topdown": ("corner4",), "window-open": ("corner4",)}
"""Tasks learned from pictures, and the cameras; each has a blind control, which sees its hand alone."""
PUSHT_DEMOS = 800
PUSHT_NOISE = {"scale": 40.0, "rate": 0.04, "steps": 3}
"""Now and then the finger is pushed aside while demonstrations of PushT are recorded; the recorded action is not."""
SHARING = 10
"""How many tasks of one policy share the held-out episodes; each of more gets a tenth of them, too."""
MAX_STEPS = 300
PIXELS = 96


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

    @property
    def envs(self) -> list[str]:
        """The names of its environments."""
        return [task if task == "pusht" else f"metaworld/{task}" for task in self.tasks]

    @property
    def preset(self) -> str:
        """Which preset it trains."""
        if self.policy in COMPONENTS:
            return COMPONENTS[self.policy]
        policy = "act" if self.policy == LEROBOT else self.policy
        if self.cameras:
            return f"metaworld-images-{policy}"
        if len(self.tasks) > 1:
            return f"metaworld-{len(self.tasks)}-tasks"
        return f"pusht-{policy}" if self.tasks == ("pusht",) else f"metaworld-{policy}"

    def config(self, dataset: str, steps: int | None) -> dict[str, Any]:
        """Return what is trained."""
        if self.policy in COMPONENTS:
            return component_recipe(self.preset, dataset, self.seed, steps or COMPONENT_STEPS)
        return read_recipe(self.preset, dataset, seed=self.seed, steps=steps, augment=self.is_augmented)

    @property
    def is_augmented(self) -> bool:
        """Whether its samples are changed in training as its preset says."""
        return self.policy == FEW or self.tasks == ("pusht",)

    @property
    def noise(self) -> dict[str, Any]:
        """The noise with which its demonstrations are recorded."""
        return PUSHT_NOISE if self.tasks == ("pusht",) else {}


def suite(name: str, seed: int, *, lerobot: bool) -> Iterator[Row]:
    """Yield the rows of a suite."""
    if name == "smoke":
        yield from (Row(("pick-place",), policy, 50, seed) for policy in POLICIES)
        return
    for task in TASKS:
        policies = (*POLICIES, LEROBOT) if lerobot and task in COMPARED else POLICIES
        yield from (Row((task,), policy, 50, seed) for policy in policies)
    yield from (Row((task,), policy, 50, seed) for task in COMPONENT_TASKS for policy in COMPONENTS)
    for demos in (5, 10):
        policies = (*POLICIES, LEROBOT) if lerobot else POLICIES
        yield from (Row(("pick-place",), policy, demos, seed) for policy in policies)
    yield from (Row((task,), FEW, demos, seed) for task in FEW_TASKS for demos in (5, 10))
    yield Row(("pusht",), "mlp", PUSHT_DEMOS // 2, seed)
    yield from (Row(("pusht",), policy, PUSHT_DEMOS, seed) for policy in ("mlp", *POLICIES))
    for task, cameras in IMAGE_TASKS.items():
        yield from (Row((task,), "act", 50, seed, seen, "hand") for seen in (cameras, ()))
    yield Row(TASKS, "act", 50, seed)
    yield Row(tuple(ALL_TASKS), "mlp", 30, seed)


def component_recipe(preset: str, dataset: str, seed: int, steps: int) -> dict[str, Any]:
    """Return how a policy made of components is trained for so many steps, to which its learning rates keep."""
    from etude.config.load import load
    from etude.config.presets import presets

    changes = [f"data.datamodule.params.root={dataset or 'data'}", f"seed={seed}", f"train.seed={seed}"]
    values = load(presets()[preset], [*changes, f"training.duration={steps} steps"]).raw
    for optimizer in values["training"]["optimizers"].values():
        warmup = min(optimizer["params"]["warmup_steps"], steps // 10)
        optimizer["params"] = {**optimizer["params"], "total_steps": steps, "warmup_steps": warmup}
    kept = ("policy", "data", "trainer", "loss", "training")
    return {name: values[name] for name in kept if name in values}


def run_row(row: Row, episodes: int, folder: Path, steps: int | None, workers: int) -> dict[str, Any]:
    """Record, train and evaluate; return what came of it."""
    from etude.simulation.record import Noise, record

    name = row.tasks[0] if len(row.tasks) == 1 else f"{len(row.tasks)}-tasks"
    options: dict[str, Any] = {}
    if row.tasks != ("pusht",):
        options = {"cameras": list(row.cameras), "size": PIXELS, "state": row.state}
    noise = [f"{key}{value:g}" for key, value in row.noise.items()]
    dataset = folder / "data" / "-".join([name, str(row.demos), str(row.seed), row.state, *row.cameras, *noise])
    record(row.envs, dataset, episodes=row.demos, seed=row.seed, noise=Noise(**row.noise), options=options)
    config = row.config(str(dataset), steps)
    learn = _train_lerobot if row.policy == LEROBOT else _train
    each = -(-episodes // min(len(row.tasks), SHARING))
    return {**asdict(row), "label": row.label, **learn(row, config, dataset, each, folder, workers)}


def _train(
    row: Row, config: dict[str, Any], dataset: Path, episodes: int, folder: Path, workers: int
) -> dict[str, Any]:
    from etude.config.build import build
    from etude.config.load import load
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.reading import yaml12

    path = folder / "row.yaml"
    path.write_text(yaml12.write({**config, "loggers": []}))
    trainer = build(load(path), run=None)
    trainer.run_request, trainer.show_progress = False, False
    began, before = time.perf_counter(), _cpu_s()
    result = trainer.fit()
    spent = {"steps": result.steps, "train_s": time.perf_counter() - began, "train_cpu_s": _cpu_s() - before}
    tasks = {text: index for index, text in enumerate(LeRobotDataset(dataset, show_progress=False).tasks)}
    return {**spent, **_evaluate(row, trainer.policy, episodes, workers, tasks)}


def _train_lerobot(
    row: Row, config: dict[str, Any], dataset: Path, episodes: int, folder: Path, workers: int
) -> dict[str, Any]:
    python = find_python()
    if python is None:
        raise SystemExit(f"{LEROBOT}: set ETUDE_LEROBOT_PYTHON to a Python that has lerobot")
    policy = LeRobotACT(python, dataset, config["policy"]["params"], config["training"])
    try:
        return {**policy.trained, **_evaluate(row, policy, episodes, 0, {})}
    finally:
        policy.close()


def _evaluate(row: Row, policy: Any, episodes: int, workers: int, tasks: dict[str, int]) -> dict[str, Any]:
    from etude.simulation.evaluate import evaluate_policy

    found = evaluate_policy(
        policy, row.envs, episodes=episodes, seed=row.seed, workers=workers, options={"max_steps": MAX_STEPS},
        tasks=tasks,
    )  # fmt: skip
    return {
        "episodes": found.total.episodes, "successes": found.total.successes,
        "success": found.success, "interval": list(found.interval), "evaluate_s": found.timing["seconds"],
        "policy_ms": found.timing.get("policy_ms_mean"),
        "per_task": {rate.name: [rate.successes, rate.episodes] for rate in found.tasks},
    }  # fmt: skip


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def row_key(row: Row, episodes: int, steps: int | None) -> str:
    """Return what tells a row from others: everything that its outcome depends on."""
    config = row.config("", steps)
    parts = [asdict(row), episodes, config["policy"], config["training"]]
    if row.is_augmented and "augment" in config["data"]["params"]:
        parts.append(config["data"]["params"]["augment"])
    if row.policy in COMPONENTS:
        files = config["policy"]["params"].pop("configs").values()  # what they say counts, not where they lie
        data = {**config["data"]["params"], "root": None}
        parts += [config["trainer"], config.get("loss"), data, *(Path(file).read_text() for file in files)]
    return json.dumps([*parts, row.noise] if row.noise else parts)


TABLE = Table(
    ("task", "policy", "demos", "seed", "succeeded", "rate", "95 % interval", "steps", "CPU min"),
    (-31, -11, 5, 4, 9, 7, -17, 6, 7),
)  # fmt: skip


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table; the minutes are those of training, of one core."""
    low, high = found["interval"]
    return (
        found["label"], found["policy"], str(found["demos"]), str(found["seed"]),
        f"{found['successes']}/{found['episodes']}", f"{found['success']:.1%}", f"{low:.1%} to {high:.1%}",
        str(found["steps"]), f"{found['train_cpu_s'] / 60:.2f}",
    )  # fmt: skip


def print_markdown(rows: list[dict[str, Any]]) -> None:
    """Print the table for the documentation, and for policies of several tasks how each of these went."""
    TABLE.print_markdown(map(cells, rows))
    for found in rows:
        if len(found["tasks"]) > 1:
            print(f"\n{found['label']}, {found['policy']}, {found['demos']} demonstrations of each:\n")
            print("| task | succeeded |\n|---|---:|")
            for name, (successes, episodes) in found["per_task"].items():
                print(f"| {name.removeprefix('metaworld/')} | {successes}/{episodes} |")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("smoke", "full"), default="smoke")
    parser.add_argument("--tasks", help="comma-separated; replaces the suite")
    parser.add_argument("--labels", help="comma-separated, as in the table; all of the suite unless given")
    parser.add_argument("--policies", help="comma-separated; all of the suite unless given")
    parser.add_argument("--demos", default="50", help="comma-separated, for --tasks")
    parser.add_argument("--episodes", type=int, default=200, help="of each row; up to ten tasks share them")
    parser.add_argument("--steps", type=int, help="training steps of every row; the preset's unless given")
    parser.add_argument("--minutes", type=float, help="begin no row after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-robot"))
    parser.add_argument("--markdown", action="store_true", help="print the rows of the full suite that exist")
    return parser.parse_args(arguments)


def choose_rows(given: argparse.Namespace) -> list[Row]:
    """Return the rows that the command line asks for."""
    rows = list(suite(given.suite, given.seed, lerobot=find_python() is not None))
    policies = (given.policies or ",".join(POLICIES)).split(",")
    if given.tasks:
        return [
            Row((task,), policy, int(demos), given.seed)
            for task in given.tasks.split(",") for demos in given.demos.split(",") for policy in policies
        ]  # fmt: skip
    if given.labels is not None:
        rows = [row for row in rows if row.label in given.labels.split(",")]
    return rows if given.policies is None else [row for row in rows if row.policy in policies]


def main(arguments: list[str] | None = None) -> None:
    """Make the rows that do not exist, and print all of them."""
    given = parse(arguments)
    kept = given.folder / "rows.jsonl"
    done = {line["key"]: line for line in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    if given.markdown:
        keys = [row_key(row, given.episodes, given.steps) for row in suite("full", given.seed, lerobot=True)]
        print_markdown([done[key] for key in keys if key in done])
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    TABLE.print_line(TABLE.columns)
    for row in choose_rows(given):
        key = row_key(row, given.episodes, given.steps)
        if key not in done:
            if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
                print(f"stopped after {given.minutes:g} minutes; the same command goes on", file=sys.stderr)
                return
            done[key] = {"key": key, **run_row(row, given.episodes, given.folder, given.steps, given.workers)}
            with kept.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        TABLE.print_line(cells(done[key]))


if __name__ == "__main__":
    main()
