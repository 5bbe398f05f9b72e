"""What a checkpoint holds: everything that the next step depends on, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from etude.errors import CheckpointError
from etude.loop.optimizers import shown_weights
from etude.loop.sharding import piece_of
from etude.runs.tree import Parted
from etude.types.duration import Progress
from etude.types.protocols import ORDER_VERSION

if TYPE_CHECKING:
    from etude.loop.session import Session

log = logging.getLogger("etude")


def collect(session: Session) -> dict[str, Any]:
    """Return the state of a session as a tree of tensors and plain values; every rank must call.

    A rank of a sharded policy has its own pieces of the tensors in it, and no copy of anything.
    """
    is_sharded = session.strategy.is_sharded
    own: Callable[[Any], Any] = piece_of if is_sharded else lambda value: value
    weights = own(session.policy.state_dict()) if is_sharded else session.strategy.state_dict()
    optimizers = own({n: o.state_dict(session.names) for n, o in session.optimizations.items()})
    parted = isinstance(session.policy, nn.ModuleDict)  # every component, and its optimizer, is a file of its own
    tree: dict[str, Any] = {
        "policy": Parted(weights) if parted else weights,
        "optimizer": Parted(optimizers, "_opt") if parted else optimizers,
        "session": {
            "progress": session.progress.to_dict(),
            "meter": session.meter.state_dict(),
            "metrics": session.metrics,
            "best": session.best,
            "evaluated_at": session._evaluated_at,
            "callbacks": session.callbacks.state_dict(),
            "world": session.group.world,
            "seed": session.config.seed,
            "global_batch": session.place.global_batch,
            "precision": session.config.precision,
            "order_version": session.place.order_version,
            "provenance": session.provenance,
            "total_steps": session.total_steps,
        },
    }
    describe: Any = getattr(session.policy, "describe", None)
    if describe is not None:
        tree["session"]["policy"] = describe()  # what evaluation needs, should the data be gone by then
    with shown_weights(session.optimizations.values()) as differ:
        if differ:  # what is evaluated and exported; training goes on from the others
            shown = [p for o in session.optimizations.values() if o.has_modes for p in o.params]
            tree["shown"] = own({session.names[p]: p.detach().clone() for p in shown})
    if session.statistics is not None:
        tree["norm_stats"] = session.statistics.values
    if session.ema is not None:
        tree["ema"] = own(session.ema.state_dict())
    if session.precision.scale is not None:
        tree["session"]["loss_scale"] = session.precision.scale.state_dict()
    for name, part in _stateful(session):
        tree[name] = part.state_dict()
    # Meters are sums of one rank; the others' are gathered so that means over ranks survive a restart.
    if session.group.world > 1:
        tree["session"]["meters"] = session.group.gather(tree["session"]["meter"])
    return tree


def order_version(tree: dict[str, Any] | None) -> int:
    """Return how the data of a run is ordered: as it was when the run began."""
    if tree is None:
        return ORDER_VERSION
    version: int = tree["session"].get("order_version", 1)
    return version


def restore(session: Session, tree: dict[str, Any]) -> None:
    """Take up a saved state; say so where the configuration makes the continuation differ."""
    saved = tree["session"]
    _warn_changes(session, saved)
    session.strategy.load_state_dict(tree["policy"])
    missing = sorted(set(session.optimizations) - set(tree["optimizer"]))
    if missing:
        raise CheckpointError(
            f"the checkpoint has no state for optimizer {missing[0]!r}; it has {sorted(tree['optimizer'])}"
        )
    for name, optimization in session.optimizations.items():
        changed = optimization.load_state_dict(tree["optimizer"][name], session.names)
        if changed and session.group.is_main:
            log.info("optimizer %s goes on with %s, as the configuration says now", name, ", ".join(changed))
    if session.ema is not None:
        session.ema.load_state_dict(tree["ema"] if "ema" in tree else tree["policy"])
    if session.precision.scale is not None and "loss_scale" in saved:
        session.precision.scale.load_state_dict(saved["loss_scale"])
    for name, part in _stateful(session):
        if name in tree:
            part.load_state_dict(tree[name])
    _restore_statistics(session, tree.get("norm_stats"))
    meters = saved.get("meters", [saved["meter"]])
    if session.group.rank < len(meters):  # a rank that is new has measured nothing yet
        session.meter.load_state_dict(meters[session.group.rank])
        for gone in meters[session.group.rank + session.group.world :: session.group.world]:
            session.meter.take_over(gone)
    session.progress = Progress(**saved["progress"])
    session.metrics = dict(saved["metrics"])
    session.best = saved["best"]
    session._evaluated_at, session._saved_at = saved["evaluated_at"], session.progress.step
    session.callbacks.load_state_dict(saved["callbacks"])


def _restore_statistics(session: Session, saved: Any) -> None:
    """Go on with the statistics that the weights were trained with."""
    if session.statistics is None or saved is None:
        return
    differ = session.statistics.differs_from(saved)
    if differ and session.group.is_main:
        log.warning(
            "the data's statistics of %s have changed; going on with those of the checkpoint", ", ".join(differ)
        )
    session.statistics.load(saved)


def _stateful(session: Session) -> list[tuple[str, Any]]:
    """Return the parts that carry state of their own: a replay buffer, a KL controller, a counter."""
    parts: dict[str, Any] = {"data": session.data, "trainer": session.trainer, "algorithm": session.trainer.algorithm}
    return [(name, part) for name, part in parts.items() if hasattr(part, "state_dict")]


def _warn_changes(session: Session, saved: dict[str, Any]) -> None:
    now = {
        "seed": session.config.seed,
        "global_batch": session.place.global_batch,
        "precision": session.config.precision,
    }
    was = saved.get("total_steps")
    bent = any(one.schedule in ("linear", "cosine") for one in session.config.named_optimizers().values())
    if bent and was is not None and was != session.total_steps and session.group.is_main:
        log.warning(
            "the learning rate was laid out over %s steps, and now is over %s: not as one run of that length would be",
            was, session.total_steps,
        )  # fmt: skip
    changed = [f"{key} {saved[key]} -> {value}" for key, value in now.items() if saved[key] != value]
    if changed and session.group.is_main:
        log.warning("resuming with %s: training goes on, but not bit for bit as it would have", ", ".join(changed))
