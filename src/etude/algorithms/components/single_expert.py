"""Flow matching with a decoder that learns to do without one of its cameras, and to reach the actions in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from etude.algorithms.components.flow import CAMERAS, FlowTrainer, draw_path
from etude.errors import ConfigError


class SingleExpertFlow(FlowTrainer):
    """Learn the velocity while now and then a sample lacks a camera; a Sinkhorn loss, if given, shapes the first step.

    Args:
        camera_dropout: Probability that one camera of a sample, drawn at random, shows nothing.
        transport_weight: How much the loss module counts beside the velocity.
    """

    required: ClassVar[tuple[str, ...]] = ("info_embedder", "action_decoder")

    def __init__(
        self,
        *parts: Any,
        camera_dropout: float = 0.15,
        transport_weight: float = 0.2,
        **shared: Any,
    ) -> None:
        super().__init__(*parts, **shared)
        if not 0 <= camera_dropout <= 1:
            raise ConfigError(f"camera_dropout must be from 0 to 1, got {camera_dropout}")
        self.camera_dropout, self.transport_weight = camera_dropout, transport_weight

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return the error of the velocity, and with a loss module the distance of one step."""
        path = draw_path(data)
        seen = self.observe(self.models, drop_cameras(data, self.camera_dropout))
        velocity = self.squared_error(path, seen)
        if self.loss is None:
            return {"total": velocity, "velocity": velocity}
        transport = self.transport(path, seen)
        return {"total": velocity + self.transport_weight * transport, "velocity": velocity, "sinkhorn": transport}


def drop_cameras(batch: Mapping[str, Any], probability: float) -> Mapping[str, Any]:
    """Return the batch with one camera, drawn anew for each sample that loses one, set to zero; the batch stays."""
    cameras = [name for name in batch if name.startswith(CAMERAS) and isinstance(batch[name], Tensor)]
    if not cameras or not probability:
        return batch
    first = batch[cameras[0]]
    loses_B = torch.rand(first.shape[0], device=first.device) < probability
    which_B = torch.randint(len(cameras), (first.shape[0],), device=first.device)
    out = dict(batch)
    for index, name in enumerate(cameras):
        hidden_B = loses_B & (which_B == index)
        out[name] = batch[name].masked_fill(hidden_B.view(-1, *[1] * (batch[name].dim() - 1)), 0)
    return out
