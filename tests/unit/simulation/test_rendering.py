"""Headless rendering: which OpenGL is taken, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from etude.errors import MissingExtraError
from etude.simulation.environments import rendering

REPORT = (
    "from etude.simulation.environments.rendering import prepare_mujoco\n"
    "import os, sys\n"
    "assert 'mujoco' not in sys.modules\n"
    "print(prepare_mujoco(), os.environ.get('MUJOCO_GL'))\n"
)


def run(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.slow
def test_egl_is_taken_first_and_a_choice_of_the_user_stands() -> None:
    if rendering.find_egl_fault() is None:
        assert run(REPORT) == "egl egl"
    assert run(REPORT, MUJOCO_GL="osmesa") == "osmesa osmesa"


@pytest.mark.slow
def test_osmesa_serves_where_there_is_no_egl() -> None:
    if rendering.find_osmesa_fault() is not None:
        pytest.skip("OSMesa is not installed")
    program = REPORT.replace("import os, sys", "import os, sys\nfrom etude.simulation.environments import rendering")
    program = program.replace("print(", "rendering.find_egl_fault = lambda: 'gone'\nprint(")
    assert run(program) == "osmesa osmesa"


def test_without_either_the_missing_debian_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "disable")
    monkeypatch.setattr(rendering, "find_egl_fault", lambda: "libEGL.so.1 is missing")
    monkeypatch.setattr(rendering, "find_osmesa_fault", lambda: "libOSMesa is missing")
    with pytest.raises(MissingExtraError) as caught:
        rendering.require_rendering()
    text = str(caught.value)
    assert "libEGL.so.1 is missing" in text
    for package in ("libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libosmesa6"):
        assert package in text


def test_the_packages_named_are_those_that_setup_installs(repository: object) -> None:
    from pathlib import Path

    script = Path(str(repository), "scripts/system-packages.sh").read_text()
    for package in f"{rendering.EGL_PACKAGES} {rendering.OSMESA_PACKAGES}".split():
        assert package in script


def test_rendering_that_is_switched_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "disable")
    monkeypatch.setattr(rendering, "find_egl_fault", lambda: None)
    with pytest.raises(MissingExtraError, match="switched off by MUJOCO_GL=disable"):
        rendering.require_rendering()


@pytest.mark.slow
def test_a_mujoco_that_was_imported_before_renders_without_a_screen() -> None:
    program = (
        "import mujoco\n"
        "from etude.simulation.environments import make_environment\n"
        "env = make_environment('metaworld/reach')\n"
        "env.reset(1)\n"
        "print(env.render().shape)\n"
    )
    assert run(program) == "(240, 320, 3)"


@pytest.mark.slow
def test_states_are_simulated_where_nothing_can_be_rendered() -> None:
    program = (
        "from etude.simulation.environments import make_environment\n"
        "env = make_environment('metaworld/reach')\n"
        "env.reset(1)\n"
        "try:\n    env.render()\nexcept Exception as error:\n    print(type(error).__name__)\n"
    )
    assert run(program, MUJOCO_GL="disable") == "MissingExtraError"
