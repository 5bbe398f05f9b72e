"""Signature and help of the command that moves robots; the work is in the module it imports when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import AsJson, Images, Plugins, Seed, TrainedPolicy, WhichCheckpoint, count, option
from etude.cli.panels import DEPLOY

# fmt: off
RobotName = Annotated[str, option("--robot", "ROBOT", "simulated, one of etude list robots, or file.py:Class.")]
RobotOptions = Annotated[list[str] | None, option("--robot-option", "KEY=VALUE", "A parameter of it; repeatable.")]
SimulatedEnv = Annotated[str | None, option("--env", "ENV", "What the simulated robot simulates, such as pusht.")]
Seconds = Annotated[float | None, typer.Option("--seconds", metavar="S", min=0, help="Length of an episode instead.")]
Rate = Annotated[float | None, option("--rate", "HZ", "Steps in a second [that of the policy's data].")]
BudgetMs = Annotated[float | None, option("--budget-ms", "MS", "Time of a step by which all must be done [all of it].")]
Lead = Annotated[int | None, count("--lead", "Steps ahead that a chunk is asked for [as inference needs].", least=0)]
Hold = Annotated[str | None, option("--hold", "repeat|zero", "What to command without an action [the robot's way].")]
LimitsOf = Annotated[str, option("--limits", "robot|data", "The robot's own; data adds the range of its data.")]
MaxSpeed = Annotated[float | None, option("--max-speed", "X", "Most that commands may change, in units per second.")]
StrictLimits = Annotated[bool, typer.Option("--strict-limits", help="Stop at what the limits would change.")]
WatchdogS = Annotated[float, option("--watchdog-s", "S", "Stop after so long without a new observation or action.")]
MaxMisses = Annotated[int, count("--max-misses", "Stop after so many steps in a row over their budget.")]
MaxAgeMs = Annotated[float | None, option("--max-age-ms", "MS", "Age of an observation [three steps, at least 100].")]
Record = Annotated[Path | None, option("--record", "DIR", "Keep what happened as a LeRobot dataset there.")]
Task = Annotated[str | None, option("--task", "TEXT", "What is to be done [what the robot says].")]
# fmt: on


def add_commands(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(rich_help_panel=DEPLOY)(act)


def act(
    source: TrainedPolicy,
    robot: RobotName = "simulated",
    robot_option: RobotOptions = None,
    env: SimulatedEnv = None,
    plugin: Plugins = None,
    which: WhichCheckpoint = "auto",
    episodes: Annotated[int, count("--episodes", "Episodes to run.")] = 1,
    steps: Annotated[int | None, count("--steps", "Steps of an episode [until the robot is done].")] = None,
    seconds: Seconds = None,
    rate: Rate = None,
    budget_ms: BudgetMs = None,
    lead: Lead = None,
    hold: Hold = None,
    limits: LimitsOf = "robot",
    max_speed: MaxSpeed = None,
    strict_limits: StrictLimits = False,
    watchdog_s: WatchdogS = 1.0,
    max_misses: MaxMisses = 25,
    max_age_ms: MaxAgeMs = None,
    record: Record = None,
    images: Images = "video",
    task: Task = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run POLICY on a robot at a fixed rate, within limits, and stop it when something is wrong.

    Such as: etude act runs/act --robot my_arm.py:MyArm --seconds 30 --record data/trial
    """
    from etude.cli.act import ActOptions
    from etude.cli.act import act as run

    asked = ActOptions(
        robot=robot, robot_options=robot_option or [], env=env, plugins=plugin or [], which=which,
        episodes=episodes, steps=steps, seconds=seconds, rate=rate, budget_ms=budget_ms, lead=lead, hold=hold,
        limits=limits, max_speed=max_speed, strict_limits=strict_limits, watchdog_s=watchdog_s,
        max_misses=max_misses, max_age_ms=max_age_ms, record=record, images=images, task=task, seed=seed,
        as_json=as_json,
    )  # fmt: skip
    run(source, asked)
