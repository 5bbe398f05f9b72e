"""The command line is public: a change to this list must be deliberate, and noted in the changelog."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.testing import CliRunner

from etude.cli.main import app
from etude.cli.panels import ORDER

SURFACE = """
etude --install-completion
etude --show-completion
etude --version
etude train CONFIG? KEY=VALUE?
etude train --jobs N = 1
etude train --resume auto|never|PATH = auto
etude train --seeds N|A,B
etude train -c --config --train_config --train-config CONFIG
etude train -m --mode self-hosted|training-service
etude train -r --run-nexrl
etude train -t --tag NAME
etude resume RUN KEY=VALUE?
etude check CONFIG KEY=VALUE?
etude check --json
etude sweep CONFIG KEY=WHAT?
etude sweep --jobs N
etude sweep --metric NAME
etude sweep --mode min|max
etude sweep --name NAME
etude sweep --open
etude sweep --pruner median|asha|hyperband|none = median
etude sweep --ray
etude sweep --sampler tpe|random|grid|gp = tpe
etude sweep --seed N
etude sweep --timeout TIME
etude sweep --trials N
etude runs ROOT? = runs
etude runs --json
etude report RUN
etude report --output -o FILE
etude report --open
etude compare RUN...
etude compare --json
etude compare --metric NAME
etude compare --open
etude compare --output -o FILE
etude watch RUN?
etude watch --open
etude watch --port N = 8700
etude list KIND? NAME?
etude list --plugin MODULE
etude list --json
etude verify CONFIG KEY=VALUE?
etude verify --steps N = 20
etude data inspect DATASET
etude data inspect --json
etude data stats DATASET
etude data stats --episodes A-B,C
etude data stats --json
etude data view DATASET
etude data view --episode N
etude data view --open
etude data view --output -o FILE
etude data view --port N = 8701
etude data view --rerun FILE
etude data view --serve
etude model show FILE
etude model show --json
etude model show --output -o FILE
etude data convert SRC DST
etude data convert --format auto|aloha|robomimic|zarr = auto
etude data convert --fps N
etude data convert --images video|image = video
etude data convert --rename OLD=NEW
etude data convert --task TEXT
etude record --cameras A,B
etude record --env ENV
etude record --episodes N = 50
etude record --images video|image = video
etude record --keep-failures
etude record --noise STD
etude record --noise-rate P = 1.0
etude record --noise-share P = 1.0
etude record --noise-steps N = 1
etude record --option KEY=VALUE
etude record --policy WHO = expert
etude record --rewards
etude record --root DIR
etude record --seed N
etude record --size PIXELS
etude record --workers N
etude evaluate POLICY
etude evaluate --diagnose = True
etude evaluate --env ENV
etude evaluate --episodes N = 50
etude evaluate --json
etude evaluate --plugin MODULE
etude evaluate --option KEY=VALUE
etude evaluate --output -o DIR
etude evaluate --samples N
etude evaluate --seed N
etude evaluate --slots N
etude evaluate --split train|validation|test = test
etude evaluate --video N
etude evaluate --which best|last|STEP = auto
etude evaluate --workers N
etude quickstart --dir DIR
etude quickstart --episodes N = 50
etude quickstart --eval-episodes N = 50
etude quickstart --noise STD
etude quickstart --policy KEY = act
etude quickstart --seed N
etude quickstart --steps N
etude quickstart --task NAME = pick-place
etude redteam train CONFIG?
etude redteam train --algorithm dpo|ipo|ppo
etude redteam train --auditor MODEL
etude redteam train --output -o DIR
etude redteam train --prompts FILE
etude redteam train --run RUN
etude redteam train --scorer NAME
etude redteam train --set KEY=VALUE
etude redteam train --steps N
etude redteam train --target MODEL
etude redteam robot POLICY
etude redteam robot --baseline = True
etude redteam robot --disturb KIND[=X]
etude redteam robot --env ENV
etude redteam robot --episodes N = 200
etude redteam robot --json
etude redteam robot --option KEY=VALUE
etude redteam robot --output -o DIR
etude redteam robot --plugin MODULE
etude redteam robot --search NAME
etude redteam robot --seed N
etude redteam robot --strength X = 1.0
etude redteam robot --to-dataset DIR
etude redteam robot --video N = 6
etude redteam robot --which best|last|STEP = auto
etude redteam robot --workers N
etude redteam evaluate AUDITOR
etude redteam evaluate --against MODEL
etude redteam evaluate --config FILE
etude redteam evaluate --json
etude redteam evaluate --output -o DIR
etude redteam evaluate --prompts FILE
etude redteam evaluate --rollouts N = 48
etude redteam evaluate --scorer NAME
etude redteam evaluate --set KEY=VALUE
etude redteam evaluate --target MODEL
etude serve --folder DIR = service
etude serve --host ADDRESS = 127.0.0.1
etude serve --keys FILE
etude serve --model MODEL
etude serve --port N = 8000
etude serve --sessions N
etude serve --snapshot-steps N
etude act POLICY
etude act --budget-ms MS
etude act --env ENV
etude act --episodes N = 1
etude act --hold repeat|zero
etude act --images video|image = video
etude act --json
etude act --lead N
etude act --limits robot|data = robot
etude act --max-age-ms MS
etude act --max-misses N = 25
etude act --max-speed X
etude act --plugin MODULE
etude act --rate HZ
etude act --record DIR
etude act --robot ROBOT = simulated
etude act --robot-option KEY=VALUE
etude act --seconds S
etude act --seed N
etude act --steps N
etude act --strict-limits
etude act --task TEXT
etude act --watchdog-s S = 1.0
etude act --which best|last|STEP = auto
etude serve-policy POLICY
etude serve-policy --host ADDRESS = 127.0.0.1
etude serve-policy --key TEXT
etude serve-policy --port N = 8765
etude serve-policy --which best|last|STEP = auto
etude export POLICY
etude export --format torch|onnx|pretrained|components|lerobot = torch
etude export --output -o DIR
etude export --which best|last|STEP = auto
etude push POLICY OWNER/NAME
etude push --private
etude push --revision BRANCH
etude push --which best|last|STEP = auto
etude pull OWNER/NAME
etude pull --output -o DIR
etude pull --revision NAME
etude import DIR
etude import --output -o DIR
etude new trainer NAME
etude new trainer --dir DIR = .
"""


def _describe(command: Any, path: str) -> list[str]:
    arguments, options = [], []
    for parameter in command.params:
        default = parameter.default
        shown = f" = {default}" if default not in (None, False) and not callable(default) else ""
        if parameter.param_type_name == "argument":
            arguments.append(f"{parameter.metavar or parameter.name.upper()}{'' if parameter.required else '?'}{shown}")
        elif parameter.name != "help":
            names = " ".join(parameter.opts)
            kind = "" if parameter.is_flag else f" {parameter.metavar}"
            options.append(f"{path} {names}{kind}{shown}")
    head = [f"{path} {' '.join(arguments)}"] if arguments else []
    nested = [
        line for name, one in getattr(command, "commands", {}).items() for line in _describe(one, f"{path} {name}")
    ]
    return [*head, *sorted(options), *nested]


def test_the_command_line_surface_is_frozen() -> None:
    found = _describe(typer.main.get_command(app), "etude")
    assert sorted(found) == sorted(SURFACE.split("\n")[1:-1])


def test_every_command_and_option_has_help() -> None:
    def silent(command: Any, path: str) -> list[str]:
        here = [] if command.help else [path]
        here += [f"{path} {one.name}" for one in command.params if not getattr(one, "help", None)]
        return here + [
            gap for name, one in getattr(command, "commands", {}).items() for gap in silent(one, f"{path} {name}")
        ]

    assert silent(typer.main.get_command(app), "etude") == []


def test_help_groups_commands_by_what_one_wants_to_do() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    panels = re.findall(r"^([A-Z][a-z ]+):$", shown, re.MULTILINE)
    assert panels == ["Options", *ORDER], "each command has its panel"
    assert set(re.findall(r"^  ([a-z][a-z-]*) +[A-Z]", shown, re.MULTILINE)) == set(
        typer.main.get_command(app).commands
    )  # type: ignore[attr-defined]
