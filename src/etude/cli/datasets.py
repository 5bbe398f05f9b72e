"""What `etude data` does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.output import in_terminal, print_json, print_table, say
from etude.errors import ConfigError

if TYPE_CHECKING:
    from etude.data.lerobot.reader import LeRobotDataset

_SHOWN = ("mean", "std", "min", "q01", "q50", "q99", "max")


def find(root: str) -> Path:
    """Return the directory of a dataset given as a directory or by its name."""
    if Path(root).is_dir():
        return Path(root)
    from etude.data.module import find_dataset

    return find_dataset(root)


def inspect_dataset(root: str, *, as_json: bool) -> None:
    """Check a dataset and print what it holds."""
    from etude.data.lerobot.source import LeRobotSource
    from etude.data.windows import role_of

    # Every frame of every camera is looked for; none is decoded.
    source = LeRobotSource(find(root), cache_gb=0.0, warn=False, show_progress=False)
    info, episodes = source.info, source.episodes
    counted = Counter(source.columns["task_index"][episodes.starts].tolist())
    size_bytes = sum(path.stat().st_size for path in source.root.rglob("*") if path.is_file())
    facts: dict[str, Any] = {
        "root": str(source.root), "version": info.version, "robot_type": info.robot_type, "fps": info.fps,
        "episodes": len(episodes), "frames": info.total_frames, "duration_s": info.total_frames / info.fps,
        "shortest": int(episodes.lengths.min()), "longest": int(episodes.lengths.max()), "size_bytes": size_bytes,
    }  # fmt: skip
    features: list[dict[str, Any]] = [
        {
            "name": name, "dtype": feature.dtype, "shape": list(feature.shape),
            "role": "image" if feature.is_camera else role_of(name), "names": feature.dimension_names,
        }
        for name, feature in info.features.items()
    ]  # fmt: skip
    tasks = [{"index": i, "task": text, "episodes": counted.get(i, 0)} for i, text in enumerate(source.tasks)]
    if as_json:
        print_json({**facts, "features": features, "tasks": tasks})
        return
    say(f"{facts['root']}: LeRobot {info.version}, robot {info.robot_type or 'unknown'}, {info.fps:g} frames a second")
    say(
        f"{len(episodes)} episodes of {facts['shortest']} to {facts['longest']} frames, {info.total_frames} frames, "
        f"{_duration(facts['duration_s'])}, {size_bytes / 1e6:.1f} MB; every frame is in order"
    )
    say()
    rows = [(f["name"], f["dtype"], " x ".join(map(str, f["shape"])), f["role"]) for f in features]
    print_table(("feature", "dtype", "shape", "role"), rows)
    say()
    listed = [(str(task["index"]), str(task["task"]), str(task["episodes"])) for task in tasks]
    print_table(("task", "text", "episodes"), listed, right=(2,))


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def print_stats(root: str, episodes: str | None, *, as_json: bool) -> None:
    """Print the statistics of every feature."""
    dataset = _open(root, parse_episodes(episodes))
    stats = dataset.stats
    if as_json:
        print_json({name: {kind: value.tolist() for kind, value in one.items()} for name, one in stats.items()})
        return
    rows = []
    for name, found in stats.items():
        flat = {kind: found[kind].reshape(-1) for kind in _SHOWN}
        count = len(flat["mean"])
        labels: Any = dataset.source.info.features[name].dimension_names
        if name in dataset.cameras:
            labels = ("red", "green", "blue") if count == 3 else ("grey",)
        for place in range(count):
            label = labels[place] if labels else str(place)
            rows.append((name if place == 0 else "", label, *(f"{flat[kind][place]:.4g}" for kind in _SHOWN)))
    print_table(("feature", "dimension", *_SHOWN), rows, right=range(2, 2 + len(_SHOWN)))
    say(f"over {len(dataset)} frames of {dataset.num_episodes} episodes; pictures in 0..1")


def convert_recording(
    source: Path,
    target: Path,
    *,
    format_: str,
    fps: float | None,
    task: str | None,
    images: str,
    renames: Sequence[str] = (),
) -> None:
    """Convert a recording, counting episodes in a terminal."""
    from etude.data.convert import convert

    if fps is not None and not fps > 0:
        raise ConfigError(f"--fps must be positive, got {fps}")

    def count(done: int, total: int) -> None:
        if in_terminal():
            sys.stdout.write(f"\r{done}/{total} episodes" + ("\n" if done == total else ""))
            sys.stdout.flush()

    made = convert(
        source, target, format=format_, fps=fps, task=task, images=images,  # type: ignore[arg-type]
        rename=_pairs(renames), on_episode=count,
    )  # fmt: skip
    say(
        f"{made.root}: {made.episodes} episodes, {made.frames} frames of {made.format} at {made.fps:g} a second, "
        f"task {made.task!r}"
    )


def _pairs(renames: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in renames:
        old, mark, new = text.partition("=")
        if not (old and mark and new) or old in pairs:
            raise ConfigError(f"--rename {text!r}: write OLD=NEW, once for each feature")
        pairs[old] = new
    return pairs


def parse_episodes(text: str | None) -> list[int] | None:
    """Read `0-9,12` as a list of episodes."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--episodes must look like 0-9,12, got {text!r}")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def _open(root: str, episodes: list[int] | None, **options: Any) -> LeRobotDataset:
    from etude.data.lerobot.reader import LeRobotDataset
    from etude.data.lerobot.source import LeRobotSource

    source = LeRobotSource(find(root), **options, warn=not options)
    return LeRobotDataset(source, episodes)
