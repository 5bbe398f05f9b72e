"""Saved weights by name: `tinker://MODEL/weights/NAME` with the optimizer, `.../sampler_weights/NAME` to draw from."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Final

from etude.errors import CheckpointError, ConfigError, DataError
from etude.service.server.store import Store
from etude.service.server.trained import WEIGHTS, TrainedModel

SCHEME: Final = "tinker://"
KINDS: Final = {"weights": "training", "sampler_weights": "sampler"}
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass
class Effects:
    """What a request changes beside its model: rows in the transaction of its result, files after it."""

    writes: list[Callable[[sqlite3.Connection], Any]] = field(default_factory=list)
    unused: list[str | None] = field(default_factory=list)
    """Files that may no longer be needed."""


def require_name(name: Any) -> str:
    """Refuse a name that could mean a place."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{str(name)[:80]!r} is no name for a checkpoint: letters, digits, dots, dashes and underlines, at most 128"
        )
    return name


def path_of(row: Mapping[str, Any] | sqlite3.Row) -> str:
    """Return the path of a checkpoint."""
    return f"{SCHEME}{row['model']}/{row['kind']}/{row['name']}"


def find_checkpoint(store: Store, path: str, owner: str) -> sqlite3.Row:
    """Return the row of a checkpoint that a client may read: its own, or one that was published."""
    parts = path[len(SCHEME) :].split("/") if path.startswith(SCHEME) else []
    if len(parts) != 3 or parts[1] not in KINDS:
        raise ConfigError(f"{path[:200]!r} is no checkpoint: {SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME")
    query = "SELECT * FROM checkpoints WHERE model=? AND kind=? AND name=? AND (owner=? OR public=1)"
    found = store.find(query, *parts, owner)
    if found is None or (found["expires"] is not None and found["expires"] < time.time()):
        raise CheckpointError(f"there is no checkpoint {path[:200]!r}")
    return found


def save_state(
    store: Store, model: sqlite3.Row, trained: TrainedModel, given: Mapping[str, Any], effects: Effects
) -> str:
    """Write weights and optimizer under a name, and return the path."""
    name = require_name(given["name"])
    known = store.find("SELECT * FROM checkpoints WHERE model=? AND kind='weights' AND name=?", model["id"], name)
    if known is not None and not given.get("overwrite"):
        raise DataError(f"{path_of(known)} is there already; choose another name, or say overwrite=True")
    file, size = store.write_weights(trained.state())
    return _keep(store, _row(model, "weights", name, given, file, size), effects)


def save_sampler(
    store: Store, model: sqlite3.Row, trained: TrainedModel, given: Mapping[str, Any], effects: Effects, *, keep: int
) -> dict[str, Any]:
    """Write weights to draw from, under a name or for one sampling session."""
    name = None if given.get("name") is None else require_name(given["name"])
    file, size = store.write_weights(trained.weights())
    if name is not None:
        return {"path": _keep(store, _row(model, "sampler_weights", name, given, file, size), effects)}
    sampler = {
        "id": f"{model['session']}:sample:{given['number']}", "owner": model["owner"], "session": model["session"],
        "model": model["id"], "base": model["base"], "adapter": model["adapter"], "file": file,
        "created": store.now(), "ephemeral": 1,
    }  # fmt: skip
    query = "SELECT * FROM samplers WHERE model=? AND ephemeral=1 AND id!=? ORDER BY created DESC"
    old = store.all(query, model["id"], sampler["id"])

    def write(db: sqlite3.Connection) -> None:
        store.insert("samplers", sampler, db=db, replace=True)
        for row in old[max(0, keep - 1) :]:
            db.execute("UPDATE samplers SET file='gone' WHERE id=?", (row["id"],))

    effects.writes.append(write)
    effects.unused += [row["file"] for row in old[max(0, keep - 1) :]]
    return {"path": None, "sampling_session_id": sampler["id"]}


def _row(model: sqlite3.Row, kind: str, name: str, given: Mapping[str, Any], file: str, size: int) -> dict[str, Any]:
    ttl_s = given.get("ttl_seconds")
    return {
        "model": model["id"], "kind": kind, "name": name, "owner": model["owner"], "file": file, "base": model["base"],
        "adapter": model["adapter"], "expires": None if ttl_s is None else time.time() + ttl_s, "size": size,
        "about": json.dumps(given.get("user_metadata")),
    }  # fmt: skip


def _keep(store: Store, row: dict[str, Any], effects: Effects) -> str:
    row["created"] = store.now()
    query = "SELECT * FROM checkpoints WHERE model=? AND kind=? AND name=?"
    known = store.find(query, row["model"], row["kind"], row["name"])
    effects.writes.append(lambda db: store.insert("checkpoints", row, db=db, replace=True))
    effects.unused.append(None if known is None else known["file"])
    return path_of(row)


def load_into(store: Store, model: sqlite3.Row, trained: TrainedModel, given: Mapping[str, Any]) -> None:
    """Give a model in training the weights of a checkpoint, with or without its optimizer."""
    found = find_checkpoint(store, given["path"], model["owner"])
    if given["optimizer"] and found["kind"] != "weights":
        raise ConfigError(f"{given['path']} was saved for sampling, without an optimizer; load it without one")
    if found["base"] != model["base"]:
        raise ConfigError(f"{given['path']} was trained on {found['base']!r}, and this model on {model['base']!r}")
    trained.load(store.read_weights(found["file"]), with_optimizer=bool(given["optimizer"]))


def drop_expired(store: Store) -> None:
    """Forget checkpoints whose time is over."""
    old = store.all("SELECT * FROM checkpoints WHERE expires IS NOT NULL AND expires<?", time.time())
    for row in old:
        delete_checkpoint(store, row)


def delete_checkpoint(store: Store, row: sqlite3.Row) -> None:
    """Forget a checkpoint; sampling sessions that began on it keep their weights."""
    with store.writing() as db:
        db.execute(
            "DELETE FROM checkpoints WHERE model=? AND kind=? AND name=?", (row["model"], row["kind"], row["name"])
        )
    store.drop_unused([row["file"]])


def archive(store: Store, row: sqlite3.Row) -> IO[bytes]:
    """Return a checkpoint as an open tar file: the trained weights in safetensors, and what they belong to.

    The file has no name: it is gone when it is closed, and also after a kill.
    """
    from safetensors.torch import save

    tensors = {
        name[len(WEIGHTS) :].removeprefix("model."): value
        for name, value in store.read_weights(row["file"]).items()
        if name.startswith(WEIGHTS)
    }
    adapter = json.loads(row["adapter"])
    # Adapters go by the names that peft gives them in a file.
    plain = {name.replace(".default.weight", ".weight"): value.contiguous() for name, value in tensors.items()}
    about: dict[str, Any] = {"base_model": row["base"], "path": path_of(row), "created": row["created"], **adapter}
    named = {"adapter_model.safetensors" if adapter["rank"] else "model.safetensors": save(plain)}
    if adapter["rank"]:
        named["adapter_config.json"] = json.dumps(_peft_config(row["base"], adapter["rank"], plain)).encode()
    named["about.json"] = json.dumps(about, indent=1).encode()
    file = tempfile.TemporaryFile(dir=store.folder)  # noqa: SIM115 - whoever sends it closes it
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in named.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), int(row["created"])
            tar.addfile(entry, io.BytesIO(data))
    return file


def _peft_config(base: str, rank: int, names: Mapping[str, Any]) -> dict[str, Any]:
    from etude.service.server.bases import LORA_ALPHA

    modules = sorted({name.split(".lora_")[0].split(".")[-1] for name in names})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0, "target_modules": modules, "bias": "none",
    }  # fmt: skip
