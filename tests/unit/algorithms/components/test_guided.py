"""Flow matching guided by a code: rounding, leaving codes out, dead codes, the averaged posterior."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from etude.algorithms.components.flow import draw_path
from etude.algorithms.components.guided import GuidedCodeFlow, find_codebook, forget_rows, quantize
from etude.errors import ConfigError
from tests.component_models import ACTION, HORIZON, LATENT, STATE, chunks, codebook, components

KEY = "cfg_vqvae_flow_matching_trainer"


def make(kind: Any = torch.optim.AdamW, lr: float = 0.01, **params: Any) -> GuidedCodeFlow:
    models = components(KEY)
    optimizers = {name: kind(model.parameters(), lr=lr) for name, model in models.items()}
    return GuidedCodeFlow(models, optimizers, None, torch.device("cpu"), **params)


def test_nsvq_puts_noise_as_long_as_the_rounding_error_and_lets_codes_learn_by_it() -> None:
    torch.manual_seed(0)
    book, latent = codebook(), torch.randn(7, LATENT, requires_grad=True)
    code = book(latent)
    told = quantize(latent, code, "nsvq")
    assert torch.allclose((told - latent).norm(dim=1), (latent - code["codes"]).norm(dim=1), atol=1e-5)
    told.square().sum().backward()
    weight = find_codebook(book).codes.weight
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    assert latent.grad is not None
    assert latent.grad.abs().sum() > 0


def test_straight_through_passes_the_gradient_by_and_pulls_codes() -> None:
    book, latent = codebook(), torch.randn(7, LATENT, requires_grad=True)
    code = book(latent)
    told = quantize(latent, code, "straight_through")
    assert torch.allclose(told, code["codes"], atol=1e-6)
    (grad,) = torch.autograd.grad(told.sum(), latent)
    assert torch.equal(grad, torch.ones_like(latent))
    found = make(quantization="straight_through").train_step(chunks())
    assert float(found["codebook"]) > 0


def test_the_total_is_the_sum_of_its_parts() -> None:
    trainer = make(commitment_weight=0.3, prior_weight=0.7)
    found = trainer.losses(chunks(), 0)
    expected = found["velocity"] + 0.3 * found["commitment"] + 0.7 * found["prior_posterior"]
    assert torch.allclose(found["total"], expected)
    posterior, prior = trainer.models["vqvae_posterior"], trainer.models["vqvae_prior"]
    data = chunks()
    latent = posterior(data["observation.state"], draw_path(data).actions_BHA)
    code = trainer.models["vqvae_codebook"](latent)["codes"]
    assert torch.allclose(found["commitment"], functional.mse_loss(latent, code), atol=1e-6)
    averaged = trainer.posterior_ema(data["observation.state"], draw_path(data).actions_BHA)
    guess = prior(data["observation.state"])
    assert torch.allclose(found["prior_posterior"], functional.mse_loss(guess, averaged), atol=1e-6)


def test_codes_are_left_out_more_often_with_every_epoch() -> None:
    torch.manual_seed(0)
    trainer, latents = make(dropout=0.5, dropout_epochs=2), torch.ones(4000, LATENT)
    shares = [float((trainer.leave_out(latents, epoch)[:, 0] == 0).float().mean()) for epoch in (0, 1, 2, 9)]
    assert shares == pytest.approx([0.0, 0.25, 0.5, 0.5], abs=0.03)


def test_guidance_goes_from_the_free_velocity_past_that_of_the_code() -> None:
    models, seen = components(KEY), {"observation.state": torch.randn(3, STATE)}
    noise = torch.randn(3, HORIZON, ACTION)
    free, guided, further = (
        GuidedCodeFlow.sample_actions(models, seen, n_steps=1, noise=noise, guidance=scale) for scale in (0.0, 1.0, 3.0)
    )
    assert not torch.allclose(free, guided)
    assert torch.allclose(further, free + 3 * (guided - free), atol=1e-5)
    with torch.no_grad():
        find_codebook(models["vqvae_codebook"]).codes.weight.add_(1.0)
    assert torch.equal(GuidedCodeFlow.sample_actions(models, seen, n_steps=1, noise=noise, guidance=0.0), free)


def test_dead_codes_are_replaced_in_the_first_epoch_alone() -> None:
    trainer, data = make(replace_every=2), chunks()
    replaced = [trainer.train_step(data, epoch=0).get("codes_replaced") for _ in range(4)]
    assert [value is None for value in replaced] == [True, False, True, False]
    assert int(replaced[1]) > 0
    assert all("codes_replaced" not in trainer.train_step(data, epoch=1) for _ in range(4))


@pytest.mark.parametrize("kind", ["adamw", "sgd", "schedule_free"])
def test_a_replaced_code_begins_anew_with_its_optimizer_too(kind: str) -> None:
    book = find_codebook(codebook())
    weight = book.codes.weight
    if kind == "schedule_free":
        schedulefree = pytest.importorskip("schedulefree")
        optimizer = schedulefree.RAdamScheduleFree([weight], lr=0.1)
        optimizer.train()
    else:
        optimizer = torch.optim.AdamW([weight], 0.1) if kind == "adamw" else torch.optim.SGD([weight], 0.1, 0.9)
    for _ in range(8):
        optimizer.zero_grad()
        (weight * torch.arange(1.0, 7.0).unsqueeze(1)).sum().backward()
        optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
    dead = torch.tensor([True, False, False, True, False, False])
    forget_rows(optimizer, weight, dead)
    rows = {name: value for name, value in optimizer.state[weight].items()
            if isinstance(value, torch.Tensor) and value.shape == weight.shape}  # fmt: skip
    assert rows
    for name, value in rows.items():
        assert torch.equal(value[~dead], before[name][~dead])
        assert torch.equal(value[dead], weight[dead] if name == "z" else torch.zeros_like(value[dead]))
    forget_rows(torch.optim.AdamW([weight], 0.1), weight, dead)  # which has seen no step


def test_a_replaced_code_stays_where_it_was_put() -> None:
    """With what Adam remembered of the old code, the new one would drift although nothing pulls at it."""
    trainer, data = make(replace_every=3, lr=0.05), chunks()
    weight, optimizer = (
        find_codebook(trainer.models["vqvae_codebook"]).codes.weight,
        trainer.optimizers["vqvae_codebook"],
    )
    optimizer.param_groups[0]["weight_decay"] = 0.0
    trainer.train_step(data, epoch=0)
    with torch.no_grad():
        weight[4:] = 100.0  # further than any latent
        find_codebook(trainer.models["vqvae_codebook"]).uses_K.zero_()
    found = [trainer.train_step(data, epoch=0) for _ in range(2)][-1]
    assert int(found["codes_replaced"]) >= 2
    held = weight.detach().clone()
    assert float(held[4:].abs().max()) < 50
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weight[4:], held[4:])


def test_the_average_follows_the_posterior() -> None:
    trainer, data = make(ema_decay=0.5), chunks()
    assert not any(p.requires_grad for p in trainer.posterior_ema.parameters())
    start = copy.deepcopy(trainer.posterior_ema)
    expected = [p.clone() for p in start.parameters()]
    for step in range(1, 4):
        trainer.train_step(data)
        decay = min(0.5, (1 + step) / (10 + step))
        now = list(trainer.models["vqvae_posterior"].parameters())
        expected = [decay * old + (1 - decay) * new.detach() for old, new in zip(expected, now, strict=True)]
    assert all(
        torch.allclose(p, value, atol=1e-6)
        for p, value in zip(trainer.posterior_ema.parameters(), expected, strict=True)
    )


def test_the_prior_learns_to_guess_the_code() -> None:
    trainer, data = make(lr=0.02, dropout=0.1), chunks(128)
    torch.manual_seed(0)
    found = [trainer.train_step(data, epoch=step // 30) for step in range(120)]
    assert float(found[-1]["prior_accuracy"]) > 0.5
    assert float(found[-1]["codes_used"]) > 1


def test_a_component_without_a_codebook_is_named() -> None:
    with pytest.raises(ConfigError, match="vqvae_codebook has no module of type vq_codebook"):
        find_codebook(nn.Linear(1, 1))
