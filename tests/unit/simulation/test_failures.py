"""Why episodes failed: rules on made-up ones, and groups of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.simulation.diagnosis import Diagnosis, EnvironmentDiagnosis, diagnose
from etude.simulation.failures import first_beyond, rank_z, still_from, tell_starts
from tests.unit.simulation.made_up import USUAL_STEPS, demonstrations, row, trace, walk

LONG = 100


def make(failures: dict[int, Any], successes: int = 8, known: Any = "gone") -> EnvironmentDiagnosis:
    """Diagnose failures, given as traces, beside so many successes."""
    good = {number: trace(number, walk(0.05 * number, USUAL_STEPS)) for number in range(successes)}
    rows = [row(number, True, USUAL_STEPS) for number in good] + [row(number, False, LONG) for number in failures]
    traces = {("table", number): one for number, one in {**good, **failures}.items()}
    (found,) = diagnose(rows, traces, {"table": known}).environments
    return found


def left_at(step: int) -> Any:
    """Return an episode that goes as it should up to a step, and then far away."""
    states = walk(0.1, LONG)
    states[step:, 1] += np.linspace(2, 4, LONG - step)
    return states


def kinds(found: EnvironmentDiagnosis) -> dict[str, tuple[int, ...]]:
    return {group.kind: group.episodes for group in found.groups}


def test_the_first_thing_that_went_wrong_names_the_group() -> None:
    stuck = walk(0.1, LONG)
    stuck[30:] = stuck[30]
    untouched = walk(0.1, LONG)
    untouched[:, 2:4] = untouched[0, 2:4]
    found = make(
        {
            **{number: trace(number, left_at(step)) for number, step in ((20, 8), (21, 30), (22, 60), (23, 9))},
            24: trace(24, untouched), 25: trace(25, stuck), 26: trace(26, left_at(8), ended=True),
        },
        known=demonstrations(),
    )  # fmt: skip
    assert kinds(found) == {
        "left early": (20, 23), "ended": (26,), "left after": (22,), "left late": (21,), "still": (25,),
        "unmoved object": (24,),
    }  # fmt: skip
    titles = {group.kind: str(group) for group in found.groups}
    early = "2 failures: left the demonstrations early (in half of them trouble begins by step 8)"
    assert titles["left early"] == early
    assert titles["unmoved object"].startswith("1 failure: object never moved")
    facts = {finding.episode: finding.facts for finding in found.findings}
    assert facts[20] == ("left the demonstrations from step 8 on", "out of time at step 100")
    assert facts[26][-1] == "ended at step 100"


def test_limits_rest_on_successes_where_there_are_enough_and_on_demonstrations_elsewhere() -> None:
    many, few = (make({20: trace(20, left_at(8))}, count, demonstrations()) for count in (8, 4))
    assert (many.limits.distance_from, few.limits.distance_from) == (
        "of the successes", "of the demonstrations from each other"
    )  # fmt: skip
    assert kinds(few) == kinds(many) == {"left early": (20,)}
    assert few.limits.typical_steps == USUAL_STEPS


def test_without_demonstrations_it_is_said_and_only_what_is_known_is_told() -> None:
    found = make({20: trace(20, left_at(8))})
    assert found.missing == "gone" and found.limits.distance is None
    assert kinds(found) == {"time": (20,)}
    assert found.groups[0].title == "ran out of time"


def test_demonstrations_of_other_numbers_are_not_compared() -> None:
    other = demonstrations()
    narrow = type(other)(other.features, other.states_NS[:, :3], other.episodes_N, other.starts_ES, other.lengths_E)
    found = make({20: trace(20, left_at(8))}, known=narrow)
    assert found.missing == "the demonstrations have 3 numbers of state, the environment 5"


def test_plans_that_disagree_beyond_what_successes_show_are_a_group() -> None:
    torn, states = np.zeros(LONG, np.float32), walk(0.1, LONG)
    torn[50:] = 3.0
    states[:, 0] += np.sin(np.arange(LONG))  # or it would have stopped moving
    wrong = trace(20, states, disagreement=torn)
    assert kinds(make({20: wrong})) == {"time": (20,)}, "it is not known what successes show"
    good = {n: trace(n, walk(0.05 * n, USUAL_STEPS), disagreement=np.full(USUAL_STEPS, 0.5)) for n in range(8)}
    rows = [row(n, True, USUAL_STEPS) for n in good] + [row(20, False, LONG)]
    traces = {("table", n): one for n, one in {**good, 20: wrong}.items()}
    (found,) = diagnose(rows, traces, {}).environments
    assert kinds(found) == {"apart": (20,)}
    assert found.findings[0].onset == 50


def test_nothing_is_told_of_episodes_that_know_no_success() -> None:
    traces = {("table", n): trace(n, walk(0.1, 10)) for n in range(3)}
    found = diagnose([row(n, None, 10) for n in range(3)], traces, {})
    assert found.groups == [] and found.environments[0].findings == ()


def test_a_single_state_and_no_state_at_all_are_lived_with() -> None:
    for states in (walk(0.1, 1), np.zeros((3, 0), np.float32)):
        one = trace(0, walk(0.1, 1))
        one.state, one.steps, one.names = states, np.arange(len(states)), one.names[: states.shape[1]]
        found = diagnose([row(0, False, 1)], {("table", 0): one}, {"table": "there are none"})
        assert isinstance(found, Diagnosis) and len(found.groups) == 1


def test_where_failures_begin_is_told_only_if_it_is_clear() -> None:
    generator = np.random.default_rng(0)
    good = [{"goal_x": float(x), "goal_y": float(y)} for x, y in generator.uniform(-1, 0, (20, 2))]
    bad = [{"goal_x": float(x), "goal_y": float(y)} for x, y in generator.uniform((0.1, -1), (1, 0), (10, 2))]
    assert tell_starts(bad, good).startswith("they begin with a larger goal_x: 0.")
    assert tell_starts(good[:8], good[8:]) == ""
    assert tell_starts(bad[:4], good) == "", "too few to tell"


def test_rules() -> None:
    steps = np.arange(0, 40, 4.0)
    values = np.array([0, 5, 0, 5, 5, 5, 0, 5, np.nan, 5.0])
    assert first_beyond(steps, values, 1.0) == 12
    assert first_beyond(steps, values, None) is None
    assert first_beyond(steps, values, 6.0) is None
    states = np.concatenate([np.arange(5.0), np.full(5, 5.0)])[:, None]
    assert still_from(steps, states, 40) == 20
    assert still_from(steps, np.arange(10.0)[:, None], 40) is None
    assert rank_z(np.ones(3), np.ones(3)) == 0.0
    assert rank_z(np.array([4.0, 5, 6]), np.array([1.0, 2, 3])) == pytest.approx(1.964, abs=0.01)
