"""Give a few failed tests a second try, alone in a process each when all others have ended: `-p tests.again --again 3`.

A test that fails beside others and passes alone is unsteady. It is named at the end of the run with its first failure,
and is to be mended all the same; but it says nothing about the change that is being tested. Nothing is tried again
where more tests failed than that, where a worker died (what it had not run yet was not run), or without the option.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

LIMIT_S = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", type=int, default=0, help="how many failed tests may be tried again, alone")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(config), "second_try")


class SecondTry:
    """What a run has found, and what of it a second try changes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_complete = True
        self.unsteady: list[Any] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.is_complete = self.is_complete and not error

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        stats = self.config.pluginmanager.get_plugin("terminalreporter").stats
        failed = [*stats.get("failed", ()), *stats.get("error", ())]
        names = list(dict.fromkeys(report.nodeid for report in failed))
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self.is_complete:
            return
        if 0 < len(names) <= self.config.getoption("again") and all(map(self._passes_alone, names)):
            for kind in ("failed", "error"):
                stats.pop(kind, None)
            stats["unsteady"] = self.unsteady = failed
            session.exitstatus = pytest.ExitCode.OK

    def _passes_alone(self, name: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-n0", "-m", "", *self._settings(), name]
        try:
            done = subprocess.run(
                command, cwd=self.config.invocation_params.dir, timeout=LIMIT_S, check=False, capture_output=True,
                text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            print(f"\n{name} failed again, alone:\n{done.stdout}{done.stderr}")
        return done.returncode == 0

    def _settings(self) -> list[str]:
        """Return what says where the tests are and which plugins they have."""
        said = ["--rootdir", str(self.config.rootpath)]
        if self.config.inipath is not None:
            said += ["-c", str(self.config.inipath)]
        return said + [word for name in self.config.getoption("plugins") for word in ("-p", name)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.unsteady:
            return
        terminalreporter.section("unsteady: failed beside other tests and passed alone; to be mended")
        for report in self.unsteady:
            terminalreporter.write_line(f"UNSTEADY {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)
