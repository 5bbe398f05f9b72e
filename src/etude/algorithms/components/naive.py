"""Flow matching as it is: one condition, one decoder, the squared error of the velocity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from etude.algorithms.components.flow import FlowTrainer, draw_path


class NaiveFlowMatching(FlowTrainer):
    """Learn the velocity from noise to actions under what `info_embedder` makes of the observation.

    A loss module that is given compares velocities over real actions, in place of their mean squared error.
    """

    required: ClassVar[tuple[str, ...]] = ("info_embedder", "action_decoder")

    def losses(self, data: Mapping[str, Any], epoch: int) -> dict[str, Tensor]:
        """Return the error of the velocity."""
        path, seen = draw_path(data), self.observe(self.models, data)
        if self.loss is None:
            velocity = self.squared_error(path, seen)
        else:
            real_BH = path.valid_BH > 0
            found_BHA = self.velocity(self.models, seen, path.point_BHA, path.time_B)
            velocity = self.loss(found_BHA[real_BH], path.velocity_BHA[real_BH])
        return {"total": velocity, "velocity": velocity}
