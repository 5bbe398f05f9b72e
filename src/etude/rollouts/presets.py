"""Settings that learn Meta-World's tasks from state on a CPU in a minute or so. Plain values; imports nothing.

`configs/metaworld/` has the same as files, to copy and change.
"""

from __future__ import annotations

from typing import Any, Final

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
            "params": {"down_dims": [64, 128], "sampler": "ddim", "num_inference_steps": 10},
        },
        "training": {**_TRAINING, "batch_size": 64, "training_steps": 3000},
    },
    "flow": {
        "policy": {"type": "flow", "params": {"down_dims": [64, 128], "num_inference_steps": 10}},
        "training": {**_TRAINING, "batch_size": 64, "training_steps": 3000},
    },
}


IMAGES: Final[dict[str, Any]] = {"image_backbone": "resnet10_small"}
"""What a preset adds for datasets with cameras of 96 pixels or so."""


def make_config(
    policy: str, dataset: str, *, seed: int = 0, steps: int | None = None, cameras: bool = False
) -> dict[str, Any]:
    """Return the configuration that trains one of the presets on a recorded dataset."""
    preset = PRESETS[policy]
    training = {**preset["training"], "seed": seed}
    params = {**preset["policy"]["params"], **(IMAGES if cameras else {})}
    if steps is not None:
        training["training_steps"] = steps
    return {
        "policy": {"type": preset["policy"]["type"], "params": params},
        "data": {"type": "lerobot", "params": {"root": dataset}},
        "training": training,
    }
