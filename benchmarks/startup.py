"""CPU time of `etude check` over that of importing transformers' Trainer, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "digits.yaml"


def cpu_seconds(command: list[str]) -> float:
    """Run a command and return the CPU time that it and its children took."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> float | None:
    """Print the ratios; return the one that has a goal."""
    check = [sys.executable, "-m", "etude", "check", str(CONFIG)]
    ours = min(cpu_seconds(check) for _ in range(5))
    if importlib.util.find_spec("transformers") is None:
        print(f"startup: etude check takes {ours:.2f} s of CPU time (transformers is not installed to compare with)")
        return None
    trainer = min(cpu_seconds([sys.executable, "-c", "from transformers import Trainer"]) for _ in range(3))
    plain = min(cpu_seconds([sys.executable, "-c", "import transformers"]) for _ in range(3))
    print(f"  etude check {ours:.2f} s, transformers.Trainer {trainer:.2f} s, the lazy package alone {plain:.2f} s")
    print(f"startup: etude check takes {ours / trainer:.3f}x the import of transformers' Trainer (goal <= 0.05)")
    return ours / trainer


if __name__ == "__main__":
    main()
