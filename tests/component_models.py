"""Small components for the trainers that come with Etude, and data for them: states of 3 numbers, chunks of 4 x 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from etude.policies.graph import build_model

STATE, HORIZON, ACTION, WIDTH, LATENT = 3, 4, 2, 8, 4


def graph(inputs: dict[str, Any], modules: dict[str, Any], nodes: list[Any], outputs: Any) -> nn.Module:
    """Build a model from its parts."""
    model = {"inputs": inputs, "modules": modules, "nodes": nodes, "outputs": outputs}
    return build_model({"schema_version": 1, "model": {"graph": model}})


def mlp(width_in: int, width_out: int) -> dict[str, Any]:
    """Describe a small perceptron."""
    return {"_type_": "mlp", "in_features": width_in, "out_features": width_out, "hidden": [16], "activation": "silu"}


def encoder(inputs: dict[str, int], width_out: int) -> nn.Module:
    """Build a model that puts its inputs side by side and looks at them."""
    shapes = {name: {"shape": ["B", HORIZON, ACTION] if name == "action" else ["B", size]}
              for name, size in inputs.items()}  # fmt: skip
    nodes: list[Any] = [{"name": f"{name}_flat", "call": "op:flatten", "args": [f"${name}", 1]} for name in inputs]
    nodes.append({"name": "all", "call": "op:cat", "args": [[f"${name}_flat" for name in inputs], 1]})
    nodes.append({"name": "out", "call": "module:layers", "args": ["$all"]})
    return graph(shapes, {"layers": mlp(sum(inputs.values()), width_out)}, nodes, ["$out"])


def decoder(*conditions: str, experts: int = 0) -> nn.Module:
    """Build a model of the velocity under some conditions; with experts, of each expert's."""
    widths = {"condition": WIDTH, "latent": LATENT}
    noisy = {"shape": ["B", HORIZON, ACTION]}
    inputs = {"noisy": noisy, "time": {"shape": ["B"]}, **{name: {"shape": ["B", widths[name]]} for name in conditions}}
    one = mlp(HORIZON * ACTION + 1 + sum(widths[name] for name in conditions), HORIZON * ACTION)
    module = {"_type_": "mixture_of_experts", "experts": [one] * experts} if experts else one
    nodes: list[Any] = [
        {"name": "flat", "call": "op:flatten", "args": ["$noisy", 1]},
        {"name": "step", "call": "op:unsqueeze", "args": ["$time", 1]},
        {"name": "all", "call": "op:cat", "args": [["$flat", "$step", *(f"${name}" for name in conditions)], 1]},
        {"name": "found", "call": "module:layers", "args": ["$all"]},
        {"name": "out", "call": "op:reshape",
         "args": ["$found", [-1, *([experts] if experts else []), HORIZON, ACTION]]},
    ]  # fmt: skip
    return graph(inputs, {"layers": module}, nodes, ["$out"])


def gaussian(*inputs: str) -> nn.Module:
    """Build a distribution of latents."""
    sizes = {"state": STATE, "action": HORIZON * ACTION}
    shapes = {"state": {"shape": ["B", STATE]}, "action": {"shape": ["B", HORIZON, ACTION]}}
    width = sum(sizes[name] for name in inputs)
    module = {"_type_": "gaussian_prior", "in_features": width, "latent_dim": LATENT, "hidden": [16]}
    keys = ("mean", "log_variance", "sample")
    node = {"name": "latent", "call": "module:layers", "args": [f"${name}" for name in inputs],
            "out": {key: key for key in keys}}  # fmt: skip
    return graph({name: shapes[name] for name in inputs}, {"layers": module}, [node], {key: f"${key}" for key in keys})


def codebook(codes: int = 6) -> nn.Module:
    """Build a codebook."""
    keys = ("quantized", "codes", "indices", "distance")
    node = {"name": "code", "call": "module:book", "args": ["$latent"], "out": {key: key for key in keys}}
    module = {"_type_": "vq_codebook", "codes": codes, "width": LATENT}
    return graph({"latent": {"shape": ["B", LATENT]}}, {"book": module}, [node], {key: f"${key}" for key in keys})


def gate(experts: int = 3, **params: Any) -> nn.Module:
    """Build a gate."""
    module = {"_type_": "gate", "in_features": LATENT, "experts": experts, "hidden": [16], **params}
    node = {"name": "g", "call": "module:gate", "args": ["$latent"], "out": {"weights": "weights", "logits": "logits"}}
    outputs = {"weights": "$weights", "logits": "$logits"}
    return graph({"latent": {"shape": ["B", LATENT]}}, {"gate": module}, [node], outputs)


def components(key: str) -> nn.ModuleDict:
    """Build the components of a trainer, by its registry key; the same every time."""
    torch.manual_seed(0)
    seen = {"state": STATE}
    if key == "mutual_information_estimator_trainer":
        parts = {"state_encoder": encoder(seen, WIDTH), "action_encoder": encoder({"action": HORIZON * ACTION}, WIDTH)}
    elif key == "cfg_vqvae_flow_matching_trainer":
        parts = {
            "vqvae_posterior": encoder({"state": STATE, "action": HORIZON * ACTION}, LATENT),
            "vqvae_prior": encoder(seen, LATENT),
            "vqvae_codebook": codebook(),
            "proprio_projector": encoder(seen, WIDTH),
            "action_decoder": decoder("condition", "latent"),
        }
    elif key == "variational_flow_matching_policy_trainer":
        parts = {
            "vqvae_posterior": gaussian("state", "action"),
            "vqvae_prior": gaussian("state"),
            "info_embedder": encoder(seen, WIDTH),
            "gate": gate(top_k=2, noise=0.1),
            "moe_action_decoder": decoder("condition", experts=3),
        }
    else:
        parts = {"info_embedder": encoder(seen, WIDTH), "action_decoder": decoder("condition")}
    return nn.ModuleDict(parts)


def chunks(count: int = 48) -> dict[str, Tensor]:
    """Return states and the actions that follow from them, some of which are padding."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(count, STATE, generator=generator)
    ramp = torch.linspace(0.5, 1.0, HORIZON).view(1, -1, 1)
    action = ramp * torch.stack([state[:, 0], state[:, 1] * state[:, 2]], dim=1).unsqueeze(1)
    is_pad = torch.arange(HORIZON).expand(count, -1) >= torch.randint(2, HORIZON + 1, (count, 1), generator=generator)
    return {"observation.state": state, "action": action, "action_is_pad": is_pad}
