"""The optimizer that a user sees before training, changes or replaces, is the one that trains.

So is a scheduler of torch that is attached to it: the trainer finds it among its own attributes, steps it once a step
and saves its state.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from etude.config.training import OptimizerConfiguration
from etude.errors import ConfigError
from etude.loop.optimizers import Optimization, assign_parameters, build_optimizer, freeze
from etude.loop.schedule import make_schedule

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")


def early_optimizer(trainer: Trainer) -> Optimizer:
    """Return the optimizer of the configuration, made before training."""
    if getattr(trainer.policy, "is_built", True) is False:
        raise ConfigError(
            "the policy takes its shapes from the data, so that there is nothing to optimize before training starts; "
            "override configure_optimizers instead of using trainer.optimizer"
        )
    _only(trainer)
    freeze(trainer.policy, trainer.config.freeze)
    configs = trainer.config.named_optimizers()
    ((name, params),) = assign_parameters(trainer.policy, configs).items()
    return build_optimizer(configs[name], params)


def replacement(trainer: Trainer, given: Any) -> Optimizer:
    """Return an optimizer that is to train, if it can."""
    if not isinstance(given, Optimizer):
        raise ConfigError(f"trainer.optimizer must be a torch optimizer, got {type(given).__name__}")
    if hasattr(trainer, "session") and trainer.session.is_open:
        raise ConfigError(
            "trainer.optimizer cannot be replaced during training, for a resumed run could not know; "
            "replace it before fit(), or change its param_groups"
        )
    _only(trainer)
    return given


def adopt(trainer: Trainer, optimizer: Optimizer) -> Optimization:
    """Return the user's optimizer with its scheduler, or else the schedule of the configuration."""
    config = _only(trainer)
    known = {id(parameter) for parameter in trainer.policy.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "trainer.optimizer holds parameters that the policy does not have (FSDP replaces them when training "
            "starts); make it in configure_optimizers"
        )
    scheduler = _find_scheduler(trainer, optimizer)
    if scheduler is not None and (config.schedule != "constant" or config.warmup_steps):
        raise ConfigError(
            f"both training.schedule ({config.schedule}, {config.warmup_steps} warm-up steps) and "
            f"{type(scheduler).__name__} would set the learning rate; choose one"
        )
    schedule = scheduler or make_schedule(config, trainer.session.total_steps)
    return Optimization(optimizer, schedule, config.clip_norm)


def _only(trainer: Trainer) -> OptimizerConfiguration:
    configs = trainer.config.named_optimizers()
    if len(configs) != 1:
        raise ConfigError(
            f"training.optimizers names {', '.join(configs)}: trainer.optimizer cannot stand for all of them before "
            "training; override configure_optimizers"
        )
    return next(iter(configs.values()))


def _find_scheduler(trainer: Trainer, optimizer: Optimizer) -> LRScheduler | None:
    held = [value for value in vars(trainer).values() if isinstance(value, LRScheduler)]
    held = [scheduler for scheduler in held if scheduler.optimizer is optimizer]
    inner = {id(part) for scheduler in held for part in getattr(scheduler, "_schedulers", ())}
    found = [scheduler for scheduler in held if id(scheduler) not in inner]
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(type(one).__name__ for one in found)} are both attached to trainer.optimizer; join them "
            "with torch's SequentialLR or ChainedScheduler"
        )
    if not found and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        log.warning(
            "a scheduler is attached to trainer.optimizer, but the trainer does not have it: keep it as an attribute "
            "(self.scheduler = ...) to have it stepped and saved"
        )
    return found[0] if found else None
