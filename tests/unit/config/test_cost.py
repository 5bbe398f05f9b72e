"""Checking a configuration is quick: no torch, no NumPy, no OmegaConf where nothing is composed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from etude.config.load import load
loaded = load(sys.argv[1], ["training.lr=1e-4"])
loaded.explain()
print(time.process_time(), *sorted({"torch", "numpy", "transformers", "omegaconf", "yaml"} & set(sys.modules)))
"""


def test_a_check_imports_nothing_heavy_and_takes_well_under_a_second(
    repository: Path, child_env: dict[str, str]
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(repository / "configs" / "digits.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=child_env)
    seconds, *imported = done.stdout.split()
    assert imported == ["yaml"]
    # 0.2 to 0.35 s of processor time on the machines this is developed on; the bound allows for slow ones.
    assert float(seconds) < 1.5
