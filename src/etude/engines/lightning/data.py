"""Data modules that are not Lightning's, as ones that are."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.utilities import CombinedLoader

from etude.errors import DataError


class PlainDataModule(lightning.LightningDataModule):
    """Lends Lightning the loaders of a data module that knows nothing of it; attributes are those of the module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("module")
        if module is None or name in vars(self) or hasattr(type(self), name) or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)  # such as the batch size that Lightning's Tuner tries

    def prepare_data(self) -> None:
        """Pass on, if the module wants to know."""
        self._call("prepare_data")

    def setup(self, stage: str) -> None:
        """Pass on, if the module wants to know."""
        self._call("setup", stage)

    def teardown(self, stage: str) -> None:
        """Pass on, if the module wants to know."""
        self._call("teardown", stage)

    def train_dataloader(self) -> Any:
        """Return the module's training loader."""
        return self.module.train_dataloader()

    def val_dataloader(self) -> Any:
        """Return the module's validation loaders; none is fine."""
        return self._loaders("val_dataloader")

    def test_dataloader(self) -> Any:
        """Return the module's test loaders; none is fine."""
        return self._loaders("test_dataloader")

    def predict_dataloader(self) -> Any:
        """Return the module's loaders to predict from."""
        return self._loaders("predict_dataloader")

    def _loaders(self, hook: str) -> Any:
        found = self._call(hook)
        return NoLoaders() if found is None or found == [] else found

    def _call(self, hook: str, *arguments: Any) -> Any:
        method = getattr(self.module, hook, None)
        return method(*arguments) if callable(method) else None


def is_data_module(source: Any) -> bool:
    """Tell whether something is a data module, of Lightning's or another make."""
    return isinstance(source, lightning.LightningDataModule) or callable(getattr(source, "train_dataloader", None))


def as_lightning(source: Any) -> lightning.LightningDataModule | None:
    """Return a data module as one of Lightning's; None stays None."""
    if source is None or isinstance(source, lightning.LightningDataModule):
        return source
    if not is_data_module(source):
        raise DataError(f"{type(source).__name__} is no data module; it has no train_dataloader()")
    return PlainDataModule(source)


class NoLoaders(CombinedLoader):
    """No loaders at all, for a data module without validation; Lightning takes an empty list for an empty loader."""

    def __init__(self) -> None:
        super().__init__([], "sequential")

    @property
    def flattened(self) -> list[Any]:
        """Return nothing."""
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        """Keep nothing."""


def no_loaders() -> NoLoaders:
    """Return no loaders."""
    return NoLoaders()
