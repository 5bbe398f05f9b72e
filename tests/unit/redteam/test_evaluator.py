"""What an evaluation says is what happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.redteam.evaluator import ASTEvaluator, bootstrap_interval, compare, distinct_n, mean_distance
from etude.rollouts.graph import Graph, Node, Sampler
from etude.simulation.results import wilson_interval
from tests.unit.redteam.test_scorers import Letters
from tests.unit.redteam.tiny_models import Share, make_sampler
from tests.unit.runs.strict_page import Page


class Told:
    scorer = Share("x")


class Scripted(Sampler):
    """Conversations of three turns whose responses have the scores that the start says."""

    def rollout(self, seed: int | None = None) -> Graph:
        raise AssertionError("an evaluation evaluates")

    def eval_rollout(self, seed: Any = None) -> Graph:
        graph = Graph(f"start {seed}")
        children = graph.children
        for turn, score in enumerate(SCORES[seed]):
            extra: dict[str, Any] = {"response_score": score, "perplexity": 10.0, "auditor": {"tokens": []}}
            node = Node("c", "x" * (turn + 1), f"<b>answer</b> {seed}", score, extra=extra)
            children.append(node)
            children = node.children
        return graph


SCORES = {0: [0.7, 0.7, 0.7], 1: [0.1, 0.2, 0.9], 2: [0.0, 0.0, 0.3]}


def evaluate(**options: Any) -> dict[str, Any]:
    return ASTEvaluator(Scripted(Told()), [0, 1, 2], **{"embedder": None, **options}).evaluate()


def test_means_are_means() -> None:
    result = evaluate()
    assert result["means"]["response_score"]["mean"] == pytest.approx((0.7 + 0.4 + 0.1) / 3)
    assert result["means"]["probe_score"]["mean"] == 1.0
    assert [row["response_score"] for row in result["per_turn"]] == pytest.approx([0.8 / 3, 0.3, 1.9 / 3])
    assert (result["rollouts"], result["turns"]) == (3, 9)
    low, high = result["means"]["response_score"]["interval"]
    assert low == pytest.approx(0.1) and high == pytest.approx(0.7), "of three values, the least and the greatest"


def test_success_is_counted_by_conversation_with_wilsons_interval() -> None:
    result = evaluate()
    assert result["attack_success"] == {
        "successes": 2, "of": 3, "rate": 2 / 3, "interval": list(wilson_interval(2, 3)),
    }  # fmt: skip
    assert [row["attack_success"]["successes"] for row in result["per_turn"]] == [1, 1, 2]
    assert evaluate(threshold=0.95)["attack_success"]["successes"] == 0


def test_examples_are_the_worst_responses() -> None:
    result = evaluate(examples=2)
    assert [turn["response_score"] for turn in result["examples"]] == [0.9, 0.7]


def test_a_result_is_json_and_a_page_that_runs_nothing(tmp_path: Path) -> None:
    result, baseline = evaluate(), evaluate(threshold=0.95)
    path = ASTEvaluator.write_json(result, tmp_path / "deep" / "result.json")
    assert json.loads(path.read_text()) == result
    page = ASTEvaluator.write_html(result, tmp_path / "page.html", baseline=baseline).read_text()
    assert "<b>answer</b>" not in page and "&lt;b&gt;answer&lt;/b&gt;" in page
    assert "<script" not in page and "default-src 'none'" in page
    for word in ("Failures found", "Diversity", "Baseline", "66.7%", "Score of responses"):
        assert word in page
    quiet = ASTEvaluator.write_html(evaluate(threshold=2.0), tmp_path / "quiet.html").read_text()
    assert "No response reached the threshold" in quiet and "Baseline" not in quiet


def test_the_page_shows_what_was_said_as_reports_of_runs_do(tmp_path: Path) -> None:
    result, baseline = evaluate(), evaluate()
    for talk in baseline["conversations"]:
        for turn in talk["turns"]:
            turn["probe"] = "as before"
    page = Page(ASTEvaluator.write_html(result, tmp_path / "page.html", baseline=baseline).read_text())
    texts = [text.strip() for text in page.text if text.strip()]
    said = texts[texts.index("What was said", texts.index("What was said") + 1) :]
    marks = [text for text in said if text in ("Auditor", "Baseline", "best", "worst", "random")]
    assert marks == ["Auditor", "best", "worst", "random", "Baseline", "best", "worst", "random"]
    assert [text for text in said if text.startswith("start ")] == ["start 0", "start 1", "start 2"]
    first = said[said.index("start 0") : said.index("start 1")]
    assert first == [
        "start 0", "baseline", "0.7", *["as before", "<b>answer</b> 0"] * 3,
        "auditor", "0.7", "x", "<b>answer</b> 0", "xx", "<b>answer</b> 0", "xxx", "<b>answer</b> 0",
    ]  # fmt: skip
    assert "b" not in [tag for tag, fields in page.tags if fields], "what was said is no markup"


def test_texts_that_the_reward_scored_are_not_scored_again() -> None:
    sampler = make_sampler(depth=2, scorer=(scorer := Share()))
    result = ASTEvaluator(sampler, range(4), embedder=Letters_or_space()).evaluate()
    assert [len(call) for call in scorer.calls] == [8, 8, 8], "two levels of texts, then the probes"
    for turn in result["examples"]:
        assert turn["response_score"] == Share().score([turn["response"]])[0]
        assert turn["probe_score"] == Share().score([turn["probe"]])[0]
    assert result["diversity"]["method"] == "mean pairwise embedding distance"


class Letters_or_space(Letters):
    def embed(self, texts: Sequence[str]) -> Any:
        return super().embed([text.strip() or "a" for text in texts])


def test_prompts_are_taken_again_with_other_words() -> None:
    evaluator = ASTEvaluator(make_sampler(depth=1), prompts=["a cage", "a bed"], embedder=None)
    first, second = evaluator.evaluate(6), evaluator.evaluate(6)
    assert first == second
    assert [talk["prompt"] for talk in first["conversations"]] == ["a cage", "a bed"] * 3
    assert len({str(talk["turns"][0]["probe"]) for talk in first["conversations"]}) > 2
    other = ASTEvaluator(make_sampler(depth=1), prompts=["a cage"], embedder=None, seed=9).evaluate(1)
    assert other["conversations"][0]["turns"] != first["conversations"][0]["turns"]
    with pytest.raises(ConfigError, match="either seeds or prompts"):
        ASTEvaluator(make_sampler(), [0], prompts=["a"])
    with pytest.raises(ConfigError, match="at least one"):
        ASTEvaluator(make_sampler(), []).evaluate()


def test_comparing_with_a_baseline() -> None:
    ours = {"means": {"response_score": {"mean": 0.5, "interval": [0.4, 0.6]}}}
    theirs = {"means": {"response_score": {"mean": 0.2, "interval": [0.1, 0.3]}}}
    assert compare(ours, theirs)["beyond_baseline"] is True
    assert compare(theirs, ours)["beyond_baseline"] is False


def test_the_bootstrap_interval_is_about_two_standard_errors() -> None:
    values = np.random.Generator(np.random.Philox(1)).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values.tolist())
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.3 * error)
    assert bootstrap_interval([0.5]) == [0.5, 0.5]


def test_diversity() -> None:
    vectors = Letters().embed(["a", "a", "b"]).numpy()
    assert mean_distance(vectors) == pytest.approx(2 / 3)
    assert mean_distance(vectors[:1]) == 0.0
    assert distinct_n(["a b c", "a b d"]) == 3 / 4
    assert distinct_n(["a"]) == 0.0
