"""Share work among forked processes; what they find comes back as JSON, and so do their errors.

Forked, not started afresh: a policy or a function of the user's need not be sent, and a child is ready at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from etude import errors

T = TypeVar("T")
Work = Callable[[Sequence[T]], Iterator[Any]]

_LEAVE_S = 5.0


def run_in_processes(work: Work[T], shares: Sequence[Sequence[T]]) -> Generator[Any, None, None]:
    """Call `work` with each share in a process of its own, and yield what they yield as it comes."""
    context = multiprocessing.get_context("fork")
    children: dict[Connection, Any] = {}
    try:
        for share in shares:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(work, share, there), daemon=True)
            process.start()
            there.close()
            children[here] = process
        while children:
            for ready in wait(list(children)):
                assert isinstance(ready, Connection)
                yield from _receive(ready, children)
    finally:
        for process in children.values():
            process.terminate()
        for process in children.values():
            process.join(_LEAVE_S)
            if process.is_alive():  # it took over a handler of signals, or a lock that another thread held at the fork
                process.kill()
                process.join(_LEAVE_S)


def _receive(pipe: Connection, children: dict[Connection, Any]) -> Iterator[Any]:
    try:
        kind, value = json.loads(pipe.recv_bytes())
    except EOFError:
        process = children.pop(pipe)
        process.join(_LEAVE_S)
        raise RuntimeError(f"a worker process died (exit code {process.exitcode}) before its work was done") from None
    if kind == "found":
        yield value
        return
    children.pop(pipe).join(_LEAVE_S)
    if kind == "failed":
        name, message, trace = value
        known = getattr(errors, name, None)
        if isinstance(known, type) and issubclass(known, errors.EtudeError):
            raise known(message)
        raise RuntimeError(f"a worker process failed:\n{trace}")


def _serve(work: Work[T], share: Sequence[T], pipe: Connection) -> None:
    # Ctrl-C reaches the whole group: the parent decides what it means, and ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        for value in work(share):
            pipe.send_bytes(json.dumps(["found", value]).encode())
        pipe.send_bytes(json.dumps(["done", None]).encode())
    except (BrokenPipeError, KeyboardInterrupt):
        return
    # Whatever goes wrong must reach the parent in words: it may not survive as an object.
    except Exception as error:  # noqa: BLE001 - the last stop of this process
        failure = [type(error).__name__, str(error), traceback.format_exc()]
        pipe.send_bytes(json.dumps(["failed", failure]).encode())


def deal(items: Sequence[T], hands: int) -> list[list[T]]:
    """Deal items to a number of hands in turn; hands that would stay empty are left out."""
    return [list(items[start::hands]) for start in range(min(hands, len(items)))]
