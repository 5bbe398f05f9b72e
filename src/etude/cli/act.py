"""`etude act`: a policy on a robot at a fixed rate, with a line a second, a summary, and JSON for programs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.acting import read_options
from etude.cli.output import print_json, print_table, say
from etude.cli.serve import find_served
from etude.errors import ConfigError
from etude.registry import load_plugins

if TYPE_CHECKING:
    from etude.deploy.control import ControlTally
    from etude.deploy.session import RobotSession

SIMULATED = "simulated"


@dataclass(frozen=True)
class ActOptions:
    """What the command line says beside the policy."""

    robot: str
    robot_options: Sequence[str]
    env: str | None
    plugins: Sequence[str]
    which: str
    episodes: int
    steps: int | None
    seconds: float | None
    rate: float | None
    budget_ms: float | None
    lead: int | None
    hold: str | None
    limits: str
    max_speed: float | None
    strict_limits: bool
    watchdog_s: float
    max_misses: int
    max_age_ms: float | None
    record: Path | None
    images: str
    task: str | None
    seed: int
    as_json: bool


def act(source: str, asked: ActOptions) -> None:
    """Run a policy on a robot, and tell how it went."""
    gc.enable()  # switched off for the start by `main`
    if asked.steps is not None and asked.seconds is not None:
        raise ConfigError("--steps and --seconds both say how long an episode is; give one of them")
    if asked.limits not in ("robot", "data"):
        raise ConfigError(f"--limits is robot or data, got {asked.limits!r}")
    load_plugins(list(asked.plugins))
    options = read_options(asked.robot_options, None, None, "--robot-option")
    policy = find_served(source, asked.which)
    from etude.deploy.planner import require_chunks
    from etude.deploy.robot import make_robot

    require_chunks(policy)
    session = _session(policy, make_robot(asked.robot, _with_env(asked.robot, options, asked.env, policy)), asked)
    rate, recorded = session.settings.rate_hz, policy.spec.fps
    if not asked.as_json and recorded and abs(rate / recorded - 1) > 0.01:
        say(f"the policy's data has {recorded:g} Hz, the loop {rate:g} Hz: it acts {rate / recorded:.3g} times as fast")
    try:
        session.run()
    finally:
        print_json(session.to_dict()) if asked.as_json else print_session(session)
        sys.stdout.flush()


def _session(policy: Any, robot: Any, asked: ActOptions) -> RobotSession:
    from etude.deploy.control import ControlSettings
    from etude.deploy.robot import ActionLimits
    from etude.deploy.session import RobotSession, data_limits

    rate = asked.rate if asked.rate is not None else policy.spec.fps or getattr(robot, "rate_hz", None)
    if rate is None:
        raise ConfigError("neither the policy's data nor the robot says at which rate it runs; give --rate HZ")
    limits = data_limits(policy.spec[policy.action_name]) if asked.limits == "data" else ActionLimits()
    if asked.max_speed is not None:
        limits = limits.narrowed(ActionLimits(max_speed=asked.max_speed))
    settings = ControlSettings(
        rate_hz=rate,
        budget_s=None if asked.budget_ms is None else asked.budget_ms / 1e3,
        watchdog_s=asked.watchdog_s,
        max_misses=asked.max_misses,
        max_age_s=None if asked.max_age_ms is None else asked.max_age_ms / 1e3,
        hold=asked.hold or str(getattr(robot, "hold", "repeat")),
        strict_limits=asked.strict_limits,
    )
    return RobotSession(
        policy, robot, settings, limits=limits, episodes=asked.episodes,
        steps=asked.steps if asked.seconds is None else max(1, round(asked.seconds * rate)),
        lead=asked.lead, record=asked.record, images=asked.images,  # type: ignore[arg-type]
        task=asked.task, seed=asked.seed, on_step=_Telling(quiet=asked.as_json).tell,
    )  # fmt: skip


def _with_env(robot: str, options: dict[str, Any], env: str | None, policy: Any) -> dict[str, Any]:
    """Return the options of a robot; the simulated one shows what the policy was trained to see."""
    if robot != SIMULATED:
        if env is not None:
            raise ConfigError(f"--env is for the robot {SIMULATED!r}; {robot} takes its own --robot-option")
        return options
    if env is not None:
        options = {"env": env, **options}
    if "env" not in options:
        raise ConfigError("the simulated robot needs an environment: --env metaworld/pick-place, pusht, gym:ID, ...")
    from etude.simulation.environments import options_for

    fitting = options_for(str(options["env"]), policy.spec)
    return {**options, "env_options": {**fitting, **(options.get("env_options") or {})}}


class _Telling:
    """Says once a second how the loop gets on."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._said_s, self._steps = quiet, 0.0, 0

    def tell(self, session: RobotSession, tally: ControlTally) -> None:
        from etude.deploy.robot import ask_robot

        if tally.steps < self._steps:  # another episode
            self._said_s, self._steps = 0.0, 0
        passed_s = tally.seconds - self._said_s
        if self._quiet or passed_s < 1.0 or session.planner is None:
            return
        rate = (tally.steps - self._steps) / passed_s
        self._said_s, self._steps = tally.seconds, tally.steps
        latency, clamps = session.planner.latency, tally.clamped_position + tally.clamped_speed
        success = ask_robot(session.robot, "success", None, bool)
        text = (
            f"{tally.seconds:5.0f} s  {rate:6.1f} Hz  inference p50 {latency.percentile_ms(0.5):.1f} ms "
            f"p99 {latency.percentile_ms(0.99):.1f} ms  misses {tally.missed}  clamps {clamps}"
        )
        say(text + ("" if success is None else f"  success {'yes' if success else 'no'}"))
        sys.stdout.flush()


def print_session(session: RobotSession) -> None:
    """Print what happened, an episode a line."""
    if session.tallies:
        heads = ("episode", "steps", "Hz", "misses", "held", "clamped", "success", "ended")
        rows = [_row(number, tally) for number, tally in enumerate(session.tallies)]
        print_table(heads, rows, right=(0, 1, 2, 4, 5))
    if session.planner is not None and session.planner.latency.count:
        latency = session.planner.latency
        p50, p99 = latency.percentile_ms(0.5), latency.percentile_ms(0.99)
        budget = 1e3 * session.settings.budget
        say(f"inference: {latency.count} chunks, p50 {p50:.2f} ms, p99 {p99:.2f} ms; budget {budget:.4g} ms a step")
    if session.recorder is not None and session.recorder.episodes:
        told = session.recorder
        episodes = "1 episode" if told.episodes == 1 else f"{told.episodes} episodes"
        say(f"recorded: {told.root}, {episodes}, {told.frames} frames")


def _row(number: int, tally: ControlTally) -> tuple[str, ...]:
    rate = f"{tally.steps / tally.seconds:.1f}" if tally.seconds else "-"
    causes = ", ".join(f"{cause} {count}" for cause, count in tally.misses.items() if count) or "0"
    success = "-" if tally.success is None else "yes" if tally.success else "no"
    clamped = str(tally.clamped_position + tally.clamped_speed)
    ended = tally.ended if len(tally.ended) < 20 else "stopped"  # the sentence follows as the error
    return str(number), str(tally.steps), rate, causes, str(tally.held), clamped, success, ended
