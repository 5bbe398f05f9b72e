"""`make bench`: every figure that the README states, each a ratio measured side by side in this run."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks import checkpoint, data, graph_model, memory, overhead, resume, startup


def main() -> None:
    """Print all figures; exit 1 if one misses its goal."""
    missed = []
    # First, in a process that has not yet held anything else.
    if (found := memory.main()) > 0.1:
        missed.append(f"memory {found:.3f}")
    for label, (ratio, goal) in overhead.main().items():
        if ratio > goal:
            missed.append(f"overhead {label} {ratio:.3f}")
    if (found := checkpoint.main()) > 1.3:
        missed.append(f"checkpoint {found:.2f}")
    if (found := resume.main()) > 1.2:
        missed.append(f"resume {found:.2f}")
    if (found := data.main()) < 5:
        missed.append(f"data {found:.1f}")
    if (found := graph_model.main()) > graph_model.GOAL:
        missed.append(f"graph model {found:.3f}")
    startup_ratio = startup.main()
    if startup_ratio is not None and startup_ratio > 0.05:
        missed.append(f"startup {startup_ratio:.3f}")
    if importlib.util.find_spec("ray") is not None:
        from benchmarks import ray_online

        for label, (spread, is_met) in ray_online.main().items():
            if not is_met:
                missed.append(f"ray {label} {spread.median:.2f}")
    print("all goals met" if not missed else f"missed: {', '.join(missed)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
