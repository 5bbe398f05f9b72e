"""Worker processes that make batches ahead of time, in order, and whose death is reported at once and in words."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from etude.data.fetch import Fetch, Request
from etude.errors import DataError, ShortRunError, describe_exit
from etude.rng import fold

_KILL_AFTER_S = 1.0
_DYING_S, _ENDING_S = 0.5, 10.0
_UNSENDABLE = 87  # exit code of a worker whose batch could not be sent


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, as text: an exception itself may not survive the way between processes."""

    message: str
    trace: str
    leaves: bool = False
    """Whether the code asked to exit."""


class WorkerTraceback(Exception):
    """The traceback of a worker, shown as the cause of the error in the training process."""


class _Remote(Dataset[Any]):
    """The dataset as workers see it: one request in, one batch out."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __getitems__(self, request: Request) -> Any:
        try:
            return self._fetch(*request)
        except DataError as error:
            return _Failure(str(error), traceback.format_exc())
        except SystemExit as leave:  # torch would let the worker go, with exit code 0 or any other
            return _Failure(f"a data-loading worker called {describe_exit(leave)}", traceback.format_exc(), leaves=True)


class _Requests:
    """The batch sampler of the loader: whatever requests are to be made next."""

    def __init__(self) -> None:
        self.coming: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.coming


def _as_is(batch: Any) -> Any:
    return batch


class _Begin:
    """Prepare a worker: signals meant for the training process must not end its workers first."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # By default a batch that cannot be sent is dropped, and the training process waits for it for ever.
        Queue._on_queue_feeder_error = staticmethod(_die_of_unsendable)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(number)


def _die_of_unsendable(error: Exception, batch: Any) -> None:
    print(f"etude data worker: a batch cannot be sent between processes: {error}", file=sys.stderr, flush=True)
    os._exit(_UNSENDABLE)


class Workers:
    """Batches made by worker processes in the order of the requests."""

    def __init__(
        self,
        fetch: Fetch,
        number: int,
        *,
        seed: int,
        ahead: int,
        pin_memory: bool | None,
        begin: Callable[[int], None] | None = None,
        context: Any = None,
    ) -> None:
        self._requests = _Requests()
        self._loader = DataLoader(
            _Remote(fetch),
            batch_sampler=self._requests,  # type: ignore[arg-type]  # any iterable of requests will do
            collate_fn=_as_is,
            num_workers=number,
            prefetch_factor=ahead,
            persistent_workers=True,
            pin_memory=pin_memory is not False and torch.cuda.is_available(),
            worker_init_fn=_Begin(begin),
            multiprocessing_context=context,
            # A generator of its own: starting workers must not draw from the global one.
            generator=torch.Generator().manual_seed(fold(seed)),
        )
        self._iterator: Any = None
        self._processes: list[Any] = []
        self._end: Callable[[], Any] = _nothing
        _alive.add(self)

    def start(self, requests: Iterator[Request]) -> None:
        """Serve these requests from now on; what was under way is dropped."""
        self.require_alive()
        self._requests.coming = requests
        fresh = self._iterator is None
        with _deaths_reported_to(self):
            self._iterator = self._guarded(lambda: iter(self._loader))
        if fresh:
            self._processes = list(self._iterator._workers)
            self._end = weakref.finalize(self, _end, self._iterator, self._processes, os.getpid())

    def next(self) -> Any:
        """Wait for the next batch."""
        self.require_alive()
        with _deaths_reported_to(self):
            batch = self._guarded(lambda: next(self._iterator))
        if isinstance(batch, _Failure):
            raise (ShortRunError if batch.leaves else DataError)(batch.message) from WorkerTraceback(f"\n{batch.trace}")
        return batch

    def require_alive(self) -> None:
        """Raise DataError if a worker has died; ShortRunError if it ended as if all were well."""
        for process in self._processes:
            if not process.is_alive():
                kind = DataError if process.exitcode else ShortRunError
                raise kind(_obituary(process.pid, process.exitcode))

    def close(self) -> None:
        """End the workers and wait for them."""
        self._end()
        self._iterator = None
        self._processes = []

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (RuntimeError, OSError, EOFError) as error:
            # What a dying worker sent may be lost a moment before it is dead.
            gone = wait([process.sentinel for process in self._processes], _DYING_S)
            for process in self._processes:
                if process.sentinel in gone:  # its files are closed, but on a busy machine it may not have ended yet
                    process.join(_ENDING_S)
            self.require_alive()
            raise DataError(f"loading data in worker processes failed: {error}") from error


def _nothing() -> None:
    return None


_alive: weakref.WeakSet[Workers] = weakref.WeakSet()


# Registered after multiprocessing's own hook, hence run before it: that one would wait for ever for workers that ignore
# SIGTERM. The finalizer of Workers cannot do this, since its place in the order of hooks is not ours to choose.
@atexit.register
def _end_all() -> None:
    for workers in tuple(_alive):
        workers.close()


def _obituary(pid: int, code: int | None) -> str:
    if code == _UNSENDABLE:
        return "a batch cannot be sent from a data-loading worker, for the reason printed above; set num_workers to 0"
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        cause = f"was killed by {name}" + (", often because memory ran out" if name == "SIGKILL" else "")
    else:
        cause = f"ended with exit code {code}"
    return f"the data-loading worker with process id {pid} {cause}; lower num_workers, or set it to 0 to find the cause"


def _end(iterator: Any, processes: list[Any], owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy of us; the workers are not its own
        return
    # torch's own way to end workers, which comes last, waits 5 s for each that is busy; we ask first, then kill.
    iterator._workers_done_event.set()
    for queue in iterator._index_queues:
        queue.put(None)
    deadline = time.monotonic() + _KILL_AFTER_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    iterator._shutdown_workers()


# torch raises from its SIGCHLD handler wherever the main thread happens to be, say in the middle of an update. We let a
# death interrupt only the wait for a batch; otherwise it is found when the next batch is asked for.
_WAITING_MODULES = ("selectors", "threading", "queue")
_waiting: list[Workers] = []
_others: list[Callable[[int, Any], Any]] = []


def _on_child_end(signum: int, frame: Any) -> None:
    for handler in _others:
        handler(signum, frame)
    # Raise only out of the wait itself, not while torch opens or closes something.
    if frame is not None and frame.f_globals.get("__name__") in _WAITING_MODULES:
        for workers in tuple(_waiting):
            workers.require_alive()


class _deaths_reported_to:
    """Context in which the death of a worker is raised at once."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __enter__(self) -> None:
        keep_deaths_quiet()
        _waiting.append(self._workers)

    def __exit__(self, *_: object) -> None:
        _waiting.remove(self._workers)
        keep_deaths_quiet()  # torch sets its own handler with its first workers


def keep_deaths_quiet() -> None:
    """Keep torch from raising in the main thread, wherever it may be, when a loader's worker dies."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread can set handlers; torch does not set its own elsewhere either
    handler = signal.getsignal(signal.SIGCHLD)
    if handler is _on_child_end:
        return
    if callable(handler) and not getattr(handler, "__module__", "").startswith("torch."):
        _others.append(handler)
    signal.signal(signal.SIGCHLD, _on_child_end)
