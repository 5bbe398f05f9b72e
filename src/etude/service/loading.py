"""Find a trainer's class: in a file of the user's, or among the ready ones by class name or by type."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from etude import plugins, service
from etude.errors import ConfigError, one_line
from etude.reading.suggest import did_you_mean
from etude.service.base import BaseTrainer
from etude.service.remote import RemoteApiTrainer
from etude.service.self_hosted import SelfHostedTrainer

TYPES: Final = {
    "self_hosted_grpo": "SelfHostedGrpoTrainer",
    "self_hosted_cross_entropy": "SelfHostedCrossEntropyTrainer",
    "self_hosted_opd": "SelfHostedOpdTrainer",
    "remote_api_grpo": "RemoteApiGrpoTrainer",
    "remote_api_cross_entropy": "RemoteApiCrossEntropyTrainer",
    "remote_api_opd": "RemoteApiOpdTrainer",
}
"""The ready trainers by the types of recipes."""


def load_class(class_name: str, module_path: str | Path | None = None) -> type[BaseTrainer]:
    """Return a trainer's class, or say what is wrong with it.

    Args:
        class_name: Its name in the file; without a file the class name or the type of a ready one.
        module_path: The Python file that defines it; its siblings are imported as `from .other import x`.
    """
    if module_path is None:
        name = TYPES.get(class_name, class_name)
        if name not in TYPES.values():
            near = did_you_mean(class_name, [*TYPES, *TYPES.values()])
            raise ConfigError(
                f"there is no trainer {class_name!r}{near or '; ready are ' + ', '.join(TYPES)}; one of your own needs "
                "the file that defines it"
            )
        found: type[BaseTrainer] = getattr(service, name)
        return found
    return _checked(_find(class_name, str(module_path)), class_name, str(module_path))


def _find(class_name: str, path: str) -> Any:
    try:
        plugins.import_plugin(path if plugins.is_plugin_file(path) else os.path.join(".", path))
    except FileNotFoundError:
        raise ConfigError(f"the file of trainer {class_name!r} is not there: {path}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    module = sys.modules[plugins.PLUGIN_FILES[os.path.realpath(os.path.expanduser(path))]]
    if not hasattr(module, class_name):
        classes = [name for name, thing in vars(module).items() if isinstance(thing, type) and name[0] != "_"]
        own = [name for name in classes if vars(module)[name].__module__ == module.__name__]
        near = did_you_mean(class_name, classes)
        raise ConfigError(f"{path} has no class {class_name!r}{near or '; it defines ' + (', '.join(own) or 'none')}")
    return getattr(module, class_name)


def _checked(kind: Any, class_name: str, path: str) -> type[BaseTrainer]:
    where = f"{path}: {class_name}"
    if not isinstance(kind, type):
        raise ConfigError(f"{where} is no class but a {type(kind).__name__}")
    if not issubclass(kind, BaseTrainer):
        raise ConfigError(
            f"{where} is no trainer; make it a subclass of SelfHostedTrainer, RemoteApiTrainer or BaseTrainer of "
            "etude.service"
        )
    lacking = missing_hook(kind)
    if lacking:
        raise ConfigError(f"{where} does not define {lacking}")
    return kind


def missing_hook(kind: type[BaseTrainer]) -> str | None:
    """Return the method that a trainer's class must define and does not."""
    for base, method, call in (
        (SelfHostedTrainer, "_prepare_batch", "_prepare_batch(self, batch)"),
        (RemoteApiTrainer, "_prepare_trajectories", "_prepare_trajectories(self, trajectories, metrics)"),
        (BaseTrainer, "train", "train(self, trajectories)"),
    ):
        if issubclass(kind, base):
            same = getattr(kind, method) is getattr(base, method)
            own_train = base is RemoteApiTrainer and kind.train is not RemoteApiTrainer.train
            return call if same and not own_train else None
    return None
