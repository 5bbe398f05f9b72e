"""`train_func`: an experiment as the worker function of Ray Train, beside actors that others have started.

It is `etude.engines.ray.train_func`; it stands here because it reads and builds what a file describes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.config.load import load
from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean

PATHS = ("config_path", "train_config", "config", "path")
"""What the key with the file's path may be called."""
OPTIONS = ("namespace", "overrides", "publish_every")


@dataclass(frozen=True)
class _Request:
    path: str
    namespace: str | None = None
    overrides: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def train_func(config_path: str | Path | Mapping[str, Any]) -> None:
    """Train what an experiment file describes, as one worker of any `ray.train.torch.TorchTrainer`.

    The actors `replay_buffer` and `policy_state_manager` are found in the job's namespace, or in `online_rl`. Where the
    path is absolute, relative paths in the file, that of the run directory included, begin at the file's folder.

    Args:
        config_path: The path of the file; or a dictionary with `config_path` and, if wanted, `namespace` (where the
            actors are), `overrides` (texts such as `training.lr=1e-4`) and `publish_every` (updates from one
            publication of weights to the next, for files without an `online` section).
    """
    request = _read(config_path)
    if os.path.isabs(request.path) and os.path.isfile(request.path):
        os.chdir(os.path.dirname(request.path))  # Ray's own folder, in which a worker begins, is nobody's
    from etude.engines.ray.actors import find_actors

    actors = find_actors(request.namespace)
    loaded = load(request.path, list(request.overrides))
    from etude.config.build import build  # only a valid file is worth the import of torch
    from etude.engines.ray.worker import experiment_name, train_beside

    run = loaded.config.run
    # Ray Train's own name stays the same when it starts the workers again.
    directory = Path(run.root) / (run.name or experiment_name())
    train_beside(build(loaded, run=directory), actors, run.resume, **request.options)


def _read(given: Any) -> _Request:
    if isinstance(given, str | Path):
        return _Request(str(given))
    if not isinstance(given, Mapping):
        raise ConfigError(f"train_func takes the path of an experiment file, got {type(given).__name__}")
    for key in given:
        if key not in (*PATHS, *OPTIONS):
            raise ConfigError(f"train_loop_config: unknown key {key!r}{did_you_mean(str(key), [*PATHS[:1], *OPTIONS])}")
    paths = [given[key] for key in PATHS if key in given]
    if len(paths) != 1 or not isinstance(paths[0], str | Path):
        raise ConfigError("train_loop_config: give the experiment file once, as {'config_path': 'x.yaml'}")
    overrides = given.get("overrides", ())
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ConfigError("train_loop_config: overrides is a list of texts such as 'training.lr=1e-4'")
    every = given.get("publish_every", 1)
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"train_loop_config: publish_every is a number of updates, at least 1, got {every!r}")
    options = {"publish_every": every} if "publish_every" in given else {}
    return _Request(str(paths[0]), given.get("namespace"), tuple(map(str, overrides)), options)
