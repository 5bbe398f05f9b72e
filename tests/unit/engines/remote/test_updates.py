"""The remote engine makes the updates that the torch engine makes, whatever the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Trainer
from etude.algorithms.grpo import CISPO, DRO, GRPO, GSPO
from etude.algorithms.sft import SFT
from etude.engines.remote.engine import RemoteEngine
from etude.engines.remote.named import named_loss
from etude.errors import ConfigError, NonFiniteError
from etude.types.batch import Batch
from etude.types.trajectory import Trajectory
from tests.served import Served
from tests.unit.engines.remote.apart import (
    STEADY,
    adapted,
    difference,
    digits,
    quick,
    rows_of,
    steps_on,
    weights_in,
    weights_on,
)

pytest.importorskip("tinker")
pytest.importorskip("peft")


def texts(count: int = 12) -> list[dict[str, Any]]:
    """Return rows of text, every one of another length, of which a part counts."""
    policy, rows = adapted(), []
    for number in range(count):
        tokens = policy.encode(f"the number after {number} is {number + 1}")
        rows.append(Trajectory(tokens, [0] * 10 + [1] * (len(tokens) - 10), 0.0))
    batch = Batch.from_trajectories(rows)
    return [{name: batch[name][row] for name in ("input_ids", "attention_mask", "loss_mask")} for row in range(count)]


def train(run: Path, engine: Any, algorithm: Any, data: Any, **training: Any) -> Trainer:
    trainer = Trainer(
        adapted(), data, algorithm, engine=engine, run=run, loggers=[], show_progress=False,
        config=quick(**{**STEADY, **training}),
    )  # fmt: skip
    trainer.fit()
    return trainer


def compare(served: Served, tmp_path: Path, make: Any, data: Any, **training: Any) -> None:
    here = train(tmp_path / "here", "torch", make(), data(), **training)
    train(tmp_path / "there", RemoteEngine(served.url, timeout_s=60), make(), data(), **training)
    assert difference(weights_in(here.policy), weights_on(served, tmp_path / "there")) < 1e-5
    assert difference(weights_in(here.policy), weights_in(adapted())) > 1e-4
    one, other = rows_of(tmp_path / "here"), rows_of(tmp_path / "there")
    assert len(one) == len(other) == training.get("training_steps", 2)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        told = [name for name in mine if name.startswith("train/") and "time" not in name and "per_s" not in name]
        assert "train/loss" in told
        assert [mine[name] for name in told] == pytest.approx([theirs[name] for name in told], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_text_given_is_learned_as_here(served: Served, tmp_path: Path, aggregation: Any) -> None:
    compare(
        served, tmp_path, lambda: SFT(aggregation=aggregation), texts, batch_size=3, gradient_accumulation_steps=2
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: GRPO(epochs=2, minibatches=2, clip_low=0.01, clip_high=0.01),
        lambda: GRPO(objective="importance_sampling"),
        lambda: CISPO(epochs=2),
        lambda: GRPO(kl_coef=0.1),
        lambda: DRO(epochs=2, beta=0.5),
        lambda: GSPO(epochs=2),
    ],
    ids=["ppo", "importance_sampling", "cispo", "kl", "dro", "gspo"],
)
def test_rewards_teach_as_here(served: Served, tmp_path: Path, make: Any) -> None:
    compare(served, tmp_path, make, digits)


def test_a_service_is_asked_by_name_for_what_it_knows() -> None:
    def name_of(algorithm: Any) -> str | None:
        found = named_loss(Trainer(adapted(), digits(), algorithm, run=False, config=quick()))
        return None if found is None else found.loss_fn

    known = [SFT(), GRPO(), GRPO(objective="importance_sampling"), CISPO()]
    assert [name_of(one) for one in known] == ["cross_entropy", "ppo", "importance_sampling", "cispo"]
    assert [name_of(one) for one in (GRPO(kl_coef=0.1), GRPO(dual_clip=3.0), DRO(), GSPO())] == [None] * 4


class _Broken(GRPO):
    """Makes advantages that are not numbers in the second step."""

    calls = 0

    def estimate(self, batch: Batch) -> Any:
        self.calls += 1
        found = dict(super().estimate(batch))
        if self.calls == 2:
            found["advantages"] = torch.full_like(found["advantages"], float("nan"))
        return found


@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.1}], ids=["named", "derived"])
def test_what_is_not_finite_is_never_sent(served: Served, tmp_path: Path, options: Any) -> None:
    before = steps_on(served)
    with pytest.raises(NonFiniteError, match=r"step 1, .*(not finite|nan).*No weight was changed"):
        train(tmp_path / "run", RemoteEngine(served.url), _Broken(**options), digits(), training_steps=3)
    assert steps_on(served) == before + 1


@pytest.mark.parametrize(
    "algorithm, training, said",
    [
        (GRPO(entropy_coef=0.1), {}, "entropies"),
        (GRPO(), {"optimizer": "sgd"}, "AdamW"),
        (GRPO(), {"ema_decay": 0.9}, "ema_decay"),
        (GRPO(), {"precision": "bf16"}, "precision"),
    ],
)
def test_what_a_service_cannot_do_is_refused(
    served: Served, tmp_path: Path, algorithm: Any, training: Any, said: str
) -> None:
    options = {} if "optimizer" in training else STEADY
    with pytest.raises(ConfigError, match=said):
        trainer = Trainer(
            adapted(), digits(), algorithm, engine=RemoteEngine(served.url), run=False, loggers=[],
            config=quick(**options, **training), show_progress=False,
        )  # fmt: skip
        trainer.fit()


def test_a_model_that_is_not_there_and_a_url_that_is_none_are_named(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offers tiny; base_model 'huge' is not one of them"):
        train(tmp_path / "run", RemoteEngine(served.url, base_model="huge"), GRPO(), digits())
    with pytest.raises(ConfigError, match="starts with http"):
        train(tmp_path / "run", RemoteEngine("localhost:1"), GRPO(), digits())
