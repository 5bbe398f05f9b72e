"""How tests are run: a death and a hang end the run and have a name, and nothing is skipped by mistake."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.expected_skips import is_expected

pytestmark = pytest.mark.slow


def _commands_of_make(repository: Path, target: str) -> list[str]:
    """Return what make would run, without running it."""
    given = ("AGAIN", "MAKE", "MFLAGS", "PYTEST_")  # by the make that runs these tests: it exports what it was given
    kept = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    command = ["make", "-n", "--no-print-directory", target]
    done = subprocess.run(command, cwd=repository, env=kept, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.replace("\\\n", " ").splitlines()


def _run(
    repository: Path, directory: Path, tests: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run tests as make does, with the project's settings and conftest.py; it ends, or this test fails."""
    for name, text in {"test_one.py": tests, "test_two.py": "def test_of_another_file():\n    pass\n"}.items():
        (directory / name).write_text(textwrap.dedent(text))
    words = shlex.split(_commands_of_make(repository, "test-fast")[-1])
    command = [
        sys.executable, "-m", *words[words.index("pytest") :], "-c", repository / "pyproject.toml",
        "--rootdir", directory, "-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", *options, directory,
    ]  # fmt: skip
    left_out = ("PYTEST_", "ETUDE_TEST_EXTRAS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    # Plugins of other packages are left out, which take seconds to import.
    command += ["-p", "pytest_timeout", "-p", "xdist.plugin"]
    environment |= {"PYTHONPATH": str(repository), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    return subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_worker_that_dies_ends_the_run_with_the_name_of_its_test(repository: Path, tmp_path: Path) -> None:
    done = _run(
        repository, tmp_path, """
        import os, signal
        import pytest

        def test_that_is_fine():
            pass

        def test_that_dies():
            os.kill(os.getpid(), signal.SIGILL)

        @pytest.mark.parametrize("number", range(5))
        def test_that_comes_after_it(number):
            pass
        """,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_one.py::test_that_dies'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout, "the rest of the file is not run by a new worker"


UNSTEADY = """
    from pathlib import Path

    MARK = Path(__file__).with_name("tried")

    def test_that_fails_once():
        was_there = MARK.exists()
        MARK.touch()
        assert was_there, "the first time"
    """


def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_run(repository: Path, tmp_path: Path) -> None:
    done = _run(repository, tmp_path, UNSTEADY, "--again", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UNSTEADY test_one.py::test_that_fails_once" in done.stdout
    assert "AssertionError: the first time" in done.stdout
    assert "1 passed, 1 unsteady" in done.stdout


def test_a_failure_counts_where_nobody_asked_for_a_second_try(repository: Path, tmp_path: Path) -> None:
    done = _run(repository, tmp_path, UNSTEADY)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout


def test_what_fails_again_or_in_numbers_or_with_its_worker_has_failed(repository: Path, tmp_path: Path) -> None:
    fails = "def test_that_fails():\n    assert False\n"
    dies = "import os\n\ndef test_that_dies():\n    os._exit(3)\n"
    for name, tests in {"again": fails, "numbers": fails + fails.replace("fails", "fails_too"), "worker": dies}.items():
        (folder := tmp_path / name).mkdir()
        done = _run(repository, folder, tests, "--again", "1")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "unsteady" not in done.stdout


def test_a_test_that_hangs_inside_c_ends_the_run_with_its_name(repository: Path, tmp_path: Path) -> None:
    """It holds Python's lock and lets no signal handler run, so that pytest-timeout waits for ever."""
    done = _run(
        repository, tmp_path, """
        from collections import deque
        from itertools import repeat
        import pytest

        @pytest.mark.timeout(1)
        def test_that_hangs():
            deque(repeat(0), maxlen=0)
        """,
        "-n0", ETUDE_HANG_GRACE_S="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "in test_that_hangs" in done.stderr, done.stdout + done.stderr


def test_a_skip_that_is_not_expected_is_a_failure(repository: Path, tmp_path: Path) -> None:
    done = _run(
        repository, tmp_path, """
        import pytest

        def test_on_a_gpu():
            pytest.skip("needs a CUDA device")

        def test_that_is_not_there_yet():
            pytest.skip("its module is not there yet")

        def test_with_a_misspelt_package():
            pytest.importorskip("pyarow")

        @pytest.mark.skipif(True, reason="")
        def test_without_a_reason():
            pass

        @pytest.mark.parametrize("nothing", [])
        def test_of_nothing(nothing):
            pass

        @pytest.mark.xfail(reason="known", strict=True)
        def test_that_is_known_to_fail():
            assert False
        """,
        "-n1",
    )  # fmt: skip
    assert done.returncode == 1
    outcomes = {
        line.split("::")[1].partition(" ")[0].partition("[")[0]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR", "PASSED", "XFAIL")) and "::" in line
    }
    assert outcomes == {
        "test_that_is_not_there_yet": "FAILED", "test_with_a_misspelt_package": "FAILED",
        "test_without_a_reason": "ERROR", "test_of_nothing": "ERROR", "test_that_is_known_to_fail": "XFAIL",
        "test_of_another_file": "PASSED",
    }, done.stdout  # fmt: skip
    assert "SKIPPED [1] test_one.py" in done.stdout and "needs a CUDA device" in done.stdout


def test_a_file_that_skips_itself_by_mistake_is_an_error(repository: Path, tmp_path: Path) -> None:
    text = "import pytest\npytest.importorskip('pyarow')\ndef test_it():\n    pass\n"
    done = _run(repository, tmp_path, text, "-n0")
    assert done.returncode != 0
    assert "could not import 'pyarow'" in done.stdout and "ERROR" in done.stdout


def test_packages_may_be_missing_only_where_their_extra_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"wandb", "metaworld"}
    monkeypatch.setattr("tests.expected_skips.find_spec", lambda name: None if name in missing else object())
    for reason, expected in {
        "Skipped: could not import 'wandb': No module named 'wandb'": True,
        "wandb is not installed (extra: report)": True,
        "needs etude[sim]": True,
        "Skipped: could not import 'pyarrow': DLL load failed": False,  # it is there, and broken
        "Skipped: could not import 'wandbb': No module named 'wandbb'": False,
        "needs etude[hf]": False,
        "needs etude[simm]": False,
    }.items():
        assert is_expected(reason, installed=[]) is expected, reason
        assert not is_expected(reason, installed=["report", "sim", "hf"]), reason


def test_what_takes_too_long_is_ended_with_all_it_started_and_says_where_it_was(repository: Path) -> None:
    program = (
        "import faulthandler, subprocess, sys, time\n"
        "faulthandler.enable()\n"
        "def test_that_waits_for_ever():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
        "test_that_waits_for_ever()\n"
    )
    command = [sys.executable, repository / "scripts" / "bounded.py", "0.1", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 124
    assert "in test_that_waits_for_ever" in done.stderr and "no end within 0.1 minutes" in done.stderr
    left = int(done.stdout)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("program, code", [("pass", 0), ("import sys; sys.exit(3)", 3), ("import os; os.abort()", 134)])
def test_what_ends_in_time_keeps_its_exit_code(repository: Path, program: str, code: int) -> None:
    command = [sys.executable, repository / "scripts" / "bounded.py", "5", sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == code


@pytest.mark.parametrize("target", ["test", "test-all", "test-fast"])
def test_make_bounds_every_step_of_the_tests(repository: Path, target: str) -> None:
    commands = _commands_of_make(repository, target)
    for what in ("setup_venv.py", "system-packages.sh", "-m pytest", "/mypy"):
        assert all("bounded.py" in command.partition(what)[0] for command in commands if what in command)


def test_child_processes_of_tests_have_a_time_limit(repository: Path) -> None:
    runs = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
    found = [
        f"{path.relative_to(repository)}:{node.lineno}"
        for path in sorted((repository / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in runs
        if not {"timeout", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
