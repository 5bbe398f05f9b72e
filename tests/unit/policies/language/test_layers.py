"""The layers of a plain Llama, computed without its modules: the same values and gradients, and when they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.policies.language import LanguageModel, layers, layout

from .samples import SMALL, make_batch
from .test_log_probs import PAIRS, gradients, weights_like


def watched(policy: LanguageModel) -> None:
    policy.causal.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def without_ours(policy: LanguageModel, batch: Any, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute with the modules themselves: somebody looks on."""
    hook = policy.causal.model.register_forward_hook(lambda *_: None)
    assert not layers.can_train(policy.causal)
    found = policy.log_probs(batch)
    grads = gradients(policy, (found * weights).sum())
    hook.remove()
    return found.detach(), grads


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
def test_values_and_gradients_are_those_of_the_modules(
    monkeypatch: pytest.MonkeyPatch, packed: bool, onednn: bool
) -> None:
    policy, batch = LanguageModel.tiny(**SMALL), make_batch(PAIRS)
    monkeypatch.setattr(layout, "PACK_ABOVE", 4 if packed else 1 << 20)
    monkeypatch.setattr(layers, "ONEDNN_ABOVE", 0 if onednn else 1 << 60)
    monkeypatch.setattr(layers, "BLOCK", 5 * 64)  # several blocks, the last of them shorter
    assert layers.can_train(policy.causal)
    with torch.no_grad():
        for name, value in policy.named_parameters():  # norms that are not all one
            value.mul_(torch.linspace(0.5, 1.5, value.numel()).view_as(value) if "norm" in name else 3)
    ours = policy.log_probs(batch)
    found = gradients(policy, (ours * weights_like(ours)).sum())
    theirs, wanted = without_ours(policy, batch, weights_like(ours))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())), name


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("part", ["norm", "project", "finish"])
def test_gradients_are_those_of_small_differences(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(layers, "BLOCK", 16)
    cos, sin = (numbers(5, 1, width).detach()[..., :2].repeat(1, 1, 2) for width in (2, 3))  # halves alike, as Llama's
    parts: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "norm": (layers._Norm.apply, (numbers(5, 6), numbers(6), 1e-5)),
        "project": (
            layers._Project.apply,
            (numbers(5, 6), numbers(6), 1e-5, cos, sin, numbers(8, 6), numbers(4, 6), numbers(4, 6)),
        ),
        "finish": (
            layers._Finish.apply,
            (numbers(5, 6), numbers(5, 8), numbers(6), 1e-5, *(numbers(*s) for s in ((6, 8), (7, 6), (7, 6), (6, 7)))),
        ),
    }
    function, given = parts[part]
    assert torch.autograd.gradcheck(function, given)


def test_frozen_weights_get_no_gradient_and_the_others_theirs() -> None:
    policy, batch = LanguageModel.tiny(**SMALL), make_batch(PAIRS)
    for name, value in policy.named_parameters():
        value.requires_grad_("up_proj" in name or "q_proj" in name)
    assert layers.can_train(policy.causal)
    ours = policy.log_probs(batch)
    found = gradients(policy, ours.sum())
    _, wanted = without_ours(policy, batch, torch.ones_like(ours))
    assert found.keys() == wanted.keys() and found
    assert all(torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-5) for name, value in found.items())


def test_the_same_batch_gives_the_same_bits_also_in_a_second_backward_pass() -> None:
    policy, batch = LanguageModel.tiny(**SMALL), make_batch(PAIRS)
    total = policy(batch).total
    policy.zero_grad()
    total.backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}
    policy.zero_grad()
    total.backward()
    again = gradients(policy, policy(batch).total)
    for name, value in policy.named_parameters():
        assert value.grad is not None and torch.equal(value.grad, once[name]) and torch.equal(again[name], once[name])


def dropping(policy: LanguageModel) -> None:
    policy.causal.config.attention_dropout = 0.1
    policy.train()


def replaced(policy: LanguageModel) -> None:
    norm = policy.causal.model.norm
    norm.forward = norm.forward


@pytest.mark.parametrize(
    "change",
    [
        watched,
        dropping,
        replaced,
        lambda policy: policy.double(),
        lambda policy: policy.bfloat16(),
        lambda policy: policy.causal.gradient_checkpointing_enable(),
        lambda policy: setattr(policy.causal.model, "norm", torch.nn.RMSNorm(32)),
    ],
    ids=["hook", "dropout", "replaced", "float64", "bfloat16", "checkpointing", "another norm"],
)
def test_what_is_left_to_the_modules(change: Callable[[LanguageModel], Any]) -> None:
    policy = LanguageModel.tiny(**SMALL)
    assert layers.can_train(policy.causal)
    change(policy)
    assert not layers.can_train(policy.causal)


def test_adapters_and_autocast_are_left_to_the_modules() -> None:
    assert not layers.can_train(LanguageModel.tiny(**SMALL, lora=2).causal)
    with torch.autocast("cpu", torch.bfloat16):
        assert not layers.can_train(LanguageModel.tiny(**SMALL).causal)
