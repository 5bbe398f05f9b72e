"""An adversary that learns: what happens to the robot is its action, and likely failures are what it earns.

It decides when an episode begins (start, latency, noise, cameras and the first push) and at the beginning of the part
of the window that each later push falls into, when it sees what the policy sees. It draws what it does, and begins as
chance does. An ordinary `Trainer` trains it, with an actor and a critic (`actor_critic`) and PPO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.algorithms.ppo import PPO
from etude.config.training import TrainingConfiguration
from etude.policies.actor_critic import ActorCritic
from etude.redteam.robot.environment import DisturbedEnvironment
from etude.redteam.robot.results import StressEpisode, StressResult
from etude.redteam.robot.search import PRICE
from etude.rng import fold_more
from etude.rollouts.explore import EnvironmentRollouts
from etude.simulation.actors import Actor, Seat, make_actor
from etude.simulation.environments import make_environment
from etude.simulation.environments.base import Array, HasScene, Observation, StepOutcome
from etude.simulation.episodes import EnvironmentPool
from etude.simulation.results import EpisodeRow
from etude.simulation.seeds import episode_key, episode_seed
from etude.trainer import Trainer
from etude.types import DataSpec, Feature
from etude.types.names import ACTION, STATE
from etude.types.protocols import Place

if TYPE_CHECKING:
    from etude.redteam.robot.stress import StressStage

SEARCH, FOLDER = "adversary", "adversary"
EPISODES_PER_STEP = 25
_SPLIT, _FIRST = "train", 6 << 20
_LIMIT = 10.0


class AdversaryEnvironment:
    """Where an adversary acts: an action is what happens next, and the policy's episode goes on until the next one.

    Actions are standard normal numbers where nothing is learned; those that stand for uniform numbers become such.

    Args:
        stage: The policy that is disturbed, and its environment.
        actor: Who acts there, in a slot of its own.
        slot: That slot.
        numbers: The number of the episode that begins with a seed.
        keep: Called with each episode that has ended.
    """

    fps = 1.0

    def __init__(
        self, stage: StressStage, actor: Actor, slot: int, numbers: Mapping[int, int],
        keep: Callable[[StressEpisode], None],
    ) -> None:  # fmt: skip
        self._stage, self._actor, self._slot, self._numbers, self._keep = stage, actor, slot, numbers, keep
        self._inner = make_environment(stage.env, **stage.options)
        space = stage.space
        self._env = DisturbedEnvironment(self._inner, space, {}, stage.units)
        self.task = f"make the policy fail: {self._inner.task}"
        self.max_steps = space.pushes if "push" in space.strengths else 1
        pushes = np.zeros(len(space.names), bool)
        if "push" in space.strengths:
            pushes[space.slice_of("push")] = True
        self._once, per_push = np.flatnonzero(~pushes), int(pushes.sum()) // self.max_steps
        self._each = [np.flatnonzero(pushes)[at * per_push : (at + 1) * per_push] for at in range(self.max_steps)]
        shown = [f for f in self._inner.spec.features.values() if f.role in ("state", "environment")]
        self._size = sum(math.prod(one.shape) for one in shown)
        self.spec = DataSpec({
            STATE: Feature((self.max_steps + self._size,), "float32", "state"),
            ACTION: Feature((len(self._once) + per_push,), "float32", "action"),
        }, self.fps)  # fmt: skip

    def reset(self, seed: int) -> Observation:
        """Wait for the first decision; nothing is seen yet."""
        self._number = self._numbers[seed]
        self._seed = episode_seed(self._stage.seed, _SPLIT, self._number)
        self._vector = np.where(self._stage.space.is_uniform, 0.5, 0.0)
        self._decision = self._steps = 0
        self._reward, self._success = 0.0, False
        self._scene: dict[str, float] = {}
        return self._shown(None)

    def step(self, action: Array) -> StepOutcome:
        """Let happen what was decided until the next decision, or to the end."""
        cost = self._decide(np.asarray(action, np.float64))
        space, stage = self._stage.space, self._stage
        until = self._inner.max_steps
        if self._decision + 1 < self.max_steps:
            until = int(space.window / space.pushes * (self._decision + 1))
        with self._actor.session():
            done = self._play(until)
        self._decision += 1
        done = done or self._decision == self.max_steps
        reward = -cost
        if done:
            row = EpisodeRow(
                stage.env, self._inner.task, self._number, self._seed, self._success, self._steps, self._reward
            )
            found = StressEpisode.of(space, self._vector, row, stage.max_steps, self._scene)
            reward += 1.0 if found.failed else 0.5 * found.steps / stage.max_steps
            self._keep(found)
        return StepOutcome(self._shown(self._observation), reward, done, False, not self._success if done else None, {})

    def _decide(self, action: Array) -> float:
        """Put a decision into the vector, within what is plausible; return what its unlikelihood costs."""
        space = self._stage.space
        first = self._decision == 0
        places = np.concatenate([self._once, self._each[0]]) if first else self._each[self._decision]
        chosen = action if first else action[len(self._once) :]
        uniform = space.is_uniform[places]
        spent = float(np.square(self._vector[~space.is_uniform]).sum())
        squares = float(np.square(chosen[~uniform]).sum())
        room = max(0.0, space.most_unlikely - spent)
        normal = chosen * min(1.0, math.sqrt(room / squares) if squares else 1.0)
        shares = [0.5 * (1.0 + math.erf(value / math.sqrt(2.0))) for value in chosen]
        self._vector[places] = np.where(uniform, shares, normal)
        used = float(np.square(normal[~uniform]).sum())
        return PRICE * used / max(1, int((~space.is_uniform).sum()))

    def _play(self, until: int) -> bool:
        """Let the policy act up to a step; return whether the episode has ended."""
        if self._decision == 0:
            self._env.plan = {self._seed: self._vector}
            self._observation = self._env.reset(self._seed)
            self._actor.reset(self._slot)
            if isinstance(self._inner, HasScene):
                self._scene = {name: float(value) for name, value in self._inner.scene().items()}
        else:
            self._env.disturb(self._vector)
        key = episode_key(self._stage.seed, _SPLIT, self._number)
        while self._steps < until:
            seat = Seat(self._slot, self._env, self._observation, fold_more(key, self._steps))
            outcome = self._env.step(self._actor.act([seat])[0])
            self._observation = outcome.observation
            self._steps += 1
            self._reward += outcome.reward
            self._success = self._success or outcome.success is True
            if outcome.done:
                return True
        return self._steps >= self._inner.max_steps

    def _shown(self, observation: Observation | None) -> Observation:
        turn = np.eye(self.max_steps, dtype=np.float32)[min(self._decision, self.max_steps - 1)]
        seen = np.zeros(self._size, np.float32)
        if observation is not None:
            parts = [
                np.ravel(observation[name] / np.maximum(self._stage.units.get(name, np.ones(())), 1e-6))
                for name, feature in self._inner.spec.features.items()
                if feature.role in ("state", "environment")
            ]
            seen = np.clip(np.concatenate(parts), -_LIMIT, _LIMIT).astype(np.float32) if parts else seen
        return {STATE: np.concatenate([turn, seen])}

    def render(self) -> Array:
        """Return a picture of the robot."""
        return self._inner.render()

    def close(self) -> None:
        """Close the robot's environment."""
        self._inner.close()


class AdversaryRollouts(EnvironmentRollouts):
    """Episodes in which an adversary disturbs a policy.

    Args:
        stage: The policy that is disturbed, and its environment.
        episodes: Episodes of the whole search.
        on_episode: Called with each episode that has ended.
        on_round: Called when those of a step have.
    """

    def __init__(
        self, stage: StressStage, episodes: int, on_episode: Callable[[StressEpisode], None],
        on_round: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__("adversary", EPISODES_PER_STEP, slots=1, step_timeout_s=None, on_error="stop")
        self._stage, self._on_round = stage, on_round
        self._numbers: dict[int, int] = {}
        self._episodes_in_all = episodes
        actor = make_actor(stage.policy, tasks=stage.tasks)
        self._pool = EnvironmentPool({}, lambda _: AdversaryEnvironment(stage, actor, 0, self._numbers, on_episode))

    def open(self, place: Place) -> None:
        """Learn which episode begins with which seed."""
        super().open(place)
        total = math.ceil(self._episodes_in_all / EPISODES_PER_STEP) * EPISODES_PER_STEP
        self._numbers.update({episode_seed(place.seed, _SPLIT, one): _FIRST + one for one in range(total)})

    def _play(self, episodes: Sequence[int]) -> None:
        super()._play(episodes)
        self._on_round()


def train_adversary(
    stage: StressStage, result: StressResult, episodes: int, folder: Path,
    on_episode: Callable[[str, int, int], None] | None = None,
) -> None:  # fmt: skip
    """Train an adversary for so many episodes, all of which are what it found; one that was interrupted goes on."""
    known = {one.number: one for one in result.searches.get(SEARCH, [])}

    def keep(found: StressEpisode) -> None:
        known[found.number] = found
        if on_episode is not None and len(known) <= episodes:
            on_episode(SEARCH, len(known), sum(one.failed for one in known.values()))

    def write() -> None:
        ordered = [known[number] for number in sorted(known)]
        result.searches[SEARCH] = ordered[:episodes]
        result.write(folder)

    if len(known) < episodes:
        data: Any = AdversaryRollouts(stage, episodes, keep, write)
        steps = math.ceil(episodes / EPISODES_PER_STEP)
        config = TrainingConfiguration(
            seed=stage.seed, training_steps=steps, lr=3e-3, batch_size=EPISODES_PER_STEP, log_every=1, save_every=1,
            device="cpu",
        )  # fmt: skip
        algorithm = PPO(gamma=1.0, epochs=8, minibatches=2, value_clip=None)
        trainer = Trainer(
            ActorCritic(hidden=[32, 32]), data, algorithm, config=config, run=folder / FOLDER, loggers=[],
            show_progress=False,
        )  # fmt: skip
        trainer.fit()
    write()
