"""Stands in for `etude train` where a test is about who starts it: a run directory, in milliseconds and without torch.

eval/loss falls to the distance of training.lr from 1e-3 in powers of ten; above 0.05 it is NaN, which ends the run.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

EVERY, LAST = 10, 40


def main() -> int:
    given = dict(text.split("=", 1) for text in sys.argv[4:] if "=" in text)
    run = Path(given["run.root"], given["run.name"])
    rate = float(given.get("training.lr", 1e-3))
    hold = os.environ.get("STAND_IN_HOLDS", "") == run.name
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    step = rows[-1]["step"] if rows else 0
    print(f"begins after step {step}", flush=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    training = {"training_steps": LAST, "duration": None, "lr": rate, "seed": int(given.get("training.seed", 0))}
    (run / "config.yaml").write_text(f"training: {json.dumps(training)}\n")
    with path.open("a") as file:
        while step < LAST:
            step += EVERY
            if rate > 0.05:
                print(f"etude: error: the loss is nan at step {step}; lower training.lr", file=sys.stderr)
                return _end(run, "failed", step, 5)
            loss = abs(math.log10(rate) + 3) + 1 / step
            file.write(json.dumps({"step": step, "eval/loss": loss, "train/loss": loss}) + "\n")
            file.flush()
            while (hold or "STAND_IN_SLOW" in os.environ) and not asked:
                time.sleep(0.02)
                if not hold:
                    break
            if asked:
                return _end(run, "interrupted", step, 143)
    return _end(run, "finished", step, 0)


def _end(run: Path, state: str, step: int, code: int) -> int:
    (run / "status.json").write_text(json.dumps({"state": state, "step": step, "duration_s": 0.1}))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
