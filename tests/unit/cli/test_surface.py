"""The command line is public: a change to this list must be deliberate, and noted in the changelog."""

from __future__ import annotations

from typing import Any

import typer

from etude.cli.main import app

SURFACE = """
etude --install-completion
etude --show-completion
etude --version
etude train CONFIG? KEY=VALUE?
etude train --resume auto|never|PATH = auto
etude train --train_config --train-config CONFIG
etude resume RUN KEY=VALUE?
etude check CONFIG KEY=VALUE?
etude check --json
etude runs ROOT? = runs
etude runs --json
etude report RUN
etude report --output -o FILE
etude report --open
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
etude record --root DIR
etude record --seed N
etude record --size PIXELS
etude evaluate POLICY
etude evaluate --env ENV
etude evaluate --episodes N = 50
etude evaluate --json
etude evaluate --plugin MODULE
etude evaluate --option KEY=VALUE
etude evaluate --output -o DIR
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
etude serve --snapshot-steps N
etude serve-policy POLICY
etude serve-policy --host ADDRESS = 127.0.0.1
etude serve-policy --key TEXT
etude serve-policy --port N = 8765
etude serve-policy --which best|last|STEP = auto
etude export POLICY
etude export --format torch|onnx|pretrained|components = torch
etude export --output -o DIR
etude export --which best|last|STEP = auto
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
