"""The control loop: one command a step at a fixed rate, whatever the policy or the robot does.

Steps begin at absolute times, so that nothing drifts, and a step that comes too late makes no burst of steps after it.
All waiting has a limit, and goes through a clock and lanes that a test can replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from etude.deploy.lanes import Call, Clock, Lane
from etude.deploy.planner import ChunkPlanner
from etude.deploy.robot import HOLDS, ActionLimits, Array, Limited, Robot, ask_robot, robot_name
from etude.errors import ConfigError, ControlError, EtudeError, RobotError, one_line

OBSERVE, INFERENCE, ACT, LATE = "observe", "inference", "act", "late"
CAUSES = (OBSERVE, INFERENCE, ACT, LATE)
"""What a step can miss its budget by; late is the loop itself, held up by something else on the machine."""
_COMMAND_SHARE = 0.2
"""Last part of the budget, which is kept for the command: a hold must not be late because a plan was waited for."""
_SLICE_S = 0.1
"""How often a long wait looks whether somebody wants to stop."""


def _ignore(*_: Any) -> None:
    """Do nothing about it."""


@dataclass(frozen=True)
class ControlSettings:
    """How a loop runs.

    Args:
        rate_hz: Steps in a second.
        budget_s: Time within a step by which everything must be done; None is the whole step.
        watchdog_s: Seconds without a fresh observation, or without a planned action, after which the robot is stopped.
        max_misses: Steps in a row that may miss their budget.
        max_age_s: How old an observation may be; None is three steps, and at least 0.1 s.
        hold: What is commanded where no action is ready: "repeat" the last command, or "zero".
        strict_limits: Stop at what the limits would change.
        start_s: Seconds that connecting, a reset, and the first observation and plan may take.
        stop_s: Seconds that `stop()` may take.
    """

    rate_hz: float
    budget_s: float | None = None
    watchdog_s: float = 1.0
    max_misses: int = 25
    max_age_s: float | None = None
    hold: str = "repeat"
    strict_limits: bool = False
    start_s: float = 120.0
    stop_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_hz <= 10_000:
            raise ConfigError(f"the rate must lie above 0 and not above 10000 Hz, got {self.rate_hz:g}")
        if not 0 < self.budget <= self.period_s * (1 + 1e-9):
            most = f"{1e3 * self.period_s:g} ms of a step at {self.rate_hz:g} Hz"
            raise ConfigError(f"the budget must lie above 0 and within the {most}, got {1e3 * self.budget:g} ms")
        if not self.watchdog_s > 0 or self.max_misses < 1:
            raise ConfigError(
                f"the watchdog needs a time above 0 and misses from 1, got {self.watchdog_s:g} and {self.max_misses}"
            )
        if self.hold not in HOLDS:
            raise ConfigError(f"hold is one of {', '.join(HOLDS)}, got {self.hold!r}")

    @property
    def period_s(self) -> float:
        """Time of a step."""
        return 1.0 / self.rate_hz

    @property
    def budget(self) -> float:
        """Seconds within a step by which everything must be done."""
        return self.period_s if self.budget_s is None else self.budget_s

    @property
    def oldest_s(self) -> float:
        """How old an observation may be."""
        return max(3 * self.period_s, 0.1) if self.max_age_s is None else self.max_age_s


@dataclass(frozen=True)
class ControlStep:
    """What happened in one step."""

    time_s: float
    """Since the beginning of the episode."""
    observation: Mapping[str, Array]
    """What was seen last."""
    planned: Array | None
    """What the policy wanted; None if nothing was ready."""
    command: Array | None
    """What was sent; None if nothing was."""
    missed: tuple[str, ...]
    """What was late, the steps before it that were left out included."""
    limited: Limited | None


@dataclass
class ControlTally:
    """What happened in an episode."""

    steps: int = 0
    seconds: float = 0.0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    held: int = 0
    """Steps without an action of a plan."""
    clamped_position: int = 0
    clamped_speed: int = 0
    success: bool | None = None
    ended: str = ""
    """Why the episode ended."""

    @property
    def missed(self) -> int:
        """How often something was late."""
        return sum(self.misses.values())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "steps": self.steps, "seconds": round(self.seconds, 4),
            "rate_hz": round(self.steps / self.seconds, 3) if self.seconds else None,
            "misses": dict(self.misses), "held": self.held,
            "clamped": {"position": self.clamped_position, "speed": self.clamped_speed},
            "success": self.success, "ended": self.ended,
        }  # fmt: skip


class ControlLoop:
    """Runs episodes of a policy on a robot.

    Args:
        robot: What is moved.
        planner: Where actions come from.
        settings: How it runs.
        limits: What commands are kept in.
        clock: The time.
        lane: Where the robot is called.
        stop_lane: Where it is stopped, also while a call hangs.
        wants_stop: Tells whether somebody wants to stop.
        on_step: Called after each step.
    """

    def __init__(
        self,
        robot: Robot,
        planner: ChunkPlanner,
        settings: ControlSettings,
        *,
        limits: ActionLimits | None = None,
        clock: Clock,
        lane: Lane,
        stop_lane: Lane,
        wants_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[ControlStep, ControlTally], None] = _ignore,
    ) -> None:
        self.robot, self.planner, self.settings = robot, planner, settings
        self.limits = limits or ActionLimits()
        self._clock, self._lane, self._stop_lane = clock, lane, stop_lane
        self._wants_stop, self._on_step = wants_stop, on_step
        self._name = robot_name(robot)
        self._is_warm = False
        self._forget()

    def _forget(self) -> None:
        self.tally = ControlTally()
        self._pending: Call | None = None
        self._observation: Mapping[str, Array] = {}
        self._last_command: Array | None = None
        self._in_a_row = 0
        self._began_s = self._seen_s = self._planned_s = self._clock.now()

    # ---- an episode --------------------------------------------------------------------------------------------------

    def run_episode(
        self,
        number: int,
        seed: int,
        most_steps: int | None,
        on_begin: Callable[[Mapping[str, Array]], None] = _ignore,
    ) -> ControlTally:
        """Run an episode and stop the robot, however it ends; return what happened, or raise why it was broken off.

        Args:
            number: Which episode it is.
            seed: For robots that can be reset to a state of their choice.
            most_steps: Steps it may have; None leaves it to the robot to say that it is done.
            on_begin: Called with the first observation, before the robot moves.
        """
        self._forget()
        error: EtudeError | None = None
        try:
            self._prepare(number, seed, on_begin)
            self._run(most_steps)
        except EtudeError as known:
            error, self.tally.ended = known, str(known)
            raise
        except BaseException as unknown:
            self.tally.ended = f"{type(unknown).__name__}: {one_line(unknown)}"
            raise
        finally:
            trouble = self.stop()
            try:
                self.tally.success = ask_robot(self.robot, "success", None, bool)
            except EtudeError as silent:
                trouble = trouble or str(silent).removeprefix(f"{self._name}: ")
            if trouble:
                self.tally.ended += f"{'; ' if self.tally.ended else ''}{trouble}"
                if error is not None:
                    error.args = (f"{error}; {trouble}",)
        if trouble:
            raise RobotError(f"{self._name}: {trouble}")
        return self.tally

    def stop(self) -> str:
        """Tell the robot to stop; return what went wrong with that, if anything."""
        call = self._stop_lane.start("stop", self.robot.stop)
        if not call.wait(self._clock.now() + self.settings.stop_s):
            return f"stop() did not return within {self.settings.stop_s:g} s; cut its power"
        try:
            call.result()
        except Exception as error:  # noqa: BLE001 - a robot may fail in any way, and the reason of the stop comes first
            return f"stop() failed: {one_line(error)}"
        return ""

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call the robot before it moves, and wait for it."""
        call = self._lane.start(what, function)
        self._wait(call)
        return self._answer(call)

    def _wait(self, call: Call) -> None:
        limit_s = self._clock.now() + self.settings.start_s
        while not call.wait(min(self._clock.now() + _SLICE_S, limit_s)):
            if self._wants_stop():
                raise _StopAskedFor
            if self._clock.now() >= limit_s:
                raise RobotError(f"{self._name}: {call.what}() did not return within {self.settings.start_s:g} s")

    def _answer(self, call: Call) -> Any:
        try:
            return call.result()
        except EtudeError:
            raise
        except Exception as error:
            raise RobotError(
                f"{self._name}: {call.what}() failed: {type(error).__name__}: {one_line(error)}"
            ) from error

    def _prepare(self, number: int, seed: int, on_begin: Callable[[Mapping[str, Array]], None]) -> None:
        """Make ready, and have a plan before the clock starts: a chunk at rest costs no step."""
        try:
            if hasattr(self.robot, "reset"):
                self.call("reset", lambda: self.robot.reset(seed))  # type: ignore[attr-defined]
            self._observation = self._understood(self.call("observe", self.robot.observe))
            on_begin(self._observation)
            self.planner.begin(number)
            self.planner.see(self._observation)
            while not self.planner.prepare(self._clock.now() + _SLICE_S):
                if self._wants_stop():
                    raise _StopAskedFor
                if self._clock.now() - self._began_s > 2 * self.settings.start_s:
                    raise ControlError(f"the first plan was not there after {self.settings.start_s:g} s")
            if not self._is_warm:
                self._warm_up()
        except _StopAskedFor:
            self.tally.ended = "asked to stop"

    def _warm_up(self) -> None:
        self._is_warm = True
        again = self.planner.warm_up()
        self._wait(again)
        again.result()
        if again.seconds > self.planner.covers_s:
            raise ControlError(
                f"a chunk takes {1e3 * again.seconds:.0f} ms and lasts {1e3 * self.planner.covers_s:.0f} ms at "
                f"{self.settings.rate_hz:g} Hz: the policy cannot keep up; lower --rate, or make it faster"
            )
        self.planner.relearn(again.seconds)

    def _run(self, most_steps: int | None) -> None:
        if self.tally.ended:
            return
        period_s = self.settings.period_s
        began_s = self._began_s = self._seen_s = self._planned_s = self._clock.now()
        number, is_first = 0, True
        while most_steps is None or number < most_steps:
            due_s = began_s + number * period_s
            self._clock.sleep_until(due_s)
            if self._wants_stop():
                self.tally.ended = "asked to stop"
                break
            if not is_first and ask_robot(self.robot, "is_done", False, bool):
                self.tally.ended = "done"
                break
            if skipped := math.floor((self._clock.now() - due_s) / period_s):
                self._skip(skipped)
                number += skipped
                due_s += skipped * period_s
                if most_steps is not None and number >= most_steps:
                    continue
            self._step(due_s, is_first, is_late=skipped > 0)
            self._watch(due_s)
            number, is_first = number + 1, False
        else:
            self._clock.sleep_until(began_s + number * period_s)  # the last command has its time, too
            self.tally.ended = "all steps taken"
        self.tally.seconds = self._clock.now() - began_s

    def _skip(self, steps: int) -> None:
        self.planner.skip(steps)
        if steps * self.settings.period_s >= self.settings.watchdog_s:
            late_s = steps * self.settings.period_s
            raise ControlError(f"the loop itself was held up for {late_s:.3g} s; is the machine too busy?")
        self.tally.misses[LATE] += steps
        self._in_a_row += steps

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, due_s: float, is_first: bool, is_late: bool) -> None:
        budget_s, missed, tally = self.settings.budget, list[str](), self.tally
        until_s = due_s + (1 - _COMMAND_SHARE) * budget_s
        if is_first:  # seen and planned before the clock started
            self._seen_s = self._clock.now()
        else:
            self.planner.see(self._observe(until_s, missed))
        planned, limited = self.planner.action(until_s), None
        if planned is not None:
            self._planned_s = self._clock.now()
            limited = self._limit(planned)
        else:
            tally.held += 1
        if planned is None or self.planner.is_late:
            missed.append(INFERENCE)
        command = self._held() if limited is None else limited.command
        if self._pending is not None:  # the robot has not answered yet, and is not called twice at once
            command = None
        if command is not None:
            self._act(command, due_s + budget_s, missed)
        for cause in missed:
            tally.misses[cause] += 1
        self._in_a_row = self._in_a_row + 1 if missed else 0
        tally.steps += 1
        tally.seconds = self._clock.now() - self._began_s
        told = (*missed, LATE) if is_late else tuple(missed)
        step = ControlStep(due_s - self._began_s, self._observation, planned, command, told, limited)
        self._on_step(step, tally)

    def _observe(self, until_s: float, missed: list[str]) -> Mapping[str, Array] | None:
        """Return a fresh observation, if there is one in time."""
        call = self._pending
        if call is not None and call.what == ACT:
            if not call.wait(until_s):
                missed.append(ACT)
                return None
            self._answer(call)
            call = self._pending = None
        call = call or self._lane.start(OBSERVE, self.robot.observe)
        if not call.wait(until_s):
            self._pending = call
            missed.append(OBSERVE)
            return None
        self._pending = None
        observation = self._understood(self._answer(call))
        age_s = ask_robot(self.robot, "age_s", 0.0, float)
        if age_s > self.settings.oldest_s:
            missed.append(OBSERVE)
            return None
        self._seen_s = self._clock.now() - age_s
        self._observation = observation
        return observation

    def _understood(self, observation: Any) -> Mapping[str, Array]:
        if not isinstance(observation, Mapping):
            kind = type(observation).__name__
            raise RobotError(f"{self._name}: observe() returned a {kind}; it returns arrays by feature name")
        # Copies: drivers fill the same buffer again, while a plan is computed from it and a recording written.
        try:
            return {str(name): np.array(value) for name, value in observation.items()}
        except ValueError as error:
            raise RobotError(f"{self._name}: observe() returned what is no array: {one_line(error)}") from error

    def _limit(self, action: Array) -> Limited:
        if action.dtype.kind != "f":
            return Limited(action)
        before = self.limits.position(self._observation, action.size)
        limited = self.limits.apply(
            action, self._last_command if before is None else before.reshape(action.shape), self.settings.period_s
        )
        self.tally.clamped_position += limited.by_position
        self.tally.clamped_speed += limited.by_speed
        if self.settings.strict_limits and (limited.by_position or limited.by_speed):
            which = "position" if limited.by_position else "speed"
            raise ControlError(
                f"an action exceeds the limit on {which} at step {self.tally.steps}: {_shown(action)} would become "
                f"{_shown(limited.command)}; --strict-limits stops there"
            )
        return limited

    def _held(self) -> Array | None:
        last = self._last_command
        return last if last is None or self.settings.hold == "repeat" else np.zeros_like(last)

    def _act(self, command: Array, until_s: float, missed: list[str]) -> None:
        call = self._lane.start(ACT, lambda: self.robot.act(command))
        self._last_command = command
        if call.wait(until_s):
            self._answer(call)
            return
        self._pending = call
        missed.append(ACT)

    def _watch(self, due_s: float) -> None:
        """Raise where going on is no longer safe."""
        now, limit_s = self._clock.now(), self.settings.watchdog_s
        if now - due_s >= limit_s:  # every wait ends within a step: it was not the robot, nor the policy
            raise ControlError(f"the loop itself was held up for {now - due_s:.3g} s; is the machine too busy?")
        pending = self._pending
        if now - self._seen_s >= limit_s or (pending is not None and now - pending.started_s >= limit_s):
            why = "there was no new observation" if pending is None else f"{pending.what}() has not returned"
            raise RobotError(f"{self._name}: {why} for {limit_s:g} s")
        if now - self._planned_s >= limit_s:
            raise ControlError(f"there was no planned action for {limit_s:g} s; chunks took {self.planner.latency}")
        if self._in_a_row >= self.settings.max_misses:
            causes = ", ".join(f"{cause} {count}" for cause, count in self.tally.misses.items() if count)
            raise ControlError(f"{self._in_a_row} steps in a row missed their budget; misses so far: {causes}")


class _StopAskedFor(Exception):
    """Somebody wants to stop before the robot has moved."""


def _shown(values: Array) -> str:
    return np.array2string(np.asarray(values, dtype=np.float64), precision=4, threshold=16)
