"""Model cards: what a saved policy says about itself, and nothing that its texts would have it say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.policies import MLP
from etude.policies.card import MADE_BY, plain
from etude.policies.language import LanguageModel
from etude.policies.origin import PolicyOrigin, origin_of, set_origin
from etude.reading import yaml12
from etude.simulation.results import EpisodeRow, EvaluationResult
from tests.unit.policies.samples import make_spec

EVIL = "<script>alert(1)</script> [x](javascript:alert(2)) ![y](z) | **b** `c`\n# title"


def make_policy() -> MLP:
    policy = MLP(hidden=[8])
    policy.build(make_spec())
    return policy


def make_run(directory: Path, task: str = "put it there", env: str = "metaworld/pick-place") -> Path:
    dataset = directory / "demonstrations"
    (dataset / "meta").mkdir(parents=True)
    (dataset / "meta/info.json").write_text(json.dumps({"total_episodes": 50, "total_frames": 4321}))
    data = {"type": "lerobot", "params": {"root": str(dataset), "task": task}}
    training = {"training_steps": 100, "lr": 1e-3}
    (directory / "config.yaml").write_text(
        yaml12.write({"policy": {"type": "mlp"}, "data": data, "training": training})
    )
    rows = tuple(EpisodeRow(env, task, n, n, n > 0, 10, 0.0) for n in range(4))
    EvaluationResult(rows, "test", 0, policy="best checkpoint, step 80").to_json(directory / "evaluation/a-test.json")
    for outcome in ("failure", "success"):
        film = directory / f"evaluation/videos/pick-000-{outcome}.mp4"
        film.parent.mkdir(exist_ok=True)
        film.write_bytes(outcome.encode())
    return directory


def test_a_card_has_task_data_success_and_film(tmp_path: Path) -> None:
    policy = make_policy()
    set_origin(policy, PolicyOrigin(make_run(tmp_path / "pick"), 80, "best"))
    policy.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved/README.md").read_text()
    assert card.startswith("---\nlibrary_name: etude\npipeline_tag: robotics\n")
    for expected in (
        "# MLP, pick", "- put it there", "- episodes: 50", "- frames: 4,321", "- root: demonstrations",
        "| metaworld/pick\\-place | 4 | success 75.0% | 30.1% to 95.4% |", "evaluated: best checkpoint, step 80",
        "[A film of an episode](film.mp4)", "| observation.state | state |", "- weights: best checkpoint, step 80",
        'policy = MLP.from_pretrained(".")', "from etude.policies import MLP",
    ):  # fmt: skip
        assert expected in card, card
    assert (tmp_path / "saved/film.mp4").read_bytes() == b"success"
    assert str(tmp_path) not in card, "paths of this machine stay here"


def test_a_policy_that_knows_no_run_says_what_it_is(tmp_path: Path) -> None:
    make_policy().save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "# MLP" in card and "Not recorded." in card and "## Training" not in card
    assert MLP.from_pretrained(tmp_path).spec.features.keys() == {"observation.state", "action"}
    assert origin_of(make_policy()) is None


def test_a_card_of_ones_own_is_kept(tmp_path: Path) -> None:
    make_policy().save_pretrained(tmp_path)
    ours = (tmp_path / "README.md").read_text()
    make_policy().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == ours
    (tmp_path / "README.md").write_text(ours.replace(MADE_BY, "mine"))
    make_policy().save_pretrained(tmp_path)
    assert "mine" in (tmp_path / "README.md").read_text()


def test_texts_cannot_speak_to_the_card(tmp_path: Path) -> None:
    policy = make_policy()
    set_origin(policy, PolicyOrigin(make_run(tmp_path / "run<b>", EVIL, EVIL), 80))
    policy.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved/README.md").read_text()
    body = card.replace(MADE_BY, "").replace("<video ", "").replace("></video>", "")
    assert "<" not in body and "](javascript" not in body and "\n# title" not in card
    assert card.count("\n# ") == 1


@pytest.mark.parametrize("text, shown", [("a_b", r"a\_b"), ("x|y", r"x\|y"), ("<b>", "&lt;b&gt;"), ("a\nb", "a b")])
def test_markup_is_shown_as_it_is(text: str, shown: str) -> None:
    assert plain(text) == shown


@pytest.mark.slow
def test_a_language_model_has_a_card_too(tmp_path: Path) -> None:
    LanguageModel.tiny().save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card and "from etude.policies.language import LanguageModel" in card
