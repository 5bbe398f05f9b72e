"""Stress tests of robots: what is searched, what counts as found, and that a vector makes the same episode again."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.data.lerobot.reader import LeRobotDataset
from etude.errors import ConfigError, DataError
from etude.redteam.robot import DisturbanceSpace, DisturbedEnvironment, make_space, read_stress, stress_policy
from etude.redteam.robot.demonstrations import record_failures
from etude.redteam.robot.environment import shift_picture
from etude.redteam.robot.model import FailureModel, relevance
from etude.redteam.robot.page import render_page
from etude.redteam.robot.results import StressResult
from etude.redteam.robot.search import Tried, propose_by_chance, propose_cross_entropy
from etude.redteam.robot.stress import prepare_stage
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.environments.base import CanLookAway, Environment, HasExpert, HasScene
from etude.simulation.evaluate import evaluate_policy
from etude.types.names import ACTION, STATE
from tests.unit.redteam.narrow_gate import NarrowGate, lazy

pytest.importorskip("av")
SPACE = DisturbanceSpace({"start": 1.0, "push": 1.0, "noise": 0.1, "latency": 1.0}, 1, ("up", "idle"), window=20)
RARE = {"width": 2.1}
"""A gate so wide that the lazy driver misses it one time in ten."""


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "gate", NarrowGate)


def search(folder: Path, episodes: int = 60, **more: Any) -> StressResult:
    return stress_policy(lazy, "gate", folder, **{"episodes": episodes, "videos": 0, "options": RARE, **more})


def test_cross_entropy_finds_three_times_as_many_distinct_failures_as_chance(tmp_path: Path) -> None:
    result = search(tmp_path, episodes=200)
    by_chance, found = result.tally("random"), result.tally("cross_entropy")
    assert 0.04 < by_chance.failures / 200 < 0.2, "the policy succeeds about nine times in ten"
    assert found.distinct >= 3 * by_chance.distinct
    for distance in (0.75, 1.0):
        ours, chance = (
            len(result.space.distinct(np.array([one.vector for one in result.failures(name)]), distance))
            for name in ("cross_entropy", "random")
        )
        assert ours >= 3 * chance, "further apart as well"
    assert all(one.plausibility >= 0.01 for one in result.searches["cross_entropy"]), "nothing far-fetched"
    kept = read_stress(tmp_path)
    assert kept.searches == result.searches and kept.settings == result.settings


def try_out(vectors: Any) -> Tried:
    """Fail where the first push goes up by more than a deviation."""
    return Tried(vectors, vectors[:, SPACE.names.index("push 1 up")] > 1.0)


def test_a_round_is_distinct_plausible_and_follows_from_the_rounds_before() -> None:
    tried = try_out(propose_by_chance(SPACE, 0, 0, 60))
    found = propose_cross_entropy(SPACE, 0, 6, 10, tried)
    assert np.array_equal(found, propose_cross_entropy(SPACE, 0, 6, 10, tried))
    assert not np.array_equal(found, propose_cross_entropy(SPACE, 1, 6, 10, tried))
    assert (SPACE.plausibility(found) >= 0.01).all()
    known = [*tried.vectors_ND[tried.failed_N], *found]
    assert SPACE.distinct(np.stack(known)) == list(range(len(known)))
    nothing = Tried(tried.vectors_ND[~tried.failed_N], np.zeros(int((~tried.failed_N).sum()), bool))
    assert propose_cross_entropy(SPACE, 0, 6, 10, nothing).shape == (10, len(SPACE.names)), "chance, until one fails"


def test_one_failure_is_enough_to_look_around() -> None:
    tried = try_out(propose_by_chance(SPACE, 0, 0, 60))
    first = int(np.flatnonzero(tried.failed_N)[0])
    keep = np.append(np.flatnonzero(~tried.failed_N), first)
    found = propose_cross_entropy(SPACE, 0, 1, 40, Tried(tried.vectors_ND[keep], tried.failed_N[keep]))
    assert try_out(found).failed_N.mean() > 2 * tried.failed_N.mean()


def test_the_model_knows_which_numbers_matter_and_is_in_doubt_where_nothing_was_tried() -> None:
    tried = try_out(propose_by_chance(SPACE, 0, 0, 200))
    white, place = SPACE.whiten(tried.vectors_ND), SPACE.names.index("push 1 up")
    model = FailureModel(white, tried.failed_N)
    assert int(model.scale_D.argmax()) == place and relevance(white[tried.failed_N])[place] > 0.9
    asked = np.zeros((3, len(SPACE.names)))
    asked[1, place], asked[2] = 2.0, 6.0
    mean, doubt = model.predict(asked)
    assert mean[0] < 0.3 < 0.6 < mean[1] and doubt[2] > 3 * max(doubt[0], doubt[1])


def test_a_disturbed_environment_can_do_what_its_own_can() -> None:
    gate = NarrowGate()
    env = DisturbedEnvironment(gate, SPACE, {}, {})
    needed = ("spec", "fps", "max_steps", "task", "reset", "step", "render", "close")
    for name in (*needed, "expert_action", "scene"):
        inspect.getattr_static(env, name)  # as protocols look for it from Python 3.12 on
    assert isinstance(env, Environment) and isinstance(env, HasExpert) and isinstance(env, HasScene)
    assert not isinstance(env, CanLookAway)
    bare: Any = SimpleNamespace(**{name: getattr(gate, name) for name in needed})
    assert not isinstance(DisturbedEnvironment(bare, SPACE, {}, {}), HasExpert | HasScene)


def test_a_failure_that_was_found_happens_again(tmp_path: Path) -> None:
    result = search(tmp_path)
    for one in result.failures("cross_entropy")[:5]:
        env = DisturbedEnvironment(NarrowGate(**RARE), result.space, {one.seed: np.array(one.vector)}, {})
        seen = [env.reset(one.seed)]
        success = None
        for _ in range(one.steps):
            outcome = env.step(lazy(seen[-1]))
            seen.append(outcome.observation)
            success = outcome.success
        assert success is False and outcome.terminated


def test_a_search_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    for episodes in (7, 33, 60):
        parts = search(tmp_path / "parts", episodes=episodes)
    assert parts.searches == search(tmp_path / "whole").searches
    assert parts.searches == search(tmp_path / "shared", workers=2).searches


def test_the_same_vector_and_seed_make_the_same_episode(tmp_path: Path) -> None:
    vector = SPACE.draw(np.random.default_rng(0))
    env = DisturbedEnvironment(NarrowGate(), SPACE, {3: vector, 4: vector}, {})

    def play(seed: int) -> list[Any]:
        return [env.reset(seed)[STATE], *(env.step(np.full(2, 0.1)).observation[STATE] for _ in range(10))]

    assert np.array_equal(play(3), play(3))
    assert not np.array_equal(play(3), play(4)), "the noise is another"


def test_a_push_is_added_to_what_is_executed_for_as_long_as_it_lasts() -> None:
    space = DisturbanceSpace({"push": 2.0}, 0, ("up", "idle"), pushes=1, push_steps=3, window=20)
    env = DisturbedEnvironment(NarrowGate(), space, {0: np.array([0.25, 1.0, 0.0])}, {ACTION: np.array([0.5, 1.0])})
    env.reset(0)
    ways = []
    for _ in range(10):
        before = env.undisturbed.scene()["cart_y"]  # type: ignore[attr-defined]
        env.step(np.zeros(2, np.float32))
        ways.append(env.undisturbed.scene()["cart_y"] - before)  # type: ignore[attr-defined]
    assert np.allclose(ways, [0.0] * 5 + [0.1] * 3 + [0.0] * 2)


def test_latency_shows_what_was_seen_before() -> None:
    space = DisturbanceSpace({"latency": 1.0})
    env = DisturbedEnvironment(NarrowGate(), space, {0: np.array([2.5])}, {})
    seen = [env.reset(0)[STATE][0]] + [float(env.step(np.zeros(2)).observation[STATE][0]) for _ in range(4)]
    assert np.allclose(seen, [0.0, 0.0, 0.0, 0.05, 0.1])


def test_noise_is_in_deviations_of_each_number() -> None:
    space = DisturbanceSpace({"noise": 1.0})
    env = DisturbedEnvironment(NarrowGate(), space, {0: np.array([-2.0])}, {STATE: np.array([0.0, 1.0])})
    env.reset(0)
    seen = np.stack([env.step(np.zeros(2)).observation[STATE] for _ in range(15)])
    true = np.stack([np.arange(1, 16) / 20, np.full(15, env.undisturbed.scene()["cart_y"])], 1)  # type: ignore[attr-defined]
    assert np.allclose(seen[:, 0], true[:, 0]) and 1.0 < np.std(seen[:, 1] - true[:, 1]) < 3.5


def test_a_shifted_picture_repeats_its_edge() -> None:
    picture = np.arange(3 * 4 * 3, dtype=np.uint8).reshape(3, 4, 3)
    shifted = shift_picture(picture, 0.25, -0.25)
    assert np.array_equal(shifted[0, 1:], picture[1, :3]) and np.array_equal(shifted[:2, 0], picture[1:, 0])
    assert shift_picture(picture, 0.01, 0.0) is picture


def test_likelihood_is_what_the_distribution_says() -> None:
    draws = np.stack([SPACE.draw(np.random.default_rng(one)) for one in range(2000)])
    plausibility = SPACE.plausibility(draws)
    assert np.allclose(np.quantile(plausibility, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.04)
    assert SPACE.log_likelihood(np.zeros(len(SPACE.names))) == 0.0
    assert np.isclose(SPACE.unlikelihood(draws).mean(), 1.0, atol=0.1)
    assert np.allclose(SPACE.unwhiten(SPACE.whiten(draws)), draws)
    assert np.allclose(SPACE.whiten(draws).std(0), 1.0, atol=0.1)


def test_vectors_that_hardly_differ_count_once() -> None:
    one = SPACE.draw(np.random.default_rng(0))
    other = SPACE.draw(np.random.default_rng(1))
    assert SPACE.distinct(np.stack([one, one + 0.01, other, other])) == [0, 2]


def test_workers_and_the_plain_evaluation_see_undisturbed_episodes_alike(tmp_path: Path) -> None:
    plain = evaluate_policy(lazy, "gate", episodes=8, options=RARE)
    chosen = evaluate_policy(lazy, "gate", episodes=[2, 5], options=RARE)
    assert chosen.rows == (plain.rows[2], plain.rows[5])


def test_the_expert_demonstrates_what_the_policy_failed_at(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    result = search(tmp_path / "found")
    done = record_failures(result, tmp_path / "data")
    failures = len(result.likeliest())
    assert 0 < done.episodes <= done.attempts == failures
    dataset = LeRobotDataset(tmp_path / "data", show_progress=False)
    assert dataset.source.columns[ACTION].shape[1:] == (2,)
    longer = search(tmp_path / "found", episodes=80)
    more = record_failures(longer, tmp_path / "data")
    assert more.episodes >= done.episodes and more.attempts >= len(longer.likeliest())
    with pytest.raises(DataError, match="was recorded with seed=0, not 1"):
        record_failures(search(tmp_path / "other", seed=1), tmp_path / "data")


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    search(tmp_path, episodes=2)
    with pytest.raises(DataError, match="holds a search with another seed: 0, not 1; choose another folder"):
        search(tmp_path, seed=1)
    with pytest.raises(DataError, match="another space"):
        search(tmp_path, disturb=["push=0.5"])
    with pytest.raises(ConfigError, match="at least one episode, got 0"):
        search(tmp_path / "none", episodes=0)
    with pytest.raises(ConfigError, match="there is no search 'luck'; there are cross_entropy, adversary, random"):
        search(tmp_path / "none", search=["luck"])
    for asked, said in {
        "pusch": "no disturbance 'pusch'; did you mean 'push'",
        "push=much": "a number above 0, as in push=0.5; got 'push=much'",
        "camera": "camera is not possible here: it has no cameras",
    }.items():
        with pytest.raises(ConfigError, match=said):
            make_space(NarrowGate(), [asked])
    with pytest.raises(ConfigError, match="strength of disturbances is a number above 0, got 0"):
        make_space(NarrowGate(), strength=0.0)
    for asked, strength in (["latency"], 1e300), (["push=1e300"], 1.0):
        with pytest.raises(ConfigError, match=r"strength of (latency|push) is at most 10,000, got 1e.300"):
            make_space(NarrowGate(), asked, strength)
    (tmp_path / "stress.json").write_text("[]")
    with pytest.raises(DataError, match="not the result of a stress test"):
        search(tmp_path)
    assert not (tmp_path / "none").exists()


def test_an_environment_without_success_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=r"does not say whether an episode succeeded.*success_return"):
        stress_policy(
            lambda _: np.zeros(1), "gym:Pendulum-v1", tmp_path, episodes=1, videos=0,
            options={"render": False, "max_steps": 3},
        )  # fmt: skip


def test_an_adversary_learns_and_what_it_did_happens_again(tmp_path: Path) -> None:
    stage = prepare_stage(lazy, "gate", (), 1.0, 0, RARE, None, 0, None)
    result = search(tmp_path / "parts", search=["adversary"], episodes=50, baseline=False)
    found = result.searches["adversary"]
    again = stage.play({one.number: np.array(one.vector) for one in found})
    for before, after in zip(found, again, strict=True):
        assert (before.failed, before.steps, before.seed) == (after.failed, after.steps, after.seed)
        assert before.score == pytest.approx(after.score) and before.reward == pytest.approx(after.reward)
        assert before.plausibility >= 0.0099
    longer = search(tmp_path / "parts", search=["adversary"], episodes=500, baseline=False).searches["adversary"]
    assert longer[:50] == found and len(longer) == 500, "it goes on where it was"
    assert sum(one.failed for one in longer[-100:]) > 3 * sum(one.failed for one in longer[:100])
    assert (tmp_path / "parts" / "adversary" / "metrics.jsonl").is_file(), "it is a run like any other"


def test_the_page_shows_names_and_never_interprets_them(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    result = search(tmp_path, policy_name=hostile, episodes=80)
    result.settings["env"] = hostile
    episodes = result.searches["cross_entropy"]
    result.searches["cross_entropy"] = [
        type(one)(**{**vars(one), "what": hostile, "scene": {hostile: one.scene["cart_x"], "b": one.scene["cart_y"]}})
        for one in episodes
    ]
    result.searches["random"] = []
    page = render_page(result)
    assert hostile not in page and page.count("&lt;img src=x") >= 4


def test_the_command_searches_films_and_demonstrates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import numpy\n\ndef lazy(seen):\n    return numpy.zeros(2, 'float32')\n")
    command = [
        "redteam", "robot", "own.py:lazy", "--env", "gate", "--episodes", "50", "--option", "width=1.8", "--video", "2",
    ]  # fmt: skip
    said = CliRunner().invoke(app, [*command, "--to-dataset", "hard"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    assert "cross_entropy" in said.output and "times as many distinct failures as random" in said.output
    assert "demonstrated: " in said.output and (tmp_path / "hard" / "meta" / "info.json").is_file()
    films = list((tmp_path / "stress" / "gate" / "videos").glob("*-failure.mp4"))
    assert len(films) == 2
    page = (tmp_path / "stress" / "gate" / "stress.html").read_text()
    assert page.count("<video") == 2 and "distinct failures by episode" in page
    again = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    summary = json.loads(again.output)["summary"]
    assert [one["name"] for one in summary] == ["cross_entropy", "random"] and summary[0]["episodes"] == 50


def test_the_command_says_what_is_wrong_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def lazy(seen):\n    return [0, 0]\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.txt").touch()
    for more, said in {
        ("--disturb", "wind"): "there is no disturbance 'wind'",
        ("--env", "gym:CartPole-v1", "--to-dataset", "d"): "gym:CartPole-v1 comes without an expert",
        ("--to-dataset", "notes"): "notes: holds 'plan.txt' and is no dataset; record into a folder of its own",
        ("--to-dataset", "own.py"): "cannot use own.py/README.md: ",
        ("--option", "width=wide"): "gate: width: expected a number, got 'wide'",
    }.items():
        with pytest.raises((ConfigError, DataError), match=said):
            CliRunner().invoke(
                app, ["redteam", "robot", "own.py:lazy", "--env", "gate", *more], catch_exceptions=False
            )  # fmt: skip
