"""`LightningPolicy`: a plain policy as a LightningModule."""

from __future__ import annotations

import inspect
from typing import Any

import lightning
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from etude.config.training import OptimizerConfiguration
from etude.engines.lightning.simulation import Simulation, simulate
from etude.errors import ConfigError
from etude.loop.distributed import Group
from etude.loop.optimizers import build_optimizer, torch_optimizers
from etude.loop.schedule import make_schedule
from etude.loop.step import Meter
from etude.types import Loss, batch_length, split_loss


class LightningPolicy(lightning.LightningModule):
    """Trains a policy whose forward turns a batch into a loss.

    Logs train/loss, val/loss and test/loss with the policy's other metrics, and val/success and test/success where the
    data module names an environment. Attributes that a LightningModule does not have are the policy's, so that
    callbacks find its methods on `pl_module`.
    """

    def __init__(self, policy: nn.Module, optimizer: OptimizerConfiguration) -> None:
        super().__init__()
        self.policy = policy
        self.optimizer_configuration = optimizer
        self._meter = Meter()
        own = {"policy": type(policy).__name__, **getattr(policy, "_params", {})}
        # What Lightning's own gradient_clip_val decides is not recorded as if it were decided here.
        settings = optimizer.model_dump(mode="json", exclude={"clip_norm", "match"})
        chosen = {} if hasattr(policy, "configure_optimizers") else {"optimizer": settings}
        self.save_hyperparameters({**own, **chosen})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            policy = self.__dict__.get("_modules", {}).get("policy")
            if policy is None:
                raise
        return getattr(policy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        policy = self.__dict__.get("_modules", {}).get("policy")
        own = policy is None or name in vars(self) or hasattr(type(self), name) or name in self._modules
        if not own and hasattr(policy, name):
            setattr(policy, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def lr(self) -> Any:
        """The peak learning rate, for Lightning's Tuner; that of a policy with optimizers of its own is its own."""
        if hasattr(self.policy, "configure_optimizers"):
            return getattr(self.policy, "lr", None)
        return self.optimizer_configuration.lr

    @lr.setter
    def lr(self, value: float) -> None:
        if hasattr(self.policy, "configure_optimizers"):
            self.policy.lr = value  # type: ignore[assignment]  # a plain attribute of the policy's
        else:
            self.optimizer_configuration = self.optimizer_configuration.model_copy(update={"lr": float(value)})

    def forward(self, batch: Any) -> Any:
        """Return what the policy makes of a batch."""
        return self.policy(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss as a sum and a weight."""
        root, factor, weight, metrics = split_loss(self.policy(batch), batch)
        total = root if factor == 1 else root * factor
        size = batch_length(batch)
        self.log("train/loss", total.detach() / max(float(weight), 1e-30), prog_bar=True, batch_size=size)
        for name, value in metrics.items():
            self.log(f"train/{name}", value, batch_size=size)
        return Loss(total, weight)

    def configure_optimizers(self) -> Any:
        """Return the policy's own optimizers if it has any, else the one that the trainer was given."""
        own = getattr(self.policy, "configure_optimizers", None)
        if own is not None:
            return own()
        config = self.optimizer_configuration
        params = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        if not params:
            raise ConfigError("the policy has no trainable parameter")
        optimizer = build_optimizer(self._clippable(config), params)
        steps = self.trainer.estimated_stepping_batches if config.schedule in ("linear", "cosine") else None
        factor = make_schedule(config, None if steps is None or steps == float("inf") else int(steps))
        if factor is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _clippable(self, config: OptimizerConfiguration) -> OptimizerConfiguration:
        """Do without fused kernels under mixed precision, where Lightning does not clip gradients with them."""
        kind = torch_optimizers().get(config.type)
        fuses = kind is not None and "fused" in inspect.signature(kind).parameters and "fused" not in config.params
        if not fuses or not isinstance(self.trainer.precision_plugin, MixedPrecision):
            return config
        return config.model_copy(update={"params": {**config.params, "fused": False}})

    # -- evaluation ---------------------------------------------------------------------------------------------

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add up the loss of a validation batch, or simulate."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add up the loss of a test batch, or simulate."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the actions that the policy plans."""
        plan = getattr(self.policy, "predict_action_chunk", None)
        return self.policy(batch) if plan is None else plan(batch)

    def _evaluate(self, batch: Any, name: str) -> None:
        if isinstance(batch, Simulation):
            for metric, number in simulate(self.policy, batch, self._group).items():
                self.log(f"{name}/{metric}", number, batch_size=1, sync_dist=True, add_dataloader_idx=False)
            return
        root, factor, weight, metrics = split_loss(self.policy(batch), batch)
        if float(weight):
            self._meter.add("loss", root.item() * factor / float(weight), float(weight))
            for metric, value in metrics.items():
                self._meter.add(metric, value, float(weight))

    def on_validation_epoch_end(self) -> None:
        """Log the means over all ranks."""
        self._log_means("val")

    def on_test_epoch_end(self) -> None:
        """Log the means over all ranks."""
        self._log_means("test")

    def _log_means(self, name: str) -> None:
        for metric, value in self._meter.read(self._group).items():
            self.log(f"{name}/{metric}", value, prog_bar=metric == "loss", sync_dist=True)

    @property
    def _group(self) -> Group:
        return Group(self.trainer.global_rank, self.trainer.world_size, self.trainer.strategy.root_device)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the policy is, so that it can be used without its data."""
        describe: Any = getattr(self.policy, "describe", None)
        if describe is not None:
            checkpoint["policy"] = describe()
