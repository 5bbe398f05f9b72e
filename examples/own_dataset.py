"""Your arrays become a LeRobot dataset, and ACT learns from it: `python examples/own_dataset.py`.

The robot here is a point on a table that is led to a target. Put your own arrays in `demonstrate`.
"""

import argparse
from pathlib import Path

import numpy as np

from etude import Trainer, TrainingConfiguration
from etude.data import LeRobotDataModule, LeRobotWriter
from etude.policies import ACT

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.environment_state": {"dtype": "float32", "shape": (2,), "names": ["target_x", "target_y"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    # A camera would be {"dtype": "video", "shape": (96, 96, 3)}, and each of its frames uint8.
}


def demonstrate(seed: int, steps: int = 30) -> dict[str, np.ndarray]:
    """Return one demonstration as arrays whose first dimension is time."""
    generator = np.random.default_rng(seed)
    place, target = generator.uniform(-1, 1, (2, 2))
    places, actions = [], []
    for _ in range(steps):
        action = np.clip(target - place, -0.1, 0.1)
        places.append(place)
        actions.append(action)
        place = place + action + generator.normal(0, 0.005, 2)
    arrays = {
        "observation.state": np.stack(places),
        "observation.environment_state": np.tile(target, (steps, 1)),
        "action": np.stack(actions),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def write(root: Path, episodes: int) -> None:
    # Whole episodes survive a crash; the same writer on the same root goes on after the last one.
    with LeRobotWriter(root, FEATURES, fps=10, robot_type="point") as writer:
        for number in range(writer.num_episodes, episodes):
            arrays = demonstrate(seed=number)
            for row in range(len(arrays["action"])):
                writer.add_frame({name: array[row] for name, array in arrays.items()})
            writer.save_episode(task="reach the target")


def train(root: Path, run: Path, steps: int) -> ACT:
    module = LeRobotDataModule(root=root, val_fraction=0.1)
    policy = ACT(
        chunk_size=10, n_action_steps=5, dim_model=64, n_heads=4, dim_feedforward=128, n_encoder_layers=1,
        n_vae_encoder_layers=1, dropout=0.0,
    )  # fmt: skip
    config = TrainingConfiguration(training_steps=steps, batch_size=32, lr=1e-3, evaluate_every=max(1, steps // 4))
    trainer = Trainer(policy, module.train_data(), eval_data=module.eval_data(), config=config, run=run)
    print({name: round(value, 4) for name, value in trainer.fit().metrics.items() if "loss" in name})
    return policy


def reach(policy: ACT, seed: int, steps: int = 40) -> float:
    """Let the policy act, and return how far from the target it ends."""
    generator = np.random.default_rng(seed)
    place, target = generator.uniform(-1, 1, (2, 2)).astype(np.float32)
    policy.reset()
    for _ in range(steps):
        seen = {"observation.state": place[None], "observation.environment_state": target[None]}
        place = place + policy.select_action(seen)[0].numpy()
    return float(np.linalg.norm(target - place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/own-dataset"))
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    data = options.dir / "dataset"
    write(data, options.episodes)

    module = LeRobotDataModule(root=data)
    print(f"{module.train_dataset.num_episodes} episodes, {len(module.train_dataset)} frames, tasks {module.tasks}")
    for name, feature in module.spec.features.items():
        print(f"  {name}: {feature.dtype} {list(feature.shape)}, {feature.role}")

    policy = train(data, options.dir / "run", options.steps)
    policy.save_pretrained(options.dir / "policy")  # complete: no dataset is needed to use it

    loaded = ACT.from_pretrained(options.dir / "policy")
    distances = [reach(loaded, seed=10_000 + number) for number in range(20)]
    print(f"mean distance from the target: {np.mean(distances):.3f} (it begins at about 1)")


if __name__ == "__main__":
    main()
