"""A dataset of one's own: a factory that returns samples, and what to normalise them by.

`opt_params` say where the factory runs (`local_rank`, `dist_enabled`, `save_dir`), `params` are those of the YAML. A
parameter that the factory does not read is an error, so that none is mistyped in silence.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from etude.registry import DATASET_BUILDER_REGISTRY

from .shapes import ACTION, STATE


class Reaches(Dataset):
    """Where an arm is and where it should be, and how it should move."""

    def __init__(self, count: int, seed: int) -> None:
        self.state = 5.0 + 2.0 * torch.randn(count, STATE, generator=torch.Generator().manual_seed(seed))
        self.action = self.state[:, ACTION:] - self.state[:, :ACTION]

    def __len__(self) -> int:
        return len(self.state)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"observation.state": self.state[index], "action": self.action[index]}


@DATASET_BUILDER_REGISTRY.register("my_dataset")
class MyDatasetFactory:
    def build(self, opt_params, params) -> dict:
        dataset = Reaches(params["count"], params.get("seed", 0))
        columns = {"observation.state": dataset.state, "action": dataset.action}
        stats = {name: {"mean": values.mean(0), "std": values.std(0)} for name, values in columns.items()}
        return {"dataset": dataset, "norm_stats": stats}
