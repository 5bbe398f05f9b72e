"""`etude export`: a trained policy as one graph, with a manifest that says what goes in and comes out."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from etude.cli.output import say


def export_source(source: str, output: Path, *, kind: str, which: str) -> None:
    """Load a policy, write it to a directory, and say how near to the module it is."""
    gc.enable()  # switched off for the start by `main`
    from etude.cli.runs import find_run
    from etude.config.restore import load_policy
    from etude.deploy.export import export_policy, write_components

    policy: Any = load_policy(find_run(source), which)
    if kind == "components":
        say(f"{output}: {', '.join(write_components(policy, output))}")
        return
    if kind == "pretrained":
        policy.save_pretrained(output)
        say(f"{output}: load it with {type(policy).__name__}.from_pretrained")
        return
    done = export_policy(policy, output, kind)
    size_mb = done.file.stat().st_size / 1e6
    say(f"{done.file} ({size_mb:.1f} MB) and {done.manifest.name}: actions differ by at most {done.difference:.1e}")
