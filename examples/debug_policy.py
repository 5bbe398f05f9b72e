"""Find out why a policy fails: `python examples/debug_policy.py runs/NAME --env metaworld/pick-place --data DATASET`.

Three questions, the cheapest first: does it fit the demonstrations, does it see there what it was trained to see, and
where do its episodes end? docs/howto/debug-a-failing-policy.md says what to do about each answer.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from etude.config.restore import load_policy
from etude.data import LeRobotDataset
from etude.policies import PolicyModule
from etude.simulation.environments import make_environment, options_for
from etude.simulation.evaluate import evaluate_policy
from etude.simulation.seeds import episode_seed


def compare_chunks(policy: PolicyModule, data: LeRobotDataset, samples: int) -> None:
    """Print how far predicted chunks are from demonstrated ones, by step of the chunk and by dimension."""
    data.use_windows(policy.observation_delta_indices, policy.action_delta_indices)
    rows = np.linspace(0, len(data) - 1, min(samples, len(data))).astype(np.int64)
    batch = data.gather(rows, np.zeros(len(rows), np.uint64))
    torch.manual_seed(0)  # policies that sample draw from torch's generator
    predicted = policy.predict_action_chunk(batch)
    # Chunks of Diffusion and FlowMatching begin at the oldest observation; what is executed begins now.
    now = policy.action_delta_indices.index(0)
    demonstrated = batch["action"][:, now : now + predicted.shape[1]]
    is_real = ~batch["action_is_pad"][:, now : now + predicted.shape[1]]
    errors = (predicted - demonstrated).abs()
    real = demonstrated[is_real]
    spread = (real - real.mean(0)).abs().mean(0)
    spread[spread < 1e-6] = 1.0  # it never varied: its error is told in its own units
    print(f"\nchunks against demonstrations, {len(rows)} frames; 0 is perfect, 1 is as bad as always the mean")
    for step in sorted({0, predicted.shape[1] // 2, predicted.shape[1] - 1}):
        relative = errors[:, step][is_real[:, step]].mean(0) / spread
        print(f"  step {step:3d} of the chunk: " + "  ".join(f"{value:.2f}" for value in relative.tolist()))
    worst = int((errors.mean(-1) * is_real).amax(1).argmax())
    print(f"  worst: episode {int(batch['episode_index'][worst])}, frame {int(batch['frame_index'][worst])}")


def compare_observations(policy: PolicyModule, env_name: str, seed: int) -> None:
    """Print which numbers of a fresh episode lie outside of what the training data had."""
    env = make_environment(env_name, **options_for(env_name, policy.spec))
    seen = env.reset(episode_seed(seed, "test", 0))
    env.close()
    print("\nwhat the policy sees, against its training data")
    for name in sorted([*policy.spec.with_role("state"), *policy.spec.with_role("environment")]):
        feature = policy.spec[name]
        low, high = (np.asarray(feature.stats[key]) for key in ("min", "max"))
        outside = np.flatnonzero((seen[name] < low - 1e-4) | (seen[name] > high + 1e-4))
        labels = [feature.names[place] if feature.names else str(place) for place in outside]
        constant = int((high - low < 1e-6).sum())
        print(f"  {name}: outside the range: {', '.join(labels) or 'none'}; {constant} dimensions never varied")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", help="a run, a checkpoint or a saved policy")
    parser.add_argument("--env", required=True)
    parser.add_argument("--data", type=Path, required=True, help="the demonstrations it learned from")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--videos", type=int, default=0)
    options = parser.parse_args()

    policy = load_policy(options.policy)
    compare_chunks(policy, LeRobotDataset(options.data), options.samples)
    compare_observations(policy, options.env, seed=0)

    films = Path(options.policy) / "debug" if options.videos else None
    for split in ("train", "test"):  # train: the very scenes of the recording
        result = evaluate_policy(
            policy, options.env, episodes=options.episodes, split=split, video_dir=films, videos=options.videos
        )
        print(f"\n{split}: {result.total}")
        for row in sorted(result.rows, key=lambda row: row.success)[:8]:  # failures first
            outcome = "success" if row.success else "FAILURE"
            print(f"  episode {row.episode:3d}  {outcome}  {row.steps:3d} steps  reward {row.reward:.1f}")
        for path in result.videos:
            print(f"  {path}")


if __name__ == "__main__":
    main()
