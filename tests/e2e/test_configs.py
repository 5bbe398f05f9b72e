"""Every configuration in configs/ is valid, and those for robots train on what their comments say to record."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.cli.environments import plain_name
from etude.config.load import load
from etude.config.presets import presets

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EVERY = sorted(presets().values())
ROBOT = [path for path in EVERY if "etude record" in path.read_text(encoding="utf-8")]
needs_sim = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs etude[sim]")


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def commands(path: Path) -> list[list[str]]:
    """Return the commands in the comments at the head of a file."""
    head = path.read_text(encoding="utf-8").replace("\\\n#", " ")
    found = re.findall(r"^# .*?(etude (?:record|train|evaluate) .*)$", head, re.MULTILINE)
    return [shlex.split(text) for text in found]


def options(command: Sequence[str], name: str) -> list[str]:
    return [value for option, value in pairwise(command) if option == name]


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_every_configuration_is_valid(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(
    "path", [path for path in EVERY if path not in ROBOT and path.parent.name != "rl"], ids=name_of
)
def test_what_needs_no_data_on_disk_is_built(path: Path) -> None:
    from etude.config.build import build

    assert build(load(path), run=False).policy is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ROBOT, ids=name_of)
def test_comments_say_how_to_make_the_data_and_how_to_train(path: Path) -> None:
    config = load(path).config
    made, *rest = commands(path)
    roots = options(made, "--root") or [f"data/{plain_name(options(made, '--env'))}"]
    assert config.data.params["root"] == roots[0]
    trained = [command for command in rest if command[1] == "train"]
    assert trained[0][2] == path.stem
    for command in rest:
        if command[1] == "evaluate":
            assert command[2] == f"runs/{config.run.name}"


def numbers(made: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the numbers that a command records, by feature."""
    from etude.simulation.environments import metaworld, pusht

    if options(made, "--env")[0] == "pusht":
        seen = {"observation.state": pusht.FINGER_NAMES, "observation.environment_state": pusht.CORNER_NAMES}
        found = {**seen, "action": pusht.TARGET_NAMES}
    else:
        is_relative = "state=relative" in options(made, "--option")
        state = metaworld.RELATIVE_NAMES if is_relative else metaworld.STATE_NAMES
        found = {"observation.state": state, "action": metaworld.ACTION_NAMES}
    return {name: list(names) for name, names in found.items()}


def write_data(root: Path, made: Sequence[str]) -> None:
    """Write a small dataset with the features that a command records."""
    from etude.data import LeRobotWriter

    envs = options(made, "--env")
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": (len(names),), "names": names} for name, names in numbers(made).items()
    }
    for camera in options(made, "--cameras"):
        size = int(options(made, "--size")[0])
        features[f"observation.images.{camera}"] = {"dtype": "image", "shape": (size, size, 3)}
    if "--rewards" in made:
        features["next.reward"] = {"dtype": "float32", "shape": (1,)}
    generator = np.random.default_rng(0)
    with LeRobotWriter(root, features, fps=10) as writer:
        for episode in range(2 * len(envs)):
            for _ in range(6):
                frame = {
                    name: generator.random(one["shape"]).astype(np.float32)
                    if one["dtype"] == "float32"
                    else generator.integers(0, 255, one["shape"], dtype=np.uint8)
                    for name, one in features.items()
                }
                writer.add_frame(frame)
            writer.save_episode(task=envs[episode % len(envs)])


@needs_sim
@pytest.mark.slow
@pytest.mark.parametrize("path", ROBOT, ids=name_of)
def test_a_step_is_trained_on_data_of_that_kind(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.config.build import build

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    small = ["training.duration=1 steps", "training.batch_size=2", "callbacks=[]"]
    if path.parent.name != "components":
        small += ["training.evaluate_every=null", "training.best_metric=eval/loss", "training.best_mode=min"]
    if path.parent.name == "online":
        small += ["online.episodes_per_round=1", "online.options.max_steps=3", "online.share=0.5"]
        small += ["online.start_after=0", "online.keep=all", "training.save_every=null"]
    loaded = load(path, small)
    write_data(Path(loaded.config.data.params["root"]), commands(path)[0])
    trainer = build(loaded)
    trainer.show_progress = False
    result = trainer.fit()
    assert result.steps == 1
    assert result.run_dir == Path(loaded.config.run.root) / str(loaded.config.run.name)
    if hasattr(trainer.policy, "select_action") and path.stem != "mutual_information_estimator":
        named = numbers(commands(path)[0])
        if not options(commands(path)[0], "--cameras"):
            seen = {name: torch.zeros(1, len(names)) for name, names in named.items() if name != "action"}
            seen["task_index"] = torch.zeros(1, dtype=torch.long)
            assert trainer.policy.select_action(seen).shape == (1, len(named["action"]))
