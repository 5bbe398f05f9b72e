"""Pictures are rendered where a policy looks at them, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from etude.policies.base import PolicyModule
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.environments.base import Observation
from etude.simulation.evaluate import evaluate_policy
from etude.types import DataSpec, Feature
from tests.unit.simulation.point_reach import PointReach

CAMERA = "observation.images.top"
STEPS = 13
STATS = {"mean": [0.0], "std": [1.0], "min": [-1.0], "max": [1.0], "q01": [-1.0], "q99": [1.0]}


class AlwaysSeen(PointReach):
    """A plane with a camera that counts its pictures, and cannot look away."""

    rendered = 0

    def __init__(self) -> None:
        super().__init__(max_steps=STEPS)
        self.spec = DataSpec({**self.spec.features, CAMERA: Feature((6, 6, 3), "uint8", "image")}, self.fps)

    def _seen(self) -> Observation:
        seen = super()._seen()
        if getattr(self, "looks", True):
            type(self).rendered += 1
            seen[CAMERA] = np.full((6, 6, 3), round(float(self.point[0]) * 40) % 256, np.uint8)
        return seen


class Seen(AlwaysSeen):
    """The same, which can."""

    looks = True


class Looker(PolicyModule):
    """Acts by the brightness of its pictures."""

    def make_layers(self, spec: DataSpec) -> None:
        self.layer = nn.Linear(1, 1)

    def sample_actions(self, batch: Mapping[str, Any]) -> Tensor:
        bright = batch[CAMERA].flatten(1).mean(1)
        return torch.stack([bright.sin(), bright.cos()], 1)[:, None].expand(-1, self.horizon, -1)


def make(**settings: Any) -> Looker:
    policy = Looker(6, **settings)
    stats = {name: values * 2 for name, values in STATS.items()}
    pictures = {name: [[[one[0]]] * 3] for name, one in STATS.items()}
    features = {
        CAMERA: Feature((3, 6, 6), "uint8", "image", stats={k: np.reshape(v, (3, 1, 1)) for k, v in pictures.items()}),
        "action": Feature((2,), "float32", "action", stats=stats),
    }
    policy.build(DataSpec(features, 10.0))
    return policy


@pytest.mark.parametrize(
    "settings, pictures",
    [
        ({"n_action_steps": 5}, 3),  # at steps 0, 5, 10
        ({"n_action_steps": 5, "n_obs_steps": 2}, 5),  # and at 4 and 9
        ({"n_action_steps": 6, "n_obs_steps": 3}, 7),  # 0, 4 to 6, 10 to 12
        ({"temporal_ensemble_coeff": 0.01}, 14),  # at every step, and after the last
    ],
)
def test_pictures_are_rendered_at_the_rate_of_the_policy(
    settings: dict[str, Any], pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "seen", Seen)
    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "always_seen", AlwaysSeen)
    monkeypatch.setattr(Seen, "rendered", 0)
    policy = make(**settings)
    found = evaluate_policy(policy, "seen", episodes=2)
    assert [row.steps for row in found.rows] == [STEPS] * 2
    assert Seen.rendered == 2 * pictures
    plain = evaluate_policy(policy, "always_seen", episodes=2)
    assert [row.reward for row in plain.rows] == [row.reward for row in found.rows]
    together = evaluate_policy(policy, "seen", episodes=2, slots=2, exact=False)
    np.testing.assert_allclose([row.reward for row in together.rows], [row.reward for row in found.rows], rtol=1e-4)


def test_a_policy_that_chooses_in_its_own_way_sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless(Looker):
        def select_action(self, observation: Mapping[str, Any], slots: Any = None) -> Tensor:
            return super().select_action(observation, slots)

    monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, "seen", Seen)
    monkeypatch.setattr(Seen, "rendered", 0)
    policy = make(n_action_steps=5)
    policy.__class__ = Restless
    evaluate_policy(policy, "seen", episodes=1)
    assert Seen.rendered == STEPS + 1
