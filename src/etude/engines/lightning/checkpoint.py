"""Lightning's checkpoints as directories that are whole or absent: safetensors and JSON, hashed, renamed once.

A checkpoint keeps the name that Lightning gives it (`epoch=0-step=10.ckpt`), and is a directory.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core import saving

from etude.engines.lightning.codec import decode, encode
from etude.errors import CheckpointError
from etude.policies.base import SPEC_KEY
from etude.runs import durable
from etude.runs.checkpoint import CheckpointStore
from etude.runs.named import aside_of, load_named

log = logging.getLogger("etude")

SAVED = "etude"
"""Our key in Lightning's checkpoints."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class SafeCheckpointIO(CheckpointIO):
    """Writes checkpoints aside, verifies them and puts them in place by one rename; falls back, loudly, on damage."""

    def __init__(self) -> None:
        self._store: CheckpointStore | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save what Lightning gathered; on return it is on disk and verified."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        durable.remove_leftovers(target.parent)
        with durable.in_use(target.parent / durable.temp_name(target.name)) as temp:
            if self._store is None:  # kept for its warm memory
                self._store = CheckpointStore(temp, keep_last=1, keep_best=0)
            self._store.directory = temp
            written = self._store.save(_to_tree(checkpoint), step=int(checkpoint.get("global_step", 0)), wait=True)
            _put_in_place(written, target)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, or the newest good one of a directory; see `load_checkpoint`."""
        return load_checkpoint(path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint so that a crash leaves all of it or nothing."""
        target = Path(path)
        if target.is_dir() and not target.is_symlink():
            durable.discard(target)
        else:
            target.unlink(missing_ok=True)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a checkpoint as Lightning's dictionary, every byte verified.

    A directory of checkpoints, or the `version_N` that holds it, gives its newest good one. In place of a damaged one
    the newest good one that is not newer is taken, with a warning. A single file of Lightning's own is read without
    executing anything in it.

    Args:
        path: A checkpoint, the directory they lie in, or that of the run.
    """
    found = Path(path)
    if found.is_file():
        return _load_foreign(found)
    chosen = load_named(found)
    log.info("using %s (step %d)", chosen.path, chosen.step)
    return _from_tree(chosen.tree)


def _read_directories() -> None:
    """Let `load_from_checkpoint` of any LightningModule or data module read our checkpoints, which are directories."""
    read_file = vars(saving)["pl_load"]

    @functools.wraps(read_file)
    def read(path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not Path(path).is_dir():
            return read_file(path, *args, **kwargs)  # Lightning's own, as it was called
        checkpoint, place = load_checkpoint(path), kwargs.get("map_location")
        if isinstance(place, str | torch.device):
            state = checkpoint["state_dict"]
            for name, value in state.items():
                state[name] = value.to(place) if isinstance(value, torch.Tensor) else value
        return checkpoint

    vars(saving)["pl_load"] = read


_read_directories()


# -- what is inside -------------------------------------------------------------------------------------------------


def _to_tree(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    apart = {"model": "state_dict", "optimizer": "optimizer_states"}
    rest = {key: value for key, value in checkpoint.items() if key not in apart.values()}
    tree = {name: encode(checkpoint[key]) for name, key in apart.items() if key in checkpoint}
    return {**tree, "lightning": encode(rest, _may_drop)}


_said: set[str] = set()


def _may_drop(path: str, value: Any) -> bool:
    """Tell whether something may be left out: hyperparameters are whatever a constructor takes."""
    if "hyper_parameters" not in path and not path.endswith("hparams_type"):
        return False
    if path not in _said:
        _said.add(path)
        log.warning("%s is a %s, which a checkpoint cannot hold; it is left out", path, type(value).__name__)
    return True


def _from_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint: dict[str, Any] = decode(tree["lightning"])
    checkpoint["state_dict"] = state = OrderedDict(decode(tree["model"]))
    # Where torch keeps what belongs to a state dictionary beside its tensors: policies without layers build them there.
    specs = checkpoint.get(SAVED, {}).get("specs", {})
    state._metadata = {name: {SPEC_KEY: spec} for name, spec in specs.items()}  # type: ignore[attr-defined]
    if "optimizer" in tree:
        checkpoint["optimizer_states"] = decode(tree["optimizer"])
    return checkpoint


def _load_foreign(path: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError" and not isinstance(error, RuntimeError | ValueError | EOFError):
            raise
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, or is damaged; it is not read, because reading it would "
            "run what is in it. Load it with Lightning where you trust it, and save it again with this trainer"
        ) from error
    return loaded


def _put_in_place(written: Path, target: Path) -> None:
    """Give a finished checkpoint its name; one that had the name before goes only once the new one is there."""
    aside = aside_of(target)
    if not os.path.lexists(target):
        os.rename(written, target)
    elif target.is_dir() and not target.is_symlink() and _exchange(written, target):
        pass  # the old one is now in the temporary directory, and goes with it
    else:
        durable.remove(aside)
        os.rename(written, aside)
        durable.fsync_directory(target.parent)
        durable.discard(target) if target.is_dir() and not target.is_symlink() else target.unlink()
        os.rename(aside, target)
    durable.fsync_directory(target.parent)
    durable.remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step, where the system can (Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return bool(done == 0)
