"""Stock torch brings triton: its LLVM and that of software OpenGL live together in one order of loading only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("mujoco") is None, reason="needs etude[sim]"),
]

RENDER = """
import sys
from etude.simulation.environments import rendering
assert rendering.prepare_mujoco() == sys.argv[1]
import mujoco
scene = '<mujoco><worldbody><light pos="0 0 3"/><camera name="eye" pos="0 0 2"/><geom size=".2"/></worldbody></mujoco>'
model = mujoco.MjModel.from_xml_string(scene)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = rendering.CameraRenderer(model, 48, 48)
assert renderer.render(data, "eye").any()
renderer.close()
"""
PROBE = (
    "from etude.simulation.environments import rendering; rendering.find_egl_fault(); rendering.find_osmesa_fault()\n"
)
PLUGIN = """
import sys
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.environments import make_environment

@ENVIRONMENT_REGISTRY.register("own")
class Own:
    "An environment with an OpenGL of its own."
    def __init__(self):
        assert "triton" in sys.modules
    reset = step = render = close = lambda self: None

make_environment("own")
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with triton, as PYTHONPATH: 10 s and 0.7 GB, which are given back."""
    folder = tmp_path_factory.mktemp("triton")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder)]
    done = subprocess.run([*command, "triton==3.7.1"], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, f"pip cannot get triton, without which nothing is shown here: {done.stderr}"
    yield folder
    shutil.rmtree(folder)


def run(program: str, *arguments: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=100)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("library", ["egl", "osmesa"])
def test_triton_is_imported_after_a_frame_was_rendered(library: str, triton: Path, child_env: dict[str, str]) -> None:
    env = {**child_env, "PYTHONPATH": str(triton), "MUJOCO_GL": library}
    run(RENDER + "import torch, triton\n", library, env=env)


def test_triton_is_imported_after_opengl_was_looked_for(triton: Path, child_env: dict[str, str]) -> None:
    run(PROBE + "import torch, triton\n", env={**child_env, "PYTHONPATH": str(triton)})


def test_an_environment_of_ones_own_finds_triton_loaded(triton: Path, child_env: dict[str, str]) -> None:
    run(PLUGIN, env={**child_env, "PYTHONPATH": str(triton)})


def test_the_quickstart_trains_beside_triton(triton: Path, child_env: dict[str, str], tmp_path: Path) -> None:
    """Records, which looks for OpenGL, then trains, for which torch imports triton: 20 CPU seconds."""
    size = ["--episodes", "2", "--eval-episodes", "1", "--steps", "5"]
    command = [sys.executable, "-m", "etude", "quickstart", "--task", "reach", *size]
    env = {**child_env, "PYTHONPATH": str(triton)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/quickstart-reach-act/report.html").is_file()


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('not for this machine')", "import warnings; warnings.warn('old')"]
)
def test_a_triton_that_is_broken_disturbs_no_rendering(text: str, child_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text(text)
    env = {**child_env, "PYTHONPATH": str(tmp_path), "MUJOCO_GL": "egl", "PYTHONWARNINGS": "error::UserWarning"}
    run(RENDER, "egl", env=env)
