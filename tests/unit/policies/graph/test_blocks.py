"""The blocks: each is built from YAML, keeps its promise about shapes, and learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude.errors import ConfigError
from etude.policies.graph import MODULE_REGISTRY, build_model
from etude.policies.graph.latents import Codebook, Gate, Gaussian, MixtureOfExperts

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 16}
IMAGES = ["B", 3, 32, 32]

CASES: list[tuple[str, dict[str, Any], list[Any], Any]] = [
    ("mlp", {"in_features": 4, "out_features": 3, "hidden": [8], "norm": True, "dropout": 0.1}, [["B", 4]], [2, 3]),
    ("conv", {"in_channels": 3, "out_channels": 8, "stride": 2}, [IMAGES], [2, 8, 16, 16]),
    ("conv_bn_act", {"in_channels": 3, "out_channels": 8, "dims": 1, "norm": "group"}, [["B", 3, 9]], [2, 8, 9]),
    ("residual", {"in_channels": 3, "out_channels": 8, "stride": 2}, [IMAGES], [2, 8, 16, 16]),
    ("transformer_encoder", {"width": 8, "causal": True, "in_features": 4}, [["B", 5, 4]], [2, 5, 8]),
    ("transformer_decoder", {"width": 8, "causal": True, "memory_dim": 4}, [["B", 5, 8], ["B", 3, 4]], [2, 5, 8]),
    ("cross_attention", {"width": 8, "memory_dim": 4}, [["B", 5, 8], ["B", 3, 4]], [2, 5, 8]),
    ("film", {"features": 8, "condition_dim": 3}, [["B", 5, 8], ["B", 3]], [2, 5, 8]),
    ("positional_embedding", {"width": 8, "length": 5, "kind": "learned"}, [["B", 4, 8]], [2, 4, 8]),
    ("time_embedding", {"width": 8, "scale": 1000}, [["B"]], [2, 8]),
    ("learned_tokens", {"count": 2, "width": 8}, [["B", 4]], [2, 2, 8]),
    ("unet1d", {"action_dim": 2, "condition_dim": 3, "down_dims": [8, 16], "step_embed_dim": 8},
     [["B", 4, 2], ["B"], ["B", 3]], [2, 4, 2]),
    ("dit", {"action_dim": 2, "condition_dim": 3, "horizon": 4, "hidden_dim": 8, "n_layers": 1, "n_heads": 2},
     [["B", 4, 2], ["B"], ["B", 3]], [2, 4, 2]),
    ("resnet", {"backbone": "resnet10_small"}, [IMAGES], [2, 256, 1, 1]),
    ("vit", {"config": {**TINY, "patch_size": 8}, "pool": "cls"}, [["B", 3, 16, 16]], [2, 16]),
    ("dinov2", {"config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
                           "patch_size": 8}, "pool": "mean"}, [["B", 3, 16, 16]], [2, 16]),
    ("siglip", {"config": {**TINY, "patch_size": 8}}, [["B", 3, 16, 16]], [2, 4, 16]),
]  # fmt: skip
NAMED: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("vq_codebook", {"codes": 5, "width": 4}, [["B", 4]], "quantized"),
    ("gaussian_prior", {"in_features": 4, "latent_dim": 2}, [["B", 4]], "sample"),
    ("gaussian_posterior", {"in_features": 8, "latent_dim": 2}, [["B", 4], ["B", 2, 2]], "sample"),
    ("gate", {"in_features": 4, "experts": 3, "top_k": 2, "noise": 1.0}, [["B", 4]], "weights"),
]


def model_of(key: str, parameters: dict[str, Any], shapes: list[Any], out: Any = None) -> dict[str, Any]:
    names = [f"x{index}" for index in range(len(shapes))]
    node = {"name": "y", "call": "module:m", "args": [f"${name}" for name in names], **({"out": out} if out else {})}
    body = {"inputs": dict(zip(names, shapes, strict=True)), "modules": {"m": {"_type_": key, **parameters}}}
    return {"schema_version": 1, "model": {"graph": {**body, "nodes": [node], "outputs": ["$y"]}}}


@pytest.mark.parametrize("key, parameters, shapes, expected", CASES, ids=[case[0] for case in CASES])
def test_blocks_have_their_shapes_without_and_with_numbers(
    key: str, parameters: dict[str, Any], shapes: list[Any], expected: list[int]
) -> None:
    torch.manual_seed(0)
    model = build_model(model_of(key, parameters, shapes))
    assert model.shapes["y"] == str(expected)
    out = model(*[torch.randn([2 if size == "B" else size for size in shape]) for shape in shapes])
    assert list(out.shape) == expected
    out.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("key, parameters, shapes, name", NAMED, ids=[case[0] for case in NAMED])
def test_blocks_with_several_results(key: str, parameters: dict[str, Any], shapes: list[Any], name: str) -> None:
    torch.manual_seed(0)
    model = build_model(model_of(key, parameters, shapes, {name: "y"}))
    out = model(*[torch.randn([2 if size == "B" else size for size in shape]) for shape in shapes])
    assert model.shapes["y"] == str(list(out.shape))


def test_every_block_is_tried_here() -> None:
    tried = {case[0] for case in CASES} | {case[0] for case in NAMED} | {"mixture_of_experts", "residual_block"}
    assert {key for key in MODULE_REGISTRY if MODULE_REGISTRY.is_builtin(key)} == tried


def test_every_module_of_torch_is_known_by_name() -> None:
    from etude.policies.graph.components import find_component
    from etude.policies.graph.tree import Item, WrittenAt

    classes = {name: getattr(nn, name) for name in dir(nn) if isinstance(getattr(nn, name), type)}
    names = [name for name, found in classes.items() if issubclass(found, nn.Module)]
    assert len(names) > 100
    assert all(find_component(Item(f"nn.{name}", WrittenAt("here"))) is getattr(nn, name) for name in names)


def test_codes_that_nothing_uses_are_replaced_by_latents() -> None:
    torch.manual_seed(0)
    book = Codebook(4, 2)
    with torch.no_grad():
        book.codes.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0], [50.0, 50.0], [60.0, 60.0]]))
    latents = torch.tensor([[0.1, 0.0], [0.9, 1.0], [0.2, 0.1]], requires_grad=True)
    out = book(latents)
    assert out["indices"].tolist() == [0, 1, 0]
    torch.testing.assert_close(out["quantized"], book.codes.weight[[0, 1, 0]])
    out["quantized"].sum().backward()
    assert torch.equal(latents.grad, torch.ones_like(latents))
    assert book.replace_dead(latents).tolist() == [False, False, True, True]
    assert all(any(torch.equal(row, one) for one in latents) for row in book.codes.weight[2:])
    assert book.uses_K.sum() == 0


def test_a_gate_lets_only_the_best_count_and_is_quiet_in_evaluation() -> None:
    torch.manual_seed(0)
    gate = Gate(4, 3, [8], top_k=2, noise=1.0).eval()
    x = torch.randn(5, 4)
    weights = gate(x)["weights"]
    assert torch.equal(weights, gate(x)["weights"])
    assert (weights == 0).sum(1).tolist() == [1] * 5
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    with pytest.raises(ConfigError, match="top_k"):
        Gate(4, 3, top_k=4)


def test_a_mixture_weighs_experts_with_weights_of_their_own() -> None:
    expert = {"_template_": "expert"}
    config = {
        "schema_version": 1,
        "templates": {"expert": {"_type_": "mlp", "in_features": 4, "out_features": 2, "hidden": [4]}},
        "model": {"graph": {
            "inputs": {"x": ["B", 4]},
            "modules": {"gate": {"_type_": "gate", "in_features": 4, "experts": 2, "hidden": [4]},
                        "moe": {"_type_": "mixture_of_experts", "experts": [expert, expert]}},
            "nodes": [
                {"name": "g", "call": "module:gate", "args": ["$x"], "out": {"weights": "w"}},
                {"name": "all", "call": "module:moe", "args": ["$x"]},
                {"name": "y", "call": "module:moe", "args": ["$x"], "kwargs": {"weights_BE": "$w"}},
            ],
            "outputs": ["$all", "$y", "$w"],
        }},
    }  # fmt: skip
    torch.manual_seed(0)
    every, weighed, weights = build_model(config)(torch.randn(3, 4))
    assert every.shape == (3, 2, 2)
    assert not torch.equal(every[:, 0], every[:, 1])
    torch.testing.assert_close((every * weights.unsqueeze(-1)).sum(1), weighed)
    with pytest.raises(ConfigError, match="list of modules"):
        MixtureOfExperts([])


def test_a_gaussian_samples_in_training_and_says_its_mean_otherwise() -> None:
    torch.manual_seed(0)
    head = Gaussian(3, 2)
    x = torch.randn(1, 3)
    out = head(x)
    assert not torch.equal(out["sample"], out["mean"])
    out = head.eval()(x)
    assert torch.equal(out["sample"], out["mean"])


def test_backbones_load_folders_and_download_nothing(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    saved = ViTModel(ViTConfig(**TINY, patch_size=8), add_pooling_layer=False)
    saved.save_pretrained(tmp_path / "vit")
    model = build_model(model_of("vit", {"weights": str(tmp_path / "vit")}, [["B", 3, 16, 16]]))
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model.eval()(images), saved.eval()(images).last_hidden_state)
    for key in ("vit", "resnet", "dinov2", "siglip"):
        with pytest.raises(ConfigError, match="nothing is downloaded"):
            build_model(model_of(key, {"weights": "google/some-model"}, [["B", 3, 16, 16]]))
    with pytest.raises(ConfigError, match="has no 'hidden_sise'; did you mean 'hidden_size'"):
        build_model(model_of("vit", {"config": {"hidden_sise": 3}}, [["B", 3, 16, 16]]))
