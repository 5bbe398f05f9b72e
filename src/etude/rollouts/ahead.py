"""One step ahead: while a step trains, a thread draws and rewards the rollouts of the next one.

It draws with a copy of the policy that is taken before the step's update, so that rollouts are exactly one version old
when they are trained on; their log-probabilities are those of the copy, which is what ratios are taken against. A
checkpoint holds the rollouts that wait, or, where they are not drawn yet, the weights to draw them with.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.coordinator import GivenUpError
from etude.rollouts.judge import GLANCE_S
from etude.rollouts.measures import timed
from etude.rollouts.plain import from_plain, to_plain
from etude.types.trajectory import Trajectory

if TYPE_CHECKING:
    from etude.rollouts.text import TextRollouts
    from etude.trainer import Trainer

log = logging.getLogger("etude")


@dataclass
class Draw:
    """The rollouts of a step that has not begun: drawn, being drawn, or yet to be drawn with some weights."""

    step: int
    rollouts: list[Trajectory] | None = None
    replaced: int = 0
    """Groups that were drawn anew because their rewards were equal."""
    retried: int = 0
    """Rollouts that were drawn again because they failed."""
    weights: Mapping[str, Tensor] | None = None
    """To be drawn with, where that has not begun: those of a checkpoint."""
    error: BaseException | None = None
    timings: dict[str, float] = field(default_factory=dict)
    thread: threading.Thread | None = None
    given_up: bool = False

    @property
    def is_going(self) -> bool:
        """Whether its thread is at work."""
        return self.thread is not None and self.thread.is_alive()


class Ahead:
    """Draws the rollouts of text data one step before they are needed."""

    def __init__(self, data: TextRollouts) -> None:
        self._data = data
        self._forget()

    def _forget(self) -> None:
        self._draw: Draw | None = None
        self._policy: Any = None
        self._rewards: Any = None
        self.age = 0
        """Versions between the weights that drew the last rollouts and those that they are trained with."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is under way: a copy begins with nothing."""
        return {"_data": self._data, "_draw": None, "_policy": None, "_rewards": None, "age": 0}

    def attach(self, trainer: Trainer) -> None:
        """Learn who trains, and refuse what cannot be drawn ahead."""
        data, session = self._data, trainer.session
        self._forget()
        self._session = session
        if data.rewards is not None:
            data.rewards.judge.release = lambda: [*session.written_tensors(), *self.written_tensors()]
        if data.generator is not None:
            raise ConfigError(
                "ahead: 1 draws with a copy of the policy, and a generator draws with weights that are not known here; "
                "leave out one of them"
            )
        if data.rewards is not None and data.rewards.timeout_s is None:
            raise ConfigError(
                "ahead: 1 rewards beside the training, where a reward function cannot be called in place; give it a "
                "process of its own with reward_timeout_s"
            )
        if any(hasattr(parameter, "full_tensor") for parameter in trainer.policy.parameters()):
            raise ConfigError("ahead: 1 draws with a copy of the whole policy, of which sharded ranks have a part each")
        _share_threads(trainer.config.num_threads, session.group.device)

    # ---- drawing -------------------------------------------------------------------------------------------------

    def take(self, policy: Any, step: int) -> list[Trajectory]:
        """Return the rollouts of a step, and begin those of the next.

        Only a first step is drawn here and now, with the weights as they are.
        """
        data, draw = self._data, self._draw
        if draw is not None and draw.step == step:
            with timed(data.timings, "wait"):
                self._finish(draw)
            for name, seconds in draw.timings.items():
                data.timings[name] = data.timings.get(name, 0.0) + seconds
            assert draw.rollouts is not None
            found, self.age = draw.rollouts, 1
            data.replaced, data.retried = draw.replaced, draw.retried
        else:
            self._give_up()
            found, self.age = data.rollouts_of(policy, step), 0
        with timed(data.timings, "copy"):
            self._copy_weights()
        self._draw = Draw(step + 1)
        self._start(self._draw)
        return found

    def _finish(self, draw: Draw) -> None:
        """Wait for rollouts, or raise what went wrong with them; a stop signal is answered meanwhile."""
        if draw.weights is not None:
            self._make_copy()
            self._policy.load_state_dict(draw.weights)
            self._start(draw)
        while draw.is_going:
            draw.thread.join(GLANCE_S)  # type: ignore[union-attr]
            if draw.is_going:
                self._session.heed_signals()
        self._draw = None
        if draw.error is not None:
            raise draw.error

    def _start(self, draw: Draw) -> None:
        data, place = self._data, self._data.place
        drawer = copy(data)
        drawer.timings, drawer._ahead, drawer.replaced, drawer.retried = draw.timings, None, 0, 0
        drawer._gather = _refuse_gather
        drawer._arithmetic = lambda: self._heeded(draw, data._arithmetic())
        drawer.glance = lambda: self._heeded(draw)
        if data.rewards is not None:
            rewards = drawer.rewards = self._rewards = self._rewards or copy(data.rewards)
            rewards.get_ready()  # forked by this thread, with which the process ends, and before the other is at work
            rewards.glance = lambda: self._heeded(draw)
            # As the session seeds the global generators for a step, which the training beside this draws from.
            rewards.random = random.Random(fold(place.seed, STREAM_ROLLOUT, draw.step, place.rank))
        draw.thread = threading.Thread(target=self._work, args=(draw, drawer), name="etude-ahead", daemon=True)
        draw.thread.start()

    def _work(self, draw: Draw, drawer: TextRollouts) -> None:
        try:
            if self._session.group.device.type == "cuda":
                torch.cuda.set_device(self._session.group.device)  # each thread has one of its own
            draw.rollouts = drawer.rollouts_of(self._policy, draw.step)
            draw.replaced, draw.retried = drawer.replaced, drawer.retried
        except BaseException as error:  # noqa: BLE001 - raised where the rollouts are asked for
            draw.error = error

    @staticmethod
    def _heeded(draw: Draw, context: Any = None) -> Any:
        if draw.given_up:
            raise GivenUpError
        return context

    def _give_up(self) -> None:
        """End what is being drawn; completions that have begun are waited for, calls of a reward function are not."""
        draw, self._draw = self._draw, None
        if draw is not None and draw.thread is not None:
            draw.given_up = True
            draw.thread.join()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _make_copy(self) -> None:
        policy: nn.Module = self._data._trainer.policy
        if self._policy is not None and not any(p.requires_grad for p in self._policy.parameters()):
            return  # else something that is shared is trained by now
        # What is not trained is shared, and the model before training, which a language model may hold, is left out.
        shared: dict[int, Any] = {id(value): value for value in policy.parameters() if not value.requires_grad}
        shared |= {id(held): None for held in (vars(policy).get("_reference"),) if held is not None}
        self._policy = deepcopy(policy, shared).eval()
        for kept, _ in self._pairs():
            kept.requires_grad_(False)

    def _copy_weights(self) -> None:
        self._make_copy()
        with torch.no_grad():
            for kept, now in self._pairs():
                kept.copy_(now)

    def written_tensors(self) -> list[Tensor]:
        """Return what this writes to once a step."""
        return [] if self._policy is None else [kept for kept, _ in self._pairs()]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is copied, and what of: all but the weights that both share."""
        for kept, now in zip(_tensors(self._policy), _tensors(self._data._trainer.policy), strict=True):
            if kept is not now:
                yield kept, now

    # ---- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts that wait on all ranks, once they are drawn; ranks call together.

        Where they failed, or a stop signal leaves no time for them, these are the weights to draw them with.
        """
        draw, session = self._draw, self._session
        if draw is None:
            return {}
        while draw.is_going and not (session.place.world == 1 and session.signals.is_pressing()):
            draw.thread.join(GLANCE_S)  # type: ignore[union-attr]
        drawn = None if draw.is_going or draw.rollouts is None else [to_plain(one) for one in draw.rollouts]
        everyone = session.gather([drawn, [draw.replaced, draw.retried]])
        if any(rollouts is None for rollouts, _ in everyone):
            weights = self._policy.state_dict() if draw.weights is None else draw.weights
            return {"step": draw.step, "weights": weights}
        listed = sorted((one for rollouts, _ in everyone for one in rollouts), key=_name)
        return {"step": draw.step, "rollouts": listed, "counts": [counts for _, counts in everyone]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up this rank's part of the rollouts that waited, or the weights to draw them with."""
        self._give_up()
        if "weights" in state:
            self._draw = Draw(state["step"], weights=state["weights"])
        elif "rollouts" in state:
            self._draw = self._restored(**state)

    def _restored(self, step: int, rollouts: list[dict[str, Any]], counts: list[list[int]]) -> Draw | None:
        data, place = self._data, self._data.place
        kept = [from_plain(row) for row in rollouts]
        wanted = range(step * data.prompts_per_step, (step + 1) * data.prompts_per_step)
        expected = {position: data.task_at(position).id for position in wanted}
        drawn = {int(one.group_id): one.task_id for one in kept}
        # Groups that were drawn anew are of any task.
        if drawn.keys() != expected.keys() or (not data.resample and drawn != expected):
            if place.rank == 0:
                log.warning(
                    "the rollouts that waited for step %d are of other tasks than the configuration now gives it: they "
                    "are drawn anew, so that training goes on, but not bit for bit as it would have", step,
                )  # fmt: skip
            return None
        own = [one for one in kept if int(one.group_id) % place.world == place.rank]
        same = len(counts) == place.world
        replaced, retried = counts[place.rank] if same else (sum(c) // place.world for c in zip(*counts, strict=True))
        return Draw(step, own, replaced, retried)

    def close(self) -> None:
        """End the thread."""
        self._give_up()
        self._forget()


def _name(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(row["group_id"]), int(row["run_id"])


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _refuse_gather(value: Any) -> NoReturn:
    raise AssertionError("ranks are spoken to by the training thread alone")


def _share_threads(wanted: int | None, device: torch.device) -> None:
    """Leave half of the threads of a CPU to whoever draws, unless their number was chosen."""
    # Two pools that each have a thread for every core wait for one another; the session puts the number back.
    if wanted is None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
