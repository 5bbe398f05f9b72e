"""`PolicyDatasetInteraction`: policies that take their shapes from the data, and data that takes its windows from them.

It also serves the training loaders by place, and simulation as one more validation loader.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from etude.data.histories import choose_windows
from etude.engines.lightning.exact import ExactStepsCallback
from etude.engines.lightning.module import LightningPolicy
from etude.engines.lightning.simulation import names_environment, with_simulation
from etude.errors import ConfigError
from etude.rng import STREAM_INIT, fold, generators_kept
from etude.types import DataSpec


class PolicyDatasetInteraction(ExactStepsCallback):
    """Lets a policy made as `ACT()` take shapes, statistics and windows from the data module before its first use.

    `etude.engines.lightning.Trainer` adds one by itself, exactly once. It makes the steps exact as well: Lightning
    calls every hook of every callback at every batch, so that a second callback would cost 0.1 ms a step. Under a
    Lightning Trainer of another make it brings policy and data together and does nothing else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._served: list[tuple[Any, str]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Bring policy and data together; optimizers are made and checkpoints loaded after this."""
        super().setup(trainer, pl_module, stage)
        self.introduce(trainer, pl_module)
        self._serve_by_place(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Ensure that the policy is built; `setup` has done it unless the callback is used by itself."""
        self.introduce(trainer, pl_module)
        super().on_fit_start(trainer, pl_module)

    def restore(self, trainer: Any, pl_module: Any) -> None:
        """Give the data module its own loaders back."""
        super().restore(trainer, pl_module)
        for owner, hook in self._served:
            vars(owner).pop(hook, None)
        self._served = []
        for loader in getattr(trainer, "addressed", ()):
            loader.close()

    # -- shapes, statistics, windows ------------------------------------------------------------------------------

    def introduce(self, trainer: Any, pl_module: Any) -> None:
        """Give the data its windows and build what is not built yet; once is enough."""
        modules = [module for module in pl_module.modules() if not isinstance(module, LightningPolicy)]
        policies = [module for module in modules if hasattr(module, "action_delta_indices")]
        unbuilt = [module for module in modules if getattr(module, "is_built", True) is False]
        if not policies and not unbuilt:
            return
        sources = list(_sources(trainer))
        windowed = [source for source in sources if hasattr(source, "use_windows")]
        for policy in policies:
            # A data module that knows windows gives them to all its datasets.
            choose_windows(policy, *(windowed[:1] if windowed[:1] == [trainer.datamodule] else sources))
        for policy in unbuilt:
            spec = next((found for source in sources if (found := _spec_of(source)) is not None), None)
            self._build(trainer, policy, spec)

    def _build(self, trainer: Any, policy: nn.Module, spec: DataSpec | None) -> None:
        if spec is None and getattr(trainer, "loads_checkpoint", False):
            return  # its weights are still to be loaded, and bring the spec along
        if spec is None and getattr(policy, "needs_spec", True):
            raise ConfigError(
                f"{type(policy).__name__} takes its shapes from the data, but neither the data module nor its dataset "
                "has a spec; give one of them a `spec`, or call policy.build(spec) before fit"
            )
        with generators_kept(fold(trainer.root_seed if hasattr(trainer, "root_seed") else 0, STREAM_INIT)):
            policy.build(spec)  # type: ignore[operator]

    # -- loaders ------------------------------------------------------------------------------------------------

    def _serve_by_place(self, trainer: Any, pl_module: Any) -> None:
        if not self.takes_part:
            return
        for owner in (trainer.datamodule, pl_module):
            if owner is None:
                continue
            if is_overridden("train_dataloader", owner):
                self._wrap(owner, "train_dataloader", trainer.address_loaders)
        if trainer.datamodule is not None and isinstance(pl_module, LightningPolicy):
            for split, hook in (("validation", "val_dataloader"), ("test", "test_dataloader")):
                change = functools.partial(with_simulation, trainer.datamodule, trainer, split)
                if is_overridden(hook, trainer.datamodule) or names_environment(trainer.datamodule, split):
                    self._wrap(trainer.datamodule, hook, change)

    def _wrap(self, owner: Any, hook: str, change: Any) -> None:
        """Have a hook's loaders changed on their way to Lightning, for this call of `fit` only."""
        original = getattr(owner, hook) if is_overridden(hook, owner) else list  # Lightning's own only raises
        if hook in vars(owner):
            return

        def loaders() -> Any:
            return change(original())

        setattr(owner, hook, loaders)
        self._served.append((owner, hook))


def _sources(trainer: Any) -> Iterator[Any]:
    """Yield whatever may know features or windows: the data module, its datasets, the datasets of loaders."""
    module = trainer.datamodule
    if module is not None:
        yield module
        found = [getattr(module, name, None) for name in ("train_dataset", "val_dataset", "test_dataset")]
        yield from (dataset for dataset in found if dataset is not None)
        if found[0] is None:
            dataset = getattr(module.train_dataloader(), "dataset", None)
            yield from () if dataset is None else (dataset,)
    for loader in (*getattr(trainer, "addressed", ()), *getattr(trainer, "evaluated", ())):
        if getattr(loader, "dataset", None) is not None:
            yield loader.dataset


def _spec_of(source: Any) -> DataSpec | None:
    spec = getattr(source, "spec", None)
    return spec if isinstance(spec, DataSpec) else None
