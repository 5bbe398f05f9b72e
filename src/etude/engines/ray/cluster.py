"""The Ray cluster to work on: the one that is there, or one of our own that listens on this machine alone."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import services as ray_services
from ray._private import worker as ray_worker

from etude.errors import ConfigError, RankError, one_line

untyped: Any = ray
services: Any = ray_services
START_WITHIN_S = 90.0
"""Time for a node of a cluster of our own to start."""
RAYS_PATIENCE_S = 31.0
"""More than Ray itself waits for it."""
STARTS = 3
"""How often a node is started before we give up."""
FREE_EVERY_MS = 50
"""How soon Ray's store takes back what nobody holds. With Ray's second, weights and rows go to memory that nobody has
written to yet, which takes six times as long: 100 ms for 101 MB instead of 16."""
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
    """Start a cluster that ends with this process and listens on 127.0.0.1; try again where a node gives up."""
    for number in range(STARTS):
        temporary = folder / f"ray{number or ''}"
        with _loopback_kept(), _patience(temporary):
            try:
                ray.init(
                    address="local", num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)),
                    num_gpus=None if use_gpu else 0, include_dashboard=False, logging_level=logging.ERROR,
                    log_to_driver=False, _node_ip_address="127.0.0.1", _temp_dir=str(temporary),
                    _system_config={"free_objects_period_milliseconds": FREE_EVERY_MS},
                )  # fmt: skip
                return
            except Exception as error:
                _end_node(error)
                if "timed out during startup" not in str(error):  # it has no class of its own
                    raise
    raise RankError(f"Ray did not start on this machine in {STARTS} attempts: it is too busy; try again later")


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


@contextmanager
def _patience(folder: Path) -> Iterator[None]:
    """Give a node the time that it needs to start: Ray gives it 30 seconds, which it exceeds on a busy machine.

    One that has ended is not waited for: it gives its own helpers 15 seconds, and that cannot be changed.
    """
    before = services.get_node

    def get_node(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        deadline = began + START_WITHIN_S
        while True:
            try:
                return before(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline or _has_ended(folder):
                    ended_s = time.monotonic() - began
                    time.sleep(max(0.0, RAYS_PATIENCE_S - ended_s))  # Ray asks again until its own time is over
                    raise
                time.sleep(0.1)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = before


def _end_node(error: BaseException) -> None:
    """End what a node that did not start has left running; only the traceback knows it."""
    trace = error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals.get("self")
        if isinstance(found, untyped._private.node.Node):
            found.kill_all_processes(check_alive=False, allow_graceful=False)
            return
        trace = trace.tb_next


def _has_ended(folder: Path) -> bool:
    """Tell whether the node that keeps its logs in a folder has ended itself."""
    return any("Check failed" in log.read_text(errors="replace") for log in folder.glob("session_2*/logs/raylet.err"))


def _answers(host: str, port: str) -> bool:
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def require_room(workers: int, needs: Mapping[str, float], beside: int = 0) -> None:
    """Refuse workers that the cluster could never place, which Ray would wait for without end.

    Args:
        workers: How many train.
        needs: What each of these needs.
        beside: Rollout workers, each of which needs a CPU.
    """
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
    cpus = sum(node.get("CPU", 0.0) for node in nodes)
    if beside and cpus - workers * needs.get("CPU", 0.0) < beside:
        raise ConfigError(
            f"the Ray cluster has {cpus:g} CPU, and {workers} workers with {needs.get('CPU', 0.0):g} each leave too "
            f"few for {beside} rollout workers with 1 each; lower online.workers or engine.params.num_workers"
        )


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
