"""`etude evaluate`: success of a policy in simulation, with its interval, as a table, JSON, CSV and films."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.acting import find_policy, read_options
from etude.cli.counting import Counting
from etude.cli.output import print_json, print_table, say
from etude.registry import load_plugins

if TYPE_CHECKING:
    from etude.simulation.results import EpisodeRow, EvaluationResult


def evaluate_source(
    source: str,
    envs: Sequence[str],
    *,
    episodes: int,
    split: str,
    seed: int,
    slots: int | None,
    workers: int,
    videos: int,
    which: str,
    output: Path | None,
    settings: Sequence[str],
    as_json: bool,
    plugins: Sequence[str] = (),
) -> None:
    """Evaluate a policy, keep the result, and print it."""
    gc.enable()  # switched off for the start by `main`
    load_plugins(list(plugins))
    options = read_options(settings, None, None)
    policy = find_policy(source, which)
    output = output or default_output(source)
    from etude.simulation.evaluate import evaluate_policy

    stem = output / f"{'+'.join(env.replace('/', '-').replace(':', '-') for env in envs)}-{split}"
    total = episodes * len(envs)
    with _Showing(total, min(videos, total), stem, as_json=as_json) as showing:
        result = evaluate_policy(
            policy, list(envs), episodes=episodes, split=split, seed=seed, slots=slots, workers=workers,
            video_dir=output / "videos" if videos else None, videos=videos, options=options,
            on_episode=showing.show_episode, on_film=showing.show_film,
        )  # fmt: skip
    _keep(result, stem)
    if as_json:
        print_json(result.to_dict())
        return
    if not videos:
        print_result(result)
    for path in result.videos:
        say(f"video: {path}")
    say(f"results: {stem}.json, {stem}.csv")


class _Showing:
    """Counts episodes, tells the rate as soon as it is known, and counts films."""

    def __init__(self, episodes: int, films: int, stem: Path, *, as_json: bool) -> None:
        self._episodes, self._films = Counting("episode", episodes), Counting("film", films)
        self._stem, self._as_json = stem, as_json
        self._seen: list[bool] = []

    def show_episode(self, row: EpisodeRow) -> None:
        self._seen.append(row.success)
        self._episodes.show(len(self._seen), f"{sum(self._seen)} succeeded")

    def show_film(self, result: EvaluationResult) -> None:
        if result.videos:
            self._films.show(len(result.videos))
            return
        self._episodes.close()
        _keep(result, self._stem)  # whatever becomes of the films
        if not self._as_json:
            print_result(result)
            sys.stdout.flush()

    def __enter__(self) -> _Showing:
        return self

    def __exit__(self, *_: object) -> None:
        self._films.close()
        self._episodes.close()


def _keep(result: EvaluationResult, stem: Path) -> None:
    result.to_json(stem.with_name(stem.name + ".json"))
    result.to_csv(stem.with_name(stem.name + ".csv"))


def print_result(result: EvaluationResult) -> None:
    """Print the rate of each task, and of all together if there are several."""
    rates = result.tasks if len(result.tasks) == 1 else [*result.tasks, result.total]
    rows = [
        (
            rate.name,
            f"{rate.successes}/{rate.episodes}",
            f"{rate.success:.1%}",
            f"{rate.interval[0]:.1%} to {rate.interval[1]:.1%}",
            f"{rate.mean_steps:.0f}",
            f"{rate.mean_reward:.4g}",
        )
        for rate in rates
    ]
    print_table(("env", "succeeded", "rate", "95 % interval", "steps", "reward"), rows, right=(1, 2, 4, 5))
    timing: dict[str, Any] = dict(result.timing)
    text = f"{timing['seconds']:.1f} s, {timing['env_steps_per_s']:.0f} environment steps/s"
    if "policy_ms_mean" in timing:
        text += f", policy {timing['policy_ms_mean']:.2f} ms a step (99 %: {timing['policy_ms_p99']:.2f} ms)"
    say(text)


def default_output(source: str) -> Path:
    """Return where results go unless told: beside what was evaluated."""
    if source == "expert" or ".py:" in source:
        return Path("evaluation")
    from etude.cli.runs import find_run

    path = find_run(source)
    is_checkpoint = (path / "manifest.json").is_file()
    return (path.resolve().parent.parent if is_checkpoint else path) / "evaluation"
