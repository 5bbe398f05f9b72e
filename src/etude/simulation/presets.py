"""Settings that learn Meta-World's tasks from state on a CPU in a minute or so. Plain values; imports nothing.

`etude list presets` names the same as files, to copy and change.
"""

from __future__ import annotations

from typing import Any, Final, Literal

_TRAINING: Final[dict[str, Any]] = {
    "batch_size": 32,
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "warmup_steps": 50,
    "ema_decay": 0.99,
    "log_every": 50,
    "save_every": 500,
}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "act": {
        "policy": {
            "type": "act",
            "params": {
                "chunk_size": 12,
                "n_action_steps": 8,
                "dim_model": 128,
                "n_heads": 4,
                "dim_feedforward": 256,
                "n_encoder_layers": 1,
                "n_vae_encoder_layers": 1,
                "dropout": 0.0,
            },
        },
        "training": {**_TRAINING, "training_steps": 1500},
    },
    "mlp": {
        "policy": {
            "type": "mlp",
            "params": {"hidden": [256, 256, 256], "chunk_size": 16, "n_action_steps": 8, "loss": "l1"},
        },
        "training": {**_TRAINING, "batch_size": 256, "training_steps": 2000},
    },
    "diffusion": {
        "policy": {
            "type": "diffusion",
            "params": {
                "horizon": 12,
                "n_obs_steps": 1,
                "n_action_steps": 8,
                "down_dims": [32, 64],
                "prediction_type": "sample",
                "sampler": "ddim",
                "num_inference_steps": 5,
            },
        },
        "training": {**_TRAINING, "batch_size": 64, "lr": 2e-3, "training_steps": 1500},
    },
    "flow": {
        "policy": {
            "type": "flow",
            "params": {
                "horizon": 12,
                "n_obs_steps": 1,
                "n_action_steps": 8,
                "down_dims": [32, 64],
                "num_inference_steps": 5,
            },
        },
        "training": {**_TRAINING, "batch_size": 64, "lr": 2e-3, "training_steps": 1500},
    },
}

Family = Literal["", "images", "multitask", "pusht"]

_ALL: Final = "*"
_Change = dict[str, dict[str, Any]]

FAMILIES: Final[dict[Family, dict[str, _Change]]] = {
    "": {},
    "images": {
        _ALL: {"params": {"image_backbone": "resnet10_small"}, "training": {"lr": 5e-4, "training_steps": 1400}},
    },
    "multitask": {
        "act": {
            "params": {"dim_feedforward": 512, "n_encoder_layers": 2},
            "training": {"batch_size": 64, "training_steps": 5000, "warmup_steps": 100, "ema_decay": 0.995},
        },
    },
    "pusht": {
        _ALL: {
            "params": {"n_action_steps": 4},
            "training": {"ema_decay": 0.999, "warmup_steps": 200, "save_every": 5000, "log_every": 500},
        },
        "act": {"training": {"batch_size": 64, "training_steps": 5000}},
        "mlp": {
            "params": {"hidden": [512, 512, 512], "chunk_size": 8},
            "training": {"training_steps": 15000},
        },
        "diffusion": {"training": {"training_steps": 5000}},
        "flow": {"training": {"training_steps": 5000}},
    },
}
"""What a preset has otherwise: for one camera of 96 pixels or so, for ten tasks at once, and for PushT."""


def make_config(
    policy: str, dataset: str, *, seed: int = 0, steps: int | None = None, family: Family = ""
) -> dict[str, Any]:
    """Return the configuration that trains one of the presets on a recorded dataset.

    Args:
        policy: Name of the preset: act, mlp, diffusion or flow.
        dataset: Directory of the dataset.
        seed: Seed of the training.
        steps: Training steps, if not the preset's.
        family: Which of `FAMILIES` the dataset belongs to; "" is one task of Meta-World from state.
    """
    preset = PRESETS[policy]
    training, params = {**preset["training"], "seed": seed}, {**preset["policy"]["params"]}
    for name in (_ALL, policy):
        change = FAMILIES[family].get(name, {})
        training |= change.get("training", {})
        params |= change.get("params", {})
    if steps is not None:
        training["training_steps"] = steps
    return {
        "policy": {"type": preset["policy"]["type"], "params": params},
        "data": {"type": "lerobot", "params": {"root": dataset}},
        "training": training,
    }
