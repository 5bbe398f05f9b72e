"""HFASTTrainer: evaluation, checkpoints, and going on exactly where it stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Callback, Trainer, TrainingConfiguration
from etude.config.training import EarlyStopping
from etude.errors import ConfigError
from etude.policies.language.model import LanguageModel
from etude.redteam.algorithms import DPO, PPO
from etude.redteam.embeddings import NoveltyScorer
from etude.redteam.hf_trainer import HFASTConfiguration, HFASTTrainer
from etude.redteam.scorers import CombinedScorer
from etude.rollouts.graph import Graph
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn
from tests.unit.redteam.test_scorers import Letters
from tests.unit.redteam.tiny_models import Share, make_sampler, tiny

DEV = ["a cage", "a big bed"]


def make(tmp_path: Path, sampler: Any = None, algorithm: Any = None, config: Any = None, **options: Any) -> Any:
    sampler = sampler or make_sampler()
    settings: dict[str, Any] = {"dev_prompts": DEV, "eval_every": 2, "ckpt_dir": tmp_path / "checkpoints", "run": False}
    config = config or HFASTConfiguration(training_steps=4, lr=1e-3, log_every=1)
    algorithm = algorithm or DPO(sampler.system)
    return HFASTTrainer(config, sampler, algorithm, show_progress=False, loggers=[], **{**settings, **options})


def test_the_configuration_has_the_documented_defaults() -> None:
    config = HFASTConfiguration()
    assert isinstance(config, TrainingConfiguration)
    assert (config.lr, config.batch_size, config.optimizer, config.gradient_accumulation_steps) == (1e-5, 4, "adamw", 1)
    assert (config.training_steps, config.num_episodes_per_experience) == (1000, 2)
    assert HFASTConfiguration.help_texts()["lr"] == "Peak learning rate."
    with pytest.raises(ValueError, match="learning_rate"):
        HFASTConfiguration(learning_rate=1.0)  # type: ignore[call-arg]


def test_dev_prompts_are_evaluated_once_per_due_step(tmp_path: Path) -> None:
    seen: list[Sequence[Any]] = []
    sampler = make_sampler(width=3, depth=2)
    original = sampler.eval_rollouts
    sampler.eval_rollouts = lambda prompts: seen.append(list(prompts)) or original(prompts)  # type: ignore[assignment, method-assign, func-returns-value, misc]
    result = make(tmp_path, sampler, config=TrainingConfiguration(training_steps=5, batch_size=1)).train()
    assert seen == [DEV] * 3, "after steps 2 and 4, and at the end"
    assert {"eval/score", "eval/reward", "eval/attack_success"} <= set(result.metrics)
    assert result.metrics["eval/score"] == pytest.approx(result.metrics["eval/response_score"])


def test_best_follows_the_dev_score_and_last_is_the_last(tmp_path: Path) -> None:
    scores = iter([0.2, 0.9, 0.5])
    states: list[dict[str, torch.Tensor]] = []

    class Told(HFASTTrainer):
        def evaluate(self) -> Any:
            states.append({k: v.clone() for k, v in self.policy.state_dict().items()})
            return {"score": next(scores)}

    sampler = make_sampler()
    config = HFASTConfiguration(training_steps=3, lr=1e-2)
    trainer = Told(
        config, sampler, DPO(sampler.system), dev_prompts=DEV, eval_every=1, ckpt_dir=tmp_path / "checkpoints",
        keep_steps=True, run=tmp_path / "run", loggers=[], show_progress=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.best_score == 0.9
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["best", "last", "step-1", "step-2", "step-3"]
    for tag, number in (("best", 1), ("last", 2), ("step-1", 0)):
        loaded = LanguageModel.from_pretrained(tmp_path / "checkpoints" / tag, value_head=True).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in states[number].items()), tag
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step-00000002"


def test_another_evaluation_with_another_metric_decides_what_is_best(tmp_path: Path) -> None:
    found = iter([0.2, 0.1, 0.5])

    class Told(HFASTTrainer):
        def evaluate(self) -> Any:
            return {"boredom": next(found)}

    config = HFASTConfiguration(training_steps=3, lr=1e-2, best_metric="eval/boredom", best_mode="min")
    sampler = make_sampler()
    trainer = Told(
        config, sampler, DPO(sampler.system), dev_prompts=DEV, eval_every=1, ckpt_dir=tmp_path / "checkpoints",
        run=tmp_path / "run", loggers=[], show_progress=False,
    )  # fmt: skip
    result = trainer.train()
    assert trainer.best_score == 0.1 and (tmp_path / "checkpoints" / "best").is_dir()
    assert result.best is not None and result.best.name == "step-00000002"


def test_an_evaluation_that_ranks_nothing_says_what_it_must_return(tmp_path: Path, caplog: Any) -> None:
    class Told(HFASTTrainer):
        found: Any = {"boredom": 0.5}

        def evaluate(self) -> Any:
            return self.found

    sampler = make_sampler()
    settings: dict[str, Any] = {"ckpt_dir": None, "run": False, "show_progress": False, "dev_prompts": DEV}
    config = HFASTConfiguration(training_steps=2, evaluate_every=1)
    trainer = Told(config, sampler, DPO(sampler.system), **settings)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "ranked by eval/score" in record.getMessage()]
    assert said == [
        "evaluate() returned eval/boredom, but checkpoints are ranked by eval/score: none is kept as the best; return "
        "that, or set training.best_metric and training.best_mode"
    ]
    trainer = Told(config, sampler, DPO(sampler.system), **settings)
    trainer.found = 0.5
    with pytest.raises(ConfigError, match="evaluate must return a dictionary of numbers, got float"):
        trainer.train()


def test_the_best_that_is_the_last_is_on_disk_once(tmp_path: Path) -> None:
    make(tmp_path, eval_every=4).train()
    kept = [(tmp_path / "checkpoints" / tag / "model.safetensors").stat() for tag in ("best", "last")]
    assert kept[0].st_ino == kept[1].st_ino
    make(tmp_path, dev_prompts=None).train()
    kept = [(tmp_path / "checkpoints" / tag / "model.safetensors").stat() for tag in ("best", "last")]
    assert kept[0].st_ino != kept[1].st_ino


def test_large_checkpoints_are_announced_and_few_are_kept(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    config = HFASTConfiguration(training_steps=4, lr=1e-2, save_every=1)
    make(tmp_path, config=config, run=tmp_path / "small", dev_prompts=None).train()
    assert not caplog.records
    monkeypatch.setattr("etude.loop.record.LARGE_BYTES", 1)
    make(tmp_path, config=config, run=tmp_path / "large").train()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("each checkpoint takes 0.0 GB (policy 0.0, optimizer 0.0), and up to 2 are kept in ")
    kept = [path for path in (tmp_path / "large" / "checkpoints").iterdir() if not path.is_symlink()]
    assert len(kept) <= 2, "the last, and the best"


def test_a_schedule_that_is_laid_out_anew_is_said(tmp_path: Path, caplog: Any) -> None:
    for steps in (2, 3):
        config = HFASTConfiguration(training_steps=steps, schedule="cosine")
        make(tmp_path, config=config, run=tmp_path / "run", dev_prompts=None).train()
    assert "laid out over 2 steps, and now is over 3" in caplog.text


class Even(Share):
    """Thinks alike of everything."""

    def score(self, texts: Sequence[str]) -> list[float]:
        return [0.5] * len(texts)


def test_a_run_without_pairs_says_so_at_once_and_at_the_end(tmp_path: Path, caplog: Any) -> None:
    sampler = make_sampler(scorer=Even(), likelihood_weight=0.0)
    before = [p.clone() for p in sampler.system.parameters()]
    rows: list[dict[str, float]] = []

    class Notes(Callback):
        def on_log(self, trainer: Trainer, step: int, metrics: Any) -> None:
            rows.append(dict(metrics))
            assert len(caplog.records) == 1, "after the first step, and not in every one"

    make(tmp_path, sampler, dev_prompts=None, callbacks=[Notes()]).train()
    assert [row["train/rollout/pairs"] for row in rows] == [row["train/rollout/updates"] for row in rows] == [0.0] * 4
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "2 rollouts gave no pairs to learn from: all probes of each context earned the same, or said the same; until "
        "there are some, no weight changes",
        "4 of 4 steps gave no pairs to learn from: no update was made, and the weights are those from before training",
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, sampler.system.parameters()))


def test_pairs_and_updates_of_each_step_are_logged(tmp_path: Path, caplog: Any) -> None:
    config = HFASTConfiguration(training_steps=1, batch_size=2, num_episodes_per_experience=3)
    result = make(tmp_path, make_sampler(width=2, depth=2), config=config, dev_prompts=None).train()
    pairs = result.metrics["train/rollout/pairs"]
    assert 0 < pairs <= 9
    assert result.metrics["train/rollout/updates"] == -(-pairs // 2)
    assert not caplog.records


@pytest.mark.parametrize("accumulate, is_exact", [(1, True), (4, False)])
def test_a_finished_run_made_longer_is_one_long_run_or_says_that_it_is_not(
    tmp_path: Path, caplog: Any, accumulate: int, is_exact: bool
) -> None:
    def train(name: str, steps: int) -> None:
        config = HFASTConfiguration(
            training_steps=steps, lr=1e-2, gradient_accumulation_steps=accumulate, ema_decay=0.9, log_every=1,
            num_episodes_per_experience=1,
        )  # fmt: skip
        make(tmp_path, config=config, run=tmp_path / name, ckpt_dir=tmp_path / f"{name}-hf", dev_prompts=None).train()

    train("whole", 4)
    train("parts", 3)
    assert not caplog.records
    train("parts", 4)
    assert (compare(tmp_path / "parts", tmp_path / "whole") is None) is is_exact
    assert ("not bit for bit" in caplog.text) is not is_exact


def test_averaged_weights_are_what_is_kept(tmp_path: Path) -> None:
    config = HFASTConfiguration(training_steps=2, lr=1e-2, ema_decay=0.5)
    trainer = make(tmp_path, config=config)
    trainer.train()
    kept = LanguageModel.from_pretrained(tmp_path / "checkpoints" / "last").state_dict()
    raw = trainer.policy.state_dict()
    assert any(not torch.equal(value, raw[name]) for name, value in kept.items())


def test_early_stopping_is_configuration(tmp_path: Path) -> None:
    config = HFASTConfiguration(
        training_steps=50, lr=0.0, early_stopping=EarlyStopping(metric="eval/score", mode="max", patience=2)
    )
    result = make(tmp_path, config=config, eval_every=1).train()
    assert result.steps == 3 and "early stopping" in result.stopped


@pytest.mark.parametrize("name", ["sampler", "environment"])
def test_both_names_of_the_sampler_work_and_nothing_is_required_for_evaluation(tmp_path: Path, name: str) -> None:
    sampler = make_sampler()
    trainer = HFASTTrainer(
        config=HFASTConfiguration(training_steps=1), algorithm=DPO(sampler.system), ckpt_dir=None, run=False,
        show_progress=False, **{name: sampler},
    )  # fmt: skip
    assert trainer.train().steps == 1
    assert list(tmp_path.iterdir()) == []


def test_the_batch_size_and_accumulation_are_honoured() -> None:
    sizes: list[int] = []

    class Watched(PPO):
        def step(self, batch: Any) -> Any:
            sizes.append(len(batch["probe"]))
            return super().step(batch)

    sampler = make_sampler(width=3, depth=1)
    config = TrainingConfiguration(training_steps=2, batch_size=4, num_episodes_per_experience=2)
    Trainer(config, sampler, Watched(sampler.system), run=False, show_progress=False, loggers=[]).train()
    assert sizes == [4, 2, 4, 2]


@pytest.mark.parametrize("credit", ["immediate", "best"])
def test_an_auditor_learns_what_pays(tmp_path: Path, credit: Any) -> None:
    reward = {"likelihood_weight": 0.0, "combined_weight": 1.0, "response_weight": 0.0}
    sampler = make_sampler(width=8, depth=1, **reward)
    config = HFASTConfiguration(training_steps=25, lr=1e-2, batch_size=32, num_episodes_per_experience=4, log_every=5)
    solver = PPO(sampler.system, epochs=2, credit=credit)
    trainer = make(tmp_path, sampler, solver, config, dev_prompts=None, ckpt_dir=None)
    before = [node.reward for graph in sampler.rollouts(range(16)) for node in graph.nodes()]
    trainer.train()
    after = [node.reward for graph in sampler.rollouts(range(16)) for node in graph.nodes()]
    assert sum(after) / len(after) > 0.4 > 0.2 > sum(before) / len(before)


class Noted(NoveltyScorer):
    """Embeds by first letter; an empty response begins with an `a`."""

    def __init__(self) -> None:
        class Forgiving(Letters):
            def embed(self, texts: Sequence[str]) -> torch.Tensor:
                return super().embed([text.strip() or "a" for text in texts])

        super().__init__(embedder=Forgiving(), memory=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DPO, PPO])
def test_a_killed_run_resumes_exactly_scorer_and_best_included(tmp_path: Path, kind: Any) -> None:
    def train(name: str, pause: bool) -> Any:
        torch.set_num_threads(1)
        scorer = CombinedScorer([Share(), Noted()], [1.0, 0.3])
        sampler = make_sampler(width=2, depth=2, scorer=scorer, auditor=tiny(0, value_head=True, lora=2))
        if pause:
            original = sampler.rollouts

            def rollouts(seeds: Sequence[int]) -> list[Graph]:
                if (tmp_path / name / "checkpoints" / "step-00000003").exists():
                    os.kill(os.getpid(), 9)
                return original(seeds)

            sampler.rollouts = rollouts  # type: ignore[method-assign]
        config = HFASTConfiguration(
            training_steps=6, lr=1e-2, batch_size=3, gradient_accumulation_steps=2, save_every=1, keep_last=50,
            log_every=1, evaluate_every=2, ema_decay=0.9,
        )  # fmt: skip
        trainer = make(
            tmp_path, sampler, kind(sampler.system), config, run=tmp_path / name, ckpt_dir=tmp_path / f"{name}-hf"
        )
        trainer.train()
        return trainer

    whole = train("whole", False)
    assert reap(spawn(lambda: train("killed", True))) == [-9]
    killed = train("killed", False)
    assert compare(tmp_path / "killed", tmp_path / "whole") is None
    assert killed.best_score == whole.best_score
    assert killed.system.scorer.state_dict() == whole.system.scorer.state_dict()
    last = [(tmp_path / f"{name}-hf" / "last" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert last[0] == last[1]


@pytest.mark.slow
def test_two_ranks_share_episodes_and_dev_prompts(tmp_path: Path) -> None:
    def train() -> None:
        torch.set_num_threads(1)
        scorer = CombinedScorer([Share(), Noted()], [1.0, 0.3])
        sampler = make_sampler(width=2, depth=1, scorer=scorer)
        config = HFASTConfiguration(training_steps=2, batch_size=2, num_episodes_per_experience=3, save_every=1)
        make(tmp_path, sampler, PPO(sampler.system), config, dev_prompts=[*DEV, "i"], run=tmp_path / "run").train()

    assert run_ranks(train, 2) == [0, 0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "last"]
    assert '"eval/score"' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_rank_without_pairs_borrows_some_from_another(tmp_path: Path) -> None:
    class Alike(Share):
        def score(self, texts: Sequence[str]) -> list[float]:
            return [0.5] * len(texts) if os.environ["RANK"] == "1" else super().score(texts)

    def train() -> None:
        torch.set_num_threads(1)
        sampler = make_sampler(width=3, depth=1, scorer=Alike(), likelihood_weight=0.0, auditor=tiny(0))
        config = HFASTConfiguration(training_steps=2, batch_size=2, num_episodes_per_experience=4, log_every=1)
        result = make(tmp_path, sampler, config=config, dev_prompts=None).train()
        assert result.metrics["train/rollout/updates"] > 0

    assert run_ranks(train, 2) == [0, 0]
