"""What a robot is to the control loop: it observes, acts and stops; and the limits that its actions are kept in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, EtudeError, RobotError, one_line
from etude.plugins import is_plugin_file
from etude.reading.suggest import did_you_mean
from etude.registry import ROBOT_REGISTRY, load_object, load_plugins, names_object

Array = NDArray[Any]
HOLDS = ("repeat", "zero")
"""What is commanded where no action is ready: the last command again, or zeros."""


@runtime_checkable
class Robot(Protocol):
    """An arm, a vehicle or a simulation of one.

    Calls come from one thread, one at a time; only `stop` may come from another, while a call has not returned.

    It may also offer: `connect()` and `close()`; `reset(seed)`, which makes ready for an episode; `limits`, an
    `ActionLimits`; `hold`, "repeat" or "zero"; `age_s`, how old the last observation is; `is_done` and `success`,
    about the episode; `task`, in words; `rate_hz`; `spec`, a `DataSpec` of what it shows and takes; `name`.
    """

    def observe(self) -> Mapping[str, Array]:
        """Return the newest observation at hand, by feature name; images are uint8 (height, width, channels)."""

    def act(self, action: Array) -> None:
        """Take a command, and return without waiting for the motion."""

    def stop(self) -> None:
        """Come to rest; safe at any time, from any thread, and many times over."""


@dataclass(frozen=True)
class Limited:
    """A command within limits, and which of them changed it."""

    command: Array
    by_position: bool = False
    by_speed: bool = False


@dataclass(frozen=True)
class ActionLimits:
    """Bounds of commands, one number for all dimensions or one for each.

    Args:
        low: Least value; None is no bound.
        high: Greatest value.
        max_speed: Most that a command may change, in units of the action per second.
        measured: Feature that measures what actions command. Speed then counts from there, not from the last command.
        measured_dims: Which numbers of that feature, one for each dimension of the action; the first ones unless given.
    """

    low: float | Sequence[float] | None = None
    high: float | Sequence[float] | None = None
    max_speed: float | Sequence[float] | None = None
    measured: str | None = None
    measured_dims: Sequence[int] | None = None

    def check(self, size: int) -> None:
        """Refuse bounds that do not fit an action of so many numbers."""
        for name in ("low", "high", "max_speed"):
            bound = getattr(self, name)
            if bound is None:
                continue
            values = np.asarray(bound, dtype=np.float64)
            if values.shape not in ((), (size,)) or np.isnan(values).any():
                raise ConfigError(
                    f"limits: {name} has {bound!r}; give one number, or one for each of {size} dimensions"
                )
            if name == "max_speed" and (values <= 0).any():
                raise ConfigError(f"limits: max_speed must be above 0, got {bound!r}")
        if self.low is not None and self.high is not None and np.any(np.asarray(self.low) > np.asarray(self.high)):
            raise ConfigError(f"limits: low {self.low!r} lies above high {self.high!r}")
        if self.measured_dims is not None and len(self.measured_dims) != size:
            raise ConfigError(f"limits: measured_dims names {len(self.measured_dims)} numbers for {size} dimensions")

    def position(self, observation: Mapping[str, Array], size: int) -> Array | None:
        """Return the measured position in an observation; None where nothing measures it."""
        if self.measured is None:
            return None
        if self.measured not in observation:
            raise ConfigError(f"limits: {self.measured!r} is not in the observation, which has {sorted(observation)}")
        values = np.asarray(observation[self.measured], dtype=np.float64).reshape(-1)
        dims = list(range(size)) if self.measured_dims is None else list(self.measured_dims)
        if not dims or max(dims) >= len(values) or min(dims) < 0:
            raise ConfigError(f"limits: {self.measured} has {len(values)} numbers, and not the dimensions {dims}")
        return values[dims]

    def apply(self, action: Array, before: Array | None, period_s: float) -> Limited:
        """Return a command within the limits, as near to an action as they allow.

        Args:
            action: What is wanted.
            before: Where speed counts from; None is nowhere yet, and any step is taken.
            period_s: Time that the step has.
        """
        wanted = np.asarray(action, dtype=np.float64)
        bounded = wanted if self.low is None and self.high is None else np.clip(wanted, self.low, self.high)
        command = bounded
        if self.max_speed is not None and before is not None:
            most = np.asarray(self.max_speed, dtype=np.float64) * period_s
            step = bounded - before
            # Rounding alone is no excess.
            command = np.where(np.abs(step) > most * (1 + 1e-6) + 1e-12, before + np.clip(step, -most, most), bounded)
        by_position, by_speed = bool(np.any(bounded != wanted)), bool(np.any(command != bounded))
        if not (by_position or by_speed):
            return Limited(action)
        return Limited(command.astype(action.dtype), by_position, by_speed)

    def narrowed(self, other: ActionLimits) -> ActionLimits:
        """Return limits that keep both these and others."""
        return replace(
            self,
            low=_tighter(np.maximum, self.low, other.low),
            high=_tighter(np.minimum, self.high, other.high),
            max_speed=_tighter(np.minimum, self.max_speed, other.max_speed),
        )


def _tighter(choose: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return choose(np.asarray(one), np.asarray(other)).tolist()


def make_robot(name: str, options: Mapping[str, Any] | None = None) -> Robot:
    """Make a robot.

    Args:
        name: A key of the registry, `file.py:Class`, or a Python file that registers one robot.
        options: Its parameters; unknown ones are errors.
    """
    options = dict(options or {})
    if names_object(name):
        constructor = load_object(name, "robot")
        found = constructor.__name__ if hasattr(constructor, "__name__") else name
    else:
        found = _registered_by(name) if is_plugin_file(name) else name
        constructor = ROBOT_REGISTRY.get(found)
    if not callable(constructor):
        raise ConfigError(
            f"robot {name!r} is a {type(constructor).__name__}; name a class or a function that makes one"
        )
    known = inspect.signature(constructor).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for option in options:
            if option not in known:
                listed = ", ".join(known) or "none"
                raise ConfigError(
                    f"robot {found} has no option {option!r}{did_you_mean(option, known) or ';'} It has {listed}"
                )
    missing = [p.name for p in known.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if wanting := [option for option in missing if option not in options and option != "args"]:
        raise ConfigError(f"robot {found} needs {wanting[0]}; give it as --robot-option {wanting[0]}=VALUE")
    try:
        robot = constructor(**options)
    except EtudeError:
        raise
    except Exception as error:
        raise RobotError(f"robot {found} cannot be made: {type(error).__name__}: {one_line(error)}") from error
    if lacks := [part for part in ("observe", "act", "stop") if not callable(getattr(robot, part, None))]:
        raise ConfigError(f"robot {found}: {type(robot).__name__} lacks {' and '.join(f'{part}()' for part in lacks)}")
    made: Robot = robot
    return made


def _registered_by(file: str) -> str:
    before = set(ROBOT_REGISTRY.keys())
    load_plugins([file])
    new = [key for key in ROBOT_REGISTRY if key not in before]
    if len(new) == 1:
        return new[0]
    told = f"registers {', '.join(new)}" if new else "registers no robot that was not known before"
    raise ConfigError(f"robot {file!r}: the file {told}; name its class as {file}:Class")


def ask_robot(robot: Any, what: str, default: Any, read: Callable[[Any], Any]) -> Any:
    """Return what a robot says of itself, as an attribute or a method; raise `RobotError` where that fails.

    Args:
        robot: The robot.
        what: The attribute.
        default: What holds where it has none, or None.
        read: Makes a value of what it says.
    """
    try:
        found = getattr(robot, what, None)
        found = found() if callable(found) else found
        return default if found is None else read(found)
    except EtudeError:
        raise
    except Exception as error:
        raise RobotError(f"{robot_name(robot)}: {what} failed: {type(error).__name__}: {one_line(error)}") from error


def robot_name(robot: Any) -> str:
    """Return how messages call a robot."""
    return str(getattr(robot, "name", None) or type(robot).__name__)
