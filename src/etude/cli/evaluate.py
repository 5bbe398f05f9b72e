"""`etude evaluate`: success of a policy in simulation, with its interval, as a table, JSON, CSV and films."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.acting import find_policy, read_options
from etude.cli.counting import Counting
from etude.cli.environments import find_environments, plain_name
from etude.cli.output import print_json, print_table, say
from etude.errors import ConfigError
from etude.registry import load_plugins

if TYPE_CHECKING:
    from etude.simulation.results import EpisodeRow, EvaluationResult, Rate


MOST_GROUPS = 12
"""Groups of failures that are printed."""


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
    diagnose: bool = True,
    samples: int = 0,
) -> None:
    """Evaluate a policy, keep the result, and print it."""
    gc.enable()  # switched off for the start by `main`
    load_plugins(list(plugins))
    envs = find_environments(envs)
    options = read_options(settings, None, None)
    policy = find_policy(source, which)
    output = output or default_output(source)
    from etude.runs.durable import require_place
    from etude.simulation.diagnosis import DiagnosisOptions
    from etude.simulation.evaluate import evaluate_policy

    if samples and not diagnose:
        raise ConfigError("--samples is part of the diagnosis; leave out --no-diagnose")
    stem = output / f"{plain_name(envs)}-{split}"
    require_place(stem.with_name(f"{stem.name}.json"))
    total = episodes * len(envs)
    with _Showing(total, min(videos, total), stem, as_json=as_json) as showing:
        result = evaluate_policy(
            policy, list(envs), episodes=episodes, split=split, seed=seed, slots=slots, workers=workers,
            video_dir=output / "videos" if videos else None, videos=videos, options=options,
            on_episode=showing.show_episode, on_film=showing.show_film,
            diagnosis=DiagnosisOptions(samples=samples) if diagnose else None,
        )  # fmt: skip
    result.keep(stem)
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
        self._seen: list[EpisodeRow] = []

    def show_episode(self, row: EpisodeRow) -> None:
        self._seen.append(row)
        self._episodes.show(len(self._seen), tell_so_far(self._seen))

    def show_film(self, result: EvaluationResult) -> None:
        if result.videos:
            self._films.show(len(result.videos))
            return
        self._episodes.close()
        result.keep(self._stem)  # whatever becomes of the films
        if not self._as_json:
            print_result(result)
            sys.stdout.flush()

    def __enter__(self) -> _Showing:
        return self

    def __exit__(self, *_: object) -> None:
        self._films.close()
        self._episodes.close()


def print_result(result: EvaluationResult) -> None:
    """Print the rate of each task, and of all together if there are several."""
    rates = result.tasks if len(result.tasks) == 1 else [*result.tasks, result.total]
    if any(rate.knows_success for rate in rates):
        heads = ("env", "succeeded", "rate", "95 % interval", "steps", "reward")
        print_table(heads, [_success_row(rate) for rate in rates], right=(1, 2, 4, 5))
    else:
        short = ("env", "episodes", "reward", "95 % interval", "steps")
        print_table(short, [_reward_row(rate) for rate in rates], right=(1, 2, 4))
    if result.policy:
        say(f"policy: {result.policy}")
    timing: dict[str, Any] = dict(result.timing)
    text = f"{timing['seconds']:.1f} s, {timing['env_steps_per_s']:.0f} environment steps/s"
    if "policy_ms_mean" in timing:
        text += f", policy {timing['policy_ms_mean']:.2f} ms a step (99 %: {timing['policy_ms_p99']:.2f} ms)"
    say(text)
    print_failures(result)


def print_failures(result: EvaluationResult) -> None:
    """Print a line for each group of failures, if it is known why episodes failed."""
    if result.diagnosis is None:
        return
    groups, several = result.diagnosis.groups, len(result.tasks) > 1
    for group in groups[:MOST_GROUPS]:
        say(f"{group.env}: {group}" if several else str(group))
    if len(groups) > MOST_GROUPS:
        say(f"and {len(groups) - MOST_GROUPS} more groups of failures, in the report")


def _success_row(rate: Rate) -> tuple[str, ...]:
    low, high = rate.interval
    known = (f"{rate.successes}/{rate.episodes}", f"{rate.success:.1%}", f"{low:.1%} to {high:.1%}")
    told = known if rate.knows_success else (f"-/{rate.episodes}", "-", "-")
    return (rate.name, *told, f"{rate.mean_steps:.0f}", f"{rate.mean_reward:.4g}")


def _reward_row(rate: Rate) -> tuple[str, ...]:
    ends = "-" if rate.reward_interval is None else "{:.4g} to {:.4g}".format(*rate.reward_interval)
    return rate.name, str(rate.episodes), f"{rate.mean_reward:.4g}", ends, f"{rate.mean_steps:.0f}"


def tell_so_far(rows: Sequence[EpisodeRow]) -> str:
    """Return how the episodes so far went, in a few words."""
    if all(row.success is None for row in rows):
        return f"mean reward {sum(row.reward for row in rows) / max(1, len(rows)):.4g}"
    return f"{sum(bool(row.success) for row in rows)} succeeded"


def default_output(source: str) -> Path:
    """Return where results go unless told: beside what was evaluated."""
    if source == "expert" or ".py:" in source:
        return Path("evaluation")
    from etude.cli.runs import find_run

    path = find_run(source)
    is_checkpoint = (path / "manifest.json").is_file()
    return (path.resolve().parent.parent if is_checkpoint else path) / "evaluation"
