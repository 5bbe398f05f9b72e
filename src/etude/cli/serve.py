"""`etude serve`: training for other programs; `etude serve-policy`: a trained or exported policy for robots."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

from etude.cli.output import say


def serve_training(
    folder: Path, models: list[str], *, host: str, port: int, keys: Path | None, **limits: int | None
) -> None:
    """Serve training and sampling of language models until a signal says stop."""
    gc.enable()  # switched off for the start by `main`
    # Drawing and training have a thread each; numpy, which is not imported yet, takes all cores unless told.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from etude.service.server.run import run_service

    run_service(folder, models, host=host, port=port, keys=keys, say=_say_now, **limits)


def serve_policy(source: str, *, host: str, port: int, key: str | None, which: str) -> None:
    """Load a policy and serve it until a signal says stop."""
    gc.enable()  # switched off for the start by `main`
    from etude.deploy.server import PolicyServer

    server = PolicyServer(find_served(source, which), host=host, port=port, key=key, say=_say_now)
    server.run()


def find_served(source: str, which: str) -> Any:
    """Return the policy of a run, a checkpoint, a saved policy or an export."""
    from etude.cli.runs import find_run
    from etude.deploy.exported import is_exported, load_exported

    path = find_run(source)
    if is_exported(path):
        return load_exported(path)
    from etude.config.restore import load_policy

    return load_policy(path, which)


def _say_now(text: str) -> None:
    say(text)
    sys.stdout.flush()  # who reads a pipe wants to know the port before the end
