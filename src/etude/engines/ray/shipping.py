"""How a trainer gets to the workers and its weights come back.

The trainer is put into Ray's object store as it was built, whether a configuration or a script made it: classes of a
script, a notebook or a test travel with it, those of modules and plugins are imported where it arrives.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.exceptions import RaySystemError
from torch import Tensor, nn

from etude.errors import ConfigError, one_line
from etude.loop.optimizers import freeze
from etude.loop.precision import Precision
from etude.plugins import loaded_plugins
from etude.registry import REGISTRIES, load_plugins
from etude.rng import generators_kept
from etude.runs.directory import Run
from etude.secrets import known_secrets, register_secret

if TYPE_CHECKING:
    from etude.loop.session import Session
    from etude.trainer import Trainer

Put = Callable[[Any], Any]
"""Puts an object where workers can get it, and returns a reference: `ray.put`."""
Get = Callable[[Any], Any]
"""Returns the object of a reference: `ray.get`."""

SHARED_VARIABLES = ("ETUDE_", "HF_", "MLFLOW_", "TRACKIO_", "TRANSFORMERS_", "WANDB_")
"""Environment variables that workers take over from the driver begin like this; the rest is the host's."""


@dataclass(frozen=True)
class Parcel:
    """A trainer, and what it takes to unpack it elsewhere."""

    trainer: Any
    """Reference to the trainer: it can be read only where its plugins are loaded."""
    components: Any
    """Reference to what a script or notebook has registered."""
    plugins: tuple[str, ...]
    path: tuple[str, ...]
    working_dir: str
    variables: Mapping[str, str]
    secrets: tuple[str, ...]
    """What must appear in no output of the workers either."""
    num_threads: int | None
    """Threads that the user asked for in OMP_NUM_THREADS; else a worker has as many as it has CPUs."""


def pack(trainer: Trainer, directory: Path | None, put: Put) -> Parcel:
    """Pack a trainer for a run in a directory; refuse what cannot be sent, by name."""
    shipped = copy.copy(trainer)
    vars(shipped).pop("session", None)  # of an earlier fit in this process
    shipped.engine = "torch"
    shipped.run_request = False if directory is None else Run(directory)
    shipped.run = None
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Parcel(
        _put(shipped, "trainer", put), _put(_own_components(), "components", put), tuple(loaded_plugins()),
        tuple(os.path.abspath(entry) for entry in sys.path), os.getcwd(),
        {name: value for name, value in os.environ.items() if name.startswith(SHARED_VARIABLES)},
        known_secrets(), int(threads) if threads.isdecimal() and int(threads) else None,
    )  # fmt: skip


def unpack(parcel: Parcel, get: Get) -> Trainer:
    """Make this process like the driver's, and return a trainer of its own."""
    if os.path.isdir(parcel.working_dir):
        os.chdir(parcel.working_dir)
    os.environ.update(parcel.variables)
    for secret in parcel.secrets:
        register_secret(secret)
    sys.path.extend(entry for entry in parcel.path if entry not in sys.path and os.path.exists(entry))
    if parcel.num_threads is not None:
        torch.set_num_threads(parcel.num_threads)
    load_plugins(parcel.plugins)
    try:
        for name, entries in get(parcel.components).items():
            for key, component in entries.items():
                if key not in REGISTRIES[name]:
                    REGISTRIES[name].add(key, component)
        trainer: Trainer = get(parcel.trainer)
    except (ImportError, AttributeError, RaySystemError) as error:
        raise ConfigError(
            f"a Ray worker cannot load the trainer: {one_line(error)}; its modules must be importable on every host"
        ) from error
    # Arrays in Ray's store are shared by all workers of a host, and cannot be written to.
    return copy.deepcopy(trainer)


def _own_components() -> dict[str, dict[str, Any]]:
    """Return what a script or notebook has registered: nobody can import it, so it is sent."""
    return {
        name: {
            key: component for key, component in registry._entries.items()
            if getattr(component, "__module__", None) == "__main__"
        }
        for name, registry in REGISTRIES.items()
    }  # fmt: skip


def _put(value: Any, what: str, put: Put) -> Any:
    try:
        return put(value)
    except Exception as error:  # objects refuse with errors of every kind
        path, culprit, reason = _find_culprit(value, what, put, error)
        raise ConfigError(
            f"{path} ({type(culprit).__name__}) cannot be sent to the Ray workers: {one_line(reason)}; make such "
            "things when training starts (data: open, callbacks: on_fit_start), or use the torch engine"
        ) from error


def _find_culprit(value: Any, path: str, put: Put, error: Exception, depth: int = 6) -> tuple[str, Any, BaseException]:
    """Return the innermost part that cannot be sent, with its path."""
    for name, part in _parts(value) if depth else ():
        try:
            put(part)
        except Exception as inner:  # noqa: BLE001 - as above
            return _find_culprit(part, f"{path}{name}", put, inner, depth - 1)
    return path, value, error.__cause__ or error  # Ray adds pages of its own to what the object says


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


# -- weights -----------------------------------------------------------------------------------------------------------


def collect_weights(session: Session) -> dict[str, Any]:
    """Return what the driver's policy needs to become the trained one; every rank must call."""
    weights = session.strategy.state_dict()
    spec = session.data.spec if hasattr(session.policy, "build") else None
    return {"spec": spec, "weights": {name: to_array(value) for name, value in weights.items()}}


def restore_weights(trainer: Trainer, delivered: Mapping[str, Any]) -> None:
    """Give the driver's policy the trained weights; one that takes its shapes from the data is built first."""
    policy: nn.Module = trainer.policy
    with generators_kept():
        if getattr(policy, "is_built", True) is False:
            policy.build(delivered["spec"])  # type: ignore[operator]
    Precision(trainer.config.precision, torch.device("cpu")).convert(policy)
    policy.load_state_dict({name: to_tensor(value) for name, value in delivered["weights"].items()})
    policy.train()
    for module in freeze(policy, trainer.config.freeze):
        module.eval()


def to_array(value: Any) -> Any:
    """Return a weight as what passes through Ray's store best; it may share memory with the tensor."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    # Arrays pass through Ray's object store four times as fast as tensors; bfloat16 has none.
    return value.numpy() if value.dtype != torch.bfloat16 else value


def to_tensor(value: Any) -> Any:
    """Return a weight that came through Ray's store as a tensor of its own."""
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
