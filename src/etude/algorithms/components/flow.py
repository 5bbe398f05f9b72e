"""Flow matching with components: what is observed becomes a condition, under which noise flows to actions.

Time 0 is noise and time 1 is data: x = (1 - t) noise + t actions, which moves at the velocity actions - noise. Times
are drawn from Beta(1, 1.5), more often noisy than not.

Shape letters: B batch, H actions of a chunk, A action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from etude.algorithms.components.update import Components, ComponentTrainer, ask
from etude.errors import ConfigError, DataError
from etude.policies.base import evaluating, masked_loss
from etude.policies.flow import Solver, integrate, sample_times
from etude.policies.generative import even_draws, repeat_edges

CAMERAS = "observation.images."


@dataclass(frozen=True)
class FlowPath:
    """Points on the lines from noise to the actions of a batch."""

    actions_BHA: Tensor
    valid_BH: Tensor
    """1 where an action is real, 0 where it is padding."""
    noise_BHA: Tensor
    time_B: Tensor

    @property
    def point_BHA(self) -> Tensor:
        """Where the line is at its time."""
        return torch.lerp(self.noise_BHA, self.actions_BHA, self.time_B.view(-1, 1, 1))

    @property
    def velocity_BHA(self) -> Tensor:
        """How the point moves."""
        return self.actions_BHA - self.noise_BHA

    def mean(self, errors_BHA: Tensor) -> Tensor:
        """Return the mean of errors over real actions."""
        found = masked_loss(errors_BHA, self.valid_BH)
        return found.total / found.weight


def draw_path(data: Mapping[str, Any]) -> FlowPath:
    """Draw noise and times for the actions of a batch; padding (`action_is_pad`) repeats the nearest real action."""
    if "action" not in data:
        raise DataError(f"the batch has no action; it has {', '.join(map(str, data))}")
    actions_BHA = data["action"]
    actions_BHA = actions_BHA.unsqueeze(1) if actions_BHA.dim() == 2 else actions_BHA
    is_pad = data.get("action_is_pad")
    if is_pad is None:
        valid_BH = actions_BHA.new_ones(actions_BHA.shape[:2])
    else:
        valid_BH = is_pad.view(actions_BHA.shape[:2]).logical_not().to(actions_BHA.dtype)
        actions_BHA = repeat_edges(actions_BHA, valid_BH)
    noise_BHA = torch.randn_like(actions_BHA)
    time_B = sample_times(even_draws(1, actions_BHA.shape[0], actions_BHA.device), "beta").to(actions_BHA.dtype)
    return FlowPath(actions_BHA, valid_BH, noise_BHA, time_B)


def observations(models: Components, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a batch shows, by the last part of each name: `observation.state` is `state`.

    Images of the camera `head`, from 0 to 1, go through the component `head_backbone`, or through `backbone` which all
    cameras share.
    """
    found: dict[str, Any] = {}
    for key, value in batch.items():
        name = key.rpartition(".")[2]
        if not key.startswith("observation.") or name.endswith("_is_pad"):
            continue
        if key.startswith(CAMERAS):
            value = value if value.is_floating_point() else value.float() / 255
            backbone = next((one for one in (f"{name}_backbone", "backbone") if one in models), None)
            value = value if backbone is None else through(models[backbone], value)
        found[name] = value
    if not found:
        raise DataError(f"the batch has no observation.*; it has {', '.join(map(str, batch))}")
    return found


def through(backbone: nn.Module, images: Tensor) -> Any:
    """Return the features of images (B, C, H, W), or of frames in a row (B, T, C, H, W)."""
    if images.dim() == 4:
        return backbone(images)
    features = backbone(images.flatten(0, 1))
    return features.unflatten(0, images.shape[:2])


class FlowTrainer(ComponentTrainer):
    """Learn the velocity of actions under a condition; a subclass adds what else its components learn."""

    embedder: ClassVar[str] = "info_embedder"
    decoder: ClassVar[str] = "action_decoder"
    optional: ClassVar[tuple[str, ...]] = ("backbone",)

    @classmethod
    def observe(cls, models: Components, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what components may ask for: what is seen by its names, and the `condition` made of it."""
        seen = observations(models, batch)
        return {**seen, "condition": ask(models[cls.embedder], seen)}

    @classmethod
    def decide(cls, models: Components, seen: dict[str, Any]) -> dict[str, Any]:
        """Return what acting adds to what is seen, once for a chunk: latents and shares of experts."""
        return seen

    @classmethod
    def velocity(cls, models: Components, seen: Mapping[str, Any], point_BHA: Tensor, time_B: Tensor) -> Tensor:
        """Return where a point moves at a time, (B, H, A); what the decoder takes of `seen` goes with it."""
        out: Tensor = ask(models[cls.decoder], {**seen, "noisy": point_BHA, "time": time_B})
        return out

    @classmethod
    @torch.no_grad()
    def sample_actions(
        cls,
        models: Any,
        batch: Mapping[str, Any],
        n_steps: int = 10,
        solver: Solver = "euler",
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return normalised actions for normalised observations, (B, H, A).

        Args:
            models: The components by name.
            batch: What is observed, as in a training batch.
            n_steps: Steps of the solver.
            solver: euler, or midpoint, which asks twice a step.
            noise: What the actions flow from, (B, H, A); drawn with the global generator unless given.
        """
        return cls._flow(models, batch, n_steps, solver, noise)

    @classmethod
    def _flow(
        cls, models: Any, batch: Mapping[str, Any], n_steps: int, solver: Solver, noise: Tensor | None, **steering: Any
    ) -> Tensor:
        if n_steps < 1:
            raise ConfigError(f"n_steps must be at least 1, got {n_steps}")
        with evaluating(models if isinstance(models, nn.Module) else nn.ModuleDict(models)):
            seen = cls.decide(models, cls.observe(models, batch))
            if noise is None:
                like = next(value for value in seen.values() if isinstance(value, Tensor) and value.is_floating_point())
                shape = (like.shape[0], *chunk_shape(models[cls.decoder]))
                noise = torch.randn(shape, dtype=like.dtype, device=like.device)

            def velocity(point_BHA: Tensor, time_B: Tensor) -> Tensor:
                return cls.velocity(models, seen, point_BHA, time_B, **steering)

            return integrate(velocity, noise, n_steps, solver)

    def squared_error(self, path: FlowPath, seen: Mapping[str, Any]) -> Tensor:
        """Return the mean squared error of the velocity over real actions."""
        found_BHA = self.velocity(self.models, seen, path.point_BHA, path.time_B)
        return path.mean((found_BHA - path.velocity_BHA).square())

    def transport(self, path: FlowPath, seen: Mapping[str, Any]) -> Tensor:
        """Return the loss module's distance between actions made in one step and those of the batch, with their states.

        Both are clouds of as many points as the batch has samples; padding counts as if it were made right.
        """
        zero_B = torch.zeros_like(path.time_B)
        made_BHA = path.noise_BHA + self.velocity(self.models, seen, path.noise_BHA, zero_B)
        made_BHA = torch.where(path.valid_BH.unsqueeze(2) > 0, made_BHA, path.actions_BHA)
        states = (seen["state"], seen["state"]) if "state" in seen else ()
        out: Tensor = self.loss(made_BHA, path.actions_BHA, *states)
        return out


def chunk_shape(decoder: nn.Module) -> tuple[int, int]:
    """Return how many actions of which width a decoder makes, as its file declares its input `noisy`."""
    plan = getattr(decoder, "plan", None)
    shape = next((one.shape for one in plan.inputs if one.name == "noisy"), None) if plan is not None else None
    shape = shape or getattr(decoder, "chunk_shape", None)
    if shape is None or not all(isinstance(size, int) for size in shape[-2:]):
        raise ConfigError(
            "the action decoder does not say what it makes; declare its input as `noisy: {shape: [B, H, A]}` with the "
            "number and width of actions (a module of your own has the attribute chunk_shape = (H, A))"
        )
    steps, width = (int(size) for size in shape[-2:])
    return steps, width
