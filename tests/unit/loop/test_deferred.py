"""Policies built without their large tensors: every bit as it would be, and never much in memory at a time."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from etude.loop.deferred import CannotDefer, Deferral, finish
from etude.policies import ACT, MLP, Diffusion, FlowMatching
from etude.policies.actor_critic import ActorCritic
from etude.policies.initialize import initialize_weights
from etude.rng import seed_everything
from tests.unit.policies.samples import make_spec

KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "act with a camera": (
        lambda: ACT(chunk_size=4, dim_model=32, n_heads=2, dim_feedforward=64),
        {"cameras": ("top",)},
    ),
    "act with tasks": (lambda: ACT(chunk_size=4, dim_model=32, n_heads=2, dim_feedforward=64), {"tasks": 3}),
    "diffusion unet": (lambda: Diffusion(down_dims=[16, 32]), {"cameras": ("top",)}),
    "diffusion transformer": (lambda: Diffusion(head="transformer", n_layers=2, hidden_dim=32), {}),
    "flow dit": (lambda: FlowMatching(head="dit", n_layers=2, hidden_dim=32), {}),
    "mlp": (MLP, {}),
    "actor critic": (ActorCritic, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_policies_of_the_box_are_built_without_their_weights_to_the_same_bits(kind: str) -> None:
    make, features = KINDS[kind]
    plain, lean = make(), make()
    spec = make_spec(**features)
    seed_everything(5)
    plain.build(spec)
    after = torch.rand(3)
    seed_everything(5)
    with Deferral(256) as deferral:
        lean.build(spec)
    assert_same(plain, lean, deferral)
    assert torch.equal(torch.rand(3), after), "what is drawn later is as it would be"


def assert_same(plain: nn.Module, lean: nn.Module, deferral: Deferral) -> None:
    refs = finish(lean, deferral)
    expected = dict(plain.named_parameters())
    assert set(refs) == {name for name, parameter in expected.items() if parameter.nbytes > 256}
    for name, parameter in lean.named_parameters():
        value = deferral.make(refs[name]) if name in refs else parameter
        assert torch.equal(value, expected[name]) and value.stride() == expected[name].stride(), name
    buffers = dict(lean.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in plain.named_buffers())


class Everything(nn.Module):
    """What constructors do: copies, ties, all kinds of draws, draws over draws, values read, attributes, views."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, padding_idx=0)
        self.tokens = nn.Parameter(0.02 * torch.randn(30, 16))
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.twin = copy.deepcopy(layer)
        self.register_buffer("waves", torch.arange(1000.0).sin())
        self.mask = torch.ones(40, 40).triu()
        self.right, self.cut = nn.Linear(40, 40), nn.Linear(40, 40)
        nn.init.orthogonal_(self.right.weight)
        nn.init.trunc_normal_(self.cut.weight)
        self.image = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.cell = nn.BatchNorm1d(100), nn.GRU(20, 30)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 5)] + torch.linspace(0, 1, 300).tolist()
        self.own = nn.Linear(32, 32)
        with torch.no_grad():
            self.own.weight[3:5] = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
            self.own.weight /= self.own.weight.norm()
        self.spread = self.own.weight.detach().std().item()
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight
        for name, parameter in self.encoder.named_parameters():
            if parameter.dim() > 1 and "layers.1" in name:
                nn.init.xavier_uniform_(parameter)


def test_whatever_a_constructor_does_is_done_again() -> None:
    torch.manual_seed(3)
    plain = Everything()
    torch.manual_seed(3)
    with Deferral(256) as deferral:
        lean = Everything()
    assert_same(plain, lean, deferral)
    assert lean.rates == plain.rates and lean.spread == plain.spread
    assert torch.equal(lean.mask, plain.mask)
    assert lean.head.weight is lean.table.weight


def test_weights_drawn_anew_cost_no_memory_either() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 40), nn.Conv1d(4, 40, 3), nn.Embedding(40, 40))
        initialize_weights(model)
        return model

    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    with Deferral(256) as deferral:
        lean = make()
    assert_same(plain, lean, deferral)


class Live(TorchDispatchMode):
    """Counts the bytes of memory that tensors hold at a time, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._seen += [weakref.ref(value) for value in tree_flatten(found)[0] if isinstance(value, Tensor)]
        self._seen = [reference for reference in self._seen if reference() is not None]
        alive = [tensor.untyped_storage() for reference in self._seen if (tensor := reference()) is not None]
        self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in alive if s.device.type == "cpu"}.values()))
        return found


def test_a_rank_needs_its_share_and_one_parameter() -> None:
    width, depth, world = 128, 12, 4

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)  # every weight is drawn twice
        return model

    whole = sum(p.nbytes for p in make().parameters())
    largest = width * width * 4
    with Live() as live:
        with Deferral() as deferral:
            model = make()
        kept = []
        for ref in finish(model, deferral).values():
            kept.append(deferral.make(ref).chunk(world)[0].clone())
    share = math.ceil(whole / world)
    assert len(kept) == depth
    assert live.peak <= share + 2 * largest < whole / 2


def test_what_cannot_be_made_again_is_refused_with_its_reason() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = [{"tensor": torch.randn(64, 64)}]

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.rows = self.weight.detach()[:32]

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.bernoulli(torch.rand(64, 64)))

    for kind, reason in ((Hides, "neither parameters nor buffers"), (Shares, "'rows' is a window"), (Chooses, "draws")):
        with pytest.raises(CannotDefer, match=reason):
            with Deferral(256) as deferral:
                model = kind()
            finish(model, deferral)
