"""The auditor over whole words."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.policies.language import LanguageModel
from etude.redteam import ASTSampler, VaderScorer, write_word_model
from etude.redteam.hf_system import HFASTSystem
from etude.redteam.words import EVERYDAY_WORDS
from tests.unit.redteam.tiny_models import tiny

WORDS = ("ace", "bad", "cafe")


def test_it_says_nothing_but_its_words(tmp_path: Path) -> None:
    model = LanguageModel.from_pretrained(write_word_model(tmp_path / "auditor", WORDS))
    assert model.decode(model.encode(" bad cafe ace")) == " bad cafe ace"
    assert len(model.tokenizer) == 2 + len(WORDS)
    system = HFASTSystem(
        model, tiny(1), scorer=VaderScorer(), auditor_sampling={"max_new_tokens": 4}, likelihood_weight=0.0,
        target_sampling={"max_new_tokens": 3},
    )  # fmt: skip
    nodes = [
        node for graph in ASTSampler(system, ["i hide", "a face"], 8, 1).rollouts([1, 2]) for node in graph.nodes()
    ]
    said = {word for node in nodes for word in node.probe.split()}
    assert said == set(WORDS)
    assert all(node.probe == "".join(f" {word}" for word in node.probe.split()) for node in nodes)


def test_unknown_words_do_not_hide_known_ones(tmp_path: Path) -> None:
    model = LanguageModel.from_pretrained(write_word_model(tmp_path, WORDS))
    unknown = model.tokenizer.unk_token_id
    assert model.encode("This morning bad") == [unknown, unknown, model.tokenizer.convert_tokens_to_ids(" bad")]


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_word_model(tmp_path / name, WORDS, seed=seed, hidden_size=16)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same != other


@pytest.mark.parametrize("words", [[], ["a", "a"], ["two words"], [""]])
def test_words_are_distinct_and_single(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="distinct words"):
        write_word_model(tmp_path / "auditor", words)
    assert not (tmp_path / "auditor").exists()


def test_the_packaged_words_lean_neither_way() -> None:
    scores = VaderScorer(signed=True).score(list(EVERYDAY_WORDS))
    friendly, hostile = sum(score < 0 for score in scores), sum(score > 0 for score in scores)
    assert len(set(EVERYDAY_WORDS)) == len(EVERYDAY_WORDS)
    assert friendly == hostile == 11 and abs(sum(scores)) < 0.1
