"""GRPOTrainer: a model, a reward and prompts; the same weights as the file that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude import GRPOTrainer, Trainer, TrainingConfiguration
from etude.config.build import build
from etude.config.load import load
from etude.errors import CheckpointError, ConfigError, DataError, EtudeError
from etude.policies.language import LanguageModel
from etude.rollouts.tasks import Task
from tests.callbacks import DieAt, KeepRows
from tests.crash.harness import compare
from tests.processes import reap, spawn

CONFIGS = Path(__file__).parents[2] / "configs" / "rl"
QUIET: dict[str, Any] = {"run": False, "loggers": [], "show_progress": False}


def share_of_digits(task: Task, text: str) -> float:
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def digits_trainer(run: Path, **options: Any) -> GRPOTrainer:
    return GRPOTrainer(
        "tiny", train_dataset="digits", prompts_per_step=4, group_size=8, max_new_tokens=16, lr=3e-3, log_every=5,
        training_steps=6, save_every=2, keep_last=20, ema_decay=0.9, run=run, loggers=[], show_progress=False,
        **options,
    )  # fmt: skip


def test_three_lines_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer("tiny", lambda task, text: float("4" in text), ["2+2="], training_steps=2)
    result = trainer.train()
    assert isinstance(trainer, Trainer)
    assert result.steps == 2
    assert 0 <= result.metrics["train/reward"] <= 1


@pytest.mark.slow
def test_it_gives_the_weights_of_the_equivalent_file_and_resumes(tmp_path: Path) -> None:
    overrides = ["training.training_steps=6", "training.save_every=2", "training.ema_decay=0.9", "loggers=[]"]
    same = build(load(CONFIGS / "digits-grpo.yaml", overrides), run=tmp_path / "file")
    same.show_progress = False
    same.fit()
    assert reap(spawn(lambda: digits_trainer(tmp_path / "python", callbacks=[DieAt(4)]).train())) == [-9]
    assert digits_trainer(tmp_path / "python").train().first_step == 2
    assert compare(tmp_path / "python", tmp_path / "file") is None


def test_options_reach_the_part_that_they_belong_to() -> None:
    trainer: Any = GRPOTrainer(
        LanguageModel.tiny(), share_of_digits, ["a", "b"], group_size=3, temperature=0.7, beta=0.1, clip_high=0.3,
        lr=1e-4, name="mine", **QUIET,
    )  # fmt: skip
    assert (trainer.data.group_size, trainer.data.sampling.temperature) == (3, 0.7)
    assert (trainer.algorithm.temperature, trainer.algorithm.kl_coef, trainer.algorithm.clip_high) == (0.7, 0.1, 0.3)
    assert (trainer.config.lr, trainer.name) == (1e-4, "mine")
    config = TrainingConfiguration(lr=0.5)
    assert GRPOTrainer(LanguageModel.tiny(), share_of_digits, ["a"], config=config, **QUIET).config is config


def test_a_model_may_be_a_folder_with_adapters(tmp_path: Path) -> None:
    LanguageModel.tiny(hidden_size=32, layers=1, heads=2, key_heads=1).save_pretrained(tmp_path / "model")
    trainer: Any = GRPOTrainer(tmp_path / "model", share_of_digits, ["a"], lora=2, **QUIET)
    assert trainer.policy.is_lora


class Rows:
    """What `datasets.Dataset` looks like from here: rows by number, and no Sequence."""

    column_names = ("prompt", "solution")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        return {"prompt": f"say {index}: ", "solution": str(index)}


def test_prompts_come_from_a_list_a_dataset_a_file_or_a_source(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(Rows()[index]) + "\n" for index in range(2)))
    model = LanguageModel.tiny()
    for given in (["say 0: ", "say 1: "], Rows(), path, str(path)):
        data: Any = GRPOTrainer(model, share_of_digits, given, **QUIET).data
        assert [task.prompt for task in data.tasks] == ["say 0: ", "say 1: "]
    data = GRPOTrainer(model, None, "digits", **QUIET).data
    assert len(data.tasks) == 16


def test_several_rewards_of_both_shapes_are_weighed_and_logged_by_name() -> None:
    seen: list[dict[str, Any]] = []

    def right(prompts: list[str], completions: list[str], solution: list[str], **others: Any) -> list[float | None]:
        seen.append({"prompts": prompts, "completions": completions, "solution": solution, **others})
        return [None if solution == ["1"] else 1.0]

    notes = KeepRows()
    GRPOTrainer(
        LanguageModel.tiny(), [right, share_of_digits], Rows(), reward_weights=[2, 0.5], prompts_per_step=2,
        group_size=2, max_new_tokens=4, training_steps=1, reward_timeout_s=None, callbacks=[notes], **QUIET,
    ).train()  # fmt: skip
    (row,) = notes.rows
    assert [len(value) for value in seen[0].values()] == [1] * len(seen[0])
    assert {one["solution"][0] for one in seen} == {"0", "1"}
    assert row["train/score/right"] == 1.0
    # What does not apply to a completion adds nothing to its reward.
    assert row["train/reward"] == pytest.approx(0.5 * 2 + 0.5 * row["train/score/share_of_digits"])


@pytest.mark.parametrize(
    "given, kind, message",
    [
        ({"model": "./nowhere"}, CheckpointError, "there is no such directory"),
        ({"model": 3}, ConfigError, "model must be a name, a folder or a LanguageModel, got int"),
        ({"train_dataset": []}, DataError, "train_dataset is empty; give at least one prompt"),
        ({"train_dataset": None}, ConfigError, "train_dataset is missing"),
        ({"train_dataset": "gone.jsonl"}, DataError, "gone.jsonl cannot be read"),
        ({"train_dataset": "adition"}, EtudeError, "did you mean 'addition'"),
        ({"reward_funcs": 3}, ConfigError, "the reward must be a function of .task, text. or have evaluate.*got 3"),
        ({"reward_funcs": lambda text: 1.0}, ConfigError, "a reward takes .task, text., or .prompts, completions"),
        ({"reward_funcs": [share_of_digits], "reward_weights": [1, 2]}, ConfigError, "cannot have 2 weights"),
        ({"reward_weights": [1]}, ConfigError, "goes with a list of reward_funcs"),
        ({"num_generations": 4}, ConfigError, "num_generations: unknown key; did you mean 'group_size'"),
        ({"grup_size": 4}, ConfigError, "did you mean 'group_size'"),
        ({"beta": 0.1, "kl_coef": 0.1}, ConfigError, "give one of them"),
        ({"config": TrainingConfiguration(), "lr": 1.0}, ConfigError, "lr is given beside config"),
        ({"config": {"lr": 1.0}}, ConfigError, "config must be a TrainingConfiguration"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, Any], kind: type[EtudeError], message: str) -> None:
    whole = {"model": "tiny", "reward_funcs": share_of_digits, "train_dataset": ["a"], **given}
    with pytest.raises(kind, match=message) as caught:
        GRPOTrainer(**whole)
    assert "\n" not in str(caught.value)


def test_adapters_cannot_be_added_to_a_policy_that_is_made() -> None:
    with pytest.raises(ConfigError, match="lora is for models that are made here"):
        GRPOTrainer(LanguageModel.tiny(), share_of_digits, ["a"], lora=4)
