"""Digits: the embedded task."""

from __future__ import annotations

import sys

import pytest
import torch

from etude.data import Digits, MapData
from etude.data import digits as digits_module
from etude.errors import DataError, MissingExtraError
from etude.types.protocols import Place
from tests.unit.data.sources import same, taken


def rows(digits: Digits) -> set[tuple[float, ...]]:
    return {tuple(digits[index]["observation.state"].tolist()) for index in range(len(digits))}


def test_the_splits_are_disjoint_and_complete() -> None:
    train, validation = Digits(), Digits("validation")
    assert (len(train), len(validation)) == (1438, 359)
    assert not rows(train) & rows(validation)
    assert len(Digits(validation_fraction=0.5)) == 899


def test_batches_have_the_promised_form() -> None:
    ((batch,),) = taken(MapData(Digits()), [0], Place(batch_size=7))
    assert batch["observation.state"].shape == (7, 64)
    assert batch["observation.state"].dtype == torch.float32
    assert 0 <= batch["observation.state"].min() <= batch["observation.state"].max() <= 1
    assert batch["action"].shape == (7,)
    assert batch["action"].dtype == torch.int64


def test_the_spec_describes_them_by_training_statistics() -> None:
    spec = Digits("validation").spec
    assert spec["action"].classes == 10
    assert spec["action"].role == "action"
    assert spec["observation.state"].shape == (64,)
    digits = Digits()
    train = torch.stack([digits[index]["observation.state"] for index in range(len(digits))])
    stats = spec["observation.state"].stats
    assert stats is not None
    assert torch.allclose(stats["mean"], train.mean(0), atol=1e-6)


def test_noise_is_exact_on_resume_and_anew_each_epoch() -> None:
    place = Place(batch_size=719)
    noisy = taken(MapData(Digits(noise=0.1)), [0, 1, 2, 3], place)
    assert same(taken(MapData(Digits(noise=0.1)), [2, 3], Place(batch_size=719, num_workers=1)), noisy[2:])
    clean = taken(MapData(Digits()), [0, 1, 2, 3], place)
    noise = [n[0]["observation.state"] - c[0]["observation.state"] for n, c in zip(noisy, clean, strict=True)]
    assert abs(torch.cat(noise).std() - 0.1) < 0.002
    assert not torch.equal(torch.cat(noise[:2]).sort(0)[0], torch.cat(noise[2:]).sort(0)[0])


def test_validation_digits_have_no_noise() -> None:
    noisy = taken(MapData(Digits("validation", noise=0.5)), [0], Place())
    assert same(noisy, taken(MapData(Digits("validation")), [0], Place()))


@pytest.mark.parametrize("bad", [{"split": "test"}, {"validation_fraction": 1.0}, {"noise": -1.0}])
def test_bad_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(bad))):
        Digits(**bad)  # type: ignore[arg-type]


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits_module._load.cache_clear()
    with pytest.raises(MissingExtraError, match="scikit-learn"):
        Digits()
