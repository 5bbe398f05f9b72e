"""Trainers of flow policies made of components: their formulas, that they learn, what they leave alone, and acting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from etude.algorithms.components.flow import chunk_shape, draw_path, observations
from etude.algorithms.components.mixture import VariationalFlow, first_choice_balance, prior_distance
from etude.algorithms.components.naive import NaiveFlowMatching
from etude.algorithms.components.single_expert import drop_cameras
from etude.algorithms.components.update import ask
from etude.errors import ConfigError, DataError
from etude.registry import TRAINER_REGISTRY
from tests.component_models import ACTION, HORIZON, STATE, chunks, components

FLOWS = (
    "naive_flow_matching_policy_trainer",
    "vfp_single_expert_trainer",
    "variational_flow_matching_policy_trainer",
    "cfg_vqvae_flow_matching_trainer",
)
TRAINERS = (*FLOWS, "mutual_information_estimator_trainer")


def make(key: str, loss: Any = None, lr: float = 0.01, models: Any = None, **params: Any) -> Any:
    models = components(key) if models is None else models
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr) for name, model in models.items() if list(model.parameters())
    }
    return TRAINER_REGISTRY.get(key)(models, optimizers, loss, torch.device("cpu"), **params)


@pytest.mark.parametrize("key", TRAINERS)
def test_the_loss_of_every_trainer_falls(key: str) -> None:
    trainer, data = make(key, lr=0.02), chunks()
    torch.manual_seed(1)
    totals = [float(trainer.train_step(data)["total"]) for _ in range(60)]
    assert sum(totals[-10:]) < sum(totals[:10]) - 2
    assert all(map(math.isfinite, totals))


@pytest.mark.parametrize("key", TRAINERS)
def test_metrics_are_single_numbers_and_components_move(key: str) -> None:
    trainer, data = make(key), chunks()
    before = {name: value.clone() for name, value in trainer.models.state_dict().items()}
    found = trainer.train_step(data, epoch=0, total_epochs=3, iterations=0)
    assert {"total", "grad_norm", "lr"} <= found.keys()
    assert found["lr"] == 0.01
    assert all(isinstance(value, float) or (value.numel() == 1 and not value.requires_grad) for value in found.values())
    moved = {name.split(".")[0] for name, value in trainer.models.state_dict().items()
             if not torch.equal(value, before[name])}  # fmt: skip
    assert moved == set(trainer.models)


@pytest.mark.parametrize("key", FLOWS)
def test_every_policy_acts_without_a_trace(key: str) -> None:
    models, seen = components(key), {"observation.state": torch.randn(5, STATE)}
    kind: Any = TRAINER_REGISTRY.get(key)
    before = {name: value.clone() for name, value in models.state_dict().items()}
    torch.manual_seed(3)
    first = kind.sample_actions(models, seen, n_steps=3)
    noise = torch.randn(5, HORIZON, ACTION, generator=torch.Generator().manual_seed(3))
    assert torch.equal(kind.sample_actions(models, seen, n_steps=3, noise=noise), first)
    assert first.shape == (5, HORIZON, ACTION)
    assert not first.requires_grad
    assert models.training
    assert all(torch.equal(value, before[name]) for name, value in models.state_dict().items())
    assert kind.sample_actions(dict(models.items()), seen).shape == first.shape
    with pytest.raises(ConfigError, match="n_steps must be at least 1"):
        kind.sample_actions(models, seen, n_steps=0)


@pytest.mark.parametrize("key", FLOWS)
def test_what_padding_holds_does_not_matter(key: str) -> None:
    data = chunks()
    other = {**data, "action": data["action"].masked_fill(data["action_is_pad"].unsqueeze(2), 1e6)}
    totals = []
    for batch in (data, other):
        torch.manual_seed(1)
        totals.append(make(key).train_step(batch)["total"])
    assert torch.equal(*totals)


def test_times_and_points_are_those_of_the_path() -> None:
    torch.manual_seed(0)
    path = draw_path({"action": torch.randn(20_000, 1, 2)})
    times = path.time_B.sort().values
    expected = 1 - (1 - torch.linspace(0, 1, 20_000)) ** (1 / 1.5)  # the quantiles of Beta(1, 1.5)
    assert float((times - expected).abs().max()) < 2e-3
    time = path.time_B.view(-1, 1, 1)
    assert torch.allclose(path.point_BHA, (1 - time) * path.noise_BHA + time * path.actions_BHA, atol=1e-6)
    assert torch.equal(path.velocity_BHA, path.actions_BHA - path.noise_BHA)


def test_the_naive_loss_is_the_mean_squared_error_of_real_velocities() -> None:
    trainer, data = make(FLOWS[0]), chunks()
    torch.manual_seed(2)
    found = trainer.losses(data, 0)
    torch.manual_seed(2)
    path, models = draw_path(data), trainer.models
    condition = models["info_embedder"](data["observation.state"])
    velocity = models["action_decoder"](path.point_BHA, path.time_B, condition)
    real = ~data["action_is_pad"]
    assert torch.allclose(found["velocity"], functional.mse_loss(velocity[real], path.velocity_BHA[real]), atol=1e-6)
    given = make(FLOWS[0], nn.L1Loss())
    torch.manual_seed(2)
    expected = functional.l1_loss(velocity[real], path.velocity_BHA[real])
    assert torch.allclose(given.losses(data, 0)["velocity"], expected, atol=1e-6)


def test_a_learned_flow_reaches_the_actions() -> None:
    trainer, data = make(FLOWS[0], lr=0.02), chunks(256)
    torch.manual_seed(0)
    for _ in range(250):
        trainer.train_step(data)
    found = NaiveFlowMatching.sample_actions(trainer.models, data)
    real = ~data["action_is_pad"]
    error = (found - data["action"])[real].square().mean()
    assert float(error) < 0.2 * float(data["action"][real].square().mean())


# -- cameras ---------------------------------------------------------------------------------------------------------


def with_cameras(count: int = 400) -> dict[str, Tensor]:
    return {
        "observation.state": torch.ones(count, STATE),
        **{f"observation.images.{name}": torch.ones(count, 1, 2, 2) for name in ("head", "left")},
    }


def test_cameras_are_dropped_sample_by_sample_and_the_batch_stays() -> None:
    torch.manual_seed(0)
    batch = with_cameras()
    before = {name: value.clone() for name, value in batch.items()}
    found = drop_cameras(batch, 0.5)
    assert all(torch.equal(value, before[name]) for name, value in batch.items())
    shown = torch.stack([found[f"observation.images.{name}"].flatten(1).amax(1) for name in ("head", "left")])
    lost = (shown == 0).float()
    assert lost.sum(0).max() == 1  # never both
    assert 0.4 < float(lost.sum(0).mean()) < 0.6
    assert all(0.15 < float(share) < 0.35 for share in lost.mean(1))
    assert torch.equal(found["observation.state"], batch["observation.state"])
    assert drop_cameras(batch, 0.0) is batch


def test_images_go_through_the_backbone_of_their_camera() -> None:
    batch = {**with_cameras(2), "observation.images.left": torch.ones(2, 3, 1, 2, 2), "action": torch.ones(2, 4, 2)}

    class Sum(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, images: Tensor) -> Tensor:
            return self.scale * images.flatten(1).sum(1, keepdim=True)

    seen = observations({"head_backbone": Sum(2.0), "backbone": Sum(1.0)}, batch)
    assert seen["head"].tolist() == [[8.0], [8.0]]
    assert seen["left"].shape == (2, 3, 1)  # three frames in a row
    assert "action" not in seen
    pictures = {"observation.images.head": torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)}
    assert observations({}, pictures)["head"].tolist() == torch.ones(1, 1, 2, 2).tolist()


def test_a_single_expert_may_learn_by_transport_too() -> None:
    def distance(made: Tensor, wanted: Tensor, state: Tensor, other: Tensor) -> Tensor:
        assert state.shape == (48, STATE)
        return (made - wanted).square().mean()

    trainer = make(FLOWS[1], distance, transport_weight=0.5)
    found = trainer.train_step(chunks())
    assert torch.allclose(found["total"], found["velocity"] + 0.5 * found["sinkhorn"])
    assert {"total", "velocity", "grad_norm", "lr"} <= found.keys()
    assert "sinkhorn" not in make(FLOWS[1]).train_step(chunks())


# -- the mixture -----------------------------------------------------------------------------------------------------


def test_the_mixture_weighs_the_errors_of_its_experts() -> None:
    trainer, data = make(FLOWS[2]), chunks()
    path = draw_path(data)
    seen = trainer.observe(trainer.models, data)
    weights = torch.rand(48, 3).softmax(1)
    answers = ask(trainer.models["moe_action_decoder"], {**seen, "noisy": path.point_BHA, "time": path.time_B})
    assert answers.shape == (48, 3, HORIZON, ACTION)
    by_hand = torch.zeros(())
    for expert in range(3):
        errors = (answers[:, expert] - path.velocity_BHA).square().mean(2) * path.valid_BH
        by_hand = by_hand + (weights[:, expert] * errors.sum(1)).sum() / path.valid_BH.sum()
    assert torch.allclose(trainer.weighed_error(path, {**seen, "weights": weights}), by_hand, atol=1e-6)


def test_the_total_of_the_mixture_is_the_sum_of_its_parts() -> None:
    def distance(made: Tensor, wanted: Tensor, *states: Tensor) -> Tensor:
        return (made - wanted).abs().mean()

    trainer = make(FLOWS[2], distance, transport_weight=0.3, prior_weight=0.5, z_weight=0.02, balance_weight=0.04)
    found = trainer.losses(chunks(), 0)
    expected = found["velocity"] + 0.3 * found["sinkhorn"] + 0.5 * found["prior_posterior"]
    expected = expected + 0.02 * found["z_loss"] + 0.04 * found["load_balance"]
    assert torch.allclose(found["total"], expected)
    assert all(found[name].item() > 0 for name in ("prior_posterior", "z_loss", "load_balance"))


def test_an_expert_that_top_k_leaves_out_learns_nothing_and_says_nothing() -> None:
    models = components(FLOWS[2])
    last = models["gate"].graph_modules["gate"].layers[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([5.0, 4.0, -50.0]))
    trainer = make(FLOWS[2], models=models)
    trainer.losses(chunks(), 0)["velocity"].backward()
    experts = models["moe_action_decoder"].graph_modules["layers"].experts
    norms = [sum(float(p.grad.abs().sum()) for p in expert.parameters()) for expert in experts]
    assert norms[0] > norms[1] > 0 == norms[2]
    seen = {"observation.state": torch.randn(3, STATE)}
    noise = torch.randn(3, HORIZON, ACTION)
    before = VariationalFlow.sample_actions(models, seen, noise=noise)
    with torch.no_grad():
        experts[2][-1].bias.add_(100.0)
    assert torch.equal(VariationalFlow.sample_actions(models, seen, noise=noise), before)


def test_the_distance_of_gaussians_is_their_kl_divergence() -> None:
    torch.manual_seed(0)
    q, p = ({"mean": torch.randn(5, 4), "log_variance": torch.randn(5, 4), "sample": torch.zeros(5, 4)} for _ in "qp")
    one, other = (torch.distributions.Normal(d["mean"], (d["log_variance"] / 2).exp()) for d in (q, p))
    expected = torch.distributions.kl_divergence(one, other).mean()
    assert torch.allclose(prior_distance(q, p), expected, atol=1e-5)
    latents = torch.randn(2, 5, 4)
    assert torch.allclose(prior_distance(latents[0], latents[1]), functional.mse_loss(latents[0], latents[1]))


def test_balance_is_one_where_experts_are_chosen_alike() -> None:
    even = torch.eye(3).repeat(4, 1) * 3
    assert torch.allclose(first_choice_balance(even, even.softmax(1)), torch.tensor(1.0))
    one = torch.tensor([[9.0, 0.0, 0.0]]).repeat(4, 1)
    assert float(first_choice_balance(one, one.softmax(1))) > 2.9


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_components_that_are_missing_or_unused_are_named() -> None:
    models = components(FLOWS[0])
    with pytest.raises(ConfigError, match="there is no action_decoder among info_embedder"):
        make(FLOWS[0], models=nn.ModuleDict({"info_embedder": models["info_embedder"]}))
    with pytest.raises(ConfigError, match=r"NaiveFlowMatching is made of .*; nothing uses gate"):
        make(FLOWS[0], models=nn.ModuleDict({**models, "gate": nn.Linear(1, 1)}))
    make(FLOWS[0], models=nn.ModuleDict({**models, "head_backbone": nn.Linear(1, 1)}))


def test_what_a_batch_or_a_decoder_lacks_is_said() -> None:
    trainer = make(FLOWS[0])
    with pytest.raises(DataError, match=r"the batch has no action; it has observation\.state"):
        trainer.train_step({"observation.state": torch.ones(2, STATE)})
    with pytest.raises(DataError, match=r"the batch has no observation\.\*; it has action"):
        trainer.train_step({"action": torch.ones(2, HORIZON, ACTION)})
    with pytest.raises(ConfigError, match="a component takes state, which there is not; there are current"):
        trainer.train_step({"action": torch.ones(2, HORIZON, ACTION), "observation.current": torch.ones(2, 1)})
    with pytest.raises(ConfigError, match="declare its input as `noisy: "):
        chunk_shape(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "key, params, message",
    [
        (FLOWS[0], {"clip_norm": 0.0}, "clip_norm must be more than 0"),
        (FLOWS[1], {"camera_dropout": 1.5}, "camera_dropout must be from 0 to 1"),
        (FLOWS[3], {"quantization": "vq"}, "quantization 'vq' is unknown; one of nsvq, straight_through"),
        (FLOWS[3], {"dropout": -1.0}, "dropout must be from 0 to 1"),
        (TRAINERS[4], {"bound": "nwj"}, "bound 'nwj' is unknown; one of infonce, mine"),
        (TRAINERS[4], {"ema_decay": 1.0}, "ema_decay must be from 0 to below 1"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(key: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(key, **params)


def test_each_component_is_clipped_by_itself() -> None:
    trainer = make(FLOWS[0], lr=0.0, clip_norm=1e-3)
    found = trainer.train_step(chunks())
    for name, model in trainer.models.items():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert float(norm) == pytest.approx(1e-3, rel=1e-3)
        assert float(found[f"{name} grad_norm"]) > 1e-2
    free = make(FLOWS[0], lr=0.0, clip_norm=None).train_step(chunks())
    assert float(free["grad_norm"]) > 1e-2
