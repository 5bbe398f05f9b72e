"""What `etude redteam robot` does."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.acting import find_policy, read_options
from etude.cli.counting import Counting
from etude.cli.environments import plain_name
from etude.cli.evaluate import default_output
from etude.cli.output import print_json, print_table, say
from etude.registry import load_plugins

if TYPE_CHECKING:
    from etude.redteam.robot import StressResult


@dataclass(frozen=True)
class StressOptions:
    """What was asked for."""

    env: str
    search: Sequence[str]
    episodes: int
    baseline: bool
    disturb: Sequence[str]
    strength: float
    seed: int
    workers: int
    videos: int
    which: str
    output: Path | None
    to_dataset: Path | None
    settings: Sequence[str]
    plugins: Sequence[str]
    as_json: bool


def stress(source: str, asked: StressOptions) -> None:
    """Search what makes a policy fail, keep it, and say what was found."""
    gc.enable()  # switched off for the start by `main`
    load_plugins(list(asked.plugins))
    options = read_options(asked.settings, None, None)
    policy = find_policy(source, asked.which)
    from etude.data.lerobot.commit import require_own_folder
    from etude.redteam.robot.demonstrations import require_expert
    from etude.redteam.robot.results import STRESS_FILE
    from etude.redteam.robot.stress import stress_policy
    from etude.runs.durable import require_place

    if asked.to_dataset is not None:  # before the search rather than after it
        require_expert(asked.env, options)
        require_own_folder(asked.to_dataset)
        require_place(asked.to_dataset / "README.md")
    folder = asked.output or default_output(source).parent / "stress" / plain_name([asked.env])
    require_place(folder / STRESS_FILE)
    with _CountingSearches(asked.episodes) as telling:
        result = stress_policy(
            policy, asked.env, folder, search=list(asked.search),  # type: ignore[arg-type]
            episodes=asked.episodes, baseline=asked.baseline, disturb=asked.disturb, strength=asked.strength,
            seed=asked.seed, workers=asked.workers, options=options, videos=asked.videos, policy_name=source,
            on_episode=telling.show,
        )  # fmt: skip
    if asked.as_json:
        print_json({"folder": str(folder), "summary": result.to_dict()["summary"]})
    else:
        print_result(result, folder)
    if asked.to_dataset is not None:
        _demonstrate(policy, result, asked)


class _CountingSearches:
    """Counts the episodes of each search."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._counts: dict[str, Counting] = {}

    def show(self, search: str, done: int, failures: int) -> None:
        if search not in self._counts:
            self.close()
            self._counts[search] = Counting(f"{search}: episode", self._episodes)
        self._counts[search].show(done, f"{failures} failed")

    def close(self) -> None:
        for count in self._counts.values():
            count.close()

    def __enter__(self) -> _CountingSearches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def print_result(result: StressResult, folder: Path) -> None:
    """Print how each search went, and the likeliest failure."""
    heads = ("search", "episodes", "failures", "distinct", "of all", "95 % interval", "likeliest", "median")
    print_table(heads, [_row(tally) for tally in result.tallies], right=(1, 2, 3, 4, 6, 7))
    for tally in result.tallies:
        times = result.advantage(tally.name)
        if tally.name != "random" and times is not None:
            say(f"{tally.name}: {times:.1f} times as many distinct failures as random")
    for _, one in result.likeliest(1):
        import numpy as np

        told = "; ".join(result.space.tell(np.array(one.vector)))
        say(
            f"likeliest failure: episode {one.number}{f', {one.what}' if one.what else ''}{f': {told}' if told else ''}"
        )
    for path in result.videos:
        say(f"video: {path}")
    say(f"results: {folder / 'stress.json'}, {folder / 'stress.html'}")


def _row(tally: Any) -> tuple[str, ...]:
    low, high = tally.interval
    shares = ("-" if value is None else f"{value:.1%}" for value in (tally.likeliest, tally.median))
    counts = (str(tally.episodes), str(tally.failures), str(tally.distinct))
    return (tally.name, *counts, f"{tally.rate:.1%}", f"{low:.1%} to {high:.1%}", *shares)


def _demonstrate(policy: Any, result: StressResult, asked: StressOptions) -> None:
    from etude.redteam.robot.demonstrations import record_failures
    from etude.redteam.robot.environment import units_of

    assert asked.to_dataset is not None
    counting = Counting("demonstration", len(result.likeliest()))
    try:
        done = record_failures(
            result, asked.to_dataset, units=units_of(getattr(policy, "spec", None)),
            on_episode=lambda saved, attempts: counting.show(attempts, f"{saved} succeeded"),
        )  # fmt: skip
    finally:
        counting.close()
    if not asked.as_json:
        say(f"demonstrated: {done.episodes} of {done.attempts} failures, {done.frames} frames in {done.root}")
        say(f"look at it: etude data inspect {shlex.quote(str(done.root))}")
