"""Optimizers for components, by name: AdamW with its schedule inside, and schedule-free RAdam.

A schedule is a function of the steps that the optimizer has made. It lives in the parameter groups, so it is saved and
loaded with them, and a schedule that the configuration has changed since is noticed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch.optim import AdamW, Optimizer

from etude.errors import ConfigError
from etude.extras import import_extra
from etude.loop.optimizers import can_fuse

log = logging.getLogger("etude")
Betas = tuple[float, float] | list[float]


class ScheduledAdamW(AdamW):
    """AdamW whose groups carry a schedule: `rates` of the group and of the steps made is in force at each step."""

    _OWN: tuple[str, ...] = ()
    """What a group says of its schedule."""
    owns_schedule = True

    def __init__(self, params: Iterable[Any], schedule: Mapping[str, Any], **options: Any) -> None:
        params = list(params)
        plain = [p for given in params for p in (given["params"] if isinstance(given, Mapping) else [given])]
        super().__init__(params, fused=can_fuse(plain), **options)
        for group in self.param_groups:
            ratio = float(group["lr"]) / options["lr"]  # groups with a rate of their own keep their distance
            group.update(schedule, made=schedule.get("made", 0), ratio=ratio, first_beta=group["betas"][0])
        self._follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not self._optimizer_step_pre_hooks:  # a copy has lost them
            self._follow()

    def _follow(self) -> None:
        # By hooks and not by a step() of our own, around which torch would run everyone's hooks a second time.
        self.register_step_pre_hook(_set_rates)
        self.register_step_post_hook(_advance)
        _set_rates(self)

    def rates(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the hyperparameters of one step, counted from 0."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; the schedule stays the one this optimizer was made with, and says so if it differs."""
        own = [{key: group[key] for key in self._OWN} for group in self.param_groups]
        super().load_state_dict(state_dict)
        changed: dict[str, None] = {}
        for group, said in zip(self.param_groups, own, strict=True):
            changed |= {f"{key} {group[key]} -> {said[key]}": None for key in said if group[key] != said[key]}
            group.update(said)
        if changed:
            log.warning("the schedule of the optimizer goes on with %s, as it was made with now", ", ".join(changed))
        _set_rates(self)


def _set_rates(optimizer: Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, ScheduledAdamW)
    for group in optimizer.param_groups:
        group.update(optimizer.rates(group, group["made"]))


def _advance(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["made"] += 1
    _set_rates(optimizer)


class WarmupCosineAdamW(ScheduledAdamW):
    """AdamW whose rate rises in a line, and falls as a cosine."""

    _OWN = ("start_lr", "peak_lr", "end_lr", "warmup_steps", "total_steps")

    def rates(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the rate of one step."""
        return {"lr": group["ratio"] * warmup_cosine(step, **{key: group[key] for key in self._OWN})}


def warmup_cosine(
    step: int, *, start_lr: float, peak_lr: float, end_lr: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the rate of a step: in a line to the peak at `warmup_steps - 1`, as a cosine to the end at the last."""
    if step < warmup_steps:
        return start_lr + (peak_lr - start_lr) * (step / (warmup_steps - 1) if warmup_steps > 1 else 1.0)
    if step >= total_steps:
        return end_lr
    done = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return end_lr + (peak_lr - end_lr) * 0.5 * (1 + math.cos(math.pi * done))


class OneCycleAdamW(ScheduledAdamW):
    """AdamW on one cycle: the rate up and down, the momentum down and up."""

    _OWN = (
        "max_lr", "total_steps", "pct_start", "anneal_strategy", "cycle_momentum", "base_momentum", "max_momentum",
        "div_factor", "final_div_factor", "three_phase",
    )  # fmt: skip

    def rates(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the rate and the betas of one step."""
        peak = group["ratio"] * group["max_lr"]
        start = peak / group["div_factor"]
        anneal = _ANNEALS[group["anneal_strategy"]]
        end, total, rise = start / group["final_div_factor"], group["total_steps"], group["pct_start"]
        low, high = group["base_momentum"], group["max_momentum"]
        ends = [0.0, rise * total - 1, 2 * rise * total - 2, total - 1] if group["three_phase"] else [
            0.0, rise * total - 1, total - 1
        ]  # fmt: skip
        lrs = [start, peak, start, end] if group["three_phase"] else [start, peak, end]
        momenta = [high, low, high, high] if group["three_phase"] else [high, low, high]
        lr, momentum = lrs[-1], momenta[-1]
        for phase in range(len(ends) - 1):
            if step <= ends[phase + 1]:
                span = ends[phase + 1] - ends[phase]
                done = (step - ends[phase]) / span if span else 1.0
                lr, momentum = (anneal(values[phase], values[phase + 1], done) for values in (lrs, momenta))
                break
        betas = (momentum if group["cycle_momentum"] else group["first_beta"], group["betas"][1])
        return {"lr": lr, "betas": betas}


_ANNEALS: Mapping[str, Callable[[float, float, float], float]] = {
    "cos": lambda start, end, done: end + (start - end) / 2 * (1 + math.cos(math.pi * done)),
    "linear": lambda start, end, done: start + (end - start) * done,
}


# -- factories -------------------------------------------------------------------------------------------------------


class AdamWWarmupCosineDecay:
    """AdamW with warm-up and cosine decay inside: the rate follows from the steps made, and is saved with them.

    Args:
        peak_lr: The highest rate, reached at step `warmup_steps - 1`.
        total_steps: Steps until the rate has come down; it stays there.
        betas: Decay of the averages of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of the weights.
        warmup_steps: Steps in which the rate rises.
        start_lr: The rate of the first step.
        end_lr: The rate of the last step.
    """

    def __init__(
        self,
        peak_lr: float,
        total_steps: int,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        start_lr: float = 0.0,
        end_lr: float = 0.0,
    ) -> None:
        _refuse(
            "adamw_warmup_cosine_decay",
            {
                f"peak_lr must be positive, got {peak_lr}": not 0 < peak_lr < math.inf,
                f"start_lr {start_lr} must lie between 0 and peak_lr {peak_lr}": not 0 <= start_lr <= peak_lr,
                f"end_lr {end_lr} must lie between 0 and peak_lr {peak_lr}": not 0 <= end_lr <= peak_lr,
                f"total_steps must be at least 1, got {total_steps}": total_steps < 1,
                f"warmup_steps must be at least 0 and below total_steps {total_steps}, got {warmup_steps}": not (
                    0 <= warmup_steps < total_steps
                ),
            },
        )
        self.schedule = {
            "peak_lr": peak_lr, "total_steps": total_steps, "warmup_steps": warmup_steps, "start_lr": start_lr,
            "end_lr": end_lr,
        }  # fmt: skip
        self.options = {"lr": peak_lr, "betas": _pair(betas), "eps": eps, "weight_decay": weight_decay}

    def build(self, params: Iterable[Any]) -> Optimizer:
        """Make the optimizer over parameters or parameter groups."""
        return WarmupCosineAdamW(params, self.schedule, **self.options)


class AdamWOneCycle:
    """AdamW on one cycle of the learning rate (OneCycle), whose place follows from the steps made and is saved.

    Args:
        lr: Stands in for `max_lr` where that is not said; beside it, it does nothing, for the cycle sets every rate.
        betas: Decay of the averages of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled decay of the weights.
        max_lr: The highest rate.
        total_steps: Steps of the cycle; the rate stays at its end after them.
        epochs: Epochs of the cycle, with `steps_per_epoch`, where `total_steps` is not said.
        steps_per_epoch: Steps in each of them.
        pct_start: Share of the cycle in which the rate rises.
        anneal_strategy: cos or linear.
        cycle_momentum: Whether the first beta moves against the rate.
        base_momentum: The lowest first beta.
        max_momentum: The highest first beta.
        div_factor: The first rate is `max_lr` divided by this.
        final_div_factor: The last rate is the first divided by this.
        three_phase: Whether the rate comes down to where it began before it goes to its end.
        last_epoch: Begin after this step; -1 begins at the start.
    """

    def __init__(
        self,
        lr: float | None = None,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_lr: float | None = None,
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        peak = lr if max_lr is None else max_lr
        if total_steps is None:
            total_steps = (epochs or 0) * (steps_per_epoch or 0)
        _refuse(
            "adamw_cosine_schedule",
            {
                f"max_lr must be positive, got {peak}": peak is None or not 0 < peak < math.inf,
                "give total_steps, or epochs and steps_per_epoch, of at least 1": total_steps < 1,
                f"pct_start must lie between 0 and 1, got {pct_start}": not 0 <= pct_start <= 1,
                f"anneal_strategy must be cos or linear, got {anneal_strategy!r}": anneal_strategy not in _ANNEALS,
                f"base_momentum {base_momentum} and max_momentum {max_momentum} must rise from 0 to below 1": (
                    cycle_momentum and not 0 <= base_momentum <= max_momentum < 1
                ),
                "div_factor and final_div_factor must be positive": div_factor <= 0 or final_div_factor <= 0,
                f"last_epoch must be at least -1, got {last_epoch}": last_epoch < -1,
            },
        )
        self.schedule = {
            "max_lr": peak, "total_steps": total_steps, "pct_start": pct_start, "anneal_strategy": anneal_strategy,
            "cycle_momentum": cycle_momentum, "base_momentum": base_momentum, "max_momentum": max_momentum,
            "div_factor": div_factor, "final_div_factor": final_div_factor, "three_phase": three_phase,
            "made": last_epoch + 1,
        }  # fmt: skip
        self.options: dict[str, Any] = {"lr": peak, "betas": _pair(betas), "eps": eps, "weight_decay": weight_decay}

    def build(self, params: Iterable[Any]) -> Optimizer:
        """Make the optimizer over parameters or parameter groups."""
        return OneCycleAdamW(params, self.schedule, **self.options)


class ScheduleFreeRAdam:
    """RAdam that needs no schedule: it trains one set of weights and shows another, their average.

    Args:
        lr: The rate.
        betas: How far the shown weights lean to the average, and the decay of squared gradients.
        eps: Added to the denominator.
        weight_decay: Decay of the weights.
        silent_sgd_phase: Whether the first steps, in which RAdam would be plain SGD, update only the averages.
    """

    def __init__(
        self,
        lr: float = 0.0025,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        silent_sgd_phase: bool = True,
    ) -> None:
        _refuse("schedule_free_radam", {f"lr must be positive, got {lr}": not 0 < lr < math.inf})
        self.options = {
            "lr": lr, "betas": _pair(betas), "eps": eps, "weight_decay": weight_decay,
            "silent_sgd_phase": silent_sgd_phase,
        }  # fmt: skip

    def build(self, params: Iterable[Any]) -> Optimizer:
        """Make the optimizer over parameters or parameter groups."""
        optimizer: Optimizer = import_extra("schedulefree", "components").RAdamScheduleFree(params, **self.options)
        return optimizer


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas must be two numbers from 0 to below 1, got {list(betas)}")
    return float(betas[0]), float(betas[1])


def _refuse(name: str, wrong: Mapping[str, bool]) -> None:
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(f"optimizer {name!r}: {found[0]}")
