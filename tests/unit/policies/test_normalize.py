"""Normalisation inside the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DataError
from etude.policies.normalize import OBSERVATION_LIMIT, Normalizer
from etude.policies.spec import condense, spec_from_json, spec_to_json
from etude.types import DataSpec, Feature
from tests.unit.policies.samples import make_batch, make_spec, stats

STATE = "observation.state"


def one(role: str = "state", shape: tuple[int, ...] = (3,), **values: Any) -> DataSpec:
    name = {"state": STATE, "action": "action", "image": "observation.images.top"}[role]
    dtype = "uint8" if role == "image" else "float32"
    return DataSpec({name: Feature(shape, dtype, role, stats=values or None)})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "quantiles", "identity"])
def test_actions_come_back_in_the_units_of_the_data(mode: str) -> None:
    normalizer = Normalizer(make_spec(), {"action": mode})
    actions = make_batch(make_spec())["action"] * 3
    normalized = normalizer.normalize({"action": actions})["action"]
    assert (mode == "identity") == torch.equal(normalized, actions)
    torch.testing.assert_close(normalizer.unnormalize_action(normalized), actions)


@pytest.mark.parametrize(
    "mode, low, high, lowest", [("min_max", "min", "max", -1.0), ("quantiles", "q01", "q99", -1.0)]
)
def test_bounded_modes_map_their_bounds_to_one(mode: str, low: str, high: str, lowest: float) -> None:
    normalizer = Normalizer(make_spec(), {"action": mode})
    bounds = torch.stack([stats(3)[low], stats(3)[high]])
    normalized = normalizer.normalize({"action": bounds})["action"]
    torch.testing.assert_close(normalized, torch.tensor([[lowest] * 3, [-lowest] * 3]))


def test_mean_and_std_become_zero_and_one() -> None:
    value = torch.stack([stats(5)["mean"], stats(5)["mean"] + stats(5)["std"]])
    normalized = Normalizer(make_spec()).normalize({STATE: value})[STATE]
    torch.testing.assert_close(normalized, torch.tensor([[0.0] * 5, [1.0] * 5]))


MODES_WITH_STATS = ("mean_std", "min_max", "quantiles")


@given(center=st.floats(-1e6, 1e6, width=32), output=st.floats(-1e6, 1e6, width=32))
def test_a_constant_dimension_is_zero_and_comes_back_as_the_constant(center: float, output: float) -> None:
    same = {key: [center, 0.0] for key in ("mean", "min", "max", "q01", "q99")}
    spec = one("action", (2,), **same, std=[0.0, 0.0])
    for mode in MODES_WITH_STATS:
        normalizer = Normalizer(spec, {"action": mode})
        value = torch.tensor([[center, 0.0], [center + 0.5, 3.0]])
        assert normalizer.normalize({"action": value})["action"].abs().max() == 0.0
        acted = normalizer.unnormalize_action(torch.tensor([[output, output]]))
        assert torch.equal(acted, torch.tensor([[center, 0.0]]))


def test_a_constant_observation_is_zero_on_the_robot_too() -> None:
    spec = one("state", (2,), mean=[7.0, 0.0], std=[1e-12, 2.0], min=[7.0, -4.0], max=[7.0, 4.0])
    normalized = Normalizer(spec).normalize({STATE: torch.tensor([[7.5, 1.0]])})[STATE]
    assert normalized.tolist() == [[0.0, 0.5]]


@pytest.mark.parametrize("mode", ["quantiles", "mean_std"])
def test_a_dimension_that_moves_now_and_then_keeps_its_range(mode: str) -> None:
    spec = one("action", (1,), mean=[0.0], std=[1e-9], q01=[0.0], q99=[0.0], min=[-1.0], max=[3.0])
    normalizer = Normalizer(spec, {"action": mode})
    value = torch.tensor([[-1.0], [0.0], [3.0]])
    normalized = normalizer.normalize({"action": value})["action"]
    assert normalized.flatten().tolist() == [-1.0, -0.5, 1.0]
    torch.testing.assert_close(normalizer.unnormalize_action(normalized), value)


def test_a_state_far_outside_of_the_data_is_clamped_and_an_action_is_not() -> None:
    normalizer = Normalizer(make_spec())
    far = normalizer.normalize({STATE: torch.full((1, 5), 1e6), "action": torch.full((1, 3), 1e6)})
    assert far[STATE].max() == OBSERVATION_LIMIT
    assert far["action"].min() > 1e5


@pytest.mark.parametrize(
    "mode, needed", [("mean_std", "mean and std"), ("min_max", "min and max"), ("quantiles", "q01")]
)
def test_missing_statistics_are_named(mode: str, needed: str) -> None:
    with pytest.raises(DataError, match=rf"observation\.state has no {needed}.*identity"):
        Normalizer(one(), {"state": mode})
    Normalizer(one(), {"state": "identity"})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(DataError, match="not finite"):
        Normalizer(one(mean=[0.0, bad, 0.0], std=[1.0] * 3))


def test_statistics_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"'mean' of observation\.state has shape"):
        Normalizer(one(mean=[0.0] * 4, std=[1.0] * 4))


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(DataError, match="contradict"):
        Normalizer(one("action", min=[1.0] * 3, max=[0.0] * 3), {"action": "min_max"})


@pytest.mark.parametrize(
    "modes, message",
    [
        ({"state": "meanstd"}, "one of mean_std"),
        ({"states": "mean_std"}, "did you mean 'state'"),
        ({"observation.stat": "mean_std"}, "did you mean 'observation.state'"),
        ({"state": "imagenet"}, "images of 3 channels"),
    ],
)
def test_keys_and_modes_that_mean_nothing_are_refused(modes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Normalizer(make_spec(), modes)


def test_the_name_of_a_feature_wins_over_its_role() -> None:
    normalizer = Normalizer(make_spec(environment=2), {"state": "min_max", STATE: "identity"})
    assert normalizer.modes[STATE] == "identity"
    assert normalizer.modes["observation.environment_state"] == "mean_std"


def test_history_and_chunks_are_normalised_step_by_step() -> None:
    spec = make_spec()
    normalizer = Normalizer(spec)
    batch = make_batch(spec, history=3)
    normalized = normalizer.normalize(batch)
    alone = normalizer.normalize({STATE: batch[STATE][:, 1], "action": batch["action"][:, 2]})
    assert torch.equal(normalized[STATE][:, 1], alone[STATE])
    assert torch.equal(normalized["action"][:, 2], alone["action"])


def test_what_is_not_known_passes_through_and_the_batch_stays_as_it_was() -> None:
    spec = make_spec()
    batch = make_batch(spec)
    kept = {name: value.clone() for name, value in batch.items()}
    normalized = Normalizer(spec).normalize({**batch, "episode_index": torch.arange(4)})
    assert torch.equal(normalized["episode_index"], torch.arange(4))
    assert normalized["action_is_pad"] is batch["action_is_pad"]
    assert all(torch.equal(batch[name], kept[name]) for name in batch)


def test_classes_have_no_scale() -> None:
    spec = DataSpec({"action": Feature((), "int64", "action", classes=10)})
    normalizer = Normalizer(spec)
    assert torch.equal(normalizer.normalize({"action": torch.arange(3)})["action"], torch.arange(3))
    assert torch.equal(normalizer.unnormalize_action(torch.arange(3)), torch.arange(3))


def test_the_numbers_travel_with_the_state_dict() -> None:
    first = Normalizer(make_spec())
    second = Normalizer(make_spec(), {"action": "min_max"})
    second.load_state_dict(first.state_dict())
    batch = make_batch(make_spec())
    assert torch.equal(first.normalize(batch)["action"], second.normalize(batch)["action"])


# ---- images ----------------------------------------------------------------------------------------------------------


def test_bytes_and_fractions_are_the_same_image() -> None:
    spec = make_spec(cameras=("top",))
    name = "observation.images.top"
    bytes_ = make_batch(spec)[name]
    normalizer = Normalizer(spec)
    of_bytes = normalizer.normalize({name: bytes_})[name]
    of_fractions = normalizer.normalize({name: bytes_ / 255.0})[name]
    assert torch.equal(of_bytes, of_fractions)
    expected = (bytes_[0, 1, 2, 3] / 255.0 - 0.456) / 0.224
    torch.testing.assert_close(of_bytes[0, 1, 2, 3], expected)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_statistics_of_pixels_become_statistics_of_channels(channels_last: bool, scale: float) -> None:
    pixels = torch.rand(50, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
    per_pixel = {
        "mean": pixels.mean(0),
        "std": pixels.std(0, correction=0),
        "min": pixels.amin(0),
        "max": pixels.amax(0),
    }
    if channels_last:
        per_pixel = {key: value.permute(1, 2, 0) for key, value in per_pixel.items()}
    spec = condense(one("image", (8, 9, 3) if channels_last else (3, 8, 9), **per_pixel))
    feature = spec["observation.images.top"]
    assert feature.shape == (3, 8, 9) and feature.stats is not None
    for key, expected in (
        ("mean", pixels.mean((0, 2, 3))),
        ("std", pixels.transpose(0, 1).flatten(1).std(1, correction=0)),
        ("max", pixels.amax((0, 2, 3))),
    ):
        torch.testing.assert_close(torch.tensor(feature.stats[key], dtype=torch.float64).flatten(), expected / scale)
    normalized = Normalizer(spec, {"image": "mean_std"}).normalize({"observation.images.top": pixels / scale})
    assert abs(float(normalized["observation.images.top"].mean())) < 1e-5


def test_grey_images_need_statistics_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"3 channels.*mean_std"):
        Normalizer(one("image", (1, 8, 8)))
    Normalizer(one("image", (1, 8, 8), mean=[0.5], std=[0.2]), {"image": "mean_std"})


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 7)])
def test_a_shape_that_is_no_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"observation\.images\.top has shape"):
        condense(one("image", shape))


def test_names_of_dimensions_tell_where_the_channels_are() -> None:
    feature = Feature((3, 4, 3), "uint8", "image", names=("height", "width", "channels"))
    assert condense(DataSpec({"observation.images.top": feature}))["observation.images.top"].shape == (3, 3, 4)


# ---- what is kept of a spec ------------------------------------------------------------------------------------------


def test_a_condensed_spec_is_plain_complete_and_stable() -> None:
    spec = make_spec(environment=2, cameras=("top",), tasks=4, text=3)
    more = DataSpec({**spec.features, "timestamp": Feature((), "float32"), "task": Feature((), "string", "text")}, 10.0)
    condensed = condense(more)
    assert set(condensed) == set(spec)
    assert condense(condensed) == condensed
    assert spec_from_json(spec_to_json(condensed)) == condensed


def test_tasks_are_counted_from_their_statistics() -> None:
    feature = Feature((), "int64", "task", stats={"max": torch.tensor(6)})
    assert condense(DataSpec({"task_index": feature}))["task_index"].classes == 7
