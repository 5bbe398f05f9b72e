"""Wrong arguments of red-teaming's parts are answered in a sentence, before anything is loaded or trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.errors import CheckpointError, ConfigError
from etude.policies.language.locate import locate_model
from etude.redteam import DPO, ASTEvaluator, ASTSampler, HFASTConfiguration, HFASTSystem, HFASTTrainer, write_word_model
from etude.redteam.classifiers import ClassifierScorer
from etude.redteam.embeddings import SentenceEmbedder
from etude.rollouts.harness import Harness
from tests.unit.redteam.tiny_models import Share, make_sampler, tiny

CONFIG = HFASTConfiguration(training_steps=1)


@pytest.fixture(scope="module")
def sampler() -> Any:
    return make_sampler()


CASES: dict[str, tuple[Any, str]] = {
    "a dictionary as config": (
        lambda s: Trainer(config={"lr": 1}, sampler=s, algorithm=DPO(s.system)),  # type: ignore[arg-type]
        r"config must be a TrainingConfiguration\(\.\.\.\), got dict",
    ),
    "a class as config": (
        lambda s: HFASTTrainer(HFASTConfiguration, s, DPO(s.system)),  # type: ignore[arg-type]
        "got the class HFASTConfiguration itself",
    ),
    "no config": (lambda s: Trainer(None, s, DPO(s.system)), r"Trainer\(config, sampler, algorithm\): config"),
    "a system as sampler": (lambda s: Trainer(CONFIG, s.system, DPO(s.system)), "sampler must have rollout.*ASTSystem"),
    "a class as algorithm": (lambda s: Trainer(CONFIG, s, DPO), "algorithm must have flatten.* the class DPO itself"),
    "a name as algorithm": (lambda s: Trainer(CONFIG, s, "dpo"), "algorithm must have flatten, collate_fn, step.* str"),
    "no sampler": (lambda s: HFASTTrainer(CONFIG), "HFASTTrainer needs a sampler"),
    "a text as dev prompts": (
        lambda s: HFASTTrainer(CONFIG, s, DPO(s.system), dev_prompts="one"), "dev_prompts must be a list.* 'one'"
    ),
    "a number as ckpt_dir": (
        lambda s: HFASTTrainer(CONFIG, s, DPO(s.system), ckpt_dir=3),  # type: ignore[arg-type]
        "ckpt_dir must be a path, got 3",
    ),
    "a number as run": (lambda s: HFASTTrainer(CONFIG, s, DPO(s.system), run=3), "run must be a path, got 3"),
    "a text as prompts": (lambda s: ASTSampler(s.system, "one"), "prompts must be a list of prompts, got 'one'"),
    "None as prompts": (lambda s: ASTSampler(s.system, None), "prompts must be a list of prompts, got None"),  # type: ignore[arg-type]
    "a text as width": (lambda s: ASTSampler(s.system, ["a"], "2"), "whole numbers from 1.* got '2' and 3"),  # type: ignore[arg-type]
    "None as system": (lambda s: ASTSampler(None, ["a"]), "ASTSampler needs a System first, got NoneType"),  # type: ignore[arg-type]
    "a sampler as system": (DPO, "DPO needs a System first, got ASTSampler"),
    "a text as beta": (lambda s: DPO(s.system, beta="x"), "beta must be a positive number, got 'x'"),  # type: ignore[arg-type]
    "None as target": (lambda s: HFASTSystem(tiny(), None), "a model is given by a directory.* got None"),  # type: ignore[arg-type]
    "a module as auditor": (
        lambda s: HFASTSystem(torch.nn.Linear(1, 1), tiny()),  # type: ignore[arg-type]
        "wrap Linear in LanguageModel",
    ),
    "a function as scorer": (lambda s: HFASTSystem(tiny(), tiny(1), None, len), "scorer must be a Scorer or the name"),  # type: ignore[arg-type]
    "a number as sampling": (
        lambda s: HFASTSystem(tiny(), tiny(1), None, Share(), auditor_sampling=3),  # type: ignore[arg-type]
        "sampling must be a Sampling or a mapping",
    ),
    "a text as length": (
        lambda s: HFASTSystem(tiny(), tiny(1), None, Share(), auditor_sampling={"max_new_tokens": "a"}),
        "sampling: .*'max_new_tokens': 'a'",
    ),
    "None to evaluate": (lambda s: ASTEvaluator(None), "ASTEvaluator needs a sampler first, got NoneType"),
    "None as a place for JSON": (lambda s: ASTEvaluator.write_json({}, None), "must be a path, got None"),  # type: ignore[arg-type]
    "None as a place for a page": (lambda s: ASTEvaluator.write_html({}, None), "must be a path, got None"),  # type: ignore[arg-type]
    "None as a place for a model": (lambda s: s.system.auditor.save_pretrained(None), "must be a path, got None"),
    "None as a place for words": (lambda s: write_word_model(None), "must be a path, got None"),  # type: ignore[arg-type]
    "None as a model": (lambda s: type(s.system.auditor).from_pretrained(None), "a model must be a path, got None"),
    "a text as episodes": (
        lambda s: Harness(s, DPO(s.system), "2"),  # type: ignore[arg-type]
        "num_episodes_per_experience must be a whole number from 1, got '2'",
    ),
    "a changed configuration": (
        lambda s: setattr(TrainingConfiguration(), "lr", 3),
        r"lr cannot be changed once it is set; make another configuration: config\.model_copy\(update=\{'lr': 3\}\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_answered_in_a_sentence(name: str, sampler: Any) -> None:
    attempt, sentence = CASES[name]
    with pytest.raises(ConfigError, match=sentence) as found:
        attempt(sampler)
    assert "\n" not in str(found.value)


def test_a_scorer_may_be_given_by_name() -> None:
    assert type(HFASTSystem(tiny(), tiny(1), scorer="vader").scorer).__name__ == "VaderScorer"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    (tmp_path / "my-model").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("my-modle", "there is no such directory; did you mean 'my-model'"),
        ("./elsewhere/model", "no such directory; a model on the Hugging Face hub is named owner/name"),
        ("my-model/sub/model", "no such directory; a model on the Hugging Face hub is named owner/name"),
        ("my-model/best", "no such directory; a model on the Hugging Face hub is named owner/name"),
        ("gpt2", "no such directory; a model on the Hugging Face hub is named owner/name"),
        ("owner/name", "cannot be fetched from the Hugging Face hub: 127.0.0.1 does not answer"),
    ],
)
def test_a_model_that_is_nowhere_is_said_at_once(places: Path, name: str, sentence: str) -> None:
    for load in (locate_model, tiny().from_pretrained, ClassifierScorer, SentenceEmbedder):
        with pytest.raises(CheckpointError, match=sentence):
            load(name)
    with pytest.raises(CheckpointError, match=sentence):
        HFASTSystem(tiny(), name, scorer=Share())


def test_a_hub_id_is_not_asked_for_offline(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        locate_model("owner/name")
    assert locate_model(places / "my-model") == str(places / "my-model")


def test_a_hub_that_answers_is_asked(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert locate_model("owner/name") == "owner/name"


@pytest.mark.slow
def test_a_missing_package_comes_with_what_to_install(child_env: dict[str, str]) -> None:
    program = """
import sys
sys.modules["transformers"] = sys.modules["lightning"] = None
from etude.errors import MissingExtraError
from etude.policies.language import LanguageModel
from etude.registry import ENGINE_REGISTRY
engines = ENGINE_REGISTRY.get
for attempt in (LanguageModel.tiny, lambda: engines("huggingface"), lambda: engines("lightning")):
    try:
        attempt()
    except MissingExtraError as error:
        print(error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=110, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert "transformers cannot be imported" in lines[0]
    assert lines[1:] == [
        "engine 'huggingface' needs transformers: pip install 'etude[hf]'",
        "engine 'lightning' needs lightning: pip install 'etude[lightning]'",
    ]
