"""The tensors of ACT and Diffusion as LeRobot calls them and lays them out, in both directions.

Everything here follows from the names of our own state dictionary: a policy is built first, then each of its tensors is
given away under LeRobot's name, or asked for by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import CheckpointError
from etude.policies.act import ACT
from etude.policies.base import PolicyModule
from etude.policies.diffusion import Diffusion
from etude.policies.transformer import sinusoids

COUNTER = ".num_batches_tracked"
"""What BatchNorm counts; nothing reads it."""
_COMPUTED = ("vae_encoder_pos_enc", "rgb_encoder.pool.pos_grid", COUNTER)
"""Ends of names of LeRobot's tensors that follow from the others."""

_ACT_NAMES = (
    (r"encoder\.(\d+)\.", r"encoder.layers.\1."),
    (r"decoder\.(\d+)\.", r"decoder.layers.\1."),
    (r"encoder_norm\.", "encoder.norm."),
    (r"decoder_norm\.", "decoder.norm."),
    (r"query_positions$", "decoder_pos_embed.weight"),
    (r"action_head\.", "action_head."),
    (r"tokens\.positions$", "encoder_1d_feature_pos_embed.weight"),
    (r"tokens\.latent\.", "encoder_latent_input_proj."),
    (r"tokens\.image_projection\.", "encoder_img_feat_input_proj."),
    (r"tokens\.image_encoder\.", "backbone."),
    (r"vae\.cls$", "vae_encoder_cls_embed.weight"),
    (r"vae\.state\.", "vae_encoder_robot_state_input_proj."),
    (r"vae\.action\.", "vae_encoder_action_input_proj."),
    (r"vae\.layers\.", "vae_encoder.layers."),
    (r"vae\.norm\.", "vae_encoder.norm."),
    (r"vae\.out\.", "vae_encoder_latent_output_proj."),
)
_TRANSFORMER_NAMES = (("self_attention.", "self_attn."), ("cross_attention.", "multihead_attn."), ("feed_forward.", ""))
_DIFFUSION_NAMES = (
    (r"encoder\.image_encoder\.", "rgb_encoder.backbone."),
    (r"encoder\.keypoints\.0\.project\.", "rgb_encoder.pool.nets."),
    (r"encoder\.keypoints\.1\.", "rgb_encoder.out."),
    (r"head\.step_encoder\.0\.", "unet.diffusion_step_encoder.1."),
    (r"head\.step_encoder\.2\.", "unet.diffusion_step_encoder.3."),
    (r"head\.middle\.", "unet.mid_modules."),
    (r"head\.shrink\.(\d+)\.linear\.", r"unet.down_modules.\1.2."),
    (r"head\.grow\.(\d+)\.", r"unet.up_modules.\1.2."),
    (r"head\.last\.conv\.linear\.", "unet.final_conv.0.block.0."),
    (r"head\.last\.norm\.", "unet.final_conv.0.block.1."),
    (r"head\.head\.", "unet.final_conv.1."),
)
_BLOCK_NAMES = (
    ("first.conv.linear.", "conv1.block.0."),
    ("first.norm.", "conv1.block.1."),
    ("second.conv.linear.", "conv2.block.0."),
    ("second.norm.", "conv2.block.1."),
    ("shortcut.linear.", "residual_conv."),
)
_STAGE_NAME = re.compile(r"net\.encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:(shortcut)|layer\.(\d+))\.(\w+)\.(\w+)$")


@dataclass(frozen=True)
class Link:
    """What LeRobot calls a tensor, and how its layout differs."""

    theirs: str
    pack: Callable[[Tensor], Tensor] = torch.clone
    unpack: Callable[[Tensor], Tensor] = torch.clone


def to_lerobot(policy: PolicyModule, cameras: Sequence[str]) -> dict[str, Tensor]:
    """Return the weights of a policy as LeRobot's policy of the same kind holds them.

    Args:
        policy: An ACT or a Diffusion, built.
        cameras: The images in LeRobot's order.
    """
    given = {name: value.detach().cpu() for name, value in policy.state_dict().items() if _is_weight(name)}
    tensors = {link.theirs: link.pack(given[name]) for name, link in _links(policy).items() if name in given}
    if isinstance(policy, Diffusion):
        tensors |= _split_film(policy, cameras, given["head.film.weight"], given["head.film.bias"])
    return {name: value.contiguous() for name, value in {**tensors, **_computed(policy, tensors)}.items()}


def from_lerobot(policy: PolicyModule, cameras: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dictionary of a policy, but for its normaliser, from the weights that LeRobot saved."""
    links = _links(policy)
    wanted = {link.theirs for link in links.values()}
    films = _film_blocks(policy) if isinstance(policy, Diffusion) else []
    wanted |= {f"{block}.cond_encoder.1.{kind}" for block in films for kind in ("weight", "bias")}
    if missing := sorted(wanted - set(tensors)):
        raise CheckpointError(f"the weights have no {missing[0]}, which config.json asks for")
    if extra := sorted(name for name in set(tensors) - wanted if not name.endswith(_COMPUTED)):
        raise CheckpointError(f"the weights have {extra[0]}, which config.json does not speak of")
    state = {name: link.unpack(tensors[link.theirs]) for name, link in links.items()}
    if isinstance(policy, Diffusion):
        state |= _join_film(policy, cameras, tensors)
    own = policy.state_dict()
    state |= {name: torch.zeros_like(value) for name, value in own.items() if name.endswith(COUNTER)}
    for name, value in state.items():
        if value.shape != own[name].shape:
            where = links[name].theirs if name in links else name
            raise CheckpointError(
                f"{where} is of {tuple(value.shape)}, where config.json makes it {tuple(own[name].shape)}"
            )
    return state


def _is_weight(name: str) -> bool:
    return not name.startswith("normalizer.") and not name.endswith(COUNTER)


def _links(policy: PolicyModule) -> dict[str, Link]:
    """Return the link of each of our weights but those of FiLM, which are one tensor here and many there."""
    name_of = _act_link if isinstance(policy, ACT) else _diffusion_link
    names = [name for name in policy.state_dict() if _is_weight(name) and not name.startswith("head.film.")]
    return {name: name_of(policy, name) for name in names}


# ---- ACT -------------------------------------------------------------------------------------------------------------


def _act_link(policy: PolicyModule, name: str) -> Link:
    if found := re.match(r"tokens\.vectors\.(\d+)\.(\w+)$", name):
        inputs = policy.tokens.inputs  # type: ignore[union-attr]
        roles = [role for role, names in (("robot", inputs.states), ("env", inputs.environments)) if names]  # type: ignore[union-attr]
        return Link(f"model.encoder_{roles[int(found[1])]}_state_input_proj.{found[2]}")
    theirs = _renamed(name, _ACT_NAMES)
    if theirs.startswith("backbone."):
        return Link(f"model.backbone.{_backbone_name(theirs.removeprefix('backbone.'), numbered=False)}")
    for ours, its in _TRANSFORMER_NAMES:
        theirs = theirs.replace(ours, its)
    if name in ("query_positions", "tokens.positions", "vae.cls"):
        return Link(f"model.{theirs}", lambda value: value.squeeze(1), lambda value: value.unsqueeze(1))
    return Link(f"model.{theirs}")


def _renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in table:
        renamed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return renamed
    raise CheckpointError(f"LeRobot has no place for the weights {name}")


def _backbone_name(name: str, *, numbered: bool) -> str:
    """Return what torchvision's residual network calls a tensor of ours; in a Sequential its parts are numbered."""
    stem = {"convolution": "0" if numbered else "conv1", "normalization": "1" if numbered else "bn1"}
    if name.startswith("net.embedder."):
        _, _, _, part, kind = name.split(".")
        return f"{stem[part]}.{kind}"
    found = _STAGE_NAME.match(name)
    if found is None:
        raise CheckpointError(f"LeRobot has no place for the weights {name}")
    stage, block, shortcut, layer, part, kind = found.groups()
    place = str(int(stage) + 4) if numbered else f"layer{int(stage) + 1}"
    if shortcut:
        inner = f"downsample.{0 if part == 'convolution' else 1}"
    else:
        inner = f"{'conv' if part == 'convolution' else 'bn'}{int(layer) + 1}"
    return f"{place}.{block}.{inner}.{kind}"


# ---- Diffusion -------------------------------------------------------------------------------------------------------


def _diffusion_link(policy: PolicyModule, name: str) -> Link:
    if found := re.match(r"head\.(down|up|middle)\.(\d+)\.(.+)$", name):
        theirs = f"{_block_name(found[1], int(found[2]))}.{_inner_name(found[3])}"
    else:
        theirs = f"diffusion.{_renamed(name, _DIFFUSION_NAMES)}"
    if "rgb_encoder.backbone." in theirs:
        before, _, rest = theirs.partition("backbone.")
        return Link(f"{before}backbone.{_backbone_name(rest, numbered=True)}")
    if name.startswith("head.grow.") and name.endswith("weight"):
        return Link(theirs, _pack_grow, _unpack_grow)
    if name.endswith("linear.weight") or name == "head.head.weight":
        size = policy.get_parameter(name).shape[1]
        module = policy.get_submodule(name.removesuffix(".linear.weight").removesuffix(".weight"))
        width = int(getattr(module, "kernel_size", 1))
        return Link(
            theirs,
            lambda value: value.reshape(len(value), width, size // width).transpose(1, 2),
            lambda value: value.transpose(1, 2).reshape(len(value), -1),
        )
    return Link(theirs)


def _block_name(part: str, number: int) -> str:
    if part == "middle":
        return f"diffusion.unet.mid_modules.{number}"
    return f"diffusion.unet.{part}_modules.{number // 2}.{number % 2}"


def _inner_name(name: str) -> str:
    for ours, theirs in _BLOCK_NAMES:
        if name.startswith(ours):
            return name.replace(ours, theirs)
    raise CheckpointError(f"LeRobot has no place for the weights {name}")


def _pack_grow(value: Tensor) -> Tensor:
    """Return our pairs of matrices as the weights of a transposed convolution, (C, C, 4)."""
    channels = value.shape[2]
    even, odd = value
    return torch.stack([odd[channels:], even[:channels], odd[:channels], even[channels:]], dim=2)


def _unpack_grow(value: Tensor) -> Tensor:
    first, second, third, fourth = value.unbind(2)
    return torch.stack([torch.cat([second, fourth]), torch.cat([third, first])])


def _film_blocks(policy: Diffusion) -> list[str]:
    """Return LeRobot's names of the residual blocks, in the order in which our one FiLM layer serves them."""
    head = policy.head
    return [_block_name(part, i) for part in ("down", "middle", "up") for i in range(len(head.get_submodule(part)))]  # type: ignore[arg-type]


def _film_columns(policy: Diffusion, cameras: Sequence[str]) -> Tensor:
    """Return where LeRobot's columns of the condition lie among ours.

    Both begin with the noise level. Of each observation we have the states first, then the environment's, then the
    cameras by name; LeRobot has the cameras in between, in the order of its config.
    """
    encoder = policy.encoder
    inputs = encoder.inputs
    states, environments = (inputs.width(names) for names in (inputs.states, inputs.environments))
    image = encoder.image_dim if inputs.images else 0
    begin_of_images = states + environments
    order = list(range(states))
    for camera in cameras:
        begin = begin_of_images + inputs.images.index(camera) * image
        order += range(begin, begin + image)
    order += range(states, begin_of_images)
    first = policy.options.step_embed_dim
    columns = list(range(first))
    for step in range(policy.n_obs_steps):
        columns += [first + step * encoder.step_dim + column for column in order]
    return torch.tensor(columns)


def _split_film(policy: Diffusion, cameras: Sequence[str], weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    widths: list[int] = policy.head.film_widths  # type: ignore[assignment]
    matrices = torch.split_with_sizes(weight[:, _film_columns(policy, cameras)], widths)
    vectors = torch.split_with_sizes(bias, widths)
    tensors = {}
    for block, matrix, vector in zip(_film_blocks(policy), matrices, vectors, strict=True):
        tensors[f"{block}.cond_encoder.1.weight"], tensors[f"{block}.cond_encoder.1.bias"] = matrix, vector
    return tensors


def _join_film(policy: Diffusion, cameras: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    blocks = _film_blocks(policy)
    weight = torch.cat([tensors[f"{block}.cond_encoder.1.weight"] for block in blocks])
    columns = _film_columns(policy, cameras)
    if weight.shape[1] != len(columns):
        raise CheckpointError(
            f"the blocks are conditioned on {weight.shape[1]} numbers, where config.json makes it {len(columns)}"
        )
    joined = torch.empty_like(weight)
    joined[:, columns] = weight
    return {
        "head.film.weight": joined,
        "head.film.bias": torch.cat([tensors[f"{block}.cond_encoder.1.bias"] for block in blocks]),
    }


# ---- what LeRobot computes and saves all the same --------------------------------------------------------------------


def _computed(policy: PolicyModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(policy, ACT):
        if not policy.use_vae:
            return {}
        return {"model.vae_encoder_pos_enc": sinusoids(policy.vae.lead + policy.horizon, policy.dim_model)[None]}
    if not isinstance(policy, Diffusion) or not policy.encoder.inputs.images:
        return {}
    height, width = feature_map_size(policy)
    x = torch.linspace(-1, 1, width, dtype=torch.float64).float().repeat(height)
    y = torch.linspace(-1, 1, height, dtype=torch.float64).float().repeat_interleave(width)
    counted = [name.removesuffix("running_var") for name in tensors if name.endswith(".running_var")]
    return {
        "diffusion.rgb_encoder.pool.pos_grid": torch.stack([x, y], dim=1),
        **{f"{name.rstrip('.')}{COUNTER}": torch.tensor(0) for name in counted},
    }


def feature_map_size(policy: Diffusion) -> tuple[int, int]:
    """Return height and width of what the backbone makes of an image."""
    images = policy.options.images
    size = images.crop or images.size or list(policy.spec[policy.encoder.inputs.images[0]].shape[1:])
    height, width = (_halved(length, 5) for length in size)
    return height, width


def _halved(length: int, times: int) -> int:
    """Return a length after so many layers of stride 2, each of which rounds up."""
    for _ in range(times):
        length = (length + 1) // 2
    return length
