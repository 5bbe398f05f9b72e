"""A policy on a robot for some episodes: the loop, its threads, signals and recording, and what came of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from etude.deploy.control import ControlLoop, ControlSettings, ControlStep, ControlTally
from etude.deploy.lanes import SystemClock, ThreadLane
from etude.deploy.planner import ChunkPlanner
from etude.deploy.recorder import RobotRecorder
from etude.deploy.robot import ActionLimits, Array, Robot, robot_name
from etude.errors import ConfigError, EtudeError, Interrupted, RobotError, one_line
from etude.policies.spec import condense
from etude.rng import generators_kept
from etude.simulation.seeds import episode_seed
from etude.types import Feature
from etude.types.names import ACTION

_SWITCH_S = 0.0005
"""How long Python lets a thread compute while the loop waits; 5 ms, the default, is half a step at 100 Hz."""
SPLIT = "test"
"""Whose seeds a robot that can be reset gets: those of `etude evaluate`."""


class RobotSession:
    """Run a policy on a robot; the robot is stopped whatever happens, and what was recorded is kept.

    Args:
        policy: A built policy, or an exported one.
        robot: What is moved.
        settings: How the loop runs.
        limits: What commands are kept in, beside the robot's own limits.
        episodes: How many.
        steps: Steps of an episode; None leaves it to the robot to say that it is done.
        lead: Steps ahead that chunks are asked for; None measures what is needed.
        record: Where to write what happened as a dataset.
        images: How recorded pictures are stored.
        task: What is to be done, in words; the robot's own task unless given.
        seed: Root of all seeds.
        on_step: Called after each step.
    """

    def __init__(
        self,
        policy: Any,
        robot: Robot,
        settings: ControlSettings,
        *,
        limits: ActionLimits | None = None,
        episodes: int = 1,
        steps: int | None = None,
        lead: int | None = None,
        record: Path | str | None = None,
        images: Literal["video", "image"] = "video",
        task: str | None = None,
        seed: int = 0,
        on_step: Callable[[RobotSession, ControlTally], None] = lambda session, tally: None,
    ) -> None:
        if steps is None and not hasattr(robot, "is_done"):
            raise ConfigError(
                f"{robot_name(robot)} does not say when an episode is done (is_done); give --steps or --seconds"
            )
        self.policy, self.robot, self.settings, self.limits = policy, robot, settings, limits or ActionLimits()
        self._episodes, self._steps, self._seed, self._task = episodes, steps, seed, task
        self._lead, self._record_at, self._images, self._on_step = lead, record, images, on_step
        self.tallies: list[ControlTally] = []
        self.planner: ChunkPlanner | None = None
        self.stopped = ""
        """Why it ended before all episodes were run; empty if it did not."""
        self.recorder: RobotRecorder | None = None
        self._signal = 0
        self._is_stopped = False

    def run(self) -> None:
        """Run all episodes, or raise why not; `to_dict` tells what happened either way."""
        try:
            with ExitStack() as stack:
                stack.enter_context(self._signals())
                stack.enter_context(generators_kept())
                stack.enter_context(_quick_switches())
                if isinstance(getattr(self.policy, "training", None), bool):
                    self.policy.eval()
                self._run(stack)
            if self._signal:
                raise Interrupted(self._signal, f"{signal.Signals(self._signal).name}: {self._name} was stopped")
        except (EtudeError, Interrupted) as error:
            self.stopped = getattr(error, "message", "") or str(error)
            raise
        except BaseException as error:
            self.stopped = f"{type(error).__name__}: {error}"
            raise

    @property
    def _name(self) -> str:
        return robot_name(self.robot)

    def _run(self, stack: ExitStack) -> None:
        lanes = [ThreadLane(name) for name in ("robot", "policy", "stop")]
        for lane in lanes:
            stack.callback(lane.close)
        settings, robot = self.settings, self.robot
        connecting: Any = getattr(robot, "connect", None)
        closing: Any = getattr(robot, "close", None)
        if closing is not None:
            stack.push(lambda kind, error, trace: self._close(closing, lanes[2], error))
        if connecting is not None:
            self._connect(lanes[0], connecting)
            if self._signal:
                return
        task = self._task or str(getattr(robot, "task", "") or "") or None
        self.planner = ChunkPlanner(
            self.policy, lanes[1], period_s=settings.period_s, budget_s=settings.budget, lead=self._lead,
            seed=self._seed, task=task,
        )  # fmt: skip
        action = self.policy.spec[self.policy.action_name]
        limits = self._checked_limits(action)
        if self._record_at is not None:
            self.recorder = RobotRecorder(
                Path(self._record_at), settings.rate_hz, action, task or "unnamed task", robot_type=self._name,
                images=self._images,
            )  # fmt: skip
        loop = ControlLoop(
            robot, self.planner, settings, limits=limits, clock=SystemClock(), lane=lanes[0], stop_lane=lanes[2],
            wants_stop=lambda: bool(self._signal), on_step=self._saw,
        )  # fmt: skip
        try:
            self._run_episodes(loop)
        except BaseException as error:
            self._close_recorder(error)
            raise
        self._close_recorder(None)

    def _close_recorder(self, error: BaseException | None) -> None:
        """Keep what was recorded; a fault in that comes after the reason for which it ends."""
        if self.recorder is None:
            return
        try:
            self.recorder.close()
        except EtudeError as second:
            if error is None:
                raise
            if isinstance(error, EtudeError):
                error.args = (f"{error}; {second}",)

    def _run_episodes(self, loop: ControlLoop) -> None:
        for number in range(self._episodes):
            self._is_stopped = False
            try:
                loop.run_episode(number, episode_seed(self._seed, SPLIT, number), self._steps, self._began)
            finally:
                self._is_stopped = True
                self.tallies.append(loop.tally)
                if self.recorder is not None:
                    self.recorder.end_episode()
            if self._signal:
                return

    def _connect(self, lane: ThreadLane, connecting: Callable[[], Any]) -> None:
        call, clock = lane.start("connect", connecting), SystemClock()
        limit_s = clock.now() + self.settings.start_s
        while not call.wait(clock.now() + 0.1):
            if self._signal:
                return
            if clock.now() > limit_s:
                raise RobotError(f"{self._name}: connect() did not return within {self.settings.start_s:g} s")
        try:
            call.result()
        except EtudeError:
            raise
        except Exception as error:
            raise RobotError(f"{self._name}: connect() failed: {type(error).__name__}: {error}") from error

    def _close(self, closing: Callable[[], Any], lane: ThreadLane, error: BaseException | None) -> None:
        """Switch the robot off; a fault in that comes after the reason for which it ends."""
        call, limit_s = lane.start("close", closing), 2 * self.settings.stop_s
        if not call.wait(SystemClock().now() + limit_s):
            trouble = f"close() did not return within {limit_s:g} s; its motors may still be on"
        else:
            try:
                call.result()
                return
            except Exception as fault:  # noqa: BLE001 - a robot may fail in any way
                trouble = f"close() failed: {type(fault).__name__}: {one_line(fault)}"
        if error is None:
            raise RobotError(f"{self._name}: {trouble}")
        if isinstance(error, Interrupted):
            error.message += f"; {trouble}"
        elif isinstance(error, EtudeError):
            error.args = (f"{error}; {trouble}",)
        else:
            error.add_note(trouble)

    def _checked_limits(self, action: Feature) -> ActionLimits:
        size = 1
        for length in action.shape:
            size *= length
        shown = getattr(getattr(self.robot, "spec", None), "features", {}).get(ACTION)
        if shown is not None and tuple(shown.shape) != tuple(action.shape):
            raise ConfigError(
                f"{self._name} takes actions of shape {list(shown.shape)}, the policy makes {list(action.shape)}"
            )
        own = getattr(self.robot, "limits", None)
        if own is not None and not isinstance(own, ActionLimits):
            raise ConfigError(f"{self._name}: limits must be an etude.deploy.ActionLimits, got {type(own).__name__}")
        for one in (own, self.limits):
            if one is not None:
                one.check(size)
        limits = self.limits if own is None else own.narrowed(self.limits)
        limits.check(size)
        return limits

    def _began(self, observation: Mapping[str, Array]) -> None:
        if self.recorder is not None:
            shown = getattr(getattr(self.robot, "spec", None), "features", {})
            self.recorder.begin(observation, {**condense(self.policy.spec).features, **shown})

    def _saw(self, step: ControlStep, tally: ControlTally) -> None:
        if self.recorder is not None:
            self.recorder.add(step)
        self._on_step(self, tally)

    # ---- signals -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP stop the robot first; a second one ends at once what is done after that."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: it is to outlive its terminal
                previous[number] = signal.signal(number, self._note)
        try:
            yield
        finally:
            for given, handler in previous.items():
                signal.signal(given, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal and self._is_stopped and number != signal.SIGHUP:
            os._exit(128 + number)
        if not self._signal:
            self._signal = number
            with suppress(OSError, ValueError):  # the terminal may be gone
                os.write(
                    sys.__stderr__.fileno() if sys.__stderr__ else 2,
                    f"\netude: {signal.Signals(number).name}: stopping the robot\n".encode(),
                )

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return what happened as JSON values."""
        latency = self.planner.latency if self.planner is not None else None
        return {
            "policy": str(getattr(self.policy, "name", type(self.policy).__name__)),
            "robot": self._name,
            "rate_hz": self.settings.rate_hz,
            "budget_ms": 1e3 * self.settings.budget,
            "stopped": self.stopped or None,
            "inference_ms": {
                "count": latency.count if latency else 0,
                "p50": round(latency.percentile_ms(0.5), 3) if latency else None,
                "p99": round(latency.percentile_ms(0.99), 3) if latency else None,
            },
            "chunks_too_late": self.planner.chunks_too_late if self.planner is not None else 0,
            "episodes": [tally.to_dict() for tally in self.tallies],
            "recorded": None
            if self.recorder is None
            else {
                "root": str(self.recorder.root),
                "episodes": self.recorder.episodes,
                "frames": self.recorder.frames,
            },
        }


def data_limits(action: Feature) -> ActionLimits:
    """Return the range of the actions that a policy was trained on as limits."""
    stats = action.stats or {}
    if "min" not in stats or "max" not in stats:
        raise ConfigError("the policy does not know the range of its actions (min and max); use --limits robot")
    return ActionLimits(low=list(stats["min"]), high=list(stats["max"]))


@contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
