"""Windows that a dataset factory is told: actions ahead, and histories of numbers and of pictures behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from etude.data.windows import role_of
from etude.errors import DataError

ImageWindow = Sequence[int] | Literal["alike"] | None
"""The window of pictures: distances in frames, None for single ones, or that of all other observations."""
Scaling = Literal["mean_std", "min_max"]
_KINDS = {"mean_std": ("mean", "std", "min", "max"), "min_max": ("min", "max")}


@dataclass(frozen=True)
class Histories:
    """How many frames of each kind belong to a sample, `stride` frames apart, the oldest first and the newest last.

    Actions always have a time of their own, (B, T, ...); a history of 1 is a single frame, (B, ...).
    """

    actions: int
    numbers: int
    pictures: int
    stride: int = 1

    def __post_init__(self) -> None:
        if min(self.actions, self.numbers, self.pictures) < 1:
            raise DataError(
                f"{self.actions} actions, {self.numbers} frames of numbers and {self.pictures} of pictures: each must "
                "be at least 1"
            )

    def deltas(self, names: Iterable[str], cameras: Iterable[str]) -> dict[str, list[int]]:
        """Return distances in frames by feature name; features without any come as single frames."""
        seen, found = set(cameras), {}
        for name in names:
            if role_of(name) == "action":
                found[name] = [step * self.stride for step in range(self.actions)]
            elif name in seen or name.startswith("observation"):
                length = self.pictures if name in seen else self.numbers
                found[name] = [step * self.stride for step in range(1 - length, 1)]
        return {name: steps for name, steps in found.items() if len(steps) > 1 or role_of(name) == "action"}

    def agreed(
        self,
        observation: Sequence[int] | None,
        action: Sequence[int] | None,
        images: ImageWindow,
        cameras: Sequence[str],
    ) -> Histories:
        """Return the windows that fit what a policy asks for too; refuse a policy that asks for others."""
        if action is not None and len(action) != self.actions:
            raise DataError(f"the policy plans {len(action)} actions, and the data is told to hold {self.actions}")
        asked = [len(steps or [0]) for steps in (observation, observation if images == "alike" else images)]
        said = [self.numbers, self.pictures]
        said = asked if said == [1, 1] else said  # nothing was said
        for what, wanted, length, name in zip(
            ("numbers", "pictures"), asked, said, ("n_obs_steps", "image_obs_steps"), strict=True
        ):
            if wanted != length and (cameras or what == "numbers"):
                raise DataError(
                    f"the policy sees {wanted} frames of {what}, and the data is told to hold {length}: it would act "
                    f"on something else than it learned from; set the policy's {name} to {length}"
                )
        return Histories(self.actions, *said, self.stride)


def named_statistics(stats: dict[str, Any], scaling: Scaling, cameras: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return what of a dataset's statistics normalises batches: that of observations and actions.

    Args:
        stats: Statistics by feature name.
        scaling: Whether numbers go by mean and std, or by min and max, to -1..1; pictures always go by the former.
        cameras: Which features are pictures.
    """
    if scaling not in get_args(Scaling):
        raise DataError(f"normalization {scaling!r} is unknown; one of {', '.join(get_args(Scaling))}")
    pictures = set(cameras)
    kinds = {name: _KINDS["mean_std" if name in pictures else scaling] for name in stats}
    return {
        name: {kind: found[kind] for kind in kinds[name] if kind in found}
        for name, found in stats.items()
        if name.startswith("observation") or role_of(name) == "action"
    }


def choose_windows(policy: Any, *sources: Any) -> None:
    """Let data that is cut into windows of time take them from the policy: frames seen, actions planned."""
    if getattr(policy, "action_delta_indices", None) is None:
        return
    asked = {"observation": policy.observation_delta_indices, "action": policy.action_delta_indices}
    by_kind = getattr(policy, "windows", None)
    if by_kind is not None and by_kind["images"] != by_kind["observation"]:
        asked = by_kind
    for source in sources:
        data = getattr(source, "dataset", source)
        if hasattr(data, "use_windows"):
            data.use_windows(**asked)
