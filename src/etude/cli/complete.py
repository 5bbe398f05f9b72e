"""What the shell offers after TAB; cheap, quiet, and free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import typer

KINDS = (
    "presets",
    "policies",
    "data",
    "algorithms",
    "engines",
    "trainers",
    "optimizers",
    "losses",
    "loggers",
    "callbacks",
    "environments",
    "tasks",
    "rewards",
    "agents",
    "generators",
    "robots",
)


def configs(incomplete: str) -> list[str]:
    """Offer YAML files, the folders on the way to them, and presets."""
    folder = os.path.dirname(incomplete)
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    from etude.config.presets import presets

    offers = [name for name in presets() if name.startswith(incomplete)] if incomplete else []
    for entry in entries:
        if entry.name.startswith(".") or not entry.name.startswith(os.path.basename(incomplete)):
            continue
        if entry.is_dir():
            offers.append(os.path.join(folder, entry.name) + "/")
        elif entry.name.endswith((".yaml", ".yml")):
            offers.append(os.path.join(folder, entry.name))
    return offers


def runs(incomplete: str) -> list[str]:
    """Offer the names of the runs under runs/, newest first, or run directories along a path."""
    if "/" in incomplete:
        root = Path(os.path.dirname(incomplete))
        return [str(path) for path in _run_directories(root) if str(path).startswith(incomplete)]
    return [path.name for path in _run_directories(Path("runs")) if path.name.startswith(incomplete)]


def kinds(incomplete: str) -> list[str]:
    """Offer the kinds of components."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def tasks(incomplete: str) -> list[tuple[str, str]]:
    """Offer Meta-World's tasks with what they ask for."""
    from etude.simulation.environments.metaworld_tasks import TASKS

    return [(name, text) for name, text in TASKS.items() if name.startswith(incomplete)]


def keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Offer the registry keys of the kind already typed."""
    from etude.registry import REGISTRIES

    if ctx.params.get("kind") == "presets":
        from etude.config.presets import presets

        return [name for name in presets() if name.startswith(incomplete)]
    registry = REGISTRIES.get(ctx.params.get("kind") or "")
    names = registry.keys() if registry else ()
    return [name for name in names if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[tuple[str, str]]:
    """Offer the keys of the training section with their help."""
    return [(key, help_text) for key, help_text in _override_keys() if key.startswith(incomplete)]


def _override_keys() -> Iterator[tuple[str, str]]:
    from etude.config.training import TrainingConfiguration

    for name, text in TrainingConfiguration.help_texts().items():
        yield f"training.{name}=", text.splitlines()[0]
    yield "run.name=", "Name of the run directory."


def _run_directories(root: Path) -> list[Path]:
    try:
        paths = [path for path in root.iterdir() if (path / "status.json").exists() or (path / "config.yaml").exists()]
    except OSError:
        return []
    return sorted(paths, key=lambda path: (_touched(path), path.name), reverse=True)


def _touched(path: Path) -> float:
    try:
        return (path / "status.json").stat().st_mtime
    except OSError:
        return 0.0
