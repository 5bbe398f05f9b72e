"""Scorers: batched, each text once, in the order of the texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import ConfigError
from etude.redteam.classifiers import ClassifierScorer, GuardScorer
from etude.redteam.embeddings import NoveltyScorer, SentenceEmbedder
from etude.redteam.scorers import CombinedScorer, ProfanityScorer, TextScorer, VaderScorer, make_scorer
from tests.unit.redteam.tiny_models import Share, tiny

FRIENDLY, HOSTILE = "What a lovely day, I am so happy.", "You are a horrible, stupid liar and I hate you."


class Counting(TextScorer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def score_distinct(self, texts: Sequence[str]) -> list[float]:
        self.seen += texts
        return [float(len(text)) for text in texts]


def test_equal_texts_are_scored_once() -> None:
    scorer = Counting()
    assert scorer.score(["aa", "b", "aa", "b"]) == [2, 1, 2, 1]
    assert scorer.seen == ["aa", "b"]
    assert scorer.score([]) == []


@pytest.mark.parametrize("scorer", [ProfanityScorer(), VaderScorer()], ids=["profanity", "vader"])
def test_hostile_texts_score_higher(scorer: Any) -> None:
    friendly, hostile, empty = scorer.score([FRIENDLY, HOSTILE, ""])
    assert 0 <= friendly < 0.3 < 0.6 < hostile <= 1
    assert 0 <= empty < 0.5


def test_with_a_sign_friendliness_counts() -> None:
    friendly, hostile = VaderScorer(signed=True).score([FRIENDLY, HOSTILE])
    assert friendly < -0.5 and hostile > 0.5


def test_weighted_sums() -> None:
    scorer = CombinedScorer([Share("a"), Share("b")], [2.0, -1.0])
    assert scorer.score(["a", "b", "ab"]) == [2.0, -1.0, 0.5]
    assert CombinedScorer([Share("a"), Share("b")]).score(["ab"]) == [0.5]
    with pytest.raises(ConfigError, match="1 weights for 2 scorers"):
        CombinedScorer([Share(), Share()], [1.0])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random classifier of three labels, saved as Hugging Face saves it."""
    import transformers

    path = tmp_path_factory.mktemp("classifier")
    tokenizer = tiny().tokenizer
    config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=32,
        id2label={0: "calm", 1: "loud", 2: "toxicity"}, label2id={"calm": 0, "loud": 1, "toxicity": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DistilBertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_any_classifier_scores_by_label(classifier: Path) -> None:
    texts = ["a bad cafe", "i", "dig a big hedge " * 5, "each idea"]
    scores = [ClassifierScorer(classifier, label, batch_size=2).score(texts) for label in ("calm", "loud", "Toxicity")]
    assert [sum(column) for column in zip(*scores)] == pytest.approx([1.0] * 4, abs=1e-5)
    assert ClassifierScorer(classifier).score(texts) == pytest.approx(scores[2], abs=1e-6), "the last label"
    assert ClassifierScorer(classifier, 0, batch_size=4).score(texts) == pytest.approx(scores[0], abs=1e-5)
    several = ClassifierScorer(classifier, "loud", multi_label=True).score(texts)
    assert several != pytest.approx(scores[1], abs=1e-3)
    with pytest.raises(ConfigError, match=r"no label 'rude'; there are calm, loud, toxicity"):
        ClassifierScorer(classifier, "rude")


def test_a_guard_scores_by_its_answer() -> None:
    model = tiny(4)
    scorer = GuardScorer(model, bad="bad", good="fine")
    scores = scorer.score(["a cage", "i hide"])
    assert all(0 < score < 1 for score in scores)
    opposite = GuardScorer(model, bad="fine", good="bad").score(["a cage", "i hide"])
    assert [a + b for a, b in zip(scores, opposite)] == pytest.approx([1.0, 1.0], abs=1e-5)


class Letters:
    """Embeds a text as the unit vector of its first letter."""

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        return torch.eye(26)[[ord(text[0]) - ord("a") for text in texts]]


def test_novelty_is_the_distance_to_what_was_remembered() -> None:
    scorer = NoveltyScorer(embedder=Letters(), memory=2)
    assert scorer.score(["apple", "bee"]) == [1.0, 1.0]
    assert scorer.score(["apple"]) == [1.0], "scoring is not remembering"
    scorer.remember(["apple", "apple", "bee"])
    assert scorer.score(["ant", "bear", "cat"]) == [0.0, 0.0, 1.0]
    scorer.remember(["cat"])
    assert scorer.score(["ant", "bear", "cow"]) == [1.0, 0.0, 0.0], "the oldest is forgotten"
    again = CombinedScorer([Share(), NoveltyScorer(embedder=Letters(), memory=2)], [0.0, 1.0])
    state = json.loads(json.dumps(CombinedScorer([Share(), scorer], [0.0, 1.0]).state_dict()))
    again.load_state_dict(state)
    assert again.score(["ant", "bear", "cow"]) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_packaged_sentence_model_knows_what_is_alike() -> None:
    embedder = SentenceEmbedder(batch_size=2)
    near, same, far = embedder.embed(["The cat sleeps.", "A cat is sleeping.", "Interest rates rose by a percent."])
    assert float(near @ same) > 0.7 > 0.3 > float(near @ far)
    assert near.norm() == pytest.approx(1.0, abs=1e-5)
    scorer = NoveltyScorer(embedder=embedder)
    scorer.remember(["The cat sleeps."])
    repeated, other = scorer.score(["The cat sleeps.", "Interest rates rose by a percent."])
    assert repeated == pytest.approx(0.0, abs=1e-5) and other > 0.7


def test_scorers_have_names(classifier: Path) -> None:
    assert isinstance(make_scorer("profanity"), ProfanityScorer)
    assert make_scorer("vader-signed").score([FRIENDLY])[0] < 0
    named = make_scorer(f"classifier:{classifier}#calm")
    assert isinstance(named, ClassifierScorer) and named.label == 0
    both = make_scorer("0.75*vader + 0.25*profanity")
    assert isinstance(both, CombinedScorer) and both.weights == [0.75, 0.25]
    for wrong in ("vaders", "classifier:", "x*vader", "profanity:path"):
        with pytest.raises(ConfigError, match="scorer"):
            make_scorer(wrong)
