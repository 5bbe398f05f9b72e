"""Sharded policies: never whole on a rank, saved by all ranks together, taken up by any number of them."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.cli.export import export_source
from etude.config.restore import load_policy
from etude.engines.torch import TorchEngine
from etude.errors import CheckpointError
from etude.loop import deferred
from etude.loop.session import Session
from etude.loop.sharding import full_tensor, local_tensor
from etude.policies import MLP
from etude.runs import durable
from etude.runs.checkpoint import CheckpointStore, acting_weights
from etude.runs.manifest import read_manifest
from tests.processes import run_ranks
from tests.unit.loop.stacks import Stack, fit, state, worst
from tests.unit.policies.demonstrations import make_windows


@pytest.fixture(autouse=True)
def no_tensor_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have even these weights made shard by shard, as large ones are."""
    monkeypatch.setattr(deferred, "SMALL_BYTES", 16)


class Look(Callback):
    """Writes down what a rank holds when training starts, and what it has staged when it saves."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_fit_start(self, trainer: Trainer) -> None:
        assert trainer.policy.was_lean == (trainer.world > 1), "sharded policies are built without weights"
        weights = {name: full_tensor(value).clone() for name, value in trainer.policy.state_dict().items()}
        if trainer.rank == 0 and not (self.out / "first.safetensors").exists():
            save_file(weights, self.out / "first.safetensors")

    def on_save(self, trainer: Trainer, step: int) -> None:
        session, store = trainer.session, trainer.session.record.store
        assert store is not None
        fixed = [p for p in session.policy.parameters() if not p.requires_grad]
        held = [*fixed, *session.written_tensors(), *session.policy.buffers()]
        staged = sum(file.nbytes for file in store._staged.values())
        own = sum(local_tensor(tensor).nbytes for tensor in held)
        (self.out / f"rank{trainer.rank}.json").write_text(json.dumps([staged, own]))


@pytest.mark.slow
def test_three_ranks_save_their_shards_and_any_number_goes_on(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    for folder in ("three", "one"):
        (tmp_path / folder).mkdir()
    assert run_ranks(partial(fit, run, 2, callbacks=[Look(tmp_path / "three")]), 3) == [0, 0, 0]
    fit(alone, 6, callbacks=[Look(tmp_path / "one")])
    # What three ranks made shard by shard is what one process made, to the last bit.
    first, whole = (load_file(tmp_path / folder / "first.safetensors") for folder in ("three", "one"))
    assert all(torch.equal(first[name], whole[name]) for name in whole)
    assert worst(state(run), state(alone)) < 1e-6

    shares = [json.loads((tmp_path / "three" / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert all(staged <= own for staged, own in shares), "a copy of its own share, and no more"
    (staged_alone, _) = json.loads((tmp_path / "one" / "rank0.json").read_text())
    assert sum(staged for staged, _ in shares) == staged_alone, "together, every byte once"

    folder = CheckpointStore(run / "checkpoints").last
    assert folder is not None
    files = set(read_manifest(folder).files)
    assert {f"{part}-0000{r}-of-00003.safetensors" for part in ("policy", "ema", "optimizer") for r in range(3)} < files
    assert {path.name for path in folder.iterdir()} == files | {"manifest.json"}

    longer = fit(alone, 6, training_steps=12)
    assert longer.progress.step == 12
    for ranks, steps in ((2, 10), (1, 12)):
        assert run_ranks(partial(fit, run, 6 // ranks, training_steps=steps), ranks) == [0] * ranks
    assert worst(state(run), state(alone)) < 1e-6


def peak_of_saves(run: Path, out: Path) -> None:
    """Train, and write down by how much this process grows beyond what it has while it saves, and what it holds."""
    real, found = Session.save, list[list[int]]()

    def save(self: Session, *args: Any, **options: Any) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        before = memory_bytes("VmRSS")
        real(self, *args, **options)
        assert self.record.store is not None
        self.record.store.wait()
        own = sum(local_tensor(tensor).nbytes for tensor in self.written_tensors())
        found.append([memory_bytes("VmHWM") - before, own])

    Session.save = save  # type: ignore[method-assign,assignment]
    trainer = fit(run, 3, policy=Stack(1500), freeze=[])
    (out / f"grown{trainer.rank}.json").write_text(json.dumps(found))


def memory_bytes(name: str) -> int:
    """Return what the kernel says about this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


@pytest.mark.slow
def test_saving_takes_no_memory_beside_the_copy_that_is_ready(tmp_path: Path) -> None:
    assert run_ranks(partial(peak_of_saves, tmp_path / "run", tmp_path), 2) == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"grown{rank}.json").read_text())
        assert len(found) >= 2
        for grown, own in found:
            assert own > 30e6 and grown < own / 4, "its share and the staged copy were there before"


class Die(Callback):
    """Kills one rank after a step, once its group has a checkpoint."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.progress.step == self.step and trainer.rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(tmp_path: Path, strategy: Literal["ddp", "fsdp"], ranks: int, fewer: list[int]) -> None:
    """Train on some ranks, lose one, and go on with fewer: the same samples, the same weights."""
    alone, batch = tmp_path / "alone", ranks
    options: dict[str, Any] = {"strategy": strategy, "optimizer": "sgd", "save_every": 2, "keep_last": 9}
    fit(alone, batch, training_steps=8 + 2 * len(fewer), **options)
    run = tmp_path / "run"
    codes = run_ranks(partial(fit, run, 1, training_steps=1000, callbacks=[Die(7, ranks - 1)], **options), ranks)
    assert codes[-1] == -signal.SIGKILL and set(codes[:-1]) == {6}
    for number, left in enumerate(fewer, 1):
        again = partial(fit, run, batch // left, training_steps=8 + 2 * number, **options)
        assert run_ranks(again, left) == [0] * left
        there = CheckpointStore(alone / "checkpoints").load(8 + 2 * number).tree
        here = CheckpointStore(run / "checkpoints").load(8 + 2 * number).tree
        assert worst({**here["policy"], "seen": there["policy"]["seen"]}, there["policy"]) < 1e-6
        assert worst(here["ema"], there["ema"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_group_goes_on_with_another_number_of_ranks(tmp_path: Path, strategy: Literal["ddp", "fsdp"]) -> None:
    kill_and_resume(tmp_path, strategy, 4, [2])


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_eight_ranks_equal_one_process_and_go_on_with_four_and_one(
    tmp_path: Path, strategy: Literal["ddp", "fsdp"]
) -> None:
    run, alone = tmp_path / "eight", tmp_path / "one"
    assert run_ranks(partial(fit, run, 1, strategy=strategy), 8) == [0] * 8
    fit(alone, 8)
    assert worst(state(run), state(alone)) < 1e-6
    (tmp_path / "killed").mkdir()
    kill_and_resume(tmp_path / "killed", strategy, 8, [4, 1])


def die_in_a_save(run: Path) -> None:
    """Train until rank 1 is killed while it writes its part of step 6."""
    real = durable.write_hashed

    def fatal(path: Path, parts: Any) -> Any:
        if path.name.startswith("policy-00001") and "00000006" in path.parent.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, parts)

    durable.write_hashed = fatal  # type: ignore[assignment]
    fit(run, 3, training_steps=1000, save_every=2, keep_last=9)


@pytest.mark.slow
def test_a_rank_that_is_killed_inside_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(partial(die_in_a_save, run), 2) == [6, -signal.SIGKILL]
    assert CheckpointStore(run / "checkpoints").steps() == [2, 4]
    assert run_ranks(partial(fit, run, 3), 2) == [0, 0]
    fit(tmp_path / "alone", 6)
    assert worst(state(run), state(tmp_path / "alone")) < 1e-6
    assert not list((run / "checkpoints").glob(".tmp-*"))


def train_mlp(run: Path) -> None:
    policy = MLP(chunk_size=4, hidden=[24, 24])
    windows = make_windows(policy)
    config = TrainingConfiguration(
        training_steps=6, batch_size=4, evaluate_every=2, save_every=2, best_metric="eval/loss", ema_decay=0.9
    )
    Trainer(
        policy, windows, config=config, run=run, engine=TorchEngine(strategy="fsdp"), eval_data=windows, loggers=[],
        show_progress=False,
    ).fit()  # fmt: skip


@pytest.mark.slow
def test_a_policy_trained_in_shards_is_evaluated_ranked_exported_and_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ranks(partial(train_mlp, run), 2) == [0, 0]
    best = CheckpointStore(run / "checkpoints").load("best")
    assert best.metric is not None and len(list(best.path.glob("policy-*-of-00002.safetensors"))) == 2
    export_source(str(run), tmp_path / "exported", kind="pretrained", which="best")
    policies = [load_policy(run, "best"), MLP.from_pretrained(best.path), MLP.from_pretrained(tmp_path / "exported")]
    expected = acting_weights(best.tree)
    for policy in policies:
        found = policy.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


class Odd(Stack):
    """Keeps a tensor where nobody looks for one."""

    def build(self, spec: Any) -> None:
        self.hidden = [{"deep": torch.randn(64, 64)}]
        super().build(spec)
        nn.init.constant_(self.out.bias, float(self.hidden[0]["deep"].mean()))


def train_odd(run: Path, out: Path) -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("etude").addHandler(handler)
    trainer = fit(run, 3, policy=Odd())
    if trainer.rank == 0:
        out.write_text(json.dumps(records))


@pytest.mark.slow
def test_a_policy_that_cannot_do_without_its_weights_is_built_whole_and_says_so(tmp_path: Path) -> None:
    assert run_ranks(partial(train_odd, tmp_path / "run", tmp_path / "said.json"), 2) == [0, 0]
    fit(tmp_path / "alone", 6, policy=Odd())
    assert worst(state(tmp_path / "run"), state(tmp_path / "alone")) < 1e-6
    (said,) = [line for line in json.loads((tmp_path / "said.json").read_text()) if "built whole" in line]
    assert said.startswith("Odd is built whole on every rank before it is sharded") and "neither parameters" in said


def test_sharded_tensors_are_not_saved_by_one_process_alone(tmp_path: Path) -> None:
    from etude.runs.shards import Piece

    with pytest.raises(CheckpointError, match="all of them must save together"):
        CheckpointStore(tmp_path).save({"policy": {"w": Piece(torch.zeros(2), torch.Size([4]))}}, step=1)
