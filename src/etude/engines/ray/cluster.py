"""The Ray cluster to work on: the one that is there, or one of our own that listens on this machine alone."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

from etude.errors import ConfigError, one_line

untyped: Any = ray
QUIET: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise the end of a run is noticed up to two seconds late.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # What workers print and log is ours to hand on.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Ray's workers would give way to every other process of the machine.
    "RAY_worker_niceness": "0",
    # Nothing is reported to Ray Train that it could save in advance; and it costs a process.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""Settings of Ray's, for as long as we use it and where the user has not said otherwise."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Ray's chatter, statistics and deprecations of its own parts away from the user."""
    ours = {name: value for name, value in QUIET.items() if name not in os.environ}
    os.environ.update(ours)
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"ray\.")
            yield
    finally:
        log.setLevel(level)
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def connected(address: str | None, cpus: float, use_gpu: bool) -> Iterator[Path]:
    """Be connected to a cluster; yield a folder for what Ray wants to keep, which is removed at the end."""
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"engine.params.address: {address!r} is Ray Client, which cannot run Ray Train; run the command on a host "
            "of the cluster (ray job submit) with the address HOST:PORT or auto"
        )
    with ExitStack() as stack:
        # Short: sockets live in it, whose names may have 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="etude-ray-", dir="/tmp" if os.path.isdir("/tmp") else None))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if ray.is_initialized():
            _require_same(address)
        elif address == "local" or (address is None and not os.environ.get("RAY_ADDRESS")):
            stack.enter_context(_own_token())
            stack.enter_context(_news_left_out())
            start(folder, cpus, use_gpu)
            stack.callback(ray.shutdown)
        else:
            stack.enter_context(_news_left_out())
            _join(address or os.environ["RAY_ADDRESS"])
            stack.callback(ray.shutdown)
        yield folder


def _require_same(address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise ConfigError(f"engine.params.address: {address!r} asked for, but this process is connected to {here}")


def _join(address: str) -> None:
    """Connect to a cluster that is there; find out by ourselves whether it is, for Ray takes minutes to give up."""
    host, _, port = address.rpartition(":")
    loopback = host in ("127.0.0.1", "localhost") and not _answers(untyped.util.get_node_ip_address(), port)
    refusal = (
        f"no Ray cluster answers at {address!r}; see engine.params.address and RAY_ADDRESS, or leave both out for a "
        "cluster on this machine"
    )
    if host and not _answers(host, port):
        raise ConfigError(refusal)
    _read_token_again()
    try:
        with _loopback_kept() if loopback else nullcontext():
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{refusal} ({one_line(error)})") from error


def start(folder: Path, cpus: float, use_gpu: bool) -> None:
    """Start a cluster that ends with this process and listens on 127.0.0.1."""
    with _loopback_kept():
        ray.init(
            address="local", num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)), num_gpus=None if use_gpu else 0,
            include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
            _node_ip_address="127.0.0.1", _temp_dir=str(folder / "ray"),
        )  # fmt: skip


@contextmanager
def _news_left_out() -> Iterator[None]:
    """Keep Ray from printing a paragraph about every process that ends; what matters of it we say ourselves."""
    before = ray_worker.print_to_stdstream
    ray_worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = before


@contextmanager
def _own_token() -> Iterator[None]:
    """Protect a cluster of our own with a token that nobody else has; Ray would write one into the home directory."""
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        yield
        return
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    _read_token_again()
    try:
        yield
    finally:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            os.environ.pop(name, None)
        _read_token_again()


def _read_token_again() -> None:
    native = untyped._raylet
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _loopback_kept() -> Iterator[None]:
    """Keep Ray from turning the loopback address into one that the network can reach."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _answers(host: str, port: str) -> bool:
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def require_room(workers: int, needs: Mapping[str, float]) -> None:
    """Refuse workers that the cluster could never place, which Ray would wait for without end."""
    nodes = [node["Resources"] for node in untyped.nodes() if node["Alive"]]
    places = sum(
        min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items() if amount), default=workers)
        for node in nodes
    )
    if places < workers:
        has = {name: sum(node.get(name, 0.0) for node in nodes) for name in needs}
        raise ConfigError(
            f"the Ray cluster has room for {places} of {workers} workers: each needs {_listed(needs)}, and its "
            f"{len(nodes)} {'node has' if len(nodes) == 1 else 'nodes have'} {_listed(has)}; lower "
            "engine.params.num_workers or resources_per_worker"
        )


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
