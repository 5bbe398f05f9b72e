"""0 and empty are values: what cannot be 0 is refused, and never replaced by a default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.data.convert.run import convert
from etude.errors import ConfigError, DataError
from etude.policies import Diffusion, FlowMatching
from etude.policies.language.build import language_model
from etude.rollouts.reward_callback import EvaluateRewards
from etude.simulation.environments.gym import GymEnvironment


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Diffusion(num_inference_steps=0), "num_inference_steps must be between 1"),
        (lambda: EvaluateRewards("addition", limit=0), "limit must be at least 1"),
        (lambda: GymEnvironment("CartPole-v1", max_steps=0), "max_steps must be at least 1"),
    ],
)
def test_zero_is_refused_where_it_means_nothing(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("kind", [Diffusion, FlowMatching])
def test_no_levels_are_not_the_published_ones(kind: Any) -> None:
    assert kind(down_dims=[]).options.down_dims == []


def test_a_rate_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fps must be positive, got 0"):
        convert(tmp_path / "x.zarr", tmp_path / "y", fps=0)


def test_a_tiny_model_without_sizes_is_a_tiny_model() -> None:
    assert language_model(tiny={}) is not None
