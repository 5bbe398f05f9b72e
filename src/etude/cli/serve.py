"""`etude serve-policy`: a trained or exported policy for robots, over a WebSocket."""

from __future__ import annotations

import gc
import sys
from typing import Any

from etude.cli.output import say


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
