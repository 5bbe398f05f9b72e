"""Trainers of recipes: the same run in this process and on a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.service import ServiceTrainer
from tests.served import Served
from tests.unit.engines.remote.apart import adapted, difference, digits, quick, rows_of, weights_in, weights_on

pytest.importorskip("tinker")
pytest.importorskip("peft")


def recipe(run: Path, url: str | None, **training: Any) -> ServiceTrainer:
    # A larger eps than usual: where gradients are nothing but rounding, Adam would make whole steps of it.
    service: dict[str, Any] = {"backend": "tinker", "config": {"learning_rate": 3e-3, "eps": 1e-4}}
    service |= {} if url is None else {"url": url}
    return ServiceTrainer(
        adapted(), digits(), class_name="remote_api_grpo", settings={"train_service": service}, run=run,
        config=quick(training_steps=3, **training), loggers=[], show_progress=False,
    )  # fmt: skip


def test_a_grpo_recipe_gives_the_same_in_process_and_through_the_client(served: Served, tmp_path: Path) -> None:
    here, there = recipe(tmp_path / "here", None), recipe(tmp_path / "there", served.url)
    here.fit()
    there.fit()
    one, other = rows_of(tmp_path / "here"), rows_of(tmp_path / "there")
    assert [row["train/reward"] for row in one] == [row["train/reward"] for row in other]
    assert len(one) == 3
    assert difference(weights_in(here.policy), weights_on(served, tmp_path / "there")) < 1e-5
    assert difference(weights_in(here.policy), weights_in(adapted())) > 1e-3
