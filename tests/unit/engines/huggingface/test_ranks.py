"""Several ranks: the update of one process on the same batches, one set of files, exact resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from etude.data.columns import Columns
from etude.engines.huggingface.checkpoints import saved_in
from etude.errors import NonFiniteError
from tests.processes import run_ranks
from tests.unit.engines.huggingface.parts import Weighed, arguments, make, same, weights
from tests.unit.engines.huggingface.test_accumulation import BATCH, net, sequences, update_error

pytestmark = pytest.mark.slow


def tokens(directory: Path, micro: int, accumulate: int) -> None:
    """Two steps over the whole data; rank 0 leaves the weights behind."""
    torch.set_num_threads(1)
    rows = {name: value for name, value in sequences().items() if name != "labels"}
    options = {"max_steps": 2, "gradient_accumulation_steps": accumulate, "optim": "sgd", "learning_rate": 0.1}
    model = net()
    trainer = Weighed(
        model=model, args=arguments(directory, **options), train_loader=DataLoader(Columns(rows), batch_size=micro)
    )
    trainer.train()
    if trainer.is_world_process_zero():
        save_file({name: value.clone() for name, value in model.state_dict().items()}, directory / "end.safetensors")


@pytest.mark.parametrize("micro, accumulate", [(8, 1), (4, 2), (1, 8)])
def test_two_ranks_make_the_update_of_one_process(micro: int, accumulate: int, tmp_path: Path) -> None:
    for name, ranks, split in (("one", 1, (BATCH, 1)), ("two", 2, (micro, accumulate))):
        (tmp_path / name).mkdir()
        assert run_ranks(partial(tokens, tmp_path / name, *split), ranks) == [0] * ranks
    found = [load_file(tmp_path / name / "end.safetensors") for name in ("one", "two")]
    assert update_error(found[1], found[0], dict(net().state_dict())) < 1e-12


def noisy(directory: Path, resume: str | None = None, **options: Any) -> None:
    torch.set_num_threads(1)
    trainer = make(directory, **options)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        save_file(weights(trainer), directory / "end.safetensors")


def test_two_ranks_resume_exactly(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run_ranks(partial(noisy, whole, save_strategy="steps", save_steps=1), 2) == [0, 0]
    steps = [step for step, _ in saved_in(whole)]
    assert steps == [6, 5, 4, 3, 2, 1], "10 batches for two ranks, two a step, twice"
    for step in (1, 3, 5):
        assert run_ranks(partial(noisy, resumed, resume=str(whole / f"checkpoint-{step}")), 2) == [0, 0]
        assert same(load_file(resumed / "end.safetensors"), load_file(whole / "end.safetensors"))


def test_a_bad_sample_on_one_rank_stops_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(partial(noisy, tmp_path, bad=11), 2) == [NonFiniteError.exit_code] * 2
    assert "loss is nan in micro-batch" in capfd.readouterr().err
