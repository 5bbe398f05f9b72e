from __future__ import annotations

import pytest

pytest.importorskip("lightning")

# What Lightning itself says about small runs and few workers.
_SAID = (
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches .* is smaller than the logging interval",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    "ignore:The dirpath has changed from",
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engines/lightning" in str(item.path):
            for filter_ in _SAID:
                item.add_marker(pytest.mark.filterwarnings(filter_))
