"""Load a trained policy from what a run left behind: its directory, one of its checkpoints, or a saved policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from torch import nn

    from etude.policies.base import PolicyModule
    from etude.runs.checkpoint import Checkpoint


def load_policy(source: str | Path, which: str = "auto", cls: type[PolicyModule] | None = None) -> nn.Module:
    """Return a policy in eval mode, with averaged weights if there are any.

    Args:
        source: A run directory, a checkpoint inside of one, a directory written by `save_pretrained`, or what
            `etude.engines.lightning.Trainer` leaves: a checkpoint, the directory they lie in, or its `version_N`.
        which: Which checkpoint of a run: best, last, a step, or auto for the best if there is one and the last if not.
        cls: The policy's class, where it is one of yours that is not registered.
    """
    from etude.policies.base import PolicyModule
    from etude.policies.pretrained import from_tree
    from etude.runs.named import is_named, load_named

    path, kind = Path(source), cls or PolicyModule
    if (path / "config.json").is_file():
        return kind.from_pretrained(path)
    if path.suffix == ".ckpt" and path.is_file():  # of Lightning's own writing, as its sharded strategies do
        from etude.engines.lightning.checkpoint import load_checkpoint

        found = load_checkpoint(path)
        return from_tree(kind, {"lightning": found, "model": found["state_dict"]}, str(path))
    if is_named(path):
        chosen = load_named(path)
        return from_tree(kind, chosen.tree, str(chosen.path))
    if (path / "checkpoints").is_dir():
        from etude.runs.directory import Run

        return _restore(path, *Run(path).choose_checkpoint(which), cls)
    if (path / "manifest.json").is_file():
        from etude.deploy.exported import is_exported

        if is_exported(path):
            raise CheckpointError(
                f"{path} is an export, a graph without the policy's code; `etude serve-policy` and "
                "etude.deploy.load_exported run it, and here goes the run or checkpoint that it was made from"
            )
        from etude.runs.checkpoint import read_checkpoint

        checkpoint = read_checkpoint(path.resolve())  # `last` and `best` are links
        if "lightning" in checkpoint.tree:
            return from_tree(kind, checkpoint.tree, str(path))
        return _restore(checkpoint.path.parent.parent, checkpoint, "", cls)
    raise CheckpointError(
        f"{path} is neither a run with checkpoints, nor a checkpoint, nor a saved policy; `etude runs` lists the runs"
    )


def _restore(run: Path, checkpoint: Checkpoint, which: str, cls: type[PolicyModule] | None) -> nn.Module:
    from etude.policies.origin import PolicyOrigin, set_origin
    from etude.runs.checkpoint import acting_weights

    tree = checkpoint.tree
    description = tree.get("session", {}).get("policy")
    policy: Any = _describe(description, checkpoint.path, run, cls) if description else _build(run)
    try:
        policy.load_state_dict(acting_weights(tree))
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.path}: the weights do not fit the policy: {one_line(error, 300)}") from None
    if "norm_stats" in tree:
        from etude.data.statistics import NormStats
        from etude.policies.normalize import act_in_data_units

        act_in_data_units(policy, NormStats.from_any(tree["norm_stats"]))
    set_origin(policy, PolicyOrigin(run, checkpoint.step, which))
    module: nn.Module = policy.eval()
    return module


def _describe(description: Any, checkpoint: Path, run: Path, cls: type[PolicyModule] | None) -> Any:
    from etude.policies.base import PolicyModule
    from etude.policies.pretrained import from_description
    from etude.registry import load_plugins
    from etude.runs.directory import Run

    load_plugins(Run(run).read_config().get("plugins") or [])
    return from_description(cls or PolicyModule, description, str(checkpoint))


def _build(run: Path) -> Any:
    """Build the policy as training did, from its config and its data."""
    config = run / "config.yaml"
    if not config.is_file():
        raise CheckpointError(f"{run}: the run has no config.yaml to build its policy from; load it in Python instead")
    from etude.config.build import build
    from etude.config.load import load

    trainer = build(load(config), run=run)
    if getattr(trainer.policy, "is_built", True) is False:
        if trainer.data.spec is None:
            raise CheckpointError(f"{run}: the data has no spec to build the policy from")
        trainer.policy.build(trainer.data.spec)  # type: ignore[operator]
    return trainer.policy
