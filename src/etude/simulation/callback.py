"""Evaluate in simulation while training, so that the best checkpoint is the one that succeeds most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from etude.callbacks import EvaluateEvery
from etude.signatures.nested import OptionsOf

if TYPE_CHECKING:
    from etude.trainer import Trainer


class EvaluateInSimulation(EvaluateEvery):
    """Measure success in an environment every so often and at the end; logged as eval/success.

    Environments without a notion of success have eval/reward and eval/steps alone, which others have too.
    With `training.best_metric: eval/success` and `training.best_mode: max` the best checkpoint is the most successful.

    Args:
        env: An environment, such as metaworld/pick-place, or several.
        every: How often, such as 1000 or "5 min".
        episodes: Episodes of each environment.
        split: Whose seeds: train, validation or test.
        seed: The root of the episodes' seeds.
        workers: Processes that share the episodes; 0 runs them in the training process.
        options: Parameters of the environments; cameras and sizes follow from the policy unless given.
        tasks: Index of each task by its text, for policies trained on several; the dataset's unless given.
        video_dir: Where films go, in a folder for each step; a relative one is within the run. None makes none.
        videos: At most this many films each time, failures first.
    """

    def __init__(
        self,
        env: str | list[str],
        every: int | str = 1000,
        episodes: int = 20,
        split: str = "validation",
        seed: int = 0,
        workers: int = 0,
        options: Annotated[dict[str, Any], OptionsOf("env")] | None = None,
        tasks: dict[str, int] | None = None,
        video_dir: str | None = None,
        videos: int = 2,
    ) -> None:
        super().__init__(every)
        self.env, self.episodes, self.split, self.seed = env, episodes, split, seed
        self.workers, self.options, self.tasks = workers, options, tasks
        self.video_dir, self.videos = None if video_dir is None else Path(video_dir), videos
        self.measures = ("eval/success", "eval/steps", "eval/reward")

    def on_fit_start(self, trainer: Trainer) -> None:
        """Remember where training goes on from; refuse an environment that the policy cannot act in."""
        super().on_fit_start(trainer)
        from etude.simulation.evaluate import check_environments

        check_environments(trainer.policy, self.env, options=self.options, tasks=self.tasks)

    def evaluate(self, trainer: Trainer) -> Mapping[str, float]:
        """Return the success in simulation; its episodes are written into the run."""
        from etude.simulation.evaluate import evaluate_policy

        session = trainer.session
        result = evaluate_policy(
            trainer.policy, self.env, episodes=self.episodes, split=self.split, seed=self.seed, workers=self.workers,
            video_dir=self._films(trainer), videos=self.videos, options=self.options, tasks=self.tasks,
            heartbeat=lambda: session.pulse.enter("evaluate"),
        )  # fmt: skip
        if trainer.run is not None:
            result = replace(result, policy=f"step {trainer.progress.step}")
            result.to_json(trainer.run.dir / "evaluation" / f"step-{trainer.progress.step:08d}.json")
        return result.metrics()

    def _films(self, trainer: Trainer) -> Path | None:
        if self.video_dir is None:
            return None
        run = trainer.run.dir if trainer.run is not None else Path()
        return run / self.video_dir / f"step-{trainer.progress.step:08d}"
