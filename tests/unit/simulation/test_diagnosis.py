"""What is kept of an evaluation to tell why it failed: watched at no cost to the outcome, written, read and shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.data.lerobot.writer import LeRobotWriter
from etude.policies.base import PolicyModule
from etude.policies.executor import ActionExecutor
from etude.policies.origin import PolicyOrigin, set_origin
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.demonstrations import find_dataset, read_demonstrations
from etude.simulation.diagnosis import DiagnosisOptions, choose_traces, diagnose, read_diagnosis
from etude.simulation.evaluate import choose_for_film, evaluate_policy
from etude.simulation.failure_page import choose_axes, failure_section, plan_charts
from etude.simulation.report import evaluation_sections, write_run_report
from etude.simulation.results import DIAGNOSIS, EvaluationResult
from etude.simulation.watching import MOST_POINTS
from etude.types import Feature
from tests.unit.simulation.conftest import OPTIONS, PENDULUM
from tests.unit.simulation.made_up import USUAL_STEPS, made_up_result, row, trace, walk
from tests.unit.simulation.point_reach import PointReach

STATE_NAME = "observation.state"


# ---- watching --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "noisy"])
def test_watching_changes_no_outcome(kind: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("gymnasium")
    policy = request.getfixturevalue(kind)
    asked: dict[str, Any] = {"episodes": 5, "options": OPTIONS}
    alone = evaluate_policy(policy, PENDULUM, **asked)
    traces = []
    for slots, workers in ((1, 0), (3, 0), (2, 2)):
        watched = evaluate_policy(
            policy, PENDULUM, slots=slots, workers=workers, diagnosis=DiagnosisOptions(samples=3), **asked
        )
        assert watched == alone and watched.diagnosis is not None
        traces.append(watched.diagnosis.environments[0].traces)
    assert policy.executor.on_plan is None
    for name in ("state", "action", "planned", "disagreement", "uncertainty"):
        for other in traces[1:]:
            for number, one in traces[0].items():
                np.testing.assert_allclose(getattr(other[number], name), getattr(one, name), atol=1e-5)


class Drawing(torch.nn.Module):
    """A policy in the plane that draws its plans from the global generator."""

    noise_shape = (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.executor = ActionExecutor(4, n_action_steps=2)
        self.drawn = 0

    def reset(self, slots: Any = None) -> None:
        self.executor.reset(slots)

    def predict_action_chunk(self, batch: Any) -> Any:
        self.drawn += len(batch[STATE_NAME])
        return torch.randn(len(batch[STATE_NAME]), 4, 2) + batch[STATE_NAME][:, None, 2:]

    def select_action(self, observation: Any, slots: Any = None) -> Any:
        return self.executor.select(observation, self.predict_action_chunk, slots)


def test_no_random_number_is_taken_from_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator draws from the global generators as well, which samples of plans must leave alone."""

    class Shaky(PointReach):
        def step(self, action: Any) -> Any:
            return super().step(np.asarray(action) + np.random.normal(size=2) + float(torch.rand(())))

    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "shaky", Shaky)
    policy = Drawing()
    alone = evaluate_policy(policy, "shaky", episodes=3)
    drawn, policy.drawn = policy.drawn, 0
    watched = evaluate_policy(policy, "shaky", episodes=3, diagnosis=DiagnosisOptions(samples=4))
    assert watched == alone and len({one.reward for one in alone.rows}) == 3
    assert policy.drawn == 5 * drawn, "four samples of each plan"
    assert watched.diagnosis is not None
    uncertainty = watched.diagnosis.environments[0].traces[0].uncertainty
    assert np.isfinite(uncertainty).all() and 0.3 < uncertainty.mean() < 2.0


def test_samples_are_drawn_in_films_of_episodes_that_are_played_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "point_reach", PointReach)
    result = evaluate_policy(
        Drawing(), "point_reach", episodes=3, options={"max_steps": 3}, video_dir=tmp_path, videos=1,
        diagnosis=DiagnosisOptions(),
    )  # fmt: skip
    assert result.diagnosis is not None
    known = {n: np.isfinite(one.uncertainty).all() for n, one in result.diagnosis.environments[0].traces.items()}
    assert known == {0: True, 1: False, 2: False}


def test_what_was_planned_is_kept_beside_what_was_done(mlp: PolicyModule) -> None:
    pytest.importorskip("gymnasium")
    mlp.set_execution(n_action_steps=3)
    result = evaluate_policy(mlp, PENDULUM, episodes=1, options=OPTIONS, diagnosis=DiagnosisOptions())
    assert result.diagnosis is not None
    one = result.diagnosis.environments[0].traces[0]
    assert one.steps.tolist() == list(range(12)) and one.state.shape == (12, 3)
    assert one.age.tolist() == [0, 1, 2] * 4
    np.testing.assert_allclose(one.planned, one.action, atol=1e-6)
    known = np.isfinite(one.disagreement)
    assert known.tolist() == [step >= 3 and step % 3 == 0 for step in range(12)], "chunks of 4 share one step in 3"
    assert np.isnan(one.uncertainty).all(), "it does not draw"
    mlp.set_execution(temporal_ensemble_coeff=0.01)
    result = evaluate_policy(mlp, PENDULUM, episodes=1, options=OPTIONS, diagnosis=DiagnosisOptions())
    assert result.diagnosis is not None
    one = result.diagnosis.environments[0].traces[0]
    assert one.age.tolist() == [0] * 12 and np.isfinite(one.disagreement[1:]).all()
    assert np.abs(one.planned - one.action)[1:].max() > 1e-6, "an average is done, not the newest plan"


def test_long_episodes_are_thinned_out_and_functions_are_watched_too() -> None:
    pytest.importorskip("gymnasium")
    result = evaluate_policy(
        lambda _: np.zeros(1), PENDULUM, episodes=1, options={"render": False, "max_steps": 1000},
        diagnosis=DiagnosisOptions(),
    )  # fmt: skip
    assert result.diagnosis is not None
    (one,) = result.diagnosis.environments
    steps = one.traces[0].steps
    assert MOST_POINTS / 2 <= len(steps) <= MOST_POINTS and np.unique(np.diff(steps)).tolist() == [16.0]
    assert one.missing == "it is not known what the policy was trained on"


# ---- demonstrations --------------------------------------------------------------------------------------------------


def write_dataset(root: Path, tasks: list[str]) -> None:
    features = {STATE_NAME: Feature((5,), "float32", "state"), "action": Feature((2,), "float32", "action")}
    writer = LeRobotWriter(root, features, 10.0, "made up")
    for number, task in enumerate(tasks):
        for state in walk(0.05 * number, USUAL_STEPS):
            writer.add_frame({STATE_NAME: state, "action": np.zeros(2, np.float32)})
        writer.save_episode(task)
    writer.finalize()
    writer.close()


@pytest.mark.slow
def test_demonstrations_are_read_from_the_dataset_of_the_run(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", ["carry", "carry", "throw"])
    nested = {"data": {"type": "mixture", "params": {"parts": [{"type": "lerobot", "params": {"root": "there"}}]}}}
    assert find_dataset(nested) == Path("there") and find_dataset({"data": None}) is find_dataset({}) is None
    all_of_them = read_demonstrations(tmp_path / "data", [STATE_NAME])
    some = read_demonstrations(tmp_path / "data", [STATE_NAME], "carry")
    assert not isinstance(all_of_them, str) and not isinstance(some, str)
    assert (len(all_of_them.lengths_E), len(some.lengths_E)) == (3, 2)
    assert some.distances(walk(0.0, USUAL_STEPS)).max() < 1e-3 < 0.1 < some.distances(walk(2.0, USUAL_STEPS)).min()
    assert some.own_distances().min() > 0.01, "its own episode does not count"
    assert "no longer in" in str(read_demonstrations(tmp_path / "gone", [STATE_NAME]))
    assert "have no observation.other" in str(read_demonstrations(tmp_path / "data", ["observation.other"]))
    assert "pictures alone" in str(read_demonstrations(tmp_path / "data", []))
    next((tmp_path / "data/data").glob("*/*.parquet")).write_bytes(b"PAR1 and then nothing")
    assert "cannot be read" in str(read_demonstrations(tmp_path / "data", [STATE_NAME]))


def test_a_policy_of_a_run_is_compared_with_what_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(tmp_path / "data", ["carry"] * 2)
    (tmp_path / "config.yaml").write_text(f"data: {{type: lerobot, params: {{root: {tmp_path / 'data'}}}}}\n")

    class Table(PointReach):
        def _seen(self) -> Any:
            return {STATE_NAME: np.concatenate([super()._seen()[STATE_NAME], [0.0]]).astype(np.float32)}

    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "table", Table)

    class Still:
        def __call__(self, observation: Any) -> Any:
            return np.zeros(2)

    policy = Still()
    set_origin(policy, PolicyOrigin(tmp_path, 5))
    result = evaluate_policy(policy, "table", episodes=3, diagnosis=DiagnosisOptions())
    assert result.diagnosis is not None
    (found,) = result.diagnosis.environments
    assert all(len(one.distance) == 20 for one in found.traces.values()) and found.missing == ""


# ---- kept and shown --------------------------------------------------------------------------------------------------


def test_a_diagnosis_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = made_up_result()
    result.keep(tmp_path / "a-test")
    path = tmp_path / f"a-test{DIAGNOSIS}"
    found = read_diagnosis(path)
    assert found is not None and result.diagnosis is not None
    (one,), (before,) = found.environments, result.diagnosis.environments
    assert (one.rows, one.groups, one.findings, one.limits) == (
        before.rows, before.groups, before.findings, before.limits
    )  # fmt: skip
    np.testing.assert_array_equal(one.traces[0].distance, before.traces[0].distance)
    assert one.traces[0].scene == before.traces[0].scene
    assert '"kind": "left early"' in (tmp_path / "a-test.json").read_text()
    for broken in (b"", b"no safetensors at all", path.read_bytes()[:200]):
        path.write_bytes(broken)
        assert read_diagnosis(path) is None
    replace(result, diagnosis=None).keep(tmp_path / "a-test")
    assert not path.exists(), "what belongs to other results goes"


def test_failures_are_kept_and_filmed_first_and_each_kind_in_its_turn() -> None:
    rows = [row(number, number % 3 != 0, 10) for number in range(30)]
    assert choose_traces(rows, 12) == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27]
    kinds = {("table", number): "left" if number < 20 else "still" for number in range(30)}
    assert [one.episode for one in choose_for_film(rows, 3, kinds)] == [0, 21, 3]
    assert [one.episode for one in choose_for_film(rows, 3)] == [0, 3, 6]


def test_the_report_groups_maps_and_plays_failures(tmp_path: Path) -> None:
    result = made_up_result(env="<b>table")
    film = tmp_path / "evaluation/videos/_b_table-001-failure.mp4"
    film.parent.mkdir(parents=True)
    film.write_bytes(b"film of a failure")
    replace(result, videos=(film,)).keep(tmp_path / "evaluation/table-test")
    (_, _), (title, why) = evaluation_sections(tmp_path)
    assert title == "Why it failed" and "<b>table" not in why
    assert "2 of 10 episodes failed" in why and "left the demonstrations early" in why
    assert why.count("<video") == 1 and why.index("Episode 1:") < why.index("Episode 0:"), "films come first"
    assert "Where the hand is at the beginning" not in why, "its x is the same in all"
    assert why.count('<path class="mark circle c2"') == 8 + 1, "eight successes, and the key"
    assert why.count('class="mark cross c1"') == 2 + 1 + 1 + 2, "two failures, their tile, the key, and two cards"
    assert re.search(r"<title>episode 0: left the demonstrations early; ", why)
    assert 'href="#why--b-table-0"' in why and 'id="why--b-table-0"' in why
    assert "are nearer" in why and "only policies that draw" in why
    page = write_run_report(tmp_path).read_text()
    assert "The policy acting" not in page, "its only film is shown beside the reason"


def test_a_diagnosis_of_other_episodes_is_not_shown(tmp_path: Path) -> None:
    made_up_result().keep(tmp_path / "evaluation/table-test")
    other = EvaluationResult(tuple(row(number, False, 10) for number in range(3)), "test", 0)
    other.to_json(tmp_path / "evaluation/table-test.json")
    assert [title for title, _ in evaluation_sections(tmp_path)] == ["Success in simulation"]


def test_nothing_is_shown_where_nothing_failed() -> None:
    rows = [row(number, True, 10) for number in range(3)]
    traces = {("table", number): trace(number, walk(0.1, 10)) for number in range(3)}
    assert failure_section(diagnose(rows, traces, {}), {}) == ""


def test_maps_are_drawn_by_what_is_placed_most_differently() -> None:
    scenes = [
        {"hand_x": 0.0, "hand_y": 0.0, "object_x": n / 10, "object_y": n / 20, "goal_x": n / 5.0, "goal_y": -n / 5.0}
        for n in range(4)
    ]
    assert choose_axes(scenes) == [("goal_x", "goal_y"), ("object_x", "object_y")]
    assert choose_axes([{"a": float(n), "b": 2.0 * n, "c": 1.0} for n in range(3)]) == [("b", "a")]
    assert choose_axes([{"a": float(n), "b": 1.0} for n in range(3)]) == choose_axes(scenes[:1]) == []
    assert choose_axes([{"a": np.nan, "b": float(n)} for n in range(3)]) == []


def test_what_was_done_is_drawn_beside_the_plan_where_they_differ() -> None:
    one = trace(0, walk(0.1, 10), distance=np.ones(10))
    (measures,) = plan_charts(one, 0.5)
    assert [line.name for line in measures["lines"]] == ["distance", "far"]
    one.planned = one.action + np.array([0.0, 0.1])
    assert plan_charts(one, None)[1]["title"] == "action 1, done and planned"
