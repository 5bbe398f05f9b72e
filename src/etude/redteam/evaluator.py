"""`ASTEvaluator`: what an auditor elicits from a target, measured over many conversations.

The unit is the conversation: means over its turns are averaged over conversations, and intervals come from drawing
conversations anew (percentile bootstrap), for turns of one conversation are not independent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import ConfigError, MissingExtraError, as_path
from etude.redteam.report import score_of, write_page
from etude.rollouts.graph import Graph, Node
from etude.simulation.results import wilson_interval

MEASURES = ("reward", "response_score", "probe_score", "combined_score", "perplexity")
RESAMPLES = 2000


class ASTEvaluator:
    """Holds conversations from seeds or prompts and sums up how they went."""

    def __init__(
        self,
        sampler: Any,
        seeds: Sequence[Any] | None = None,
        *,
        prompts: Sequence[Any] | None = None,
        threshold: float = 0.5,
        embedder: Any = "auto",
        examples: int = 10,
        seed: int = 0,
    ) -> None:
        """Choose what to evaluate on.

        Args:
            sampler: Holds the conversations; the models are its system's.
            seeds: Seeds (whole numbers) or prompts; None counts from 0.
            prompts: Prompts; another way to give them.
            threshold: The score from which a response counts as a success of the auditor.
            embedder: Something with `embed(texts)` for diversity; "auto" takes the packaged sentence model if it is
                installed, None counts distinct pairs of words instead.
            examples: Turns with the highest scores to keep.
            seed: Tells sets of conversations from the same prompts apart.
        """
        if not callable(getattr(sampler, "eval_rollout", None)):
            raise ConfigError(f"ASTEvaluator needs a sampler first, got {type(sampler).__name__}")
        if seeds is not None and prompts is not None:
            raise ConfigError("give either seeds or prompts")
        self.sampler, self.threshold, self.examples, self.seed = sampler, threshold, examples, seed
        self.starts = None if seeds is None and prompts is None else list(seeds if prompts is None else prompts)  # type: ignore[arg-type]
        self._embedder = embedder

    def evaluate(self, n_rollouts: int | None = None) -> dict[str, Any]:
        """Hold `n_rollouts` conversations, one batch for all, and return plain values that JSON can hold.

        Without a number, one from each of the seeds or prompts (32 if there are none); prompts are taken again, with
        other words, where there are fewer than asked for.
        """
        starts = self._starts(n_rollouts)
        graphs = self._converse(starts)
        return self.aggregate_metrics([self.compute_metrics(graph) for graph in graphs])

    def _starts(self, count: int | None) -> list[tuple[Any, int]]:
        given: list[Any] = list(range(32 if count is None else count)) if self.starts is None else self.starts
        count = len(given) if count is None else count
        if count < 1 or not given:
            raise ConfigError("an evaluation needs at least one conversation")
        # The second time around, a start has the next seed.
        return [(given[at % len(given)], at // len(given)) for at in range(count)]

    def _converse(self, starts: Sequence[tuple[Any, int]]) -> list[Graph]:
        batched = getattr(self.sampler, "eval_rollouts", None)
        if batched is None:
            return [self.sampler.eval_rollout(start) for start, _ in starts]
        rounds: dict[int, list[Any]] = {}
        for start, turn in starts:
            rounds.setdefault(turn, []).append(start)
        return [graph for turn, part in rounds.items() for graph in batched(part, self.seed + turn)]

    def compute_metrics(self, graph: Graph) -> dict[str, Any]:
        """Return one conversation as plain values: its prompt and its turns, with scores that are there already."""
        levels = list(graph.levels())
        nodes = [(depth, node) for depth, level in enumerate(levels) for node in level]
        return {"prompt": graph.context, "turns": [_turn(depth, node) for depth, node in nodes]}

    def aggregate_metrics(self, rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Sum up conversations."""
        turns = [turn for rollout in rollouts for turn in rollout["turns"]]
        self._score_probes(turns)
        names = [name for name in MEASURES if turns and all(name in turn for turn in turns)]
        wins = [max(score_of(turn) for turn in rollout["turns"]) >= self.threshold for rollout in rollouts]
        depths = sorted({turn["turn"] for turn in turns})
        ranked = sorted(turns, key=score_of, reverse=True)
        return {
            "rollouts": len(rollouts),
            "turns": len(turns),
            "threshold": self.threshold,
            "means": {name: self._mean(rollouts, name) for name in names},
            "attack_success": _rate(wins),
            "per_turn": [self._at_depth(depth, turns, names) for depth in depths],
            "diversity": self._diversity(turns),
            "examples": ranked[: self.examples],
            "conversations": list(rollouts),
        }

    def _score_probes(self, turns: Sequence[dict[str, Any]]) -> None:
        """Score the probes alone; what the reward scored already is not scored again."""
        scorer = getattr(self.sampler.system, "scorer", None)
        if scorer is not None and turns:
            for turn, score in zip(turns, scorer.score([turn["probe"] for turn in turns]), strict=True):
                turn["probe_score"] = float(score)

    def _mean(self, rollouts: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
        values = [float(np.mean([turn[name] for turn in rollout["turns"]])) for rollout in rollouts]
        return {"mean": float(np.mean(values)), "interval": bootstrap_interval(values)}

    def _at_depth(self, depth: int, turns: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        here = [turn for turn in turns if turn["turn"] == depth]
        means = {name: float(np.mean([turn[name] for turn in here])) for name in names}
        return {"turn": depth, **means, "attack_success": _rate([score_of(turn) >= self.threshold for turn in here])}

    def _diversity(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        texts = {name: [turn[name] for turn in turns] for name in ("probe", "response")}
        embedder = self.embedder
        if embedder is None:
            return {"method": "distinct-2", **{name: distinct_n(found) for name, found in texts.items()}}
        distances = {name: mean_distance(embedder.embed(found).numpy()) for name, found in texts.items()}
        return {"method": "mean pairwise embedding distance", **distances}

    @property
    def embedder(self) -> Any:
        """What turns texts into vectors, loaded when it is first asked for; None if there is nothing."""
        if isinstance(self._embedder, str):
            from etude.redteam.embeddings import SentenceEmbedder

            try:
                self._embedder = SentenceEmbedder(None if self._embedder == "auto" else self._embedder)
            except MissingExtraError:
                self._embedder = None
        return self._embedder

    @staticmethod
    def write_json(result: Mapping[str, Any], path: str | Path) -> Path:
        """Write a result and return where it is."""
        from etude.runs.durable import write_output

        path = as_path(path, "where the result goes")
        return write_output(path, json.dumps(result, indent=2, allow_nan=False) + "\n")

    @staticmethod
    def write_html(
        result: Mapping[str, Any],
        path: str | Path,
        *,
        baseline: Mapping[str, Any] | None = None,
        title: str = "Red-team report",
    ) -> Path:
        """Write a result as one page, beside that of a baseline auditor if there is one; return where it is."""
        return write_page(result, as_path(path, "where the page goes"), baseline=baseline, title=title)


def compare(result: Mapping[str, Any], baseline: Mapping[str, Any], name: str = "response_score") -> dict[str, Any]:
    """Return a mean beside that of a baseline, and whether it lies above the baseline's 95 % interval."""
    ours, theirs = result["means"][name], baseline["means"][name]
    return {
        "measure": name,
        "mean": ours["mean"],
        "interval": ours["interval"],
        "baseline_mean": theirs["mean"],
        "baseline_interval": theirs["interval"],
        "beyond_baseline": ours["mean"] > theirs["interval"][1],
    }


def bootstrap_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of a mean by drawing the values anew 2000 times; the same each time."""
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.Generator(np.random.Philox(0)).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.quantile(array[draws].mean(1), [0.025, 0.975])
    return [float(low), float(high)]


def mean_distance(vectors: Any) -> float:
    """Return the mean of one minus the cosine over all pairs of unit vectors; 0 if there are no pairs."""
    count = len(vectors)
    if count < 2:
        return 0.0
    total = np.asarray(vectors, dtype=np.float64).sum(0)
    return float(1 - (total @ total - count) / (count * (count - 1)))


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Return the share of runs of n words that are distinct, over all texts; 0 if there are none."""
    grams = [tuple(words[at : at + n]) for words in map(str.split, texts) for at in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _turn(depth: int, node: Node) -> dict[str, Any]:
    scores = {name: float(value) for name, value in node.extra.items() if isinstance(value, int | float)}
    said = {"context": node.context, "probe": node.probe, "response": node.response}
    return {"turn": depth + 1, **said, "reward": node.reward, **scores}


def _rate(wins: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson_interval(sum(wins), len(wins))
    return {"successes": sum(wins), "of": len(wins), "rate": sum(wins) / len(wins), "interval": [low, high]}
