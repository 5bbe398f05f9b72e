"""Stress tests: does a search find more than chance, and does training on what it found help?

A policy is cloned from demonstrations of a Meta-World task. Cross-entropy search looks for its failures beside chance,
with as many episodes, from several seeds; failures are counted at three distances at which they count as distinct. Then
the expert demonstrates what failed, the policy is trained on the old demonstrations and these, and as a control on the
old ones and as many more that began by chance. All three are measured on held-out episodes, plain and disturbed by
chance, and on what was found. Everything is kept in a folder; stopped and started again, it goes on.

    python -m benchmarks.stress --folder runs/stress-benchmark
    python -m benchmarks.stress --task push --strength 0.6 --seeds 0 1 2
    python -m benchmarks.stress --only search
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.cli.acting import find_policy
from etude.redteam.robot import DisturbanceSpace, StressResult, stress_policy
from etude.redteam.robot.demonstrations import record_failures
from etude.redteam.robot.environment import units_of
from etude.redteam.robot.search import propose_by_chance
from etude.redteam.robot.stress import StressStage, prepare_stage
from etude.simulation.evaluate import evaluate_policy
from etude.simulation.results import wilson_interval

DEMOS, STEPS, MAX_STEPS = 50, 1500, 300
DISTANCES = (0.5, 0.75, 1.0)
HELD_OUT_SEED = 1000
"""The root of the vectors that policies are measured with: not that of any search."""


def etude(folder: Path, *command: str) -> None:
    """Run a command in the folder."""
    print("etude", *command, flush=True)
    subprocess.run(
        [sys.executable, "-m", "etude", *command], cwd=folder, check=True, timeout=7200, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def train(folder: Path, name: str, mix: Sequence[str], steps: int, preset: str) -> Path:
    """Train a policy on datasets, in proportion to their frames, unless it is there."""
    run = folder / "runs" / name
    if not (run / "done").exists():
        data = [f"data.params.root={mix[0]}"]
        if len(mix) > 1:
            shares = {root: float(_frames(folder / root)) for root in mix}
            data = ["data.params.root=null", f"data.params.mix={json.dumps(shares)}"]
        etude(
            folder, "train", preset, *data, "callbacks=[]", "training.best_metric=eval/loss",
            "training.best_mode=min", f"training.training_steps={steps}", f"run.name={name}",
        )  # fmt: skip
        (run / "done").touch()
    return run


def _frames(root: Path) -> int:
    return int(json.loads((root / "meta" / "info.json").read_text())["total_frames"])


def count_distinct(space: DisturbanceSpace, result: StressResult, search: str, distance: float) -> int:
    """Count failures that are further from each other than a distance."""
    found = np.array([one.vector for one in result.failures(search)])
    return len(space.distinct(found, distance)) if len(found) else 0


def search(args: argparse.Namespace, policy: Any) -> list[StressResult]:
    """Search from each seed beside chance, and print how they compare."""
    results = []
    for seed in args.seeds:
        began = time.perf_counter()
        result = stress_policy(
            policy, args.env, args.folder / f"search-{seed}", search=args.search, episodes=args.episodes, seed=seed,
            strength=args.strength, disturb=args.disturb, options={"max_steps": MAX_STEPS}, videos=0,
            policy_name=f"{args.task}, {args.preset}",
        )  # fmt: skip
        results.append(result)
        for tally in result.tallies:
            counts = [count_distinct(result.space, result, tally.name, distance) for distance in DISTANCES]
            told = ", ".join(f"{count} at {distance}" for count, distance in zip(counts, DISTANCES, strict=True))
            likely = "" if tally.median is None else f"; median plausibility {tally.median:.1%}"
            print(f"seed {seed} {tally.name}: {tally.failures}/{tally.episodes} failed, distinct {told}{likely}")
        for name in args.search:
            ours, chance = result.tally(name).distinct, result.tally("random").distinct
            print(f"seed {seed} {name}: {ours / max(1, chance):.2f} times as many as chance", flush=True)
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    return results


def measure(args: argparse.Namespace, run: Path, found: StressResult) -> dict[str, list[int]]:
    """Return successes and episodes of a policy: plain, disturbed by chance, and in the failures that were found."""
    kept = run / "stress-rates.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    policy = find_policy(str(run))
    plain = evaluate_policy(policy, args.env, episodes=args.held_out, options={"max_steps": MAX_STEPS})
    stage = prepare_stage(
        policy, args.env, args.disturb, args.strength, HELD_OUT_SEED, {"max_steps": MAX_STEPS}, None, 0, None
    )
    stage.units = units_of(find_policy(str(args.folder / "runs" / "before")).spec)  # as strong for each of them
    vectors = propose_by_chance(stage.space, HELD_OUT_SEED, 0, args.held_out)
    rates = {"plain": [sum(bool(row.success) for row in plain.rows), len(plain.rows)]}
    rates["disturbed"] = _succeeded(stage, vectors)
    failures = [one.vector for _, one in found.likeliest(args.found)]
    rates["found"] = _succeeded(stage, np.array(failures))
    kept.write_text(json.dumps(rates))
    return rates


def _succeeded(stage: StressStage, vectors: Any) -> list[int]:
    episodes = stage.play(dict(enumerate(vectors)))
    return [sum(not one.failed for one in episodes), len(episodes)]


def train_and_compare(args: argparse.Namespace, results: Sequence[StressResult], policy: Any) -> None:
    """Train on what the first search found, and on as many demonstrations by chance; print the rates of all."""
    found, held_out = results[0], results[-1]
    hard = args.folder / "data" / "hard"
    done = record_failures(found, hard, units=units_of(policy.spec))
    print(f"the expert succeeds in {done.episodes} of {done.attempts} failures", flush=True)
    runs = {
        "before": args.folder / "runs" / "before",
        "with failures": train(args.folder, "failures", ["data/demos", "data/hard"], args.steps, args.preset),
    }
    if args.control:
        more = f"data/more-{done.episodes}"
        etude(args.folder, "record", "--env", args.env, "--episodes", str(done.episodes), "--root", more, "--seed", "1")
        runs["with as many by chance"] = train(args.folder, "more", ["data/demos", more], args.steps, args.preset)
    for name, run in runs.items():
        for where, (good, total) in measure(args, run, held_out).items():
            low, high = wilson_interval(good, total)
            print(f"{name:>24} {where:>10}: {good}/{total} = {good / total:.1%} ({low:.1%} to {high:.1%})", flush=True)


def main() -> None:
    """Run what is missing, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/stress-benchmark"))
    parser.add_argument("--task", default="pick-place")
    parser.add_argument("--preset", default="metaworld-act")
    parser.add_argument("--demos", type=int, default=DEMOS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--found", type=int, default=50, help="failures of the last search that policies are tried on")
    parser.add_argument("--strength", type=float, default=0.3)
    parser.add_argument("--disturb", nargs="*", default=[])
    parser.add_argument("--search", nargs="+", default=["cross_entropy"])
    parser.add_argument("--only", choices=["search"])
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.env = f"metaworld/{args.task}"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "data" / "demos" / "meta" / "info.json").exists():
        etude(args.folder, "record", "--env", args.env, "--episodes", str(args.demos), "--root", "data/demos")
    policy = find_policy(str(train(args.folder, "before", ["data/demos"], args.steps, args.preset)))
    results = search(args, policy)
    if args.only != "search":
        train_and_compare(args, results, policy)


if __name__ == "__main__":
    main()
