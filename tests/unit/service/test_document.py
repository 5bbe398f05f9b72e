"""The guide to custom trainers, block by block, and the rows of what it promises, by their numbers."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude.algorithms.core_algos import compute_grpo_advantage_for_trajectories
from etude.errors import DataError
from etude.runs.metrics import read_metrics
from etude.service import RemoteApiTrainer, SelfHostedGrpoTrainer, SelfHostedTrainer, group_by
from etude.service.loading import load_class
from etude.types import Batch, Loss, Trajectory, create_dummy_batch
from tests.unit.service import document
from tests.unit.service.held import SETTINGS, digits, hold, same, tiny, write

QUICK_ONE = {"lr": 3e-3, "batch_size": 8, "training_steps": 1}


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]


# ---- the patterns ----------------------------------------------------------------------------------------------------


def test_rows_2_3_5_6_8_the_first_pattern_trains_and_its_field_reaches_the_loss(tmp_path: Path) -> None:
    folder = write(tmp_path / "my_task", my_trainer=document.PATTERN_1)
    trainer = hold(folder / "my_trainer.py", "MyCustomTrainer", {"algorithm": {"my_param": 0.25}}, run=tmp_path / "run")
    seen: list[Batch] = []
    inner: Any = trainer.inner
    plain = inner.compute_loss
    inner.compute_loss = lambda policy, batch: (seen.append(batch), plain(policy, batch))[1]
    before = tiny()
    trainer.fit()
    assert not same(before, trainer.policy)
    assert all(torch.equal(batch.values["my_custom_field"], torch.zeros(len(batch))) for batch in seen)
    assert [len(batch) for batch in seen] == [8, 8, 8, 8]  # 16 rollouts a step, in micro-batches of 8
    for batch in seen:
        expected = torch.where(batch["loss_mask"] != 0, 0.25 * batch.metadata["rewards"][:, None], 0.0)
        assert torch.equal(batch.values["advantages"], expected)
    row = rows_of(tmp_path / "run")[0]
    assert {"train/advantage_mean", "train/rollout/reward_mean", "train/rollout/reward_std"} <= row.keys()


def test_row_13_the_second_pattern_trains_on_the_attribute_it_sets(tmp_path: Path) -> None:
    folder = write(tmp_path / "my_task", my_remote_trainer=document.PATTERN_2)
    settings: dict[str, Any] = {
        "train_service": {
            "backend": "tinker",
            "url": "http://tinker-service:8000",
            "config": {"loss_fn": "importance_sampling", "learning_rate": 2e-3},
        },
        "algorithm": {"advantage_weight": 1.0},
    }
    path = folder / "my_remote_trainer.py"
    trainer = hold(path, "MyRemoteTrainer", settings, run=tmp_path / "run")
    trainer.fit()
    assert "train/custom/advantage_mean" in rows_of(tmp_path / "run")[0]
    settings["train_service"]["config"]["weight_decay"] = 0.0
    nothing = hold(path, "MyRemoteTrainer", {**settings, "algorithm": {"advantage_weight": 0.0}})
    nothing.fit()
    assert same(nothing.policy, tiny()) and not same(trainer.policy, tiny())


def test_row_14_the_url_is_honoured_by_saying_that_nobody_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "my_task", my_remote_trainer=document.PATTERN_2)
    settings = {"train_service": {"backend": "tinker", "url": "http://tinker-service:8000"}, "algorithm": {}}
    with caplog.at_level(logging.INFO, "etude"):
        hold(folder / "my_remote_trainer.py", "MyRemoteTrainer", settings, training_steps=1).fit()
    assert sum("http://tinker-service:8000" in record.message for record in caplog.records) == 1


def test_row_16_the_third_pattern_imports_its_sibling(tmp_path: Path) -> None:
    folder = write(tmp_path / "my_task", my_algorithm=document.ALGORITHM, my_trainer=document.PATTERN_3)
    settings = {"algorithm": {"discount_factor": 0.99, "gae_lambda": 0.95}}
    trainer = hold(folder / "my_trainer.py", "MyTrainer", settings, run=tmp_path / "run")
    trainer.fit()
    assert rows_of(tmp_path / "run")[0]["train/advantage_mean"] > 0


def test_rows_19_20_the_common_patterns(tmp_path: Path) -> None:
    folder = write(tmp_path / "common", trainer=document.COMMON)
    trainer = hold(folder / "trainer.py", "WithPatterns", policy=tiny(value_head=True), run=tmp_path / "run")
    trainer.fit()
    assert rows_of(tmp_path / "run")[0]["train/value_mean"] == 0.0  # the head starts at zero
    inner: Any = trainer.inner
    assert inner._compute_nstep_returns([1.0, 2.0, 3.0], n=2, gamma=0.5) == [2.0, 3.5, 3.0]


def test_rows_21_24_the_best_practices(tmp_path: Path) -> None:
    folder = write(tmp_path / "practices", trainer=document.PRACTICES)
    inner = load_class("Careful", folder / "trainer.py")(SETTINGS)
    _, metrics = inner._prepare_batch(create_dummy_batch())
    assert metrics["algorithm/advantage_std"] == pytest.approx(1.0)
    assert torch.equal(inner._compute_advantages(create_dummy_batch(1)), torch.zeros(1))
    assert torch.equal(inner._compute_advantages(Batch(metadata={"rewards": torch.zeros(0)})), torch.zeros(0))
    # It computes advantages and leaves them out of the batch: training names the field rather than going without.
    with pytest.raises(DataError, match=r"trainer.py: Careful._prepare_batch set no 'advantages'"):
        hold(folder / "trainer.py", "Careful").fit()


@pytest.mark.parametrize(
    "block, name", [("UTILITIES", "WithUtilities"), ("FROM_GRPO", "Reusing"), ("FROM_REMOTE_GRPO", "ReusingRemote")]
)
def test_rows_4_17_18_23_utilities_and_patterns_of_existing_trainers(tmp_path: Path, block: str, name: str) -> None:
    folder = write(tmp_path / block.lower(), trainer=getattr(document, block))
    trainer = hold(folder / "trainer.py", name, run=tmp_path / "run", training_steps=1)
    trainer.fit()
    assert len(rows_of(tmp_path / "run")) == 1


def test_row_22_the_unit_test_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "my_task", my_trainer=document.PATTERN_1, test_my_trainer=document.UNIT_TEST)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_task.test_my_trainer")
    try:
        module.test_custom_trainer_prepare_batch()
    finally:
        for loaded in [name for name in sys.modules if name.startswith("my_task")]:
            del sys.modules[loaded]


# ---- what is left of the rows ----------------------------------------------------------------------------------------


def test_row_1_the_names_are_where_the_guide_says_with_imports_changed() -> None:
    import etude.service as service
    import etude.types as types

    for name in ("BaseTrainer", "SelfHostedTrainer", "RemoteApiTrainer", "SelfHostedGrpoTrainer"):
        assert getattr(service, name).__name__ == name and name in dir(service)
    assert types.Batch is Batch and types.Trajectory is Trajectory


@pytest.mark.parametrize("kind", [dict, OmegaConf.create])
def test_row_22_constructing_opens_nothing_and_takes_any_configuration(kind: Any, monkeypatch: Any) -> None:
    config = kind({"algorithm": {"my_param": 0.5}, **SETTINGS})
    monkeypatch.setattr("builtins.open", lambda *a, **k: pytest.fail("a file was opened"))
    monkeypatch.setattr("socket.socket", lambda *a, **k: pytest.fail("a connection was made"))
    trainer = SelfHostedGrpoTrainer(config)
    assert trainer._config.algorithm.my_param == trainer._config["algorithm"]["my_param"] == 0.5
    assert trainer._pad_token_id == 0
    trainer._pad_token_id = 7
    assert trainer._pad_token_id == 7


def test_row_3_helpers_are_on_the_base_class() -> None:
    class Direct(SelfHostedTrainer):
        pass

    inner, batch = Direct(SETTINGS), create_dummy_batch()
    assert inner._log_rollout_metrics(batch)["rollout/reward_mean"] == pytest.approx(
        float(batch.metadata["rewards"].mean())
    )
    assert torch.equal(inner._reward_fn(batch).sum(1), batch.metadata["rewards"])
    assert inner._compute_old_log_probs(batch) is batch.values["old_log_probs"]
    prepared = inner._compute_advantage(batch)
    assert "advantages" in prepared.values and "advantages" not in batch


def test_row_7_rewards_as_wide_as_the_text_or_one_column_less() -> None:
    class Wide(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            advantages = torch.where(batch["loss_mask"] != 0, batch.metadata["rewards"][:, None], 0.0)
            scores, short = self._reward_fn(batch), self._config.short
            batch.values["advantages"] = advantages[:, 1:] if short else advantages
            batch.values["token_level_scores"] = scores[:, 1:] if short else scores
            return batch, {}

    trained = [tiny(), tiny()]
    for policy, short in zip(trained, (False, True), strict=True):
        Wide({**SETTINGS, "short": short}).fit(
            policy, digits(), run=False, training=QUICK_ONE, loggers=[], show_progress=False
        )
    assert same(*trained) and not same(trained[0], tiny())


def test_row_8_a_loss_of_its_own_sees_the_fields_it_added(tmp_path: Path) -> None:
    class Weighed(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            batch.values["worth"] = batch.metadata["rewards"] - batch.metadata["rewards"].mean()
            return batch, {}

        def compute_loss(self, policy: Any, batch: Batch) -> Loss:
            log_probs = policy.log_probs(batch).sum(1)
            return Loss(-(log_probs * batch.values["worth"]).sum(), float(len(batch)))

    policy = tiny()
    Weighed(SETTINGS).fit(policy, digits(), run=False, training=QUICK_ONE, loggers=[], show_progress=False)
    assert not same(policy, tiny())


def test_row_15_grouping_by_run_mixes_prompts_and_by_group_does_not() -> None:
    made = [Trajectory([1, 2], [0, 1], 0.0, group_id=group, run_id=run) for group in "ab" for run in range(2)]
    assert {key: [one.group_id for one in found] for key, found in group_by(made, "run_id").items()} == {
        0: ["a", "b"], 1: ["a", "b"],
    }  # fmt: skip
    assert [{one.group_id for one in found} for found in group_by(made, "group_id").values()] == [{"a"}, {"b"}]
    assert RemoteApiTrainer.group_by is group_by
    assert len(group_by([Trajectory([1], [1], 0.0), Trajectory([1], [1], 0.0)], "group_id")) == 2


@pytest.mark.parametrize("use_run_ids", [True, False])
def test_row_21_a_single_sample_gets_zero_and_equal_rewards_no_phantom(use_run_ids: bool) -> None:
    alone = [Trajectory([1, 2], [0, 1], 0.7, group_id="a", run_id=0)]
    equal = [Trajectory([1, 2], [0, 1], 0.1, group_id="b", run_id=run) for run in range(7)]
    found = compute_grpo_advantage_for_trajectories([*alone, *equal], use_run_ids=use_run_ids)
    assert [one.advantage for one in found] == [0.0] * 8


def test_row_25_metrics_that_are_tensors_become_floats_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tensors(SelfHostedGrpoTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            batch, metrics = super()._prepare_batch(batch)
            return batch, {**metrics, "mine": torch.tensor(2.5)}

    Tensors(SETTINGS).fit(
        tiny(), digits(), run=tmp_path / "run", loggers=[], show_progress=False, training={**QUICK_ONE, "log_every": 1}
    )
    assert rows_of(tmp_path / "run")[0]["train/mine"] == 2.5
    said = [record.message for record in caplog.records if "tensors" in record.message]
    assert len(said) == 1 and "Tensors._prepare_batch" in said[0] and "mine" in said[0]
