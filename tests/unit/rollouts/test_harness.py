"""Training on a sampler's rollouts: `Trainer(config, sampler, algorithm)` on the spine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude import Trainer, TrainingConfiguration
from etude.errors import ConfigError, RolloutError
from etude.rollouts.graph import Graph, Node, Sampler
from etude.rollouts.harness import Harness, Solver
from etude.rollouts.system import System
from tests.crash.harness import compare
from tests.processes import reap, run_ranks, spawn

WORDS = 5


class Guess(System):
    """The auditor says a number; the target repeats it; 3 is what pays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.auditor = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, WORDS))

    def _logprobs(self, contexts: Sequence[float]) -> Tensor:
        return self.auditor(torch.tensor([[float(c)] for c in contexts])).log_softmax(1)

    def get_tester_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        return self._logprobs(context).gather(1, torch.tensor([[int(c)] for c in continuation]))

    def get_target_logprobs(self, context: Sequence[Any], continuation: Sequence[Any]) -> Tensor:
        return torch.zeros(len(context), 1)

    get_baseline_logprobs = get_target_logprobs

    def rollout_prompt_with_tester(self, x: Sequence[Any]) -> Sequence[int]:
        return torch.multinomial(self._logprobs(x).exp(), 1).flatten().tolist()

    def rollout_prompt_with_target(self, x: Sequence[Any]) -> Sequence[Any]:
        return list(x)

    def advance(self, context: Any, probe: Any, response: Any) -> Any:
        return context

    def reward(self, context: Sequence[Any], probe: Sequence[Any], response: Sequence[Any]) -> Sequence[float]:
        return [float(word == 3) for word in probe]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.auditor.parameters()


class GuessSampler(Sampler):
    width = 3

    def rollout(self, seed: int | None = None) -> Graph:
        torch.manual_seed(seed or 0)
        contexts = [0.5] * self.width
        probes = self.system.rollout_prompt_with_auditor(contexts)
        rewards = self.system.reward(contexts, probes, probes)
        return Graph(0.5, [Node(0.5, probe, probe, reward) for probe, reward in zip(probes, rewards)])


class Reinforce(Solver):
    def flatten(self, graph: Graph) -> Sequence[Any]:
        return [(node.context, node.probe, node.reward) for node in graph.nodes()]

    @staticmethod
    def collate_fn(steps: Sequence[Any]) -> Any:
        contexts, probes, rewards = zip(*steps)
        return list(contexts), list(probes), list(rewards)

    def step(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        contexts, probes, rewards = batch
        weights = torch.tensor(rewards) - 0.3
        loss = -(self.system.auditor_logprobs(contexts, probes).sum(1) * weights).mean()
        return loss, {"reward": float(torch.tensor(rewards).mean()), "size": float(len(rewards))}


def make(run: Any = False, sampler: Sampler | None = None, **config: Any) -> Trainer:
    torch.set_num_threads(1)
    settings = {"training_steps": 12, "num_episodes_per_experience": 4, "batch_size": 5, "lr": 1e-2, "log_every": 1,
                "ema_decay": 0.9}  # fmt: skip
    sampler = sampler or GuessSampler(Guess())
    return Trainer(
        config=TrainingConfiguration(**{**settings, **config}), sampler=sampler, algorithm=Reinforce(sampler.system),
        run=run, loggers=[], show_progress=False,
    )  # fmt: skip


def test_it_learns_what_pays() -> None:
    trainer = make(training_steps=60)
    result = trainer.train()
    assert result.steps == 60
    assert result.metrics["train/rollout/reward"] > 0.8
    assert result.metrics["train/reward"] == pytest.approx(result.metrics["train/rollout/reward"])


def test_batches_have_the_size_asked_for_and_the_last_may_be_smaller() -> None:
    sizes = []

    class Watched(Reinforce):
        def step(self, batch: Any) -> Any:
            sizes.append(len(batch[0]))
            return super().step(batch)

    sampler = GuessSampler(Guess())
    config = TrainingConfiguration(training_steps=2, num_episodes_per_experience=4, batch_size=5)
    Trainer(config, sampler, Watched(sampler.system), run=False, show_progress=False).train()
    assert sizes == [5, 5, 2, 5, 5, 2]


def count_updates(trainer: Trainer, **config: Any) -> int:
    counted = 0

    def count(*_: Any) -> None:
        nonlocal counted
        counted += 1

    made = trainer.configure_optimizers

    def configure() -> Any:
        given = made()
        given["policy"].optimizer.register_step_pre_hook(count)
        return given

    trainer.configure_optimizers = configure  # type: ignore[method-assign]
    trainer.train()
    return counted


@pytest.mark.parametrize("accumulate, updates", [(1, 36), (2, 18), (4, 9), (5, 8), (36, 1)])
def test_accumulation_goes_across_experiences_and_leaves_nothing_behind(accumulate: int, updates: int) -> None:
    assert count_updates(make(gradient_accumulation_steps=accumulate)) == updates


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_killed_run_resumes_exactly_with_batches_that_wait(tmp_path: Path, accumulate: int) -> None:
    def train(name: str, pause: bool) -> None:
        sampler = GuessSampler(Guess())
        if pause:

            class Stops(GuessSampler):
                def rollout(self, seed: int | None = None) -> Graph:
                    if (tmp_path / name / "checkpoints" / "step-00000007").exists():
                        os.kill(os.getpid(), 9)
                    return super().rollout(seed)

            sampler = Stops(Guess())
        make(tmp_path / name, sampler, save_every=1, gradient_accumulation_steps=accumulate, keep_last=50).train()

    train("whole", False)
    assert reap(spawn(lambda: train("killed", True))) == [-9]
    train("killed", False)
    assert compare(tmp_path / "killed", tmp_path / "whole") is None


@pytest.mark.slow
def test_two_ranks_share_the_episodes(tmp_path: Path) -> None:
    def train() -> None:
        make(tmp_path / "run", batch_size=4, num_episodes_per_experience=5, training_steps=20).train()

    assert run_ranks(train, 2) == [0, 0]


def test_a_rollout_that_fails_is_left_out_and_counted() -> None:
    class Flaky(GuessSampler):
        calls = 0

        def rollout(self, seed: int | None = None) -> Graph:
            self.calls += 1
            if self.calls % 3 == 0:
                raise RuntimeError("the target did not answer")
            return super().rollout(seed)

    result = make(sampler=Flaky(Guess()), training_steps=3).train()
    assert 0 < result.metrics["train/rollout/failed"] < 1


def test_if_all_fail_the_run_ends_with_the_reason() -> None:
    class Dead(GuessSampler):
        def rollout(self, seed: int | None = None) -> Graph:
            raise RuntimeError("the target did not answer")

    with pytest.raises(RolloutError, match=r"all 4 rollouts failed.*the target did not answer"):
        make(sampler=Dead(Guess())).train()


def test_seed_nought_is_a_seed_and_episodes_differ() -> None:
    seeds: list[Any] = []

    class Noted(GuessSampler):
        def rollout(self, seed: int | None = None) -> Graph:
            seeds.append(seed)
            return super().rollout(seed)

    sampler = Noted(Guess())
    harness = Harness(sampler, Reinforce(sampler.system), 4, batch_size=2)
    first, again = (list(harness.experience(seed=0)) for _ in range(2))
    assert first == again
    assert len(set(seeds)) == 4


def test_environment_is_another_name_and_mixtures_are_refused() -> None:
    sampler = GuessSampler(Guess())
    solver = Reinforce(sampler.system)
    config = TrainingConfiguration(training_steps=1, num_episodes_per_experience=2)
    assert Trainer(config=config, environment=sampler, algorithm=solver).harness is not None
    with pytest.raises(ConfigError, match="either policy and data, or a sampler"):
        Trainer(nn.Linear(1, 1), [1], config=config, sampler=sampler, algorithm=solver)
    with pytest.raises(ConfigError, match="needs an algorithm"):
        Trainer(config=config, sampler=sampler)


def test_a_subclass_may_bring_its_own_loop(tmp_path: Path) -> None:
    class MyConfig(TrainingConfiguration):
        def __init__(self) -> None:
            super().__init__(lr=1e-2, batch_size=4, optimizer="adamw", gradient_accumulation_steps=1,
                             training_steps=5, num_episodes_per_experience=2)  # fmt: skip
            self.eval_every = 2
            self.ckpt_dir = str(tmp_path / "checkpoints")

    class MyTrainer(Trainer):
        def __init__(self, config: MyConfig, sampler: Any, algorithm: Any, dev_prompts: Any = None) -> None:
            super().__init__(config, sampler, algorithm)
            self.dev_prompts = dev_prompts or []
            os.makedirs(self.config.ckpt_dir, exist_ok=True)  # type: ignore[attr-defined]

        def train(self) -> Any:
            losses = []
            for step in range(self.config.training_steps):
                for batch in self.harness.experience(seed=step):  # type: ignore[union-attr]
                    loss, _ = self.harness.step(batch)  # type: ignore[union-attr]
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    losses.append(loss.item())
            return losses

    sampler = GuessSampler(Guess())
    before = [p.clone() for p in sampler.system.parameters()]
    assert len(MyTrainer(MyConfig(), sampler, Reinforce(sampler.system)).train()) == 10
    assert any(not torch.equal(a, b) for a, b in zip(before, sampler.system.parameters()))


def test_a_system_says_what_it_lacks() -> None:
    with pytest.raises(NotImplementedError, match="Guess must define get_auditor_logprobs"):
        System.get_auditor_logprobs(Guess(), [0.5], [1])

    class Detached(Guess):
        def get_auditor_logprobs(self, context: Any, continuation: Any) -> Tensor:
            return super().get_tester_logprobs(context, continuation).detach()

    with pytest.raises(ValueError, match="carry no gradient"):
        Detached().auditor_logprobs([0.5], [1])
