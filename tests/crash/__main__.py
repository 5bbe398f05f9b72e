"""`make crash`: kill runs at random instants, some inside a save, and report passes / trials."""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from pathlib import Path

from tests.crash.harness import Trial, killed_run, reference
from tests.crash.workload import Case

CASES = [
    Case(dropout=d, augment=a, accumulate=k, workers=w, two_optimizers=o, ranks=r, save_every=s)
    for (d, a, k), (w, o, r, s) in itertools.product(
        [(True, True, 2), (False, True, 1), (True, False, 3)],
        [(0, True, 1, 1), (2, False, 1, 3), (0, True, 2, 2), (2, True, 2, 1), (0, False, 2, 4)],
    )
]


def run_trials(trials: int, seed: int, root: Path, verbose: bool = False) -> list[tuple[Case, Trial]]:
    """Kill `trials` runs, spread evenly over the cases."""
    rng = random.Random(seed)
    lengths: dict[Case, float] = {}
    results = []
    for number in range(trials):
        case = CASES[number % len(CASES)]
        reference_dir = root / f"reference-{CASES.index(case)}"
        if case not in lengths:
            lengths[case] = reference(case, reference_dir)
        trial = killed_run(case, root / f"trial-{number}", reference_dir, lengths[case], rng)
        results.append((case, trial))
        if verbose:
            outcome = trial.difference or "ok"
            print(f"{number + 1:4d}/{trials} {outcome:30s} killed={trial.kills} inside_save={trial.inside_save} {case}")
    return results


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        results = run_trials(options.trials, options.seed, Path(root), verbose=True)
    passed = sum(trial.difference is None for _, trial in results)
    killed = sum(trial.kills for _, trial in results)
    inside = sum(trial.inside_save for _, trial in results)
    where = f"{killed} killed before the end, {inside} inside a save"
    print(f"crash: {passed}/{len(results)} runs resumed bit for bit ({where})")
    raise SystemExit(0 if passed == len(results) else 1)


if __name__ == "__main__":
    main()
