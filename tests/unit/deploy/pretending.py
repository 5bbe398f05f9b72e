"""A clock, lanes, a robot and a policy whose times are given, so that a control loop needs no real time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from etude.deploy.control import ControlLoop, ControlSettings, ControlStep, ControlTally
from etude.deploy.planner import ChunkPlanner
from etude.policies.executor import ActionExecutor
from etude.types import DataSpec, Feature

NEVER = float("inf")


class GivenClock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def sleep_until(self, at_s: float) -> None:
        self.time_s = max(self.time_s, at_s)


class GivenCall:
    """A call that ends at a given time."""

    def __init__(self, clock: GivenClock, what: str, function: Callable[[], Any], ends_s: float) -> None:
        self._clock, self.what, self._ends_s, self.started_s = clock, what, ends_s, clock.now()
        self._value, self._error = None, None
        if ends_s < NEVER:
            try:
                self._value = function()
            except Exception as error:  # noqa: BLE001 - raised where the call is waited for
                self._error = error

    def wait(self, until_s: float) -> bool:
        if self._ends_s > max(until_s, self._clock.now()):
            self._clock.sleep_until(until_s)
            return False
        self._clock.sleep_until(self._ends_s)
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def seconds(self) -> float:
        return self._ends_s - self.started_s


class GivenLane:
    """Calls that take as long as is given: by name, one number for all or one for each call in turn."""

    def __init__(self, clock: GivenClock, **takes_s: float | list[float]) -> None:
        self._clock, self.takes_s, self._busy_until_s = clock, dict(takes_s), 0.0
        self.calls: list[str] = []

    def start(self, what: str, function: Callable[[], Any]) -> GivenCall:
        self.calls.append(what)
        given = self.takes_s.get(what, 0.001)
        if isinstance(given, list):
            given = given.pop(0) if len(given) > 1 else given[0]
        begins_s = max(self._clock.now(), self._busy_until_s)
        self._busy_until_s = begins_s + given
        return GivenCall(self._clock, what, function, self._busy_until_s)


class CountingRobot:
    """Shows the number of the step that time has reached, and keeps what it is told."""

    name = "counter"

    def __init__(self, clock: GivenClock, rate_hz: float = 10.0) -> None:
        self._clock, self._rate_hz, self._began_s = clock, rate_hz, None
        self.commands: list[float] = []
        self.times_s: list[float] = []
        self.stops = 0
        self.fails: dict[str, Exception] = {}
        self.age_s = 0.0

    def observe(self) -> dict[str, np.ndarray]:
        if "observe" in self.fails and self.commands:
            raise self.fails["observe"]
        began_s = self.times_s[0] if self.times_s else self._clock.now()
        step = round((self._clock.now() - began_s) * self._rate_hz)
        return {"observation.state": np.asarray([step], dtype=np.float32)}

    def act(self, action: np.ndarray) -> None:
        if "act" in self.fails and len(self.commands) >= 3:
            raise self.fails["act"]
        self.times_s.append(self._clock.now())
        self.commands.append(float(action[0]))

    def stop(self) -> None:
        self.stops += 1
        if "stop" in self.fails:
            raise self.fails["stop"]


class CountingPolicy:
    """Plans the numbers of the coming steps: whatever was late, step k is to get the action k."""

    action_name = "action"

    def __init__(self, horizon: int = 8, **execution: Any) -> None:
        self.horizon, self.scale = horizon, 1.0
        self.spec = DataSpec(
            {
                "observation.state": Feature((1,), "float32", "state"),
                "action": Feature((1,), "float32", "action", stats={"min": [0.0], "max": [5.0]}),
            },
            10.0,
        )
        self.executor = ActionExecutor(horizon, **execution)
        self.asked: list[int] = []

    def looks_at(self, name: str, feature: Feature) -> bool:
        return feature.role != "action"

    def predict_action_chunk(self, batch: Any) -> torch.Tensor:
        state = batch["observation.state"].reshape(1, -1)[:, -1]
        self.asked.append(int(state))
        return (self.scale * (state + torch.arange(self.horizon))).reshape(1, -1, 1)


class Pretence:
    """A loop with everything that it needs, in given time.

    Calls of the robot take 1 ms and chunks `predict` seconds, unless `takes` says otherwise.
    """

    def __init__(
        self,
        policy: CountingPolicy | None = None,
        *,
        lead: int | None = None,
        limits: Any = None,
        rate_hz: float = 10.0,
        takes: dict[str, float | list[float]] | None = None,
        predict: float | list[float] = 0.002,
        **settings: Any,
    ) -> None:
        self.clock = GivenClock()
        self.robot = CountingRobot(self.clock, rate_hz)
        self.policy = policy or CountingPolicy()
        self.settings = ControlSettings(rate_hz=rate_hz, **settings)
        self.lane, self.stop_lane = GivenLane(self.clock, **(takes or {})), GivenLane(self.clock, **(takes or {}))
        self.policy_lane = GivenLane(self.clock, predict=predict)
        self.planner = ChunkPlanner(
            self.policy, self.policy_lane, period_s=self.settings.period_s, budget_s=self.settings.budget, lead=lead
        )
        self.steps: list[ControlStep] = []
        self.on_step: Callable[[ControlStep], None] = lambda step: None
        self.is_asked = False
        self.loop = ControlLoop(
            self.robot, self.planner, self.settings, limits=limits, clock=self.clock, lane=self.lane,
            stop_lane=self.stop_lane, wants_stop=lambda: self.is_asked, on_step=self._saw,
        )  # fmt: skip

    def _saw(self, step: ControlStep, tally: ControlTally) -> None:
        self.steps.append(step)
        self.on_step(step)

    def run(self, steps: int | None = 20) -> ControlTally:
        return self.loop.run_episode(0, 0, steps)

    @property
    def causes(self) -> dict[str, int]:
        return {cause: count for cause, count in self.loop.tally.misses.items() if count}
