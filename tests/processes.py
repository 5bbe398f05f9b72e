"""Real ranks for tests: forked from a process that has imported everything, so that a group starts in no time."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch._dynamo  # noqa: F401 - DDP imports it on first use, for a second or more: once here, not in every child

_PORTS = itertools.count(os.getpid())


def spawn(work: Callable[[], object], ranks: int = 1) -> list[int]:
    """Fork one process a rank, each with torchrun's variables, and return their ids."""
    sys.stdout.flush()
    sys.stderr.flush()
    port = free_port()
    return [_fork(work, rank, ranks, port) for rank in range(ranks)]


def free_port() -> int:
    """Return a port that no other test takes: below those that connections get by themselves, apart for each worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for number in _PORTS:
        port = 10_000 + worker * 2_000 + number % 2_000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable: the count never ends")


def _fork(work: Callable[[], object], rank: int, ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if ranks > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        work()
        code = 0
    except SystemExit as leave:
        code = int(leave.code or 0)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into the parent's stack
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap(pids: list[int], timeout_s: float = 110.0) -> list[int]:
    """Wait for processes and return their exit codes (negative for signals); kill what does not end in time."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            kill(pid for pid in pids if pid not in codes)
            deadline = float("inf")
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def run_ranks(work: Callable[[], object], ranks: int, timeout_s: float = 110.0) -> list[int]:
    """Run a function on several ranks and return their exit codes."""
    return reap(spawn(work, ranks), timeout_s)


def run_forked(
    work: Callable[[], object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    arguments: Iterable[str] = (), timeout_s: float = 110.0,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a function as `subprocess.run` runs a program, with warnings as errors, in a process that has imported torch.

    That saves the 3 to 6 CPU seconds of importing it, where starting Python is not what is tested.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        (code,) = reap(spawn(lambda: _as_program(work, out.fileno(), err.fileno(), cwd, env, arguments)), timeout_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(list(arguments), code, *texts)


def run_example(
    path: Path, arguments: Iterable[str] = (), *, cwd: Path, env: Mapping[str, str], timeout_s: float = 110.0
) -> subprocess.CompletedProcess[str]:
    """Run an example as `python -W error PATH ARGUMENTS` does, in a process that has imported torch."""
    words = [str(path), *arguments]
    work = partial(runpy.run_path, words[0], run_name="__main__")
    return run_forked(work, cwd=cwd, env=env, arguments=words, timeout_s=timeout_s)


def _as_program(
    work: Callable[[], object], out: int, err: int, cwd: Path | None, env: Mapping[str, str] | None,
    arguments: Iterable[str],
) -> None:  # fmt: skip
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - open to the end
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = open(os.devnull)  # noqa: SIM115
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    sys.argv = list(arguments)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    sys.modules.pop("etude.engines.lightning", None)  # it silences a warning of Lightning's when it is imported
    work()


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for(path: Path, timeout_s: float = 120.0) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def wait_for_step(directory: Path, step: int, timeout_s: float = 120.0) -> None:
    """Wait until a checkpoint of at least a step exists: a fast run may have written and pruned that of the step."""
    deadline = time.monotonic() + timeout_s
    while newest_step(directory) < step:
        assert time.monotonic() < deadline, f"no checkpoint of step {step} appeared in {directory}"
        time.sleep(0.02)


def newest_step(directory: Path) -> int:
    """Return the highest step among a directory's `checkpoint-5` or `step-00000005`, and 0 where there is none."""
    names = (path.name for path in directory.glob("*-*"))
    return max((int(name.split("-")[1]) for name in names if re.fullmatch(r"(checkpoint|step)-\d+", name)), default=0)
