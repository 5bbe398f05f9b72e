"""Two gloo processes under Lightning's ddp: shared batches, exact weights, exact resume, one error for all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from etude.errors import NonFiniteError
from tests.processes import run_ranks
from tests.unit.engines.lightning.parts import Net, TokenMean, Tokens, Weights, loader, make, saved, weights

pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


def on_two_ranks(root: Path, work: Callable[[], tuple[int, Any]]) -> list[Any]:
    """Run a function on two ranks and return what it returned on each; it also says which rank it was."""

    def run() -> None:
        rank, value = work()
        (root / f"rank{rank}.json").write_text(json.dumps(value))

    assert run_ranks(run, 2) == [0, 0]
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(2)]


def plain(found: Weights) -> dict[str, Any]:
    return {name: value.tolist() for name, value in found.items()}


def test_ranks_take_turns_and_see_every_sample_once(tmp_path: Path) -> None:
    def work() -> tuple[int, Any]:
        seen: list[list[list[float]]] = []

        class Watch(lightning.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(trainer.addressed[0].ids(trainer.current_epoch, batch_idx))

        trainer = make(tmp_path, max_epochs=2, callbacks=[Watch()], **TWO)
        trainer.fit(Net(), loader(samples=24))
        return trainer.global_rank, seen

    first, second = on_two_ranks(tmp_path, work)
    assert len(first) == len(second) == 6
    for epoch in (0, 3):
        together = [index for batch in first[epoch : epoch + 3] + second[epoch : epoch + 3] for index in batch]
        assert sorted(together) == list(range(24))


def test_no_split_over_ranks_changes_the_update(tmp_path: Path) -> None:
    sgd = {"type": "sgd", "lr": 0.1}

    def update(size: int, accumulate: int, **options: Any) -> tuple[int, Any]:
        policy = TokenMean()
        trainer = make(
            tmp_path, max_epochs=1, precision="64-true", optimizer=sgd, accumulate_grad_batches=accumulate, **options
        )
        trainer.fit(policy, DataLoader(Tokens(), batch_size=size))
        assert trainer.global_step == 1
        return trainer.global_rank, plain(weights(policy))

    whole = update(16, 1)[1]
    for size, accumulate in ((8, 1), (2, 4), (1, 8)):
        for found in on_two_ranks(tmp_path, lambda size=size, many=accumulate: update(size, many, **TWO)):  # type: ignore[misc]
            for name, value in whole.items():
                assert torch.tensor(found[name]).sub(torch.tensor(value)).abs().max() < 1e-12


def test_a_resume_over_two_ranks_is_exact(tmp_path: Path) -> None:
    def train(root: Path, checkpoint: Path | None = None) -> tuple[int, Any]:
        policy = Net()
        trainer = make(root, {"every_n_train_steps": 1}, max_epochs=3, **TWO)
        trainer.fit(policy, loader(), ckpt_path=checkpoint)
        return trainer.global_rank, plain(weights(policy))

    whole, other = on_two_ranks(tmp_path, lambda: train(tmp_path / "whole"))
    assert whole == other
    points = saved(tmp_path / "whole")
    assert len(points) == 9
    for number in (1, 3, 4):
        again = on_two_ranks(tmp_path, lambda number=number: train(tmp_path / str(number), points[number]))  # type: ignore[misc]
        assert again == [whole, whole]


def test_nan_on_one_rank_stops_both_and_names_it(tmp_path: Path) -> None:
    def work() -> tuple[int, Any]:
        policy = Net()
        trainer = make(tmp_path, max_epochs=1, **TWO)
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit(policy, loader(bad=5))
        return trainer.global_rank, [str(caught.value), all(bool(v.isfinite().all()) for v in policy.parameters())]

    first, second = on_two_ranks(tmp_path, work)
    assert first == second and first[1]
    (blamed,) = re.findall(r"rank (\d): loss is nan in micro-batch 0; samples \[.*\b5\b.*\]", first[0])
    assert first[0].count("rank ") == 1, f"rank {blamed} alone has the sample"
