"""Stress a policy in a simulator of your own: what makes it fail, how likely that is, and what an expert would do.

    python examples/stress_policy.py --episodes 200 --dir stress

A cart drives along and is to pass a gate; the policy steers to the middle, too lazily. Where it begins can be chosen
(`reset_at`), so that beginnings are searched as well as pushes, sensor noise and latency. The search by cross-entropy
is compared with chance; what it found is demonstrated by the expert that the environment has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from etude.redteam.robot import record_failures, stress_policy
from etude.registry import ENVIRONMENT_REGISTRY
from etude.simulation.environments.base import Array, Observation, StepOutcome
from etude.types import DataSpec, Feature

STEPS, WIDTH = 40, 1.35


@ENVIRONMENT_REGISTRY.register("gate")
class Gate:
    """Pass a gate: the action is how fast the cart moves aside."""

    fps, max_steps, task = 10.0, STEPS, "Pass the gate"
    start_size = 1
    spec = DataSpec({
        "observation.state": Feature((2,), "float32", "state", names=("cart_x", "cart_y")),
        "action": Feature((1,), "float32", "action", names=("aside",)),
    }, 10.0)  # fmt: skip

    def reset(self, seed: int) -> Observation:
        return self.reset_at(seed, np.random.default_rng(seed).random(1))

    def reset_at(self, seed: int, start: Array) -> Observation:
        self.step_number, self.y = 0, float(start[0]) - 0.5
        return self.seen()

    def step(self, action: Array) -> StepOutcome:
        self.step_number += 1
        self.y += 0.1 * float(np.clip(action[0], -3, 3))
        done = self.step_number == STEPS
        return StepOutcome(self.seen(), -abs(self.y), done, False, done and abs(self.y) < WIDTH, {})

    def seen(self) -> Observation:
        return {"observation.state": np.array([self.step_number / STEPS, self.y], np.float32)}

    def scene(self) -> dict[str, float]:
        return {"cart_x": self.step_number / STEPS, "cart_y": self.y}

    def expert_action(self) -> Array:
        return np.array([-8.0 * self.y], np.float32)

    def render(self) -> Array:
        picture = np.full((48, 160, 3), 235, np.uint8)
        picture[: 24 - int(10 * WIDTH), -3:] = picture[24 + int(10 * WIDTH) :, -3:] = 60
        row, column = int(np.clip(24 + 10 * self.y, 3, 44)), int(3 + 150 * self.step_number / STEPS)
        picture[row - 3 : row + 4, column - 3 : column + 4] = (200, 60, 30)
        return picture

    def close(self) -> None:
        """Nothing is held."""


def lazy(observation: Observation) -> Array:
    """Steer to the middle, slowly."""
    return -0.25 * observation["observation.state"][1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=Path("stress"))
    args = parser.parse_args()
    result = stress_policy(lazy, "gate", args.dir, episodes=args.episodes, videos=2, policy_name="lazy")
    for tally in result.tallies:
        print(f"{tally.name}: {tally.failures} of {tally.episodes} failed, {tally.distinct} distinct")
    for name, one in result.likeliest(3):
        print(
            f"likelier than {one.plausibility:.0%} of all ({name}):", "; ".join(result.space.tell(np.array(one.vector)))
        )
    done = record_failures(result, args.dir / "demonstrations")
    print(f"the expert succeeds in {done.episodes} of {done.attempts}")
    print(f"page: {args.dir / 'stress.html'}")


if __name__ == "__main__":
    main()
