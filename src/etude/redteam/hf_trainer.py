"""`HFASTTrainer`: trains an auditor, evaluates it on prompts of its own, and keeps it as Hugging Face directories."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.callbacks import Callback
from etude.config.training import TrainingConfiguration
from etude.duration import Duration
from etude.redteam.config import SCORE, HFASTConfiguration
from etude.rollouts.graph import Graph
from etude.runs import durable
from etude.trainer import Trainer

__all__ = ["HFASTConfiguration", "HFASTTrainer", "measure_turns"]


class HFASTTrainer(Trainer):
    """Trains an auditor on the spine: run directory, exact resume, early stopping and schedules by configuration.

    Every `eval_every` steps, and at the end, the auditor holds one conversation from each dev prompt; the mean score of
    the target's responses is `eval/score`. Beside the checkpoints of the run, `ckpt_dir` holds the auditor as plain
    Hugging Face directories: `best` by that score, `last`, and with `keep_steps` one `step-N` for each evaluation.
    """

    def __init__(
        self,
        config: TrainingConfiguration | None = None,
        sampler: Any = None,
        algorithm: Any = None,
        *,
        environment: Any = None,
        dev_prompts: Iterable[Any] | None = None,
        eval_every: int | str = 100,
        ckpt_dir: str | Path | None = "checkpoints",
        keep_steps: bool = False,
        threshold: float = 0.5,
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        """Join the parts.

        Args:
            config: `HFASTConfiguration()`, or any training configuration.
            sampler: Makes the rollouts.
            algorithm: DPO, IPO, PPO or a `Solver` of yours.
            environment: Another name for `sampler`.
            dev_prompts: What conversations of the evaluation begin with; None or nothing does not evaluate.
            eval_every: Steps, or a duration such as "10 min", unless the configuration sets `evaluate_every`.
            ckpt_dir: Where Hugging Face directories go; None writes none.
            keep_steps: Keep a `step-N` of every evaluation.
            threshold: The score from which a response counts as a success of the auditor.
            callbacks: What else happens around the loop.
            options: Further arguments of `Trainer`, such as `run` and `loggers`.
        """
        sampler = environment if sampler is None else sampler
        self.dev_prompts = list(dev_prompts or [])
        self.ckpt_dir = None if ckpt_dir is None else Path(ckpt_dir)
        self.keep_steps, self.threshold = keep_steps, threshold
        self.best_score: float | None = None
        config = _adapted(config or HFASTConfiguration(), eval_every if self.dev_prompts else None, sampler)
        super().__init__(
            config=config, sampler=sampler, algorithm=algorithm, callbacks=[*callbacks, _KeepLast()], **options
        )

    @property
    def sampler(self) -> Any:
        """What makes the rollouts."""
        assert self.harness is not None
        return self.harness.sampler

    @property
    def system(self) -> Any:
        """The models and the reward."""
        return self.sampler.system

    def evaluate(self) -> Mapping[str, float]:
        """Hold a conversation from each dev prompt; ranks share the prompts."""
        if not self.dev_prompts:
            return {}
        mine = self.dev_prompts[self.rank :: self.world]
        rows = [turns for graph in self._converse(mine) if (turns := measure_turns(graph, self.threshold))]
        together = [row for part in self.session.group.gather(rows) for row in part]
        names = together[0]
        found = {name: sum(row[name] for row in together) / len(together) for name in names}
        self._keep(found["score"])
        return found

    def _converse(self, prompts: Sequence[Any]) -> list[Graph]:
        batched = getattr(self.sampler, "eval_rollouts", None)
        if batched is not None:
            graphs: list[Graph] = batched(prompts)
            return graphs
        return [self.sampler.eval_rollout(prompt) for prompt in prompts]

    # -- Hugging Face directories -------------------------------------------------------------------------------------

    def _keep(self, score: float) -> None:
        """Keep the auditor as it is evaluated: with averaged weights, if there are any."""
        is_best = self.best_score is None or score > self.best_score
        if is_best:
            self.best_score = score
        if self.rank == 0:
            if is_best:
                self.save_pretrained("best")
            if self.keep_steps:
                self.save_pretrained(f"step-{self.progress.step}")

    def save_pretrained(self, tag: str) -> Path | None:
        """Write the auditor and its tokenizer to `ckpt_dir/tag`, whole or not at all; systems that cannot are left."""
        auditor: Any = getattr(self.system, "auditor", None)
        if self.ckpt_dir is None or not hasattr(auditor, "save_pretrained"):
            return None
        self.ckpt_dir.mkdir(parents=True, exist_ok=True)
        durable.remove_leftovers(self.ckpt_dir)
        target = self.ckpt_dir / tag
        with durable.in_use(self.ckpt_dir / durable.temp_name(tag)) as aside:
            auditor.save_pretrained(aside)
            tokenizer = getattr(self.system, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
            if target.exists():
                durable.discard(target)
            os.rename(aside, target)
        return target

    # -- what a resumed run needs -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the best score so far, and what the scorer remembers on each rank."""
        state: dict[str, Any] = {"best_score": self.best_score}
        scorer: Any = getattr(self.system, "scorer", None)
        if hasattr(scorer, "state_dict"):
            state["scorers"] = self.session.group.gather(scorer.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.best_score = state["best_score"]
        scorers = state.get("scorers", [])
        if self.rank < len(scorers):
            self.system.scorer.load_state_dict(scorers[self.rank])


class _KeepLast(Callback):
    def on_fit_end(self, trainer: Any) -> None:
        if trainer.rank != 0:
            return
        if trainer.session.ema is None:
            trainer.save_pretrained("last")
            return
        with trainer.session.ema.applied():
            trainer.save_pretrained("last")


def measure_turns(graph: Graph, threshold: float) -> dict[str, float]:
    """Return the means over the turns of a conversation, and whether any response reached the threshold."""
    nodes = list(graph.nodes())
    if not nodes:
        return {}
    found = {"reward": sum(node.reward for node in nodes) / len(nodes)}
    for name in ("response_score", "combined_score", "likelihood"):
        values = [node.extra[name] for node in nodes if name in node.extra]
        if len(values) == len(nodes):
            found[name] = sum(values) / len(values)
    scores = [node.extra.get("response_score", node.reward) for node in nodes]
    return {**found, "score": sum(scores) / len(scores), "attack_success": float(max(scores) >= threshold)}


def _adapted(config: TrainingConfiguration, eval_every: int | str | None, sampler: Any) -> TrainingConfiguration:
    """Fill in what the configuration leaves open: when to evaluate, what is best, and where the auditor is."""
    given = config.model_fields_set
    changes: dict[str, Any] = {}
    if eval_every is not None and config.evaluate_every is None:
        changes["evaluate_every"] = Duration.parse(eval_every)
    if not {"best_metric", "best_mode"} & given:
        changes |= {"best_metric": SCORE, "best_mode": "max"}
    device = str(getattr(getattr(getattr(sampler, "system", None), "auditor", None), "device", "cpu"))
    if config.device == "auto" and device != "cpu":
        changes["device"] = device
    return config.model_copy(update=changes) if changes else config
