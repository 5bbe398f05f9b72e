"""One policy for several tasks, told apart by an index, with a table of success: `python examples/multi_task.py`."""

import argparse
from pathlib import Path

from etude import Trainer, TrainingConfiguration
from etude.data import LeRobotDataModule
from etude.policies import MLP
from etude.simulation.evaluate import evaluate_policy
from etude.simulation.record import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/multi-task"))
    parser.add_argument("--envs", nargs="+", default=["metaworld/reach", "metaworld/button-press-topdown"])
    parser.add_argument("--demos", type=int, default=20, help="demonstrations of each task")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=20, help="evaluated episodes of each task")
    options = parser.parse_args()

    # One dataset: the environments take turns, and each episode is marked with the text of its task.
    data = record(options.envs, options.dir / "demonstrations", episodes=options.demos).root
    module = LeRobotDataModule(root=data)
    print(dict(enumerate(module.tasks)))

    # A policy that sees more than one task in its data learns an embedding of `task_index` by itself.
    policy = MLP(hidden=[256, 256], chunk_size=16, n_action_steps=8, loss="l1")
    config = TrainingConfiguration(
        training_steps=options.steps, batch_size=128, lr=1e-3, schedule="cosine", warmup_steps=50, ema_decay=0.99
    )
    trainer = Trainer(policy, module.train_data(), config=config, run=options.dir / "run")
    trainer.fit()

    # The policy knows its tasks by their text, which is how it finds the index for an environment.
    result = evaluate_policy(policy, options.envs, episodes=options.episodes)
    for rate in result.tasks:
        print(f"{rate.name}: {rate}")
    print(f"all: {result.total}")
    result.to_csv(options.dir / "evaluation.csv")


if __name__ == "__main__":
    main()
