"""Parameters of ACT and Diffusion as fields of LeRobot's config.json, in both directions; what differs is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.deploy.lerobot.features import Exchanged
from etude.errors import CheckpointError, ConfigError
from etude.policies.act import ACT
from etude.policies.base import PolicyModule
from etude.policies.diffusion import Diffusion
from etude.policies.generative import PUBLISHED_DOWN_DIMS
from etude.policies.pretrained import own_class

BACKBONES = ("resnet18", "resnet34", "resnet50")
"""Those that both sides have."""
GROUPS = 8
"""Groups of the last normalisation of LeRobot's UNet, whatever its n_groups says."""
LINEAR_BETAS = 0.0001, 0.02

COMMON: Mapping[str, Any] = {
    "n_obs_steps": 1, "input_features": {}, "output_features": {}, "device": "cpu", "use_amp": False, "use_peft": False,
    "push_to_hub": False, "repo_id": None, "private": None, "tags": None, "license": None, "pretrained_path": None,
}  # fmt: skip
"""Fields of every config of LeRobot 0.4.4, with what we write or assume."""
ACT_FIELDS: Mapping[str, Any] = {
    **COMMON, "chunk_size": 100, "n_action_steps": 100, "normalization_mapping": {}, "vision_backbone": "resnet18",
    "pretrained_backbone_weights": None, "replace_final_stride_with_dilation": False, "pre_norm": False,
    "dim_model": 512, "n_heads": 8, "dim_feedforward": 3200, "feedforward_activation": "relu", "n_encoder_layers": 4,
    "n_decoder_layers": 1, "use_vae": True, "latent_dim": 32, "n_vae_encoder_layers": 4,
    "temporal_ensemble_coeff": None, "dropout": 0.1, "kl_weight": 10.0, "optimizer_lr": 1e-5,
    "optimizer_weight_decay": 1e-4, "optimizer_lr_backbone": 1e-5,
}  # fmt: skip
DIFFUSION_FIELDS: Mapping[str, Any] = {
    **COMMON, "n_obs_steps": 2, "horizon": 16, "n_action_steps": 8, "normalization_mapping": {},
    "drop_n_last_frames": 7, "vision_backbone": "resnet18", "resize_shape": None, "crop_ratio": 1.0, "crop_shape": None,
    "crop_is_random": True, "pretrained_backbone_weights": None, "use_group_norm": True,
    "spatial_softmax_num_keypoints": 32, "use_separate_rgb_encoder_per_camera": False,
    "down_dims": list(PUBLISHED_DOWN_DIMS), "kernel_size": 5, "n_groups": 8, "diffusion_step_embed_dim": 128,
    "use_film_scale_modulation": True, "noise_scheduler_type": "DDPM", "num_train_timesteps": 100,
    "beta_schedule": "squaredcos_cap_v2", "beta_start": LINEAR_BETAS[0], "beta_end": LINEAR_BETAS[1],
    "prediction_type": "epsilon", "clip_sample": True, "clip_sample_range": 1.0, "num_inference_steps": None,
    "compile_model": False, "compile_mode": "reduce-overhead", "do_mask_loss_for_padding": False, "optimizer_lr": 1e-4,
    "optimizer_betas": [0.95, 0.999], "optimizer_eps": 1e-8, "optimizer_weight_decay": 1e-6, "scheduler_name": "cosine",
    "scheduler_warmup_steps": 500,
}  # fmt: skip
FIELDS = {"act": ACT_FIELDS, "diffusion": DIFFUSION_FIELDS}

# Ours by LeRobot's name, where the values are the same.
_ACT_PARAMS = {name: name for name in (
    "chunk_size", "dim_model", "n_heads", "dim_feedforward", "n_encoder_layers", "n_decoder_layers",
    "n_vae_encoder_layers", "latent_dim", "use_vae", "kl_weight", "dropout", "pre_norm",
)} | {"feedforward_activation": "activation"}  # fmt: skip
_DIFFUSION_PARAMS = {name: name for name in (
    "horizon", "n_obs_steps", "num_train_timesteps", "beta_schedule", "prediction_type", "clip_sample",
    "clip_sample_range", "num_inference_steps", "kernel_size", "n_groups",
)} | {
    "diffusion_step_embed_dim": "step_embed_dim", "use_film_scale_modulation": "film_scale",
    "do_mask_loss_for_padding": "do_mask_loss", "spatial_softmax_num_keypoints": "keypoints",
}  # fmt: skip


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_config(policy: PolicyModule, features: Sequence[Exchanged], modes: Mapping[str, str]) -> dict[str, Any]:
    """Return config.json of the LeRobot policy that acts as this one does; refuse what it cannot."""
    kind = own_class(policy)
    if policy.executor.latency_steps:
        raise ConfigError("LeRobot knows no latency_steps; export with latency_steps: 0")
    params = policy.describe()["params"]
    made = _act_config(policy, params, features) if kind is ACT else _diffusion_config(policy, params, features)
    inputs = {one.theirs: one.to_json() for one in features if one.role != "action"}
    outputs = {one.theirs: one.to_json() for one in features if one.role == "action"}
    name = "act" if kind is ACT else "diffusion"
    shared = {"input_features": inputs, "output_features": outputs, "normalization_mapping": dict(modes)}
    return {"type": name, **FIELDS[name], **made, **shared, "n_action_steps": policy.executor.n_action_steps}


def _act_config(policy: PolicyModule, params: Mapping[str, Any], features: Sequence[Exchanged]) -> dict[str, Any]:
    if policy.n_obs_steps != 1:
        raise ConfigError(f"LeRobot's ACT sees one observation, not n_obs_steps: {policy.n_obs_steps}")
    config = {theirs: params[ours] for theirs, ours in _ACT_PARAMS.items()}
    config["temporal_ensemble_coeff"] = policy.executor.temporal_ensemble_coeff
    if config["temporal_ensemble_coeff"] is not None and policy.executor.n_action_steps != 1:
        raise ConfigError("LeRobot ensembles chunks with n_action_steps: 1 alone")
    cameras = [one for one in features if one.role == "image"]
    if not cameras:
        return config
    if _norm_of(params) == "group":
        raise ConfigError("LeRobot's ACT has a backbone with frozen norms; image_norm 'group' cannot be written there")
    if params["image_crop"] is not None:
        raise ConfigError("LeRobot's ACT does not crop; image_crop cannot be written there")
    if params["image_size"] is not None and any(list(one.shape[1:]) != params["image_size"] for one in cameras):
        raise ConfigError("LeRobot's ACT takes images as they come; record them in the image_size of the policy")
    return {**config, "vision_backbone": _backbone_of(params)}


def _norm_of(params: Mapping[str, Any]) -> str:
    """Return what the backbone is normalised by."""
    if params["image_norm"] != "auto":
        return str(params["image_norm"])
    return "group" if params["image_weights"] is None else "frozen"


def _backbone_of(params: Mapping[str, Any]) -> str:
    if params["image_backbone"] not in BACKBONES:
        raise ConfigError(f"LeRobot has no image_backbone {params['image_backbone']!r}, only {', '.join(BACKBONES)}")
    return str(params["image_backbone"])


def _diffusion_config(policy: PolicyModule, params: Mapping[str, Any], features: Sequence[Exchanged]) -> dict[str, Any]:
    if params["head"] != "unet":
        raise ConfigError(f"LeRobot's Diffusion has a UNet; head {params['head']!r} cannot be written there")
    if params["prediction_type"] == "v_prediction":
        raise ConfigError("LeRobot's Diffusion predicts epsilon or sample; v_prediction cannot be written there")
    if params["noise_scale"] != 1:
        raise ConfigError(
            f"LeRobot's Diffusion begins with noise as in training; noise_scale: {params['noise_scale']:g} cannot be "
            "written there; set noise_scale: 1 (which changes no weights) in the config.json of the saved policy, and "
            "evaluate it again"
        )
    if params["n_groups"] != GROUPS:
        raise ConfigError(
            f"LeRobot's UNet ends in {GROUPS} groups; n_groups: {params['n_groups']} cannot be written there"
        )
    if policy.executor.temporal_ensemble_coeff is not None:
        raise ConfigError("LeRobot's Diffusion does not ensemble; temporal_ensemble_coeff cannot be written there")
    if not any(one.role == "state" for one in features):
        raise ConfigError("LeRobot's Diffusion wants observation.state, which this policy does not see")
    levels = list(params["down_dims"] or PUBLISHED_DOWN_DIMS)
    factor = 2 ** len(levels)
    if params["horizon"] % factor:
        raise ConfigError(
            f"LeRobot's Diffusion wants a horizon that is a multiple of {factor} with {len(levels)} down_dims, not "
            f"{params['horizon']}"
        )
    _check_sampling(params)
    config = {theirs: params[ours] for theirs, ours in _DIFFUSION_PARAMS.items()}
    config |= {"down_dims": levels, "noise_scheduler_type": params["sampler"].upper()}
    past = params["horizon"] - policy.executor.n_action_steps - policy.n_obs_steps + 1
    config["drop_n_last_frames"] = max(past, 0)
    cameras = [one for one in features if one.role == "image"]
    return config | _diffusion_images(params, cameras) if cameras else config


def _check_sampling(params: Mapping[str, Any]) -> None:
    steps, inference = params["num_train_timesteps"], params["num_inference_steps"]
    if params["like_diffusers"]:
        return
    if inference not in (None, steps):
        raise ConfigError(
            f"LeRobot visits other noise levels with num_inference_steps: {inference} of {steps}; set like_diffusers: "
            "true (which changes no weights) or leave num_inference_steps out"
        )
    if params["sampler"] == "ddim" and params["clip_sample"]:
        raise ConfigError(
            "LeRobot's ddim treats clipped samples in another way; set like_diffusers: true (which changes no weights)"
        )


def _diffusion_images(params: Mapping[str, Any], cameras: Sequence[Exchanged]) -> dict[str, Any]:
    if len({one.shape for one in cameras}) > 1:
        raise ConfigError("LeRobot's Diffusion wants cameras of one size; these differ")
    if params["image_dim"] != 2 * params["keypoints"]:
        raise ConfigError(
            f"LeRobot's Diffusion has an image_dim of twice the keypoints; set image_dim: {2 * params['keypoints']}"
        )
    size, crop = params["image_size"], params["image_crop"]
    config = {
        "vision_backbone": _backbone_of(params), "resize_shape": size, "crop_shape": crop,
        "use_group_norm": _norm_of(params) == "group",
    }  # fmt: skip
    if crop is not None:
        check_crop(crop, size or list(cameras[0].shape[1:]))
    if size is not None and crop is not None:
        config["crop_ratio"] = _crop_ratio(size, crop)
    return config


def check_crop(crop: Sequence[int], size: Sequence[int]) -> None:
    """Refuse a window whose middle is rounded to the other side there."""
    for wanted, length in zip(crop, size, strict=True):
        if round((length - wanted) / 2) != (length - wanted) // 2:
            raise ConfigError(
                f"a crop of {wanted} out of {length} pixels lies one pixel further on in LeRobot; make it {wanted - 1}"
            )


def _crop_ratio(size: Sequence[int], crop: Sequence[int]) -> float:
    """Return the share of a resized image that LeRobot cuts out to get this crop."""
    for extra in (0.0, 0.25, 0.5, 0.75):
        ratio = (crop[0] + extra) / size[0]
        if ratio <= 1 and [int(length * ratio) for length in size] == list(crop):
            return ratio
    raise ConfigError(f"LeRobot crops height and width by one ratio; {list(crop)} of {list(size)} is none")


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_params(config: Mapping[str, Any], has_cameras: bool, source: str) -> tuple[type[PolicyModule], dict[str, Any]]:
    """Return the class and the parameters, normalisation aside, of the policy that acts as LeRobot's does.

    Args:
        config: What is in config.json.
        has_cameras: Whether there are images among its inputs.
        source: Where the config lies, for messages.
    """
    kind = str(config.get("type"))
    if kind not in FIELDS:
        raise CheckpointError(f"{source} is of a policy {kind!r}; act and diffusion can be imported")
    given = {name: value for name, value in config.items() if name != "type"}
    if unknown := sorted(set(given) - set(FIELDS[kind])):
        raise CheckpointError(f"{source} has the field {unknown[0]!r}, which LeRobot 0.4.4 does not know")
    values = {**FIELDS[kind], **given}
    if values["use_peft"]:
        raise CheckpointError(f"{source} is of a policy with adapters (use_peft); merge them before the import")
    if has_cameras and values["vision_backbone"] not in BACKBONES:
        raise CheckpointError(
            f"{source}: the backbone {values['vision_backbone']!r} is not among {', '.join(BACKBONES)}"
        )
    return (ACT, _act_params(values, source)) if kind == "act" else (Diffusion, _diffusion_params(values, source))


def _act_params(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    if values["n_obs_steps"] != 1:
        raise CheckpointError(f"{source}: ACT with n_obs_steps {values['n_obs_steps']} cannot be imported")
    if values["replace_final_stride_with_dilation"]:
        raise CheckpointError(f"{source}: a backbone with replace_final_stride_with_dilation cannot be imported")
    return {ours: values[theirs] for theirs, ours in _ACT_PARAMS.items()} | {
        "n_action_steps": values["n_action_steps"], "temporal_ensemble_coeff": values["temporal_ensemble_coeff"],
        "image_backbone": values["vision_backbone"], "image_norm": "frozen",
    }  # fmt: skip


def _diffusion_params(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    if values["use_separate_rgb_encoder_per_camera"]:
        raise CheckpointError(f"{source}: an encoder for each camera cannot be imported; ours share one")
    if values["n_groups"] != GROUPS:
        raise CheckpointError(f"{source}: n_groups {values['n_groups']} cannot be imported, only {GROUPS}")
    if values["beta_schedule"] == "linear" and (values["beta_start"], values["beta_end"]) != LINEAR_BETAS:
        raise CheckpointError(f"{source}: a linear schedule goes from {LINEAR_BETAS[0]} to {LINEAR_BETAS[1]} here")
    return {ours: values[theirs] for theirs, ours in _DIFFUSION_PARAMS.items()} | {
        "n_action_steps": values["n_action_steps"], "down_dims": list(values["down_dims"]),
        "sampler": str(values["noise_scheduler_type"]).lower(), "like_diffusers": True,
        "image_backbone": values["vision_backbone"], "image_norm": "group" if values["use_group_norm"] else "batch",
        "image_size": values["resize_shape"], "image_crop": values["crop_shape"],
        "image_dim": 2 * values["spatial_softmax_num_keypoints"],
    }  # fmt: skip
