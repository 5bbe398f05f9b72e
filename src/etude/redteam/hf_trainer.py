"""`HFASTTrainer`: trains an auditor, evaluates it on prompts of its own, and keeps it as Hugging Face directories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.callbacks import Callback
from etude.config.training import TrainingConfiguration
from etude.errors import ConfigError, as_path
from etude.redteam.config import SCORE, HFASTConfiguration
from etude.redteam.prompts import as_prompts
from etude.rollouts.graph import Graph
from etude.runs import durable
from etude.trainer import Trainer
from etude.types.duration import Duration

__all__ = ["HFASTConfiguration", "HFASTTrainer", "measure_turns"]


class HFASTTrainer(Trainer):
    """Trains an auditor on the spine: run directory, exact resume, early stopping and schedules by configuration.

    Every `eval_every` steps, and at the end, the auditor holds one conversation from each dev prompt; the mean score of
    the target's responses is `eval/score`. Beside the checkpoints of the run, `ckpt_dir` holds the auditor as plain
    Hugging Face directories: `best` by that score, `last`, and with `keep_steps` one `step-N` for each evaluation.

    An `evaluate` of yours returns a dictionary of numbers; `best` follows its `score`, or what `best_metric` and
    `best_mode` of the configuration say.
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
        if sampler is None:
            raise ConfigError("HFASTTrainer needs a sampler (or environment), such as ASTSampler(system, prompts)")
        self.dev_prompts = as_prompts([] if dev_prompts is None else dev_prompts, "dev_prompts")
        self.ckpt_dir = None if ckpt_dir is None else as_path(ckpt_dir, "ckpt_dir")
        self.keep_steps, self.threshold = keep_steps, threshold
        self.best_score: float | None = None
        self._best_step = -1
        config = _adapted(config or HFASTConfiguration(), eval_every if self.dev_prompts else None, sampler)
        super().__init__(
            config=config, sampler=sampler, algorithm=algorithm, callbacks=[*callbacks, _KeepAuditor()], **options
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
        return {name: sum(row[name] for row in together) / len(together) for name in together[0]}

    def _converse(self, prompts: Sequence[Any]) -> list[Graph]:
        batched = getattr(self.sampler, "eval_rollouts", None)
        if batched is not None:
            graphs: list[Graph] = batched(prompts)
            return graphs
        return [self.sampler.eval_rollout(prompt) for prompt in prompts]

    # -- Hugging Face directories -------------------------------------------------------------------------------------

    def keep(self, metrics: Mapping[str, float]) -> None:
        """Keep the auditor that was evaluated, if it is the best so far or all are kept."""
        score = metrics.get(self.config.best_metric)
        if score is None:
            return
        sign = -1 if self.config.best_mode == "min" else 1
        is_best = self.best_score is None or sign * score > sign * self.best_score
        if is_best:
            self.best_score, self._best_step = score, self.progress.step
        if self.rank == 0 and (is_best or self.keep_steps):
            with self.session.shown_weights():
                if is_best:
                    self.save_pretrained("best")
                if self.keep_steps:
                    self.save_pretrained(f"step-{self.progress.step}")

    def save_pretrained(self, tag: str) -> Path | None:
        """Write the auditor and its tokenizer to `ckpt_dir/tag`, whole or not at all; systems that cannot are left."""
        auditor: Any = getattr(self.system, "auditor", None)
        if self.ckpt_dir is None or not hasattr(auditor, "save_pretrained"):
            return None
        with self._aside(tag) as aside:
            auditor.save_pretrained(aside)
            tokenizer = getattr(self.system, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
        return self.ckpt_dir / tag

    def keep_last(self) -> None:
        """Keep the auditor as `last`; where the best is the last, its files are there once, under both names."""
        best = None if self.ckpt_dir is None else self.ckpt_dir / "best"
        if best is None or self._best_step != self.progress.step or not best.is_dir():
            self.save_pretrained("last")
            return
        with self._aside("last") as aside:
            aside.mkdir()
            for path in best.iterdir():
                try:
                    os.link(path, aside / path.name)
                except OSError:  # a file system without hard links
                    shutil.copyfile(path, aside / path.name)

    @contextmanager
    def _aside(self, tag: str) -> Iterator[Path]:
        """Give a path to write to, and put what was written in its place."""
        assert self.ckpt_dir is not None
        self.ckpt_dir.mkdir(parents=True, exist_ok=True)
        durable.remove_leftovers(self.ckpt_dir)
        target = self.ckpt_dir / tag
        with durable.in_use(self.ckpt_dir / durable.temp_name(tag)) as aside:
            yield aside
            if target.exists():
                durable.discard(target)
            os.rename(aside, target)

    # -- what a resumed run needs -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the best score so far, and what the scorer remembers on each rank."""
        state: dict[str, Any] = {"best_score": self.best_score, "best_step": self._best_step}
        scorer: Any = getattr(self.system, "scorer", None)
        if hasattr(scorer, "state_dict"):
            state["scorers"] = self.session.group.gather(scorer.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.best_score, self._best_step = state["best_score"], state.get("best_step", -1)
        scorers = state.get("scorers", [])
        if self.rank < len(scorers):
            self.system.scorer.load_state_dict(scorers[self.rank])


class _KeepAuditor(Callback):
    """Keeps what evaluations found best, whoever evaluated, and the last."""

    def on_evaluate_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        trainer.keep(metrics)

    def on_fit_end(self, trainer: Any) -> None:
        if trainer.rank == 0:
            with trainer.session.shown_weights():
                trainer.keep_last()


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


def _adapted(config: Any, eval_every: int | str | None, sampler: Any) -> Any:
    """Fill in what the configuration leaves open: when to evaluate, what is best, and where the auditor is."""
    if not isinstance(config, TrainingConfiguration):
        return config  # `Trainer` says what is wrong with it
    given = config.model_fields_set
    changes: dict[str, Any] = {}
    if eval_every is not None and config.evaluate_every is None:
        changes["evaluate_every"] = Duration.parse(eval_every)
    if not {"best_metric", "best_mode"} & given:
        changes |= {"best_metric": SCORE, "best_mode": "max"}
    device = str(getattr(getattr(getattr(sampler, "system", None), "auditor", None), "device", "cpu"))
    if config.device == "auto" and device != "cpu":
        changes["device"] = device
    if not changes:
        return config
    adapted = config.model_copy(update=changes)
    # What is filled in here is no wish of the user's: another metric than these is no mistake.
    adapted.model_fields_set.difference_update(changes.keys() - given)
    return adapted
