"""Every reason for which a test may be skipped. Any other skip is a failure: a test that never runs shows nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec

REASONS = {
    "needs a CUDA device": "there are machines without one",
    "needs /proc": "there are systems without it",
    "OSMesa is not installed": "a system package, which only root can install",
    "Chromium is not installed": "a system package, which only root can install",
    "mounting a small tmpfs is not permitted here": "only root may mount",
    "the older client could not be installed": "a second version, which `make setup` fetches where it can",
    "ETUDE_COOKBOOK_PYTHON names no Python that has tinker-cookbook": "its dependencies are not those of etude",
    "no Docker engine answers": "an image is built where one does",
    "ETUDE_LEROBOT_PYTHON names no Python that has lerobot": "its dependencies are not those of etude",
    "only some guarantees were selected": "the README's table is made from all of them",
}
"""What a machine or a selection may lack, and why that is no mistake. A reason is matched as a whole."""

OPTIONAL = {
    "components": ["geomloss", "h5py", "schedulefree"],
    "dev": ["ipykernel", "nbclient", "schemathesis", "sklearn"],
    "hf": ["transformers"],
    "lightning": ["lightning"],
    "llm": ["peft", "reasoning_gym", "transformers", "xllamacpp"],
    "ray": ["ray"],
    "service": ["fastapi", "openai", "tinker"],
    "rerun": ["rerun"],
    "report": ["alembic", "mlflow", "sqlalchemy", "trackio", "wandb"],
    "sweep": ["optuna"],
    "sim": [
        "av", "gym_pusht", "gymnasium", "h5py", "metaworld", "msgpack", "onnx", "onnxruntime", "onnxscript", "pyarrow",
        "pygame", "shapely", "websockets", "zarr",
    ],
}  # fmt: skip
"""Packages without which tests are skipped, by the extra that brings them."""

_PACKAGE = re.compile(r"could not import '(?P<imported>\w+)[^']*'|(?P<named>[\w-]+) is not installed \(extra: ")
_EXTRA = re.compile(r"needs etude\[(\w+)\]")


def is_expected(reason: str, installed: Sequence[str] | None = None) -> bool:
    """Return whether a test may be skipped for this reason.

    Args:
        reason: What pytest says, with or without its "Skipped: ".
        installed: Extras that are there, so that nothing of theirs can be missing; those of `make test` unless given.
    """
    reason = reason.removeprefix("Skipped: ")
    if reason in REASONS:
        return True
    installed = os.environ.get("ETUDE_TEST_EXTRAS", "").split() if installed is None else installed
    if found := _EXTRA.fullmatch(reason):
        extra = found[1]
        return extra not in installed and any(find_spec(package) is None for package in OPTIONAL.get(extra, ()))
    if found := _PACKAGE.match(reason):
        package = (found["imported"] or found["named"]).replace("-", "_")
        extras = [extra for extra, packages in OPTIONAL.items() if package in packages]
        return bool(extras) and not set(extras) & set(installed) and find_spec(package) is None
    return False
