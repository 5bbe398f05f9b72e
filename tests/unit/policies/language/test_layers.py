"""The layers of a plain Llama, computed without its modules: the same values and gradients, and when they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.policies.language import LanguageModel, layers, layout

from .samples import SMALL, make_batch
from .test_adapters import adapted
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


def test_autocast_and_dropout_of_adapters_are_left_to_the_modules() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not layers.can_train(LanguageModel.tiny(**SMALL).causal)
    policy = LanguageModel.tiny(**SMALL, lora={"rank": 2, "dropout": 0.1})
    assert layers.can_train(policy.eval().causal)
    assert not layers.can_train(policy.train().causal)
    policy.causal.model.layers[0].mlp.up_proj.lora_A["default"].double()
    assert not layers.can_train(policy.eval().causal)


EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]


@pytest.mark.parametrize("targets", [EVERYWHERE, ["k_proj", "up_proj"], ["o_proj", "gate_proj"], ["down_proj"]])
@pytest.mark.parametrize("onednn", [False, True])
def test_adapters_give_the_values_and_gradients_of_the_modules(
    monkeypatch: pytest.MonkeyPatch, targets: list[str], onednn: bool
) -> None:
    monkeypatch.setattr(layers, "ONEDNN_ABOVE", 0 if onednn else 1 << 60)
    monkeypatch.setattr(layers, "BLOCK", 5 * 64)
    policy, batch = adapted(targets, "float32"), make_batch(PAIRS)
    assert layers.can_train(policy.causal)
    ours = policy.log_probs(batch)
    found = gradients(policy, (ours * weights_like(ours)).sum())
    theirs, wanted = without_ours(policy, batch, weights_like(ours))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert found.keys() == wanted.keys() and len(found) >= 4 * len(set(targets) - {"lm_head", "embed_tokens"})
    for name, value in found.items():
        assert wanted[name].abs().max() > 0
        assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())), name


def test_several_adapters_and_frozen_ones_are_those_of_the_modules() -> None:
    policy, batch = adapted(EVERYWHERE, "float32", tied=False), make_batch(PAIRS)
    policy.model.add_adapter("second", policy.model.peft_config["default"])
    policy.model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if ".second" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
            value.requires_grad_(".second" in name or "lora_B" in name)
    assert layers.can_train(policy.causal)
    ours = policy.log_probs(batch)
    found = gradients(policy, ours.sum())
    theirs, wanted = without_ours(policy, batch, torch.ones_like(ours))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert found.keys() == wanted.keys() and found
    for name, value in found.items():
        assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max())), name


@pytest.mark.parametrize("part", ["project", "finish"])
def test_gradients_of_adapters_are_those_of_small_differences(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(layers, "BLOCK", 16)
    cos, sin = (numbers(5, 1, width).detach()[..., :2].repeat(1, 1, 2) for width in (2, 3))
    if part == "project":
        weights = [numbers(*shape) for shape in ((8, 6), (4, 6), (4, 6))]
        adapters = [numbers(2, 6), numbers(8, 2), None, None, numbers(3, 6), numbers(4, 3)]
        given = (numbers(5, 6), numbers(6), 1e-5, cos, sin, *weights, *adapters)
        assert torch.autograd.gradcheck(layers._Project.apply, given)
    else:
        shapes = ((6, 8), (7, 6), (7, 6), (6, 7))
        adapters = [part for out, width in shapes for part in (numbers(2, width), numbers(out, 2))]
        given = (numbers(5, 6), numbers(5, 8), numbers(6), 1e-5, *(numbers(*shape) for shape in shapes), *adapters)
        assert torch.autograd.gradcheck(layers._Finish.apply, given)
