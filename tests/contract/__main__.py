"""Probe every engine and door and show the table; `--write` puts it into the README."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import etude.engines.huggingface.engine
import etude.engines.lightning.engine
import etude.engines.ray.engine  # noqa: F401 - before anything is forked
from tests.contract import doors, table  # noqa: F401 - the doors too
from tests.contract.probes import EXCEPTIONS, GUARANTEES
from tests.contract.subjects import SUBJECTS, Subject
from tests.ray_cluster import ray_cluster


def main() -> None:
    with ray_cluster() as variables:
        os.environ.update(variables)
        probe_all()


def probe_all() -> None:
    found: dict[tuple[str, Subject], str] = {}
    for name, (_, probe) in GUARANTEES.items():
        for subject in SUBJECTS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[name, subject] = probe(subject, Path(folder))
                except AssertionError:
                    reason = EXCEPTIONS.get((name, subject))
                    if reason is None:
                        raise
                    found[name, subject] = f"no: {reason}"
            print(f"{name:20} {subject!s:18} {found[name, subject]}", flush=True)
    print(table.render(found))
    if "--write" in sys.argv[1:]:
        table.write(found)


if __name__ == "__main__":
    main()
