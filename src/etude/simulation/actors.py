"""Who acts in a rollout: a policy, a scripted expert, or a function of the user's."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from etude.errors import ConfigError, NonFiniteError
from etude.policies.base import PolicyModule
from etude.rng import generators_kept, seed_everything
from etude.simulation.environments.base import Array, Environment, HasExpert, Observation
from etude.types import DataSpec, Feature

EXPERT = "expert"
SeededBy = Literal["step", "episode"]


class Seat(NamedTuple):
    """One running episode, as the actor sees it."""

    slot: int
    env: Environment
    observation: Observation
    key: int
    """Key of the random numbers that may be drawn at this step."""


class Actor(Protocol):
    """Decides what to do in any number of episodes at once, each in a slot of its own."""

    most_slots: int | None
    """How many episodes it can keep apart; None is any number."""

    def session(self) -> AbstractContextManager[Any]:
        """Return a context in which it acts; what it changes of the process is undone afterwards."""

    def check(self, env: Environment) -> None:
        """Raise if it cannot act in an environment."""

    def reset(self, slot: int) -> None:
        """Forget what was in a slot: a new episode begins there."""

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Return the action of each running episode."""


class ExpertActor:
    """The expert that an environment comes with."""

    most_slots: int | None = None

    def session(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return ExitStack()

    def check(self, env: Environment) -> None:
        """Require an expert."""
        if not isinstance(env, HasExpert):
            raise ConfigError(f"{type(env).__name__} comes without an expert; give file.py:function or a run")

    def reset(self, slot: int) -> None:
        """Forget nothing: an environment that is reset resets its expert."""

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Ask each environment what its expert does."""
        return [cast(HasExpert, seat.env).expert_action() for seat in seats]


class FunctionActor:
    """A function from an observation to an action, or an object that is called like one and may have `reset()`."""

    most_slots: int | None = None

    def __init__(self, function: Callable[[Observation], Any]) -> None:
        self._function = function
        if hasattr(function, "reset"):
            self.most_slots = 1  # it remembers, and cannot tell one episode from another

    def session(self) -> AbstractContextManager[Any]:
        """Keep the global random generators."""
        return generators_kept()

    def check(self, env: Environment) -> None:
        """Leave it to the function."""

    def reset(self, slot: int) -> None:
        """Tell the object, if it wants to know, that a new episode begins."""
        forget = getattr(self._function, "reset", None)
        if forget is not None:
            forget()

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Call the function for each episode."""
        actions = []
        for seat in seats:
            seed_everything(seat.key)
            actions.append(self._checked(self._function(seat.observation), seat.env))
        return actions

    def _checked(self, action: Any, env: Environment) -> Array:
        """Refuse what is no action of an environment: simulators fail in words of their own, or take NaN in silence."""
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            values = np.asarray(action)
        except ValueError:  # lists of several lengths
            values = np.asarray(None)
        wanted = list(env.spec.with_role("action").values())
        if values.dtype.kind not in "fiub" or (len(wanted) == 1 and values.size != math.prod(wanted[0].shape)):
            shape = f" of shape {list(wanted[0].shape)}" if len(wanted) == 1 else "s"
            told = f"{list(values.shape)}" if values.dtype.kind in "fiub" else repr(action)[:80]
            raise ConfigError(f"{name} has to return numbers{shape}, the action in {env.task!r}; it returned {told}")
        if not is_finite(values):
            raise NonFiniteError(f"{name} chose an action that is not finite: {values}")
        return values


class PolicyActor:
    """A trained policy.

    Each episode is asked for on its own, with a batch of one and on one thread: what a row of a batch comes to depends
    on the size of the batch (other kernels add in another order), and outcomes must not depend on the number of slots.
    """

    def __init__(
        self, policy: nn.Module, *, exact: bool = True, tasks: Mapping[str, int] | None = None,
        seeded_by: SeededBy = "step",
    ) -> None:  # fmt: skip
        """Take a policy with `select_action`.

        Args:
            policy: The policy.
            exact: Ask for each episode on its own; false asks for all at once, faster on a GPU.
            tasks: Index of each task by its text, for policies that were trained on several.
            seeded_by: Whether the global random generators begin anew at each step, which takes 10 us, or at the first
                step of an episode; the latter for episodes one after the other.
        """
        select = getattr(policy, "select_action", None)
        if select is None:
            raise ConfigError(f"{type(policy).__name__} has no select_action(observation) and cannot act")
        self.policy, self._select, self._exact, self._tasks = policy, select, exact, tasks
        self._takes_slots = "slots" in inspect.signature(select).parameters
        remembers = hasattr(policy, "reset") and not self._takes_slots
        self.most_slots: int | None = 1 if remembers else None
        self.spec: DataSpec | None = getattr(policy, "spec", None)
        asked = {} if self.spec is None else self.spec.with_role("task")
        self._tasks_seen = {name: feature for name, feature in asked.items() if (feature.classes or 0) > 1}
        self.device = next((p.device for p in policy.parameters()), torch.device("cpu"))
        self._is_here = self.device.type == "cpu"
        self.latencies_s: list[float] = []
        self._seeds_steps, self._is_new = seeded_by == "step", True
        self._blank: dict[str, Tensor] = {}
        """A picture of nothing in the place of each that was not looked at."""

    def session(self) -> AbstractContextManager[Any]:
        """Put the policy in eval mode, on one thread, without gradient; keep the global random generators."""
        return _Acting(self.policy, self.device)

    def check(self, env: Environment) -> None:
        """Compare what the policy was trained on with what the environment shows and takes."""
        if self.spec is None:
            return
        require_fit(self.spec, env, "the policy was trained with")
        for feature in self._tasks_seen.values():
            self._task_index(env.task, feature.names)

    def reset(self, slot: int) -> None:
        """Forget plans and history of a slot."""
        self._is_new = True
        forget = getattr(self.policy, "reset", None)
        if forget is not None:
            forget([slot]) if self._takes_slots else forget()

    def act(self, seats: Sequence[Seat]) -> list[Array]:
        """Return the action of each running episode."""
        if self._exact:
            return [self._choose((seat,))[0] for seat in seats]
        return list(self._choose(seats))

    def _choose(self, seats: Sequence[Seat]) -> Array:
        """Ask the policy about some episodes at once."""
        if self._seeds_steps or self._is_new:
            seed_everything(seats[0].key)
            self._is_new = False
        batch = self._batch(seats)
        began = time.perf_counter()
        slots = {"slots": [seat.slot for seat in seats]} if self._takes_slots else {}
        chosen: Array = self._select(batch, **slots).cpu().numpy()
        self.latencies_s.append(time.perf_counter() - began)
        if not is_finite(chosen):
            raise NonFiniteError(f"{type(self.policy).__name__} chose an action that is not finite: {chosen[0]}")
        return chosen

    def _batch(self, seats: Sequence[Seat]) -> dict[str, Tensor]:
        """Return a copy of what the policy looks at in each episode."""
        if len(seats) == 1 and not self._blank and not self._tasks_seen:
            wanted = None if self.spec is None else self.spec.features
            seen = {name: value for name, value in seats[0].observation.items() if wanted is None or name in wanted}
            if all(value.ndim == 1 for value in seen.values()):  # a third of what the way for all takes (1 of 3 us)
                alone = {name: torch.from_numpy(value[None].copy()) for name, value in seen.items()}
                return alone if self._is_here else {name: one.to(self.device) for name, one in alone.items()}
        rows = [self.tensors(seat) for seat in seats]
        return {name: torch.stack([row[name] for row in rows]).to(self.device) for name in rows[0]}

    def will_look(self, slot: int) -> bool:
        """Tell whether the policy needs the next pictures of a slot: in the midst of a chunk it does not look."""
        plain = getattr(type(self.policy), "select_action", None) is PolicyModule.select_action
        if not plain or "select_action" in vars(self.policy):
            return True  # one that chooses in its own way may look whenever it likes
        return cast(PolicyModule, self.policy).executor.will_look(slot)

    def tensors(self, seat: Seat) -> dict[str, Tensor]:
        """Return what the policy looks at of an observation, images as (C, H, W)."""
        seen: dict[str, Tensor] = {}
        wanted = self.spec
        for name, value in seat.observation.items():
            if wanted is not None and name not in wanted.features:
                continue
            tensor = torch.from_numpy(np.ascontiguousarray(value))
            is_picture = value.ndim == 3 and value.dtype == np.uint8
            seen[name] = tensor.permute(2, 0, 1) if is_picture else tensor
            if is_picture and name not in self._blank:
                self._blank[name] = torch.zeros_like(seen[name])
        for name, blank in self._blank.items():
            if name not in seen:
                seen[name] = blank
        for name, feature in self._tasks_seen.items():
            seen[name] = torch.tensor(self._task_index(seat.env.task, feature.names))
        return seen

    def _task_index(self, task: str, names: Sequence[str] | None) -> int:
        known = self._tasks or {text: index for index, text in enumerate(names or ())}
        if task not in known:
            listed = ", ".join(repr(text) for text in known) or "none by name"
            raise ConfigError(f"the policy was not trained on the task {task!r}; it knows {listed}")
        return known[task]


def is_finite(values: Array) -> bool:
    """Tell whether all numbers are finite; of a few, in half the time that `all()` takes for it (0.8 of 2 us)."""
    return values.dtype.kind != "f" or 0 not in np.isfinite(values).tobytes()


class _Acting(AbstractContextManager[None]):
    """Eval mode, one thread, no gradient; everything as before afterwards."""

    def __init__(self, policy: nn.Module, device: torch.device) -> None:
        self._policy, self._device, self._stack = policy, device, ExitStack()

    def __enter__(self) -> None:
        stack = self._stack
        stack.enter_context(generators_kept())
        stack.enter_context(torch.no_grad())
        if self._device.type == "cpu":
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        modes = {module: module.training for module in self._policy.modules()}
        self._policy.eval()
        stack.callback(_set_modes, modes)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, is_training in modes.items():
        module.training = is_training


def require_fit(spec: DataSpec, env: Environment, who: str) -> None:
    """Refuse an environment that does not show and take what a spec has; `who` begins the sentence that says so."""
    shown = env.spec.features
    wanted = {name: one for name, one in spec.features.items() if one.role not in ("task", "text", "other")}
    for name, feature in wanted.items():
        if name not in shown:
            fault = f"it has no {name}"
        elif feature.role != "image" and tuple(feature.shape) != tuple(shown[name].shape):
            fault = f"{name} differs"
        else:
            continue
        raise ConfigError(
            f"{who} {_listed(wanted)}, but the environment {env.task!r} has {_listed(shown)}: {fault}; train without "
            "it (exclude:), rename it (etude data convert --rename), or choose other options of the environment"
        )


def _listed(features: Mapping[str, Feature]) -> str:
    return ", ".join(f"{name} {list(feature.shape)}" for name, feature in features.items())


def make_actor(
    policy: nn.Module | str | Callable[[Observation], Any],
    *,
    exact: bool = True,
    tasks: Mapping[str, int] | None = None,
) -> Actor:
    """Return who acts: `"expert"` for the environment's own, a policy, or a function of an observation."""
    if isinstance(policy, str):
        if policy != EXPERT:
            raise ConfigError(f"a policy is a module, a function or {EXPERT!r}, got {policy!r}")
        return ExpertActor()
    if isinstance(policy, nn.Module):
        return PolicyActor(policy, exact=exact, tasks=tasks)
    if callable(policy):
        return FunctionActor(policy)
    raise ConfigError(f"a policy is a module, a function or {EXPERT!r}, got {type(policy).__name__}")
