"""A Ray cluster for tests: one for a whole session, on 127.0.0.1, that ends when the process that asked for it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

CPUS = 4
"""Logical ones: two drivers with two workers each find room."""
# In a process of its own: tests fork, which a process with Ray's threads must not do.
_PROGRAM = f"""
import sys
from pathlib import Path
import ray
from etude.engines.ray import cluster

with cluster.quiet():
    cluster.start(Path(sys.argv[1]), {CPUS}, False)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


@contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Start a cluster and yield the variables by which drivers find it; it ends with the block, or this process."""
    folder = tempfile.mkdtemp(prefix="etude-ray-", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
    # Ray gives a node 30 s to start, which a busy machine may exceed.
    starts = (_start(folder, {**environment, **token}) for _ in range(3))
    head, address = next((found for found in starts if found[1]), (None, ""))
    assert head is not None, "the Ray cluster did not start"
    try:
        yield {"RAY_ADDRESS": address, **token}
    finally:
        _end(head)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, environment: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Start a head, and return it with its address: none if it did not start, in which case it has ended."""
    command = [sys.executable, "-c", _PROGRAM, folder]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    if not address:
        _end(head)
    return head, address


def _end(head: subprocess.Popen[str]) -> None:
    assert head.stdin is not None and head.stdout is not None
    head.stdin.close()
    try:
        head.wait(timeout=30)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait(timeout=30)
    head.stdout.close()
