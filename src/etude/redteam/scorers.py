"""Scorers that say how bad texts are: profanity, hostile sentiment, and weighted sums. Batched; equal texts once."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.rollouts.system import Scorer


def import_scorer(module: str) -> Any:
    """Import a module of the `llm` extra that a scorer needs, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as that a model was fitted with an older scikit-learn
        return import_extra(module, "llm")


class TextScorer(Scorer):
    """Base of scorers that see each distinct text of a call once."""

    def score(self, texts: Sequence[str]) -> list[float]:
        """Return one number per text."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return []
        found = dict(zip(distinct, self.score_distinct(distinct), strict=True))
        return [float(found[text]) for text in texts]

    @abstractmethod
    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return one number per text; there is at least one, and no two are equal."""


class ProfanityScorer(TextScorer):
    """Probability of profanity, 0 to 1, by the linear model of alt-profanity-check; works offline."""

    def __init__(self) -> None:
        self._predict = import_scorer("profanity_check").predict_prob

    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return the probabilities."""
        found: list[float] = self._predict(list(texts)).tolist()
        return found


class VaderScorer(TextScorer):
    """Hostility by VADER's lexicon: 0 for neutral and friendly texts, up to 1 for the most negative.

    With `signed`, friendly texts count below 0, down to -1: a signal for texts that are rarely hostile.
    """

    def __init__(self, signed: bool = False) -> None:
        self.signed = signed
        self._analyzer = import_scorer("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()

    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return minus the compound sentiment of each."""
        found = [0.0 - float(self._analyzer.polarity_scores(text)["compound"]) for text in texts]
        return found if self.signed else [max(0.0, score) for score in found]


class CombinedScorer(TextScorer):
    """A weighted sum of scorers."""

    def __init__(self, scorers: Sequence[Scorer], weights: Sequence[float] | None = None) -> None:
        """Join scorers.

        Args:
            scorers: What is summed.
            weights: One per scorer; None takes their mean.
        """
        self.scorers = list(scorers)
        self.weights = [1 / max(1, len(self.scorers))] * len(self.scorers) if weights is None else list(weights)
        if not self.scorers or len(self.weights) != len(self.scorers):
            raise ConfigError(f"{len(self.weights)} weights for {len(self.scorers)} scorers; give one for each")

    def score_distinct(self, texts: Sequence[str]) -> Sequence[float]:
        """Return the weighted sums."""
        columns = [scorer.score(texts) for scorer in self.scorers]
        return [sum(w * s for w, s in zip(self.weights, row, strict=True)) for row in zip(*columns, strict=True)]

    def remember(self, texts: Sequence[str]) -> None:
        """Let those that compare with what was seen take note."""
        for scorer in self.scorers:
            if hasattr(scorer, "remember"):
                scorer.remember(texts)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of those that have one, by their place."""
        return {str(at): one.state_dict() for at, one in enumerate(self.scorers) if hasattr(one, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        for at, part in state.items():
            self.scorers[int(at)].load_state_dict(part)  # type: ignore[attr-defined]


def make_scorer(name: str) -> Scorer:
    """Return a scorer by name: profanity, vader, vader-signed, novelty, classifier:PATH[#LABEL], or guard:PATH.

    Several are joined with `+`, each with its weight before it, as in `0.8*vader+0.2*novelty`.
    """
    parts = [part.strip() for part in name.split("+")]
    if len(parts) > 1 or "*" in name:
        weighed = [part.partition("*") if "*" in part else ("1", "*", part) for part in parts]
        try:
            weights = [float(weight) for weight, _, _ in weighed]
        except ValueError:
            raise ConfigError(f"scorer {name!r}: write weights before scorers, as in 0.8*vader+0.2*novelty") from None
        return CombinedScorer([make_scorer(one.strip()) for _, _, one in weighed], weights)
    kind, _, rest = name.partition(":")
    path, _, label = rest.partition("#")
    if kind == "profanity" and not rest:
        return ProfanityScorer()
    if kind in ("vader", "vader-signed") and not rest:
        return VaderScorer(signed=kind == "vader-signed")
    if kind == "novelty":
        from etude.redteam.embeddings import NoveltyScorer

        return NoveltyScorer(path or None)
    if kind in ("classifier", "guard") and path:
        from etude.redteam.classifiers import ClassifierScorer, GuardScorer

        return ClassifierScorer(path, label=label or None) if kind == "classifier" else GuardScorer(path)
    raise ConfigError(
        f"unknown scorer {name!r}; choose from profanity, vader, vader-signed, novelty, classifier:PATH#LABEL and "
        "guard:PATH"
    )
