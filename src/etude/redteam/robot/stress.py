"""`stress_policy`: search what makes a robot policy fail, beside chance with as many episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import nn

from etude.errors import ConfigError, DataError
from etude.redteam.robot.disturbances import DisturbanceSpace, make_space
from etude.redteam.robot.environment import DisturbedEnvironment, units_of
from etude.redteam.robot.page import write_page
from etude.redteam.robot.results import RANDOM, STRESS_FILE, StressEpisode, StressResult, read_stress
from etude.redteam.robot.search import propose_by_chance, propose_cross_entropy
from etude.runs.lock import DirectoryLock
from etude.simulation.actors import make_actor
from etude.simulation.diagnosis import Diagnosis, DiagnosisOptions
from etude.simulation.environments import make_environment
from etude.simulation.environments.base import Array, Environment
from etude.simulation.evaluate import AnyPolicy, environment_options, evaluate_policy
from etude.simulation.results import EpisodeRow
from etude.simulation.seeds import episode_seed

SearchName = Literal["cross_entropy", "adversary", "random"]
SEARCHES: tuple[SearchName, ...] = ("cross_entropy", "adversary", "random")
SPLIT = "train"
FIRST = {RANDOM: 4 << 20, "cross_entropy": 5 << 20, "adversary": 6 << 20}
"""The first episode of each search: far from those that are recorded, and from each other."""
ROUND = 10
"""Episodes of a round. The next ones follow from what they found."""

__all__ = ["SEARCHES", "StressResult", "StressStage", "read_stress", "stress_policy"]


@dataclass
class StressStage:
    """Everything that playing disturbed episodes needs."""

    policy: AnyPolicy
    env: str
    options: Mapping[str, Any]
    space: DisturbanceSpace
    units: Mapping[str, Array]
    seed: int
    max_steps: int
    tasks: Mapping[str, int] | None = None
    workers: int = 0
    slots: int | None = None

    def wrap(self, plan: Mapping[int, Array]) -> Callable[[Environment], Environment]:
        """Return what disturbs an environment by vectors, by number of the episode."""
        by_seed = {episode_seed(self.seed, SPLIT, number): vector for number, vector in plan.items()}
        return lambda env: DisturbedEnvironment(env, self.space, by_seed, self.units)

    def play(
        self, plan: Mapping[int, Array], on_episode: Callable[[EpisodeRow], None] | None = None
    ) -> list[StressEpisode]:
        """Play episodes with their vectors, by number."""
        found = evaluate_policy(
            self.policy, self.env, episodes=list(plan), split=SPLIT, seed=self.seed, slots=self.slots,
            workers=self.workers, options=self.options, tasks=self.tasks, wrap=self.wrap(plan),
            on_episode=on_episode, diagnosis=DiagnosisOptions(film_samples=0),
        )  # fmt: skip
        return self.judge(found.rows, plan, found.diagnosis)

    def judge(
        self, rows: Sequence[EpisodeRow], plan: Mapping[int, Array], why: Diagnosis | None = None
    ) -> list[StressEpisode]:
        """Return episodes with their likelihood, and with what is known about them."""
        for row in rows:
            if row.success is None:
                raise ConfigError(
                    f"{self.env} does not say whether an episode succeeded, so that nothing tells a failure; say what "
                    "does, as with --option success_return=475 of gym environments"
                )
        known = next(iter(why.environments), None) if why is not None else None
        scenes = {} if known is None else known.scenes
        titles = {} if known is None else {one.episode: one.title for one in known.findings}
        return [
            StressEpisode.of(
                self.space, plan[row.episode], row, self.max_steps, scenes.get(row.episode, {}),
                titles.get(row.episode, ""),
            )
            for row in rows
        ]  # fmt: skip

    def film(self, episodes: Sequence[StressEpisode], folder: Path) -> tuple[Path, ...]:
        """Play episodes once more, with a camera."""
        plan = {one.number: np.array(one.vector) for one in episodes}
        found = evaluate_policy(
            self.policy, self.env, episodes=list(plan), split=SPLIT, seed=self.seed, options=self.options,
            tasks=self.tasks, wrap=self.wrap(plan), video_dir=folder, videos=len(plan),
        )  # fmt: skip
        return tuple(found.videos)


def stress_policy(
    policy: AnyPolicy,
    env: str,
    folder: Path | str,
    *,
    search: Sequence[SearchName] = ("cross_entropy",),
    episodes: int = 200, baseline: bool = True,
    disturb: Sequence[str] = (), strength: float = 1.0,
    seed: int = 0, workers: int = 0, slots: int | None = None,
    options: Mapping[str, Any] | None = None, tasks: Mapping[str, int] | None = None,
    videos: int = 6, policy_name: str = "",
    on_episode: Callable[[str, int, int], None] | None = None,
) -> StressResult:  # fmt: skip
    """Search what makes a policy fail, and leave every episode, films of likely failures and a page in a folder.

    A search that was interrupted, or is to be longer, goes on where it was.

    Args:
        policy: A policy, a function of an observation, or "expert" for the environment's own.
        env: The environment.
        folder: Where results go; one with another search in it is refused.
        search: How to search: cross_entropy, adversary (one that learns), random.
        episodes: Episodes of each search.
        baseline: Whether as many episodes are drawn by chance, to compare with.
        disturb: Kinds of disturbance, perhaps with a strength, as in push=0.5; none takes all that the environment has.
        strength: What all strengths are multiplied by.
        seed: The root of all randomness.
        workers: Processes that share the episodes; 0 runs them here.
        slots: Episodes side by side in each process.
        options: Parameters of the environment.
        tasks: Index of each task by its text, for policies that were trained on several.
        videos: Likely failures to film.
        policy_name: How the results name the policy.
        on_episode: Called with the search, the episodes that it has had and the failures among them.
    """
    _check(search, episodes)
    stage = prepare_stage(policy, env, disturb, strength, seed, options, tasks, workers, slots)
    names = list(dict.fromkeys([*search, *([RANDOM] if baseline else [])]))
    folder = Path(folder)
    with DirectoryLock(folder):
        result = _open(stage, folder, policy_name)
        for name in names:
            run_search(stage, result, name, episodes, folder, on_episode)
        _keep(result, folder)  # whatever becomes of the films
        if videos > 0:
            result.videos = _films(stage, result, folder, videos)
            _keep(result, folder)
    return result


def _keep(result: StressResult, folder: Path) -> None:
    result.write(folder)
    write_page(result, folder)


def _check(search: Sequence[str], episodes: int) -> None:
    if episodes < 1:
        raise ConfigError(f"a search needs at least one episode, got {episodes}")
    for name in search:
        if name not in SEARCHES:
            raise ConfigError(f"there is no search {name!r}; there are {', '.join(SEARCHES)}")
    if not search:
        raise ConfigError(f"say how to search: {', '.join(SEARCHES)}")


def prepare_stage(
    policy: AnyPolicy, env: str, disturb: Sequence[str], strength: float, seed: int,
    options: Mapping[str, Any] | None, tasks: Mapping[str, int] | None, workers: int, slots: int | None,
) -> StressStage:  # fmt: skip
    """Return the stage, after a look at the environment: whether the policy fits, and what may disturb it."""
    actor = make_actor(policy, tasks=tasks)
    given = environment_options(actor, [env], options)[env]
    with closing(make_environment(env, **given)) as looked_at:
        actor.check(looked_at)
        space, max_steps = make_space(looked_at, disturb, strength), looked_at.max_steps
    units = units_of(getattr(policy, "spec", None))
    return StressStage(policy, env, given, space, units, seed, max_steps, tasks, workers, slots)


def _open(stage: StressStage, folder: Path, policy_name: str) -> StressResult:
    """Return what a folder holds of this search; refuse one that holds another."""
    settings = {
        "env": stage.env, "options": dict(stage.options), "policy": policy_name or _name(stage.policy),
        "weights": fingerprint(stage.policy), "seed": stage.seed, "space": stage.space.describe(),
    }  # fmt: skip
    if not (folder / STRESS_FILE).exists():
        return StressResult(settings, stage.space, {})
    found = read_stress(folder)
    for key, value in settings.items():
        if found.settings.get(key) != value and key != "policy":
            raise DataError(
                f"{folder} holds a search with another {key}: {found.settings.get(key)!r}, not {value!r}; choose "
                "another folder with --output, or delete it"
            )
    return found


def run_search(
    stage: StressStage, result: StressResult, name: str, episodes: int, folder: Path,
    on_episode: Callable[[str, int, int], None] | None = None,
) -> None:  # fmt: skip
    """Go on with a search until it has had so many episodes; what is found is written round by round."""
    if name == "adversary":
        from etude.redteam.robot.adversary import train_adversary

        train_adversary(stage, result, episodes, folder, on_episode)
        return
    known = result.searches.setdefault(name, [])
    while len(known) < episodes:
        done = len(known)
        count = min(ROUND - done % ROUND, episodes - done)
        vectors = propose(stage, result, name, done)[:count]
        failures = sum(one.failed for one in known)
        tally = [done, failures]

        def tell(row: EpisodeRow, tally: list[int] = tally) -> None:
            tally[0] += 1
            tally[1] += not row.success
            if on_episode is not None:
                on_episode(name, *tally)

        plan = {FIRST[name] + done + place: vector for place, vector in enumerate(vectors)}
        known += stage.play(plan, tell)
        result.write(folder)


def propose(stage: StressStage, result: StressResult, name: str, done: int) -> Array:
    """Return the vectors that are left of a round: what a round looks at follows from the rounds before it alone."""
    number, place = divmod(done, ROUND)
    if name == RANDOM:
        return propose_by_chance(stage.space, stage.seed, done, ROUND - place)
    before = StressResult({}, stage.space, {name: result.searches[name][: number * ROUND]}).tried(name)
    return propose_cross_entropy(stage.space, stage.seed, number, ROUND, before)[place:]


def _films(stage: StressStage, result: StressResult, folder: Path, most: int) -> tuple[Path, ...]:
    """Film the likeliest failures; a film that is there is not made again."""
    wanted = [one for _, one in result.likeliest(most)]
    made = {path.name.rsplit("-", 2)[1]: path for path in (folder / "videos").glob("*.mp4")}
    missing = [one for one in wanted if str(one.number) not in made]
    paths = [*made.values(), *(stage.film(missing, folder / "videos") if missing else ())]
    by_number = {path.name.rsplit("-", 2)[1]: path for path in paths}
    return tuple(by_number[str(one.number)] for one in wanted if str(one.number) in by_number)


def fingerprint(policy: AnyPolicy) -> str:
    """Return what tells the weights of a policy from others; nothing for a function."""
    if not isinstance(policy, nn.Module):
        return ""
    digest = xxhash.xxh3_128()
    for name, value in policy.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _name(policy: AnyPolicy) -> str:
    return policy if isinstance(policy, str) else type(policy).__name__
