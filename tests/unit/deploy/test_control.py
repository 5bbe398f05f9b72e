"""The control loop in given time: its rate, what it does without an action, its limits, and when it stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.deploy.control import ControlSettings
from etude.deploy.robot import ActionLimits
from etude.errors import ConfigError, ControlError, DataError, NonFiniteError, RobotError
from tests.unit.deploy.pretending import NEVER, CountingPolicy, Pretence

# ---- the rate --------------------------------------------------------------------------------------------------------


def test_steps_begin_at_absolute_times_whatever_they_take() -> None:
    made = Pretence(takes={"observe": [0.003, 0.07, 0.001, 0.05, 0.02], "act": 0.004}, predict=0.01)
    tally = made.run(20)
    assert [step.time_s for step in made.steps] == pytest.approx([0.1 * number for number in range(20)])
    assert (tally.steps, tally.missed, tally.held, tally.ended) == (20, 0, 0, "all steps taken")
    assert tally.seconds == pytest.approx(2.0)
    assert made.robot.commands == list(range(20))
    assert made.robot.stops == 1


def test_a_loop_that_was_held_up_skips_steps_and_makes_no_burst() -> None:
    made = Pretence()

    def hold_up(step: Any) -> None:
        if len(made.steps) == 5:
            made.clock.sleep_until(made.clock.now() + 0.35)

    made.on_step = hold_up
    tally = made.run(20)
    assert made.causes == {"late": 2}
    assert [step.missed for step in made.steps if step.missed] == [("late",)]
    assert made.robot.commands == [0, 1, 2, 3, 4, *range(7, 20)], "actions belong to their time"
    assert np.diff(made.robot.times_s).min() > 0.04
    assert tally.seconds == pytest.approx(2.0)


def test_a_loop_that_was_held_up_beyond_its_end_takes_no_further_step() -> None:
    made = Pretence()
    made.on_step = lambda step: made.clock.sleep_until(1000.0 + 0.6)
    assert made.run(4).ended == "all steps taken"
    assert made.robot.commands == [0]


def test_a_prompt_policy_acts_as_in_evaluation() -> None:
    policy = CountingPolicy(horizon=8, n_action_steps=4)
    Pretence(policy).run(12)
    assert policy.asked == [0, 0, 4, 8], "once more to warm up"


@pytest.mark.parametrize("predict", [0.07, 0.15, 0.31])
def test_a_slow_policy_is_asked_ahead_and_its_actions_are_those_of_their_time(predict: float) -> None:
    made = Pretence(CountingPolicy(horizon=16), predict=predict)
    made.run(60)
    assert made.causes == {}
    assert made.robot.commands == list(range(60))


def test_ensembled_chunks_are_those_of_their_time_too() -> None:
    made = Pretence(CountingPolicy(horizon=16, temporal_ensemble_coeff=0.01), predict=0.15)
    made.run(40)
    assert made.causes == {}
    assert made.robot.commands == pytest.approx(list(range(40)), abs=1e-4)


def test_the_lead_can_be_chosen() -> None:
    policy = CountingPolicy(horizon=8)
    made = Pretence(policy, lead=3)
    made.run(16)
    assert policy.asked == [0, 0, 5, 10, 15]
    assert made.robot.commands == list(range(16))


def test_histories_are_those_of_the_steps() -> None:
    policy = CountingPolicy(horizon=4, observation_steps=[-2, 0])
    seen: list[list[float]] = []
    predict = policy.predict_action_chunk

    def keep(batch: Any) -> torch.Tensor:
        seen.append(batch["observation.state"].flatten().tolist())
        return predict(batch)

    policy.predict_action_chunk = keep  # type: ignore[method-assign]
    Pretence(policy).run(9)
    assert seen == [[0, 0], [0, 0], [2, 4], [6, 8]]


# ---- misses and holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold, held", [("repeat", 3.0), ("zero", 0.0)])
def test_without_an_action_it_holds_and_counts(hold: str, held: float) -> None:
    made = Pretence(CountingPolicy(horizon=4), predict=[0.002, 0.002, 0.25, 0.002], hold=hold, lead=0)
    tally = made.run(12)
    assert made.causes == {"inference": 2}
    assert tally.held == 2
    assert made.robot.commands == [0, 1, 2, 3, held, held, 6, 7, 8, 9, 10, 11]


def test_a_late_chunk_is_a_miss_though_actions_are_left() -> None:
    policy = CountingPolicy(horizon=8, n_action_steps=4)
    made = Pretence(policy, predict=[0.002, 0.002, 0.25, 0.002], lead=0)
    tally = made.run(12)
    assert made.causes == {"inference": 2}
    assert tally.held == 0
    assert made.robot.commands == list(range(12))


def test_a_late_observation_is_a_miss_and_the_plan_goes_on() -> None:
    made = Pretence(takes={"observe": [0.001, 0.001, 0.13, 0.001]})
    tally = made.run(10)
    assert made.causes == {"observe": 1}
    assert tally.held == 0
    assert len(made.robot.commands) == 9, "the robot is not called twice at once"


def test_a_command_that_takes_too_long_is_a_miss() -> None:
    made = Pretence(takes={"act": [0.001, 0.15, 0.001]})
    made.run(10)
    assert made.causes == {"act": 1}


def test_a_smaller_budget_makes_more_misses() -> None:
    slow: dict[str, float | list[float]] = {"observe": 0.03}
    assert Pretence(takes=slow).run(5).missed == 0
    made = Pretence(takes=slow, budget_s=0.02)
    made.run(5)
    assert made.causes == {"observe": 2}, "what was late is used at the step after"


def test_an_old_observation_counts_as_none() -> None:
    made = Pretence()

    def grow_old(step: Any) -> None:
        made.robot.age_s = 0.4 if len(made.steps) == 3 else 0.0

    made.on_step = grow_old
    made.run(8)
    assert made.causes == {"observe": 1}


def test_a_chunk_of_which_nothing_is_left_is_thrown_away() -> None:
    made = Pretence(CountingPolicy(horizon=4), predict=[0.002, 0.002, 0.9, 0.002], watchdog_s=5.0)
    made.run(20)
    assert made.planner.chunks_too_late == 1
    assert made.robot.commands[-4:] == [16, 17, 18, 19]


# ---- stopping --------------------------------------------------------------------------------------------------------


def broken_off(made: Pretence, error: type[Exception], match: str, steps: int | None = 100) -> None:
    with pytest.raises(error, match=match):
        made.run(steps)
    assert made.robot.stops == 1
    assert match.split(".*")[0].replace("\\", "") in made.loop.tally.ended


def test_a_policy_that_hangs_is_stopped_by_the_watchdog() -> None:
    made = Pretence(predict=[0.002, 0.002, NEVER])
    broken_off(made, ControlError, "there was no planned action for 1 s")
    assert made.causes == {"inference": len(made.robot.commands) - 8}


@pytest.mark.parametrize("what", ["observe", "act"])
def test_a_robot_that_hangs_is_stopped_from_elsewhere(what: str) -> None:
    made = Pretence(takes={what: [0.001, 0.001, NEVER]})
    broken_off(made, RobotError, rf"counter: {what}\(\) has not returned for 1 s")


def test_a_robot_that_shows_nothing_new_is_stopped() -> None:
    made = Pretence()
    made.on_step = lambda step: setattr(made.robot, "age_s", made.robot.age_s + 0.1)
    broken_off(made, RobotError, "counter: there was no new observation for 1 s")


def test_a_loop_that_is_held_up_too_long_stops_the_robot() -> None:
    made = Pretence()
    made.on_step = lambda step: made.clock.sleep_until(made.clock.now() + 4.0)
    broken_off(made, ControlError, "the loop itself was held up for 4 s")


def test_too_many_misses_in_a_row_stop_it() -> None:
    made = Pretence(max_misses=4)
    made.robot.age_s = 0.5
    broken_off(made, ControlError, "4 steps in a row missed their budget; misses so far: observe 4")
    assert Pretence(takes={"observe": [0.03, 0.001]}, budget_s=0.02, max_misses=2).run(20).ended == "all steps taken"


def test_an_action_that_is_not_finite_is_never_sent() -> None:
    policy = CountingPolicy(horizon=4)
    made = Pretence(policy)
    made.on_step = lambda step: setattr(policy, "scale", float("nan"))
    broken_off(made, NonFiniteError, "CountingPolicy planned actions that are not finite")
    assert made.robot.commands == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["observe", "act"])
def test_an_error_of_the_robot_stops_it(what: str) -> None:
    made = Pretence()
    made.robot.fails[what] = OSError("the cable is out")
    broken_off(made, RobotError, rf"counter: {what}\(\) failed: OSError: the cable is out")


def test_an_error_of_the_policy_stops_the_robot_and_keeps_its_traceback() -> None:
    policy = CountingPolicy(horizon=4)
    made = Pretence(policy)
    made.on_step = lambda step: setattr(policy, "predict_action_chunk", lambda batch: 1 / 0)
    broken_off(made, ZeroDivisionError, "division by zero")


def test_an_observation_that_does_not_fit_stops_it_before_it_moves() -> None:
    made = Pretence()
    made.robot.observe = lambda: {"observation.state": np.zeros(3, np.float32)}  # type: ignore[method-assign]
    broken_off(made, DataError, r"observation.state has shape \(3,\)")
    assert made.robot.commands == []


def test_whoever_asks_stops_it() -> None:
    made = Pretence()
    made.on_step = lambda step: setattr(made, "is_asked", len(made.steps) == 3)
    assert made.run(100).ended == "asked to stop"
    assert made.robot.commands == [0, 1, 2]
    assert made.robot.stops == 1


def test_a_robot_that_cannot_be_stopped_is_told_of() -> None:
    made = Pretence()
    made.robot.fails["stop"] = OSError("no answer")
    broken_off(made, RobotError, r"counter: stop\(\) failed: no answer".replace("counter: ", ".*"), steps=5)
    hung = Pretence(takes={"stop": NEVER, "act": [0.001, NEVER]})
    with pytest.raises(RobotError, match=r"act\(\) has not returned for 1 s; stop\(\) did not return within 3 s; cut"):
        hung.run(100)


def test_a_policy_that_cannot_keep_up_is_refused_before_the_robot_moves() -> None:
    made = Pretence(CountingPolicy(horizon=4), predict=0.9)
    broken_off(made, ControlError, "a chunk takes 900 ms and lasts 400 ms at 10 Hz")
    assert made.robot.commands == []


def test_a_robot_ends_its_episode_itself() -> None:
    made = Pretence()
    made.robot.success = True  # type: ignore[attr-defined]
    made.on_step = lambda step: setattr(made.robot, "is_done", len(made.steps) == 7)
    tally = made.run(None)
    assert (tally.steps, tally.ended, tally.success) == (7, "done", True)


def test_whatever_is_late_there_is_one_command_a_step_and_a_stop() -> None:
    generator = np.random.default_rng(0)
    for _ in range(12):
        made = Pretence(
            CountingPolicy(horizon=int(generator.integers(2, 20))),
            takes={name: (generator.exponential(0.03, 300) ** 1.2).tolist() for name in ("observe", "act")},
            predict=[0.001, 0.001, *generator.exponential(0.1, 300).tolist()],
            watchdog_s=2.0,
        )
        try:
            made.run(100)
        except (ControlError, RobotError) as error:
            assert str(error) == made.loop.tally.ended
        assert made.robot.stops == 1
        slots = [round(step.time_s / 0.1) for step in made.steps]
        assert len(set(slots)) == len(slots) and slots == sorted(slots)
        assert len(made.robot.commands) <= len(slots)
        for step in made.steps:
            if step.planned is not None:
                assert float(step.planned[0]) == pytest.approx(round(step.time_s / 0.1), abs=3), "of about its time"


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_positions_are_kept_within_bounds_and_counted() -> None:
    made = Pretence(limits=ActionLimits(low=2, high=[5]))
    tally = made.run(8)
    assert made.robot.commands == [2, 2, 2, 3, 4, 5, 5, 5]
    assert (tally.clamped_position, tally.clamped_speed) == (4, 0)
    assert [float(step.planned[0]) for step in made.steps if step.planned is not None] == list(range(8))


def test_speed_counts_from_the_last_command() -> None:
    made = Pretence(limits=ActionLimits(max_speed=4.0))
    tally = made.run(6)
    assert made.robot.commands == pytest.approx([0, 0.4, 0.8, 1.2, 1.6, 2.0])
    assert tally.clamped_speed == 5


def test_speed_counts_from_the_measured_position_where_there_is_one() -> None:
    made = Pretence(limits=ActionLimits(max_speed=4.0, measured="observation.state"))
    policy = made.policy
    policy.scale = 3.0
    assert made.run(4).clamped_speed == 3
    assert made.robot.commands == pytest.approx([0, 1.4, 2.4, 3.4])


def test_strict_limits_stop_before_the_action_is_sent() -> None:
    made = Pretence(limits=ActionLimits(high=2), strict_limits=True)
    broken_off(made, ControlError, "an action exceeds the limit on position at step 3")
    assert made.robot.commands == [0, 1, 2]


def test_limits_bring_back_what_is_outside_no_faster_than_allowed() -> None:
    limits = ActionLimits(low=-1.0, high=1.0, max_speed=1.0)
    limited = limits.apply(np.asarray([5.0, 0.0]), np.asarray([3.0, 0.0]), 0.5)
    assert limited.command.tolist() == [2.5, 0.0]
    assert limited.by_position and limited.by_speed


def test_narrowed_limits_keep_both() -> None:
    both = ActionLimits(low=[-1, -2], max_speed=3).narrowed(ActionLimits(low=-1.5, high=4, max_speed=5))
    assert (both.low, both.high, both.max_speed) == ([-1, -1.5], 4, 3)


@pytest.mark.parametrize(
    "limits, match",
    [
        (ActionLimits(low=[0, 1, 2]), "low has .* give one number, or one for each of 2"),
        (ActionLimits(low=1, high=[0, 2]), "lies above high"),
        (ActionLimits(max_speed=0), "max_speed must be above 0"),
        (ActionLimits(measured="x", measured_dims=[0]), "measured_dims names 1 numbers for 2"),
    ],
)
def test_limits_that_do_not_fit_are_refused(limits: ActionLimits, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        limits.check(2)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"rate_hz": 0}, "the rate must lie above 0"),
        ({"rate_hz": 10, "budget_s": 0.2}, "within the 100 ms of a step at 10 Hz, got 200 ms"),
        ({"rate_hz": 10, "watchdog_s": 0}, "watchdog"),
        ({"rate_hz": 10, "hold": "still"}, "hold is one of repeat, zero"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ControlSettings(**settings)


def test_a_lead_beyond_the_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lead must be below the 8 actions of a chunk"):
        Pretence(lead=8)


@pytest.mark.parametrize(
    "what, value, match",
    [
        ("is_done", lambda: float("no"), "counter: is_done failed: ValueError"),
        ("age_s", "new", "counter: age_s failed: ValueError"),
        ("success", np.zeros(2), "counter: success failed: ValueError"),
    ],
)
def test_what_a_robot_says_of_itself_may_fail_like_its_calls(what: str, value: Any, match: str) -> None:
    pretence = Pretence()
    setattr(pretence.robot, what, value)
    with pytest.raises(RobotError, match=match):
        pretence.run()
    assert pretence.robot.stops == 1


def test_methods_say_the_same_as_attributes() -> None:
    pretence = Pretence()
    pretence.robot.is_done = lambda: len(pretence.robot.commands) == 7  # type: ignore[attr-defined]
    pretence.robot.success = lambda: np.bool_(True)  # type: ignore[attr-defined]
    tally = pretence.run(None)
    assert (tally.steps, tally.ended, tally.to_dict()["success"]) == (7, "done", True)


@pytest.mark.parametrize(
    "seen, error, match",
    [
        (["a"], DataError, "observation.state holds <U1; give numbers"),
        ([[1.0, 2.0], [3.0]], RobotError, "observe.. returned what is no array"),
    ],
)
def test_an_observation_that_is_no_number_is_told(seen: Any, error: type[Exception], match: str) -> None:
    pretence = Pretence()
    pretence.robot.observe = lambda: {"observation.state": seen}  # type: ignore[method-assign]
    with pytest.raises(error, match=match):
        pretence.run()
