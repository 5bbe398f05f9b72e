"""Where policies act, as a command line names it: environments, several of them by a pattern, and files after them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from etude.errors import ConfigError

LONGEST = 100
"""Characters of a file name after which environments are counted and no longer named; systems take some 250 in all."""


def find_environments(names: Sequence[str]) -> list[str]:
    """Return the environments that are named, `metaworld/*` and the like as those of its tasks that match."""
    found: list[str] = []
    for name in names:
        if not set("*?[") & set(name):
            found.append(name)
            continue
        from etude.simulation.environments.metaworld_tasks import TASKS

        matching = [known for known in (f"metaworld/{task}" for task in TASKS) if fnmatchcase(known, name)]
        if not matching:
            raise ConfigError(f"--env {name}: no task of Meta-World matches; metaworld/* are all of them")
        found += matching
    if twice := sorted({name for name in found if found.count(name) > 1}):
        raise ConfigError(f"--env names {twice[0]} twice")
    return found


def plain_name(names: Sequence[str]) -> str:
    """Return environments as part of a file name; where that would be too long, the first and how many more."""
    plain = [name.replace("/", "-").replace(":", "-") for name in names]
    joined = "+".join(plain)
    if len(joined) <= LONGEST:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
    return f"{plain[0][:LONGEST]}+{len(plain) - 1}-more-{digest}"
