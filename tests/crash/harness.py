"""Kill a training run at a random instant, resume it until it ends, and compare it with one that was left alone.

Children are forked from a process that has imported everything, so that a trial takes a fraction of a second, and
killed with SIGKILL: every rank a real process, every kill a real one.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from etude.runs.checkpoint import CheckpointStore
from etude.runs.metrics import read_metrics, read_rows
from tests.crash.workload import Case, train
from tests.processes import kill, reap, spawn


@dataclass
class Trial:
    """What came of one killed run."""

    kills: int
    inside_save: bool
    difference: str | None


def reference(case: Case, run_dir: Path) -> float:
    """Run a case undisturbed and return how long it took."""
    started = time.perf_counter()
    codes = reap(spawn(partial(train, case, run_dir), case.ranks))
    assert codes == [0] * case.ranks, f"the undisturbed run of {case} failed: {codes}"
    return time.perf_counter() - started


def killed_run(case: Case, run_dir: Path, reference_dir: Path, length_s: float, rng: random.Random) -> Trial:
    """Kill a run at a random instant, go on until it ends, and compare."""
    kills, inside = 0, False
    pids = spawn(partial(train, case, run_dir), case.ranks)
    time.sleep(rng.uniform(0.05, 1.0) * length_s)
    victims = pids if rng.random() < 0.7 else [rng.choice(pids)]
    kill(victims)
    codes = reap(pids)
    if any(code == -signal.SIGKILL for code in codes):
        kills += 1
        inside = bool(list((run_dir / "checkpoints").glob(".tmp-*")))
    codes = reap(spawn(partial(train, case, run_dir), case.ranks))
    if codes != [0] * case.ranks:
        return Trial(kills, inside, f"resuming failed with exit codes {codes}")
    return Trial(kills, inside, compare(run_dir, reference_dir))


def compare(run_dir: Path, reference_dir: Path) -> str | None:
    """Return what differs between the ends of two runs: weights, optimizer, EMA, counters, metrics, transcripts."""
    ours = CheckpointStore(run_dir / "checkpoints").load("last")
    theirs = CheckpointStore(reference_dir / "checkpoints").load("last")
    for part in ("policy", "optimizer", "ema"):
        found = differs(ours.tree[part], theirs.tree[part], part)
        if found:
            return found
    for key in ("meter", "best", "callbacks", "global_batch"):
        if ours.tree["session"][key] != theirs.tree["session"][key]:
            return f"session.{key}"
    progress = [{k: v for k, v in c.tree["session"]["progress"].items() if k != "seconds"} for c in (ours, theirs)]
    if progress[0] != progress[1]:
        return f"progress {progress}"
    rows = [[_timeless(row) for row in read_metrics(d / "metrics.jsonl")] for d in (run_dir, reference_dir)]
    if rows[0] != rows[1]:
        return f"metrics: {len(rows[0])} rows against {len(rows[1])}"
    written = [read_rows(directory / "transcripts.jsonl") for directory in (run_dir, reference_dir)]
    return None if written[0] == written[1] else f"transcripts: {len(written[0])} rows against {len(written[1])}"


def _timeless(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if not key.startswith("time")}


def differs(a: object, b: object, path: str) -> str | None:
    """Return the path of the first difference between two trees of tensors and plain values; None if there is none."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: keys"
        return next((found for key in a if (found := differs(a[key], b[key], f"{path}.{key}"))), None)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return None if a.dtype == b.dtype and torch.equal(a, b) else path
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return next((f for i, (x, y) in enumerate(zip(a, b, strict=True)) if (f := differs(x, y, f"{path}.{i}"))), None)
    return None if a == b else path
