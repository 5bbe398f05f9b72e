"""What every test shares: one thread, no network, reproducible examples, and an environment for child processes."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from etude import plugins, registry
from etude.errors import EtudeError
from etude.low_precision import require_low_precision
from tests.expected_skips import is_expected
from tests.ray_cluster import ray_cluster

REPOSITORY = Path(__file__).resolve().parent.parent

# Before torch is imported: spinning OpenMP threads cost several times the work on shared cores.
_CHILD_SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "NO_COLOR": "1"}
os.environ.update(_CHILD_SETTINGS)
for name in ("COLUMNS", "FORCE_COLOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

settings.register_profile("reproducible", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "reproducible"))


# A wait inside C is not ended by pytest-timeout, whose signal waits for Python's next instruction.
HANG_GRACE_S = float(os.environ.get("ETUDE_HANG_GRACE_S", "60"))
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # before each test's output is captured
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup is inherited, and training heeds it
    # Before any test calculates: later is too late for those that go below float32. Workers inherit the answer.
    if not hasattr(config, "workerinput"):
        with suppress(EtudeError):
            require_low_precision("bf16")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End a process whose test still runs when its time limit is long over: a thread without Python's lock sees to it.

    Its stack then names the test, and so does the worker's death.
    """
    mark, option = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    given = mark.args[0] if mark and mark.args else item.config.getini("timeout") if option is None else option
    if float(given) and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(float(given) + HANG_GRACE_S, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    return _refuse_unexpected_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    return _refuse_unexpected_skips((yield))


def _refuse_unexpected_skips(report: Any) -> Any:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not is_expected(reason):
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid}: skipped, which tests/expected_skips.py does not expect: {reason}"
    return report


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout, for tests that read configs, docs or source."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def no_secrets_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers as secret: another test's output is not to be starred out."""
    monkeypatch.setattr("etude.secrets._spellings", ())


@pytest.fixture(autouse=True)
def logger_left_as_it_was() -> Iterator[None]:
    """Take back what a command of a test has set up: it shows everything, and another test may count the warnings."""
    logger = logging.getLogger("etude")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def registries_restored() -> Iterator[None]:
    """Put registries and plugins back as they were: another test's processes load what this one's has loaded."""
    entries = {name: dict(one._entries) for name, one in registry.REGISTRIES.items()}
    files, modules = dict(plugins.PLUGIN_FILES), set(sys.modules)
    yield
    for name, one in registry.REGISTRIES.items():
        one._entries = entries[name]
    plugins.PLUGIN_FILES.clear()
    plugins.PLUGIN_FILES.update(files)
    for name in set(sys.modules) - modules:
        if name.startswith(("etude_plugin_", "plug")):
            del sys.modules[name]


@pytest.fixture
def child_env(tmp_path: Path) -> dict[str, str]:
    """The environment for child processes: one thread, no hub, warnings left to the child, a home of their own."""
    # PyOpenGL's platform is set by MuJoCo when a test of this process renders, and would be a child's, too.
    inherited = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    return {**inherited, **_CHILD_SETTINGS, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def ray_variables() -> Iterator[dict[str, str]]:
    """The variables by which drivers find a Ray cluster that lives as long as the session."""
    with ray_cluster() as variables:
        yield variables


@pytest.fixture
def on_ray_cluster(ray_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that this test starts find the session's Ray cluster."""
    for name, value in ray_variables.items():
        monkeypatch.setenv(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(REPOSITORY / "tests" / "crash"):
            item.add_marker(pytest.mark.crash)
            item.add_marker(pytest.mark.slow)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch  # only where a test asks for it: collection stays fast

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
