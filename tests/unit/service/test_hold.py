"""Held trainers in our loop: the numbers of a plain `Trainer`, faults in one sentence, and what is read of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude.config.build import build
from etude.config.load import load
from etude.errors import ConfigError, DataError, EtudeError, NonFiniteError
from etude.runs.metrics import read_metrics
from etude.service import BaseTrainer, SelfHostedGrpoTrainer, SelfHostedTrainer
from etude.types import Batch
from tests.processes import newest_step
from tests.unit.service.held import QUICK, SETTINGS, digits, hold, same, tiny, write

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rl" / "digits-grpo.yaml"
SHORT = ["training.training_steps=4", "loggers=[]", "run.root=runs"]
HEAD = "import torch\nfrom etude.service import BaseTrainer, RemoteApiTrainer, SelfHostedTrainer\n"
GRPO = """
class Mine(SelfHostedTrainer):
    def _prepare_batch(self, batch):
        batch = self._compute_advantage(batch)
        if self._train_step >= 1:
            {body}
        return batch, {{}}
"""
REMOTE = """
class Mine(RemoteApiTrainer):
    def _prepare_trajectories(self, trajectories, metrics):
        for trajectory in trajectories:
            trajectory.advantage = trajectory.reward
        if self._train_step >= 1:
            {body}
        return trajectories
"""


def fit(kind: type[BaseTrainer], policy: Any, settings: Any = None, **training: Any) -> Any:
    return kind({**SETTINGS, **(settings or {})}).fit(
        policy, digits(), run=False, loggers=[], show_progress=False, training={**QUICK, **training}
    )


def test_the_ready_grpo_gives_the_weights_of_the_configuration_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = build(load(str(CONFIG), [*SHORT, "run.name=plain"]))
    params = ["trainer.type=service", "trainer.params.class_name=self_hosted_grpo"]
    held = build(load(str(CONFIG), [*SHORT, "run.name=held", *params]))
    for trainer in (plain, held):
        trainer.show_progress = False
        trainer.fit()
    assert same(plain.policy, held.policy) and not same(held.policy, tiny())
    rows = [read_metrics(tmp_path / "runs" / name / "metrics.jsonl")[-1] for name in ("plain", "held")]
    assert rows[0]["train/loss"] == rows[1]["train/loss"] and "train/critic/grpo_std/mean" in rows[1]


def test_a_subclass_of_python_trains_without_a_file() -> None:
    class Mine(SelfHostedGrpoTrainer):
        pass

    mine, ready = tiny(), tiny()
    assert fit(Mine, mine).steps == 2
    fit(SelfHostedGrpoTrainer, ready)
    assert same(mine, ready)


def test_the_length_comes_from_the_configuration_unless_it_is_said() -> None:
    inner = SelfHostedGrpoTrainer({"total_train_steps": 3})
    assert inner._training(None).training_steps == 3
    assert inner._training({"training_steps": 5}).training_steps == 5


@pytest.mark.parametrize(
    "body, kind, message",
    [
        ("raise RuntimeError('no luck')", DataError, "_prepare_batch, line 8: RuntimeError: no luck"),
        ("return batch", DataError, r"must return \(batch, metrics\), got Batch"),
        ("return batch, {}, 1", DataError, r"must return \(batch, metrics\), got a tuple of 3"),
        ("return {}, {}", DataError, "must return a Batch and metrics, got dict"),
        ("return batch, [1]", DataError, "metrics as a dictionary, got list"),
        ("return batch, {'x': 'y'}", DataError, "metric 'x' as 'y'; metrics are numbers"),
        ("del batch.values['attention_mask']", DataError, "removed 'attention_mask', which the loss needs"),
        ("del batch.values['advantages']", DataError, "set no 'advantages', which the loss needs"),
        ("batch.metadata['advantages'] = [float('nan')] * len(batch)", NonFiniteError, "'advantages' that are not fin"),
        ("batch.metadata['advantages'] = [1.0]", DataError, "line 8: ValueError: advantages has 1 numbers"),
        ("batch.values['advantages'] = torch.zeros(len(batch), 3)", DataError, r"'advantages' of shape \(16, 3\)"),
        ("batch = batch.select([])", DataError, "a batch without rows"),
        ("self._config.algorithm.gama", ConfigError, "the configuration has no algorithm.gama"),
    ],
)
def test_a_fault_is_one_sentence_and_the_run_is_kept(
    tmp_path: Path, body: str, kind: type[EtudeError], message: str
) -> None:
    folder = write(tmp_path / "faults", mine=HEAD + GRPO.format(body=body))
    trainer = hold(folder / "mine.py", "Mine", {"algorithm": {"gamma": 1.0}}, run=tmp_path / "run", training_steps=3)
    with pytest.raises(kind, match=message) as raised:
        trainer.fit()
    said = str(raised.value)
    assert "mine.py: Mine._prepare_batch" in said and "\n" not in said
    assert said.endswith("Nothing was updated; the run is saved at step 1")
    reference = hold(folder / "mine.py", "Mine", {"algorithm": {"gamma": 1.0}}, training_steps=1)
    reference.fit()
    assert same(trainer.policy, reference.policy) and newest_step(tmp_path / "run" / "checkpoints") == 1


@pytest.mark.parametrize(
    "body, kind, message",
    [
        ("raise KeyError('x')", DataError, "_prepare_trajectories, line 9: KeyError"),
        ("return None", DataError, "must return the trajectories as a list, got NoneType"),
        ("return ['a']", DataError, "as a list, got list with a str"),
        ("return []", DataError, "returned no trajectories"),
        ("del trajectories[2].advantage", DataError, "neither 'advantage' nor 'token_advantages' on trajectory 2"),
        ("trajectories[1].advantage = float('inf')", NonFiniteError, "'advantage' of trajectory 1 is not finite"),
        ("trajectories[1].advantage = 'high'", DataError, "'advantage' of trajectory 1 must be numbers"),
        ("trajectories[0].token_advantages = [1.0]", DataError, "'token_advantages' of trajectory 0 has 1 numbers"),
        ("trajectories[0].loss_mask = [1]", DataError, "'loss_mask' of the same length"),
    ],
)
def test_a_fault_in_trajectories_is_one_sentence_too(
    tmp_path: Path, body: str, kind: type[EtudeError], message: str
) -> None:
    folder = write(tmp_path / "faults", mine=HEAD + REMOTE.format(body=body))
    trainer = hold(folder / "mine.py", "Mine", run=tmp_path / "run", training_steps=3)
    with pytest.raises(kind, match=message) as raised:
        trainer.fit()
    assert "mine.py: Mine._prepare_trajectories" in str(raised.value)
    reference = hold(folder / "mine.py", "Mine", training_steps=1)
    reference.fit()
    assert same(trainer.policy, reference.policy) and newest_step(tmp_path / "run" / "checkpoints") == 1


def test_a_fault_that_is_mended_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    text = """
class Mine(SelfHostedTrainer):
    def __init__(self, config):
        super().__init__(config)
        self.calls, self.seen = 0, torch.zeros(1)

    def _prepare_batch(self, batch):
        self.calls += 1
        self.seen += self.calls
        if self.calls == 3 and self._config.broken:
            raise RuntimeError("not yet")
        batch.metadata["advantages"] = self.seen * batch.metadata["rewards"]
        return batch, {"calls": self.calls}
"""
    folder = write(tmp_path / "mended", mine=HEAD + text)
    whole = hold(folder / "mine.py", "Mine", {"broken": False}, training_steps=4)
    whole.fit()
    with pytest.raises(DataError, match="saved at step 2"):
        hold(folder / "mine.py", "Mine", {"broken": True}, run=tmp_path / "run", training_steps=4).fit()
    mended = hold(folder / "mine.py", "Mine", {"broken": False}, run=tmp_path / "run", training_steps=4)
    assert mended.fit().first_step == 2
    assert same(mended.policy, whole.policy) and mended.inner.calls == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text, name, message",
    [
        ("", "Mine", "mine.py has no class 'Mine'; it defines none"),
        ("class Mime(SelfHostedTrainer): pass", "Mine", "no class 'Mine'; did you mean 'Mime'"),
        ("class Mine: pass", "Mine", "Mine is no trainer; make it a subclass of SelfHostedTrainer"),
        ("Mine = 3", "Mine", "Mine is no class but a int"),
        ("class Mine(SelfHostedTrainer): pass", "Mine", r"Mine does not define _prepare_batch\(self, batch\)"),
        ("class Mine(RemoteApiTrainer): pass", "Mine", "Mine does not define _prepare_trajectories"),
        ("class Mine(BaseTrainer): pass", "Mine", r"Mine does not define train\(self, trajectories\)"),
        ("import nowhere", "Mine", "mine.py cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (
            "class Mine(BaseTrainer):\n    def __init__(self, config): self.x = config.nothing.y\n"
            "    def train(self, t): pass",
            "Mine",
            "mine.py: Mine: the configuration has no nothing",
        ),
        (
            "class Mine(BaseTrainer):\n    def __init__(self, config): pass\n    def train(self, t): pass",
            "Mine",
            r"must call super\(\).__init__\(config\)",
        ),
    ],
)
def test_a_class_that_cannot_be_held_is_named_with_its_file(tmp_path: Path, text: str, name: str, message: str) -> None:
    folder = write(tmp_path / "classes", mine=HEAD + text)
    with pytest.raises(ConfigError, match=message):
        hold(folder / "mine.py", name)


def test_a_missing_file_and_an_unknown_ready_trainer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the file of trainer 'Mine' is not there: .*nowhere\.py"):
        hold(tmp_path / "nowhere.py", "Mine")
    with pytest.raises(ConfigError, match="no trainer 'self_hosted_grop'; did you mean 'self_hosted_grpo'"):
        hold(None, "self_hosted_grop")


def test_what_nobody_reads_of_the_algorithm_section_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"algorithm": {"clip_low": 0.1, "my_parm": 1, "kl_ctrl": {"type": "fixed", "targt": 3}}}
    fit(SelfHostedGrpoTrainer, tiny(), {**settings, "algorithm": {**settings["algorithm"], "use_kl_in_reward": True}})
    said = [record.message for record in caplog.records if "never read" in record.message]
    assert len(said) == 1 and "algorithm.my_parm, algorithm.kl_ctrl.targt:" in said[0]


def test_given_text_is_trained_on_by_cross_entropy_micro_batch_by_micro_batch() -> None:
    from etude import Trainer, TrainingConfiguration
    from etude.algorithms import SFT
    from etude.data.text import TextData
    from etude.service import RemoteApiCrossEntropyTrainer, SelfHostedCrossEntropyTrainer

    def text() -> Any:
        return TextData([{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}])

    config = TrainingConfiguration(**{**QUICK, "batch_size": 2})
    plain, held, remote = tiny(), tiny(), tiny()
    Trainer(plain, text(), SFT(), config=config, run=False, loggers=[], show_progress=False).fit()
    arguments: dict[str, Any] = {"run": False, "training": config, "loggers": [], "show_progress": False}
    SelfHostedCrossEntropyTrainer(SETTINGS).fit(held, text(), **arguments)
    RemoteApiCrossEntropyTrainer({"train_service": {"config": {"learning_rate": 1e-3}}}).fit(
        remote, text(), **arguments
    )
    assert same(plain, held) and not same(remote, tiny())


def test_a_trainer_that_drops_rows_trains_on_the_rest() -> None:
    counted: list[int] = []

    class Best(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            batch = self._compute_advantage(batch)
            order = torch.argsort(batch.metadata["rewards"], descending=True)
            return batch.select(order[:5]), {}

        def compute_loss(self, policy: Any, batch: Batch) -> Any:
            counted.append(len(batch))
            return super().compute_loss(policy, batch)

    fit(Best, tiny(), training_steps=1)
    assert counted == [5]


def test_evaluation_of_trainers_that_update_themselves_is_refused() -> None:
    class Mine(BaseTrainer):
        def train(self, trajectories: Any) -> dict[str, float]:
            return {"loss": 0.0}

    with pytest.raises(ConfigError, match="eval_data: Mine has no loss outside of its update"):
        Mine().fit(tiny(), digits(), eval_data=digits(), run=False)
    with pytest.raises(ConfigError, match="Mine has no policy yet"):
        Mine().policy  # noqa: B018


def test_a_base_trainer_that_fails_is_named_and_metrics_are_wanted(tmp_path: Path) -> None:
    text = HEAD + "class Mine(BaseTrainer):\n    def train(self, trajectories):\n        {body}\n"
    for index, (body, message) in enumerate(
        [
            ("raise ValueError('odd')", "Mine.train, line 5: ValueError: odd"),
            ("return 3", "Mine.train must return metrics as a dictionary, got int"),
        ]
    ):
        folder = write(tmp_path / f"base{index}", mine=text.format(body=body))
        with pytest.raises(DataError, match=message):
            hold(folder / "mine.py", "Mine").fit()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_value_head_is_trained_along_where_the_loss_asks_for_values(by_hand: bool) -> None:
    class Critic(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            if not by_hand:
                return self._compute_advantage(batch), {}
            values = self._value_network.predict(batch.values["input_ids"])
            rewards = batch.metadata["rewards"][:, None]
            batch.values["advantages"] = torch.where(batch["loss_mask"] != 0, rewards - values, 0.0)
            return batch, {"value": float(values.mean())}

    policy = tiny(value_head=True)
    result = fit(Critic, policy, {"algorithm": {"loss": "ppo"}})
    assert result.metrics["train/value_loss"] > 0
    assert policy.value_head is not None and bool(policy.value_head.weight.any())
    with pytest.raises(ConfigError, match="value head"):
        fit(Critic, tiny(), {"algorithm": {"loss": "ppo"}})


def test_old_log_probabilities_are_computed_anew_where_that_is_asked_for() -> None:
    found = []
    for stated in ({}, {"do_old_log_prob_compute": True}):
        policy = tiny()
        fit(SelfHostedGrpoTrainer, policy, {"algorithm": stated})
        found.append(policy)
    pairs = zip(found[0].state_dict().values(), found[1].state_dict().values(), strict=True)
    assert all(torch.allclose(one, other, atol=2e-4) for one, other in pairs)


def test_the_coefficient_of_a_penalty_adapts_and_is_logged() -> None:
    control = {"type": "adaptive", "kl_reward_coef": 0.1, "target_kl": 0.01, "horizon": 100}
    settings = {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": control}}
    result = fit(SelfHostedGrpoTrainer, tiny(), settings, training_steps=2)
    assert result.metrics["train/critic/kl_coeff"] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100) ** 2, rel=0.2)


def test_updates_of_a_given_number_of_rows_follow_the_actor_section() -> None:
    counted: list[int] = []

    class Counting(SelfHostedGrpoTrainer):
        def compute_loss(self, policy: Any, batch: Batch) -> Any:
            counted.append(len(batch))
            return super().compute_loss(policy, batch)

    actor = {"ppo_mini_batch_size": 8, "ppo_epochs": 2}
    fit(Counting, tiny(), {"train_service": {"main": {"actor": actor}}}, training_steps=1)
    assert counted == [8, 8, 8, 8]


def test_rollouts_drawn_at_another_temperature_are_learned_from_at_it() -> None:
    inner = SelfHostedGrpoTrainer(SETTINGS)
    inner.fit(tiny(), digits(temperature=0.7), run=False, loggers=[], show_progress=False, training=QUICK)
    assert inner._loss_algorithm.temperature == 0.7
    with pytest.raises(ConfigError, match=r"drawn at temperature 0\.7"):
        SelfHostedGrpoTrainer({"algorithm": {"temperature": 1.0}}).fit(tiny(), digits(temperature=0.7), run=False)


def test_what_a_trainer_begins_to_keep_on_the_way_is_kept_too(tmp_path: Path) -> None:
    class Counting(SelfHostedGrpoTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
            if not hasattr(self, "lengths"):
                self.lengths: dict[Any, Any] = {}
            for length in (batch["loss_mask"] != 0).sum(1).tolist():
                self.lengths[length] = self.lengths.get(length, 0) + 1
            self.lengths.setdefault("steps", []).append(self._train_step)
            return super()._prepare_batch(batch)

    def train(run: Path, steps: int) -> dict[Any, Any]:
        inner = Counting(SETTINGS)
        training = {**QUICK, "training_steps": steps}
        inner.fit(tiny(), digits(), run=run, training=training, loggers=[], show_progress=False)
        return inner.lengths

    train(tmp_path / "stopped", 2)
    assert train(tmp_path / "stopped", 3) == train(tmp_path / "whole", 3)
