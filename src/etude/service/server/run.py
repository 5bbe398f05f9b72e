"""`etude serve`: bring a service up, say where it is, and serve until a signal says stop."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.service.server.access import Keys


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said)


def run_service(
    folder: Path,
    models: list[str],
    *,
    host: str,
    port: int,
    keys: Path | None,
    say: Callable[[str], None],
    snapshot_steps: int | None = None,
    sessions: int | None = None,
) -> None:
    """Serve training and sampling.

    Args:
        folder: Where everything is kept; a service that is started there again goes on.
        models: What is offered.
        host: The address to listen at.
        port: The port, 0 for any.
        keys: A file with names and keys; None lets in this machine alone.
        say: Told where the service is.
        snapshot_steps: Steps after which a model's state is written; None is the usual number.
        sessions: Sessions of one key that may be open; None is the usual number.
    """
    uvicorn = import_extra("uvicorn", "service")
    import_extra("fastapi", "service")
    from etude.service.server.app import make_app
    from etude.service.server.lines import Line
    from etude.service.server.service import Limits, Service, require_models

    known = Keys.of(host, keys)
    limits = Limits(**_chosen(snapshot_steps=snapshot_steps, sessions=sessions))
    _log_to(sys.stderr)
    torch.set_num_threads(1)  # training and sampling have a thread each; more of them fight for the same cores
    listener = _listen(host, port)
    service = Service(folder, require_models(models), limits)
    url = f"http://{host}:{listener.getsockname()[1]}"
    say(f"serving {', '.join(service.bases.names)} at {url} from {folder}")
    app = make_app(service, known)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, timeout_keep_alive=75, log_config=None,
        http=Line, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    leave = server.handle_exit

    def send_home() -> None:
        service.end_waiting()
        app.state.live.end()

    def end(number: int, frame: Any) -> None:
        if service.loop is not None:  # not here: the signal may have come while a lock is held
            service.loop.call_soon_threadsafe(send_home)
        leave(number, frame)

    server.handle_exit = end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn ends in good order, and then sends itself the signal once more
    server.run(sockets=[listener])


def _chosen(**given: int | None) -> dict[str, int]:
    """Return the limits that are given; refuse what is none."""
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return found


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}; --port names another port, and 0 takes a free one"
        ) from None
    listener.listen(512)
    return listener


def _log_to(stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonLines())
    logging.captureWarnings(True)
    for name in ("etude.service", "uvicorn", "uvicorn.error", "asyncio", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "etude.service" else logging.WARNING)
