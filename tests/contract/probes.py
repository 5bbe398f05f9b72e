"""One probe per guarantee: makes real runs in real processes and returns what was found, or fails by assertion."""

from __future__ import annotations

import logging
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.data.coerce import as_data
from etude.errors import NonFiniteError
from etude.runs.checkpoint import CheckpointStore
from etude.runs.directory import Run
from etude.runs.metrics import read_metrics
from etude.types.protocols import Place
from tests.contract.subjects import GLOBAL_BATCH, SETTINGS, BrokenData, KilledOnce, SendSignal, Subject, train
from tests.crash.harness import compare, differs
from tests.crash.workload import Noisy
from tests.processes import kill, reap, run_ranks, spawn, wait_for, wait_for_step

ALONE = Subject("torch")


def launch(subject: Subject, run: Path, **options: Any) -> list[int]:
    """Run a subject to its end and return the ranks' exit codes; what it says is kept beside the run."""
    return run_ranks(partial(_child, subject, run, options), subject.processes, 240.0 if subject.has_driver else 60.0)


_whole: dict[str, tuple[Path, float]] = {}
_folder = tempfile.TemporaryDirectory(prefix="etude-contract-")


def undisturbed(subject: Subject, **options: Any) -> tuple[Path, float]:
    """Return a run that is left alone, and the seconds that it took; the probes share it, and must not change it."""
    key = f"{subject} {sorted(options.items())}"
    if key not in _whole:
        run, began = Path(_folder.name) / str(len(_whole)), time.perf_counter()
        shutil.rmtree(run, ignore_errors=True)  # of a launch that failed
        assert launch(subject, run, **options) == good(subject)
        _whole[key] = run, time.perf_counter() - began
    return _whole[key]


def _child(subject: Subject, run: Path, options: dict[str, Any]) -> None:
    sys.stdout = sys.stderr = run.with_suffix(".said").open("a", buffering=1)
    logging.getLogger().addHandler(logging.StreamHandler())
    (_doors().train if subject.is_door else train)(subject, run, **options)


def _doors() -> Any:
    from tests.contract import doors  # transformers and Lightning, which not every test has

    return doors


def good(subject: Subject) -> list[int]:
    """The exit codes of a run that ended well."""
    return [0] * subject.processes


def last(run: Path) -> Any:
    """The newest checkpoint of a run."""
    return CheckpointStore(run / "checkpoints").load("last")


def end_of(subject: Subject, run: Path) -> Any:
    """Return the tree of a run's newest good checkpoint, with its step."""
    if subject.is_door:
        return _doors().end_of(subject, run)
    found = last(run)
    return {"step": found.step, **found.tree}


def difference(subject: Subject, run: Path, other: Path) -> str | None:
    """Return what differs between the ends of two runs, metrics included; None if nothing."""
    if not subject.is_door:
        return compare(run, other)
    rows = [_doors().Rows(folder).read() for folder in (run, other)]
    found = differs(end_of(subject, run), end_of(subject, other), "checkpoint")
    return found or (None if rows[0] == rows[1] else "metrics")


def largest_difference(ours: Any, theirs: Any, *parts: str) -> float:
    """Return by how much the ends of two runs differ at most."""
    assert ours["step"] == theirs["step"]
    return max(
        (ours[part][name].double() - value.double()).abs().max().item()
        for part in parts for name, value in theirs[part].items() if isinstance(value, torch.Tensor)
    )  # fmt: skip


def parity(subject: Subject, folder: Path) -> str:
    """Fifty steps with everything on give the weights of the torch engine in one process."""
    if subject.is_door:
        return parity_of_doors(subject, folder)
    alone, run = undisturbed(ALONE)[0], folder / "run"
    if subject == ALONE:
        assert launch(subject, run) == good(subject)  # the second of two runs
    else:
        run = undisturbed(subject)[0]
    if subject.ranks == 1:
        assert compare(run, alone) is None
        return "bit for bit"
    assert largest_difference(end_of(subject, run), end_of(ALONE, alone), "policy", "ema") < 1e-6
    return "within 1e-6"


_BARE: dict[str, Any] = {"warmup_steps": 0, "weight_decay": 0.0}
"""Without what transformers does in its own way: how rates warm up, and which weights decay."""


def parity_of_doors(subject: Subject, folder: Path) -> str:
    """The same over one loader and without what a door leaves to its own library, averaged weights among it.

    Lightning's has our optimizers with their schedules.
    """
    options = _BARE if subject.engine == "BaseTrainer" else {"weight_decay": 0.01}
    alone = undisturbed(ALONE, loads=True, ema_decay=None, **options)[0]
    assert launch(subject, folder / "run", **options) == good(subject)
    assert largest_difference(end_of(subject, folder / "run"), end_of(ALONE, alone), "policy") < 1e-6
    if subject == Subject("BaseTrainer"):  # with two ranks transformers evaluates some samples twice
        rows = _doors().Rows(folder / "run").read()
        found = {int(step): row["eval_loss"] for step, row in rows.items() if "eval_loss" in row}
        theirs = {row["step"]: row.get("eval/loss") for row in read_metrics(alone / "metrics.jsonl")}
        assert found == pytest.approx({step: loss for step, loss in theirs.items() if loss is not None}, rel=1e-6)
    return "within 1e-6, over one loader"


def exact_resume(subject: Subject, folder: Path) -> str:
    """Runs killed anywhere end as one that was left alone: weights, optimizer, averages, rates, metrics.

    At one random instant; tests/crash has many.
    """
    if subject.has_driver:
        return exact_resume_of_workers(subject, folder)
    whole, length_s = undisturbed(subject)
    run, draw = folder / "killed", random.Random(str(subject))
    pids = spawn(partial(_child, subject, run, {}), subject.processes)
    time.sleep(draw.uniform(0.2, 0.8) * length_s)
    kill(pids)
    reap(pids)
    assert launch(subject, run) == good(subject)
    assert difference(subject, run, whole) is None
    # One for certain, after a step whose number is known.
    assert launch(subject, folder / "sure", callbacks=[SendSignal(23, signal.SIGKILL)]).count(-signal.SIGKILL) > 0
    assert launch(subject, folder / "sure") == good(subject)
    assert difference(subject, folder / "sure", whole) is None
    return "bit for bit"


def exact_resume_of_workers(subject: Subject, folder: Path) -> str:
    """A worker is killed and the driver starts the group again; then the driver is killed, and started again."""
    run, draw = folder / "killed", random.Random(str(subject))
    options = {"kind": KilledOnce, "engine": {"max_failures": 1}}
    pids = spawn(partial(_child, subject, run, options), subject.processes)
    wait_for(run / "killed", 240.0)
    wait_for_step(run / "checkpoints", 30, 240.0)
    time.sleep(draw.uniform(0.0, 0.05))
    kill(pids)
    assert reap(pids) == [-signal.SIGKILL]
    assert launch(subject, run) == good(subject)
    assert difference(subject, run, undisturbed(peer(subject))[0]) is None
    return "bit for bit"


def peer(subject: Subject) -> Subject:
    """Return who makes the run to compare with: the subject, or the torch engine where starting takes long."""
    return Subject("torch", subject.ranks) if subject.has_driver else subject


def exact_accumulation(subject: Subject, folder: Path) -> str:
    """Every split of one global batch, of samples with unequal weights, makes the same update."""
    options: dict[str, Any] = {"plain": True, "training_steps": 3, "precision": "float64", "evaluate_every": None}
    one_piece = {"batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}
    if subject.is_door:
        options |= {**_BARE, "save_every": 1}
    whole = undisturbed(ALONE, loads=subject.is_door, **options, **one_piece)[0]
    share = GLOBAL_BATCH // subject.ranks
    for batch_size in (size for size in ((1,) if subject.has_driver else (8, 4, 2, 1)) if size <= share):
        run = folder / f"by-{batch_size}"
        split = {"batch_size": batch_size, "gradient_accumulation_steps": share // batch_size}
        assert launch(subject, run, **options, **split) == good(subject)
        assert largest_difference(end_of(subject, run), end_of(ALONE, whole), "policy") < 1e-12
    return "1e-12 in float64"


def sample_of_step(step: int) -> int:
    """Return a sample that is first used in a certain step."""
    data = as_data(Noisy(37, augment=False))
    data.open(Place(SETTINGS["seed"], batch_size=GLOBAL_BATCH))
    return int(data.ids(step)[0][0])


def finite_guard(subject: Subject, folder: Path) -> str:
    """A sample that is not a number stops the run before the update, and the error says where."""
    run, bad = folder / "run", sample_of_step(3)
    codes = launch(subject, run, bad=bad, save_every=1)
    assert codes == [NonFiniteError.exit_code] * subject.processes
    found = end_of(subject, run)
    assert all(torch.isfinite(value).all() for value in found["policy"].values())
    said = run.with_suffix(".said").read_text()
    assert found["step"] == 3 and "step 3" in said, "three steps were good and saved; the one after them is named"
    named = {sample for listed in re.findall(r"samples \[([^\]]*)\]", said) for sample in listed.split(", ")}
    assert str(bad) in named, "the bad sample is named"
    assert len(set(re.findall(r"step 3, rank (\d+): ", said))) == 1, "only the rank that has it is to blame"
    assert subject.is_door or Run(run).status()["state"] == "failed"
    return "yes"


def safe_checkpoints(subject: Subject, folder: Path) -> str:
    """Damaged checkpoints are found, said, and the one before them used: the run ends as if nothing had happened."""
    whole = undisturbed(peer(subject))[0]
    damages = {30: (_flip, "safetensors"), 25: (_cut, "safetensors"), 20: (_delete, "safetensors"), 15: (_flip, "json")}
    run = folder / "damaged"
    shutil.copytree(whole, run, symlinks=True)
    paths = checkpoints(subject, run)
    for step, path in paths.items():
        if step > 30:
            shutil.rmtree(path)
        elif step in damages:
            damage, kind = damages[step]
            damage(max(path.glob(f"*.{kind}"), key=lambda path: path.stat().st_size))
    assert launch(subject, run) == good(subject)
    said = run.with_suffix(".said").read_text()
    for step in damages:
        assert paths[step].name in said, "nothing was said of the damaged checkpoint"
    assert difference(subject, run, whole) is None
    return "yes"


def checkpoints(subject: Subject, run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their step."""
    if subject.is_door:
        found: dict[int, Path] = _doors().checkpoints(subject, run)
        return found
    return {step: run / "checkpoints" / f"step-{step:08d}" for step in CheckpointStore(run / "checkpoints").steps()}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _delete(path: Path) -> None:
    path.unlink()


def full_length(subject: Subject, folder: Path) -> str:
    """A run that is stopped or fails early never exits with 0; what it had is saved, and a second run completes it."""
    run = folder / "stopped"
    codes = launch(subject, run, callbacks=[SendSignal(12, signal.SIGTERM)])
    assert codes == [128 + signal.SIGTERM] * subject.processes
    heard = 12 if subject == Subject("lightning.Trainer") else 13  # which looks between two batches
    assert end_of(subject, run)["step"] == heard, "a signal after step 12 is heard in the next one, which is saved"
    if not subject.has_driver:  # where going on, and failing, are probed elsewhere: in exact resume and finite guard
        assert launch(subject, run) == good(subject)
        assert end_of(subject, run)["step"] == 50
        assert 0 not in launch(subject, folder / "failed", kind=BrokenData)
    return "yes"


GUARANTEES: dict[str, tuple[str, Callable[[Subject, Path], str]]] = {
    "parity": ("same config, same seed: the weights of the torch engine in one process", parity),
    "exact resume": ("killed anywhere, resumed: same weights, optimizer, EMA, LR and metrics", exact_resume),
    "exact accumulation": ("any (micro, accumulate, world) split gives the same update", exact_accumulation),
    "finite guard": ("NaN or infinity stops before the update and names step, rank and samples", finite_guard),
    "safe checkpoints": ("hashed, renamed once; a damaged one is found and the previous one used", safe_checkpoints),
    "full length": ("never exits 0 having trained fewer steps than asked", full_length),
}
"""What it means, and how it is probed."""

EXCEPTIONS: dict[tuple[str, Subject], str] = {}
"""Guarantees that a subject cannot keep, and why. Their probes must fail: an exception that is none is an error."""
