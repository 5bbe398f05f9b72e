"""`etude export` and `etude import`: trained policies for other programs, and those of LeRobot for this one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from etude.cli.output import say
from etude.errors import ConfigError


def export_source(source: str, output: Path, *, kind: str, which: str) -> None:
    """Load a policy, write it to a directory, and say how near to the module it is."""
    gc.enable()  # switched off for the start by `main`
    from etude.cli.runs import find_run
    from etude.config.restore import load_policy
    from etude.deploy.export import FILES, export_policy, write_components

    if kind not in (*FILES, "pretrained", "components", "lerobot"):
        raise ConfigError(f"--format is {', '.join((*FILES, 'pretrained', 'components'))} or lerobot, got {kind!r}")
    policy: Any = load_policy(find_run(source), which)
    if kind == "components":
        say(f"{output}: {', '.join(write_components(policy, output))}")
        return
    if kind == "pretrained":
        policy.save_pretrained(output)
        say(f"{output}: load it with {type(policy).__name__}.from_pretrained")
        return
    if kind == "lerobot":
        from etude.deploy.lerobot import export_lerobot

        written = export_lerobot(policy, output)
        say(f"{output}: a policy for LeRobot 0.4.4, read back: actions differ by at most {written.difference:.1e}")
        return
    done = export_policy(policy, output, kind)
    size_mb = done.file.stat().st_size / 1e6
    say(f"{done.file} ({size_mb:.1f} MB) and {done.manifest.name}: actions differ by at most {done.difference:.1e}")


def import_source(source: Path, output: Path) -> None:
    """Read a policy of LeRobot's and save it as one of ours."""
    gc.enable()  # switched off for the start by `main`
    from etude.deploy.lerobot import import_lerobot

    if output.resolve() == source.resolve():
        raise ConfigError(f"--output {output} is where the policy of LeRobot's lies; name another directory")
    policy = import_lerobot(source)
    policy.save_pretrained(output)
    total = sum(weight.numel() for weight in policy.parameters())
    say(f"{output}: {type(policy).__name__} with {total:,} parameters; load it with from_pretrained")
