from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from etude import Callback, Loss, Result, Trainer, TrainingConfiguration
from etude.config.training import EarlyStopping, OptimizerConfiguration
from etude.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RegistryError
from etude.loop.optimizers import Optimization
from etude.runs.checkpoint import CheckpointStore
from etude.runs.loggers import TensorBoardLogger
from etude.runs.metrics import read_metrics
from tests.processes import reap, run_ranks, spawn, wait_for


class Regression(Trainer):
    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Any:
        return {"loss": (policy(batch["x"]) - batch["y"]).square().mean(), "bias": policy[-1].bias.mean()}


def rows(samples: int = 40) -> dict[str, Tensor]:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def make(kind: type[Trainer] = Regression, run: Any = False, data: Any = None, **options: Any) -> Trainer:
    parts = {key: options.pop(key) for key in ("callbacks", "eval_data", "loggers", "algorithm") if key in options}
    policy = options.pop("policy", None) or net(options.pop("dropout", 0.0))
    settings: dict[str, Any] = {"training_steps": 10, "batch_size": 8, "lr": 1e-2}
    config = TrainingConfiguration(**{**settings, **options})
    parts.setdefault("loggers", [])
    return kind(policy, rows() if data is None else data, config=config, run=run, show_progress=False, **parts)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_training_equals_a_loop_written_by_hand() -> None:
    trainer = make(training_steps=5, shuffle=False, clip_norm=None)
    trainer.fit()
    policy, data = net(), rows()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(5):
        x, y = (data[k][step * 8 : step * 8 + 8] for k in ("x", "y"))
        optimizer.zero_grad()
        (policy(x) - y).square().mean().backward()
        optimizer.step()
    assert same(weights(trainer), policy.state_dict())


@pytest.mark.parametrize("form", ["loss", "dict", "scalar", "tuple"])
def test_a_loss_may_take_any_of_its_forms(form: str) -> None:
    class Formed(Trainer):
        def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> Any:
            errors = (policy(batch["x"]) - batch["y"]).square()
            mean = errors.mean()
            return {
                "loss": Loss(errors.sum(), errors.numel()),
                "dict": {"loss": mean},
                "scalar": mean,
                "tuple": (mean, 1),
            }[form]

    trainer, other = make(Formed, training_steps=3), make(training_steps=3)
    trainer.fit()
    other.fit()
    ours, theirs = weights(trainer), weights(other)
    assert max(float((ours[k] - theirs[k]).abs().max()) for k in ours) < 1e-6


@pytest.mark.parametrize(
    "returned, message",
    [
        ({"los": 1}, "needs the key 'loss'"),
        (torch.zeros(3), "shape \\(3,\\)"),
        (None, "got NoneType"),
        ("a", "got str"),
    ],
)
def test_a_wrong_loss_is_said_in_one_sentence(returned: Any, message: str) -> None:
    class Wrong(Trainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            return returned

    with pytest.raises(ValueError, match=message):
        make(Wrong).fit()


def test_fit_leaves_a_run_directory_behind(tmp_path: Path) -> None:
    result = make(
        run=tmp_path / "run", eval_data=rows(16), evaluate_every=5, save_every=5, log_every=2, loggers=None
    ).fit()
    assert isinstance(result, Result)
    assert result.steps == 10
    assert result.run_dir == tmp_path / "run"
    assert result.stopped == "finished"
    assert {"train/loss", "eval/loss", "train/bias", "lr/policy", "grad_norm/policy"} <= result.metrics.keys()
    assert result.last is not None
    assert result.best is not None
    table = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in table if "train/loss" in row] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in table if "eval/loss" in row] == [5, 10]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert (tmp_path / "run" / "environment.json").exists()
    assert (tmp_path / "run" / "config.yaml").exists()
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5, "gradient_accumulation_steps": 3, "ema_decay": 0.9}])
@pytest.mark.parametrize("stop_at", [1, 4, 5, 7])
def test_stopping_and_resuming_changes_nothing(tmp_path: Path, options: dict[str, Any], stop_at: int) -> None:
    straight = make(run=tmp_path / "a", **options)
    straight.fit()
    make(run=tmp_path / "b", **{**options, "training_steps": stop_at}).fit()
    resumed = make(run=tmp_path / "b", **options)
    resumed.fit()
    assert same(weights(straight), weights(resumed))


def test_a_cosine_schedule_resumes_on_its_curve(tmp_path: Path) -> None:
    class StopAt(Callback):
        def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
            if trainer.progress.step == 4:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 2, "save_every": 2, "log_every": 1}
    straight = make(run=tmp_path / "a", **options)
    straight.fit()
    with pytest.raises(KeyboardInterrupt):
        make(run=tmp_path / "b", callbacks=[StopAt()], **options).fit()
    resumed = make(run=tmp_path / "b", **options)
    resumed.fit()
    assert same(weights(straight), weights(resumed))
    rates = [[row["lr/policy"] for row in read_metrics(tmp_path / d / "metrics.jsonl")] for d in "ab"]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 10


def test_resume_never_starts_afresh_beside_the_old_run(tmp_path: Path) -> None:
    first = make(run=tmp_path / "run").fit()
    second = make(run=tmp_path / "run").fit(resume="never")
    assert second.run_dir != first.run_dir
    assert second.steps == 10
    assert first.last is not None
    assert first.last.exists()


def test_resume_from_a_path_goes_on_from_that_checkpoint(tmp_path: Path) -> None:
    first = make(run=tmp_path / "first", training_steps=6).fit()
    assert first.last is not None
    trainer = make(run=tmp_path / "second")
    trainer.fit(resume=first.last)
    straight = make()
    straight.fit()
    assert same(weights(trainer), weights(straight))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        make(run=tmp_path / "third").fit(resume=tmp_path / "nowhere")


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    make(run=tmp_path / "run").fit()
    again = make(run=tmp_path / "run")
    assert again.fit().steps == 10
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load().step == 10


def test_training_begins_with_one_line_on_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        trainer = make(run=tmp_path / "run")
        trainer.show_progress = True
        trainer.fit()
    size = sum(weight.numel() for weight in trainer.policy.parameters())
    said = capsys.readouterr().err.splitlines()
    begins = f"training {size:,} parameters on 40 samples, device cpu, into {tmp_path / 'run'}"
    assert said[0] == begins
    assert said.count(begins) == 1  # a finished run does not begin again
    make(run=tmp_path / "quiet").fit()
    assert capsys.readouterr().err == ""


def test_two_named_optimizers_each_update_their_own(tmp_path: Path) -> None:
    optimizers = {
        "first": OptimizerConfiguration(match=["0.*"], type="sgd", lr=0.1, clip_norm=0.1),
        "rest": OptimizerConfiguration(match=["*"], type="adamw", lr=0.0),
    }
    trainer = make(optimizers=optimizers, log_every=1)
    before = weights(trainer)
    result = trainer.fit()
    after = weights(trainer)
    assert not torch.equal(before["0.weight"], after["0.weight"])
    assert torch.equal(before["3.weight"], after["3.weight"])
    assert {"lr/first", "lr/rest", "grad_norm/first", "grad_norm/rest"} <= result.metrics.keys()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"freeze": ["nothing.*"]}, "matches no parameter"),
        ({"freeze": ["*"]}, "no trainable parameter"),
        ({"optimizer": "adamm"}, "adamm"),
        ({"optimizer_params": {"betass": [0.9, 0.99]}}, "no parameter 'betass'"),
        ({"optimizers": {"a": OptimizerConfiguration(match=["0.*"])}}, "no optimizer matches"),
        ({"schedule": "cosine", "duration": "10 s"}, "needs the length"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"device": "toaster"}, "not a device"),
    ],
)
def test_bad_settings_are_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options).fit()


def test_frozen_parameters_stay_and_their_modules_are_in_eval_mode() -> None:
    modes = []

    class Watch(Regression):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            modes.append((policy[0].training, policy[3].training))
            return super().compute_loss(policy, batch)

    trainer = make(Watch, freeze=["0.*"])
    before = weights(trainer)
    trainer.fit()
    assert torch.equal(before["0.weight"], weights(trainer)["0.weight"])
    assert set(modes) == {(False, True)}


def test_configure_optimizers_may_return_plain_torch_optimizers_with_schedulers(tmp_path: Path) -> None:
    class Own(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1, momentum=0.9)
            return {"mine": Optimization(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), clip_norm=1.0)}

    straight = make(Own, run=tmp_path / "a", log_every=1)
    straight.fit()
    make(Own, run=tmp_path / "b", training_steps=4).fit()
    resumed = make(Own, run=tmp_path / "b", log_every=1)
    result = resumed.fit()
    assert same(weights(straight), weights(resumed))
    assert result.metrics["lr/mine"] == pytest.approx(0.1 * 0.5**3)


class ManualTrainer(Trainer):
    def train_step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        optimizer = self.optimizers["policy"]
        optimizer.zero_grad()
        loss = (self.policy(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "twice": 2 * loss.item()}


def test_a_trainer_with_its_own_train_step_matches_the_automatic_one(tmp_path: Path) -> None:
    manual, automatic = make(ManualTrainer, clip_norm=None), make(clip_norm=None)
    result = manual.fit()
    automatic.fit()
    assert same(weights(manual), weights(automatic))
    assert result.metrics["train/twice"] == pytest.approx(2 * result.metrics["train/loss"])


def test_a_manual_trainer_on_two_ranks_averages_gradients(tmp_path: Path) -> None:
    def work() -> None:
        trainer = make(ManualTrainer, batch_size=4, run=tmp_path / "run", clip_norm=None)
        trainer.fit()

    assert run_ranks(work, 2) == [0, 0]
    alone = make(clip_norm=None)
    alone.fit()
    tree = CheckpointStore(tmp_path / "run" / "checkpoints").load().tree
    assert max(float((tree["policy"][k] - v).abs().max()) for k, v in weights(alone).items()) < 1e-6


@pytest.mark.parametrize("kind", [Regression, ManualTrainer])
def test_a_nan_sample_stops_before_the_update_and_is_named(tmp_path: Path, kind: type[Trainer]) -> None:
    data = rows()
    data["x"][17] = math.nan
    trainer = make(kind, data=data, run=tmp_path / "run", save_every=1)
    with pytest.raises(NonFiniteError, match=r"step \d, rank 0: .*samples \[.*17") as caught:
        trainer.fit()
    assert "No weight was changed" in str(caught.value)
    assert all(value.isfinite().all() for value in weights(trainer).values())
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_an_infinite_gradient_of_a_finite_loss_names_the_parameter() -> None:
    class Steep(Trainer):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            return policy[0].bias.sub(policy[0].bias.detach()).abs().sqrt().sum()

    with pytest.raises(NonFiniteError, match=r"gradient not finite in 0\.bias"):
        make(Steep).fit()


def test_a_reward_that_is_not_finite_stops_too() -> None:
    data = {**rows(), "reward": torch.ones(40)}
    data["reward"][3] = math.inf
    with pytest.raises(NonFiniteError, match="reward not finite"):
        make(data=data).fit()


def test_early_stopping_ends_with_its_reason() -> None:
    result = make(
        training_steps=100, eval_data=rows(8), lr=0.0, evaluate_every=2, early_stopping=EarlyStopping(patience=3)
    ).fit()
    assert result.steps == 8
    assert result.stopped.startswith("early stopping: eval/loss")
    with pytest.raises(ConfigError, match="'eval/los' is not evaluated"):
        make(eval_data=rows(8), evaluate_every=2, early_stopping=EarlyStopping(metric="eval/los")).fit()


def test_early_stopping_counts_on_after_a_restart_and_stays_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "eval_data": rows(8), "lr": 0.0, "evaluate_every": 2, "early_stopping": EarlyStopping(patience=3),
    }  # fmt: skip
    make(run=tmp_path / "run", training_steps=4, **options).fit()
    result = make(run=tmp_path / "run", training_steps=100, **options).fit()
    assert result.steps == 8
    again = make(run=tmp_path / "run", training_steps=100, **options).fit()
    assert (again.steps, again.stopped[:14]) == (8, "early stopping")
    patient = {**options, "early_stopping": EarlyStopping(patience=5)}
    assert make(run=tmp_path / "run", training_steps=100, **patient).fit().steps == 12


def test_evaluation_never_disturbs_training() -> None:
    class Noisy(Regression):
        def evaluate(self) -> dict[str, float]:
            torch.randn(100)
            return {"draw": float(torch.rand(()))}

    plain, evaluated = make(dropout=0.5), make(Noisy, dropout=0.5, evaluate_every=1)
    plain.fit()
    result = evaluated.fit()
    assert same(weights(plain), weights(evaluated))
    assert "eval/draw" in result.metrics


def test_the_ema_is_what_gets_evaluated(tmp_path: Path) -> None:
    seen = []

    class Look(Regression):
        def evaluate(self) -> dict[str, float]:
            seen.append(weights(self))
            return {}

    trainer = make(Look, ema_decay=0.99, run=tmp_path / "run")
    trainer.fit()
    tree = CheckpointStore(tmp_path / "run" / "checkpoints").load().tree
    assert same(seen[-1], tree["ema"])
    assert not same(seen[-1], tree["policy"])
    assert same(weights(trainer), tree["policy"])


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16", "fp16"])
def test_every_precision_trains_and_resumes_exactly(tmp_path: Path, precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "gradient_accumulation_steps": 2}
    straight = make(run=tmp_path / "a", **options)
    first = straight.fit()
    make(run=tmp_path / "b", **{**options, "training_steps": 5}).fit()
    resumed = make(run=tmp_path / "b", **options)
    resumed.fit()
    assert same(weights(straight), weights(resumed))
    assert math.isfinite(first.metrics["train/loss"])
    if precision == "fp16":
        assert first.metrics["loss_scale"] > 0


def test_fp16_overflow_lowers_the_scale_and_goes_on() -> None:
    class Big(Regression):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            return super().compute_loss(policy, batch)["loss"] * 100

    trainer = make(Big, precision="fp16", training_steps=30, log_every=1)
    result = trainer.fit()
    assert result.metrics["loss_scale"] <= 65536
    assert all(value.isfinite().all() for value in weights(trainer).values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_policy_trains_to_the_same_numbers() -> None:
    plain, compiled = make(training_steps=3), make(training_steps=3, compile=True)
    plain.fit()
    compiled.fit()
    assert weights(plain).keys() == weights(compiled).keys()
    assert max(float((weights(plain)[k] - v).abs().max()) for k, v in weights(compiled).items()) < 1e-6


@pytest.mark.parametrize("duration, steps", [("3 epochs", 15), ("100 tokens", 13), (7, 7)])
def test_a_run_may_be_measured_in_any_unit(duration: Any, steps: int) -> None:
    assert make(duration=duration).fit().steps == steps


def test_a_run_may_be_measured_in_seconds() -> None:
    started = time.monotonic()
    assert make(duration="0.3 s").fit().steps > 1
    assert 0.3 <= time.monotonic() - started < 20


def test_data_that_ends_is_an_error_not_a_short_success() -> None:
    def stream() -> Any:
        yield from ({"x": torch.randn(8, 4), "y": torch.randn(8, 1)} for _ in range(3))

    with pytest.raises(DataError):
        make(data=stream()).fit()


def test_a_ready_made_loader_trains_and_resumes_exactly(tmp_path: Path) -> None:
    class Pairs(Trainer):
        def compute_loss(self, policy: Any, batch: list[Tensor]) -> Tensor:
            return (policy(batch[0]) - batch[1]).square().mean()

    def loader() -> DataLoader[Any]:
        data = rows(30)
        return DataLoader(TensorDataset(data["x"], data["y"]), batch_size=7, shuffle=True)

    straight = make(Pairs, data=loader(), run=tmp_path / "a", dropout=0.5)
    straight.fit()
    make(Pairs, data=loader(), run=tmp_path / "b", dropout=0.5, training_steps=6).fit()
    resumed = make(Pairs, data=loader(), run=tmp_path / "b", dropout=0.5)
    resumed.fit()
    assert same(weights(straight), weights(resumed))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_exits_with_its_own_code(tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    (pid,) = spawn(lambda: make(run=run, training_steps=10**6).fit())
    wait_for(run / "metrics.jsonl")
    time.sleep(0.1)
    os.kill(pid, number)
    assert reap([pid], 20) == [code]
    step = CheckpointStore(run / "checkpoints").load().step
    assert step > 0
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    class Stuck(Regression):
        def compute_loss(self, policy: Any, batch: Any) -> Any:
            if self.progress.step == 3:
                (tmp_path / "stuck").touch()
                while True:
                    time.sleep(0.05)
            return super().compute_loss(policy, batch)

    (pid,) = spawn(lambda: make(Stuck, run=tmp_path / "run").fit())
    wait_for(tmp_path / "stuck")
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(pid, signal.SIGINT)
    assert reap([pid], 5) == [130]


def test_loading_into_another_policy_says_what_does_not_fit(tmp_path: Path) -> None:
    make(run=tmp_path / "run", training_steps=3).fit()
    with pytest.raises(CheckpointError, match="does not fit the policy"):
        make(run=tmp_path / "run", policy=nn.Sequential(nn.Linear(4, 1))).fit()


def test_a_changed_learning_rate_counts_after_resuming(tmp_path: Path) -> None:
    make(run=tmp_path / "run", training_steps=3).fit()
    result = make(run=tmp_path / "run", lr=5e-3).fit()
    assert result.metrics["lr/policy"] == 5e-3


def test_callback_state_survives_a_restart(tmp_path: Path) -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Any) -> None:
            self.steps = state["steps"]

    make(run=tmp_path / "run", training_steps=4, callbacks=[Count()]).fit()
    counter = Count()
    make(run=tmp_path / "run", callbacks=[counter]).fit()
    assert counter.steps == 10


@pytest.mark.parametrize("loggers", ["tensorboard", ["tensorboard"], [TensorBoardLogger()]])
def test_loggers_are_chosen_by_name_as_engines_are(tmp_path: Path, loggers: Any) -> None:
    trainer = make(run=tmp_path / "run", loggers=loggers, training_steps=2)
    assert [type(logger) for logger in trainer.loggers] == [TensorBoardLogger]
    trainer.fit()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_what_is_no_logger_is_refused_at_once() -> None:
    with pytest.raises(RegistryError, match="unknown logger 'wandbb'; did you mean 'wandb'"):
        make(loggers=["wandbb"])
    with pytest.raises(ConfigError, match=r"or names .*wandb.*; got the class TensorBoardLogger"):
        make(loggers=[TensorBoardLogger])
    with pytest.raises(ConfigError, match="got a int"):
        make(loggers=3)


def test_a_logger_that_fails_never_stops_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def start(self, run_dir: Path, config: Any, first_step: int) -> None: ...

        def log(self, step: int, metrics: Any) -> None:
            raise RuntimeError("no route to host")

        def close(self) -> None: ...

    result = make(run=tmp_path / "run", loggers=[Broken()], log_every=1).fit()
    assert result.steps == 10
    assert "no route to host" in caplog.text
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 10


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    class Up(Regression):
        def evaluate(self) -> dict[str, float]:
            return {"success": {2: 0.1, 4: 0.9, 6: 0.3, 8: 0.2, 10: 0.5}[self.progress.step]}

    result = make(
        Up, run=tmp_path / "run", evaluate_every=2, best_metric="eval/success", best_mode="max", keep_last=1
    ).fit()
    assert result.best is not None
    assert CheckpointStore(tmp_path / "run" / "checkpoints", best_mode="max").load("best").step == 4
    with pytest.raises(ConfigError, match="best_metric"):
        make(Up, run=tmp_path / "other", evaluate_every=2, best_metric="eval/sucess").fit()


def test_seed_and_process_decide_everything(tmp_path: Path) -> None:
    a, b, c = (make(dropout=0.5, seed=seed) for seed in (1, 1, 2))
    for trainer in (a, b, c):
        trainer.fit()
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(c))


def test_the_policy_must_be_a_module() -> None:
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, got str"):
        Trainer("mlp", rows())  # type: ignore[arg-type]


def test_train_is_another_name_for_fit() -> None:
    assert make().train().steps == 10


# -- what Python says when something does not fit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"learning_rate": 1}, "TrainingConfiguration: learning_rate: unknown key; did you mean 'lr'?"),
        ({"max_steps": 1}, "TrainingConfiguration: max_steps: unknown key; did you mean 'training_steps'?"),
        (
            {"lr": "fast"},
            "lr: should be a valid number, unable to parse string as a number, got 'fast'",
        ),
        ({"batch_size": 0}, "TrainingConfiguration: batch_size: should be greater than or equal to 1, got 0"),
        ({"optimizers": {"a": {"lrr": 1}}}, "optimizers.a.lrr: unknown key; did you mean 'lr'?"),
    ],
)
def test_a_wrong_setting_is_told_as_in_a_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfiguration(**settings)
    assert message in str(caught.value)


class NoBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self) -> Tensor:
        return self.layer.weight.sum()


@pytest.mark.parametrize("policy", [NoBatch(), nn.Linear(4, 1)])
def test_a_module_whose_forward_takes_no_batch_is_told_in_one_sentence(policy: nn.Module) -> None:
    with pytest.raises(ConfigError) as caught:
        make(Trainer, policy=policy).fit()
    sentence = f"the forward of {type(policy).__name__} does not take a batch (a dictionary with x, y); define forward"
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_mistake_inside_of_a_policy_stays_what_it_is() -> None:
    class Broken(NoBatch):
        def forward(self, batch: Any) -> Any:  # type: ignore[override]
            return batch["x"] + None

    with pytest.raises(TypeError, match="unsupported operand"):
        make(Trainer, policy=Broken()).fit()


@pytest.mark.parametrize("algorithm", [nn.functional.mse_loss, nn.MSELoss(), "own"])
def test_a_pair_of_tensors_and_a_function_train(algorithm: Any) -> None:
    def own(policy: Any, batch: Any) -> Tensor:
        x, y = batch
        return (policy(x) - y).square().mean()

    data = rows()
    found = make(Trainer, data=(data["x"], data["y"].numpy()), algorithm=own if algorithm == "own" else algorithm)
    found.fit()
    expected = make(Trainer, algorithm=lambda policy, batch: (policy(batch["x"]) - batch["y"]).square().mean())
    expected.fit()
    assert same(weights(found), weights(expected))
    assert found.algorithm.compares is (algorithm != "own")


@pytest.mark.parametrize(
    "algorithm, message",
    [
        (nn.MSELoss, r"algorithm is the class MSELoss, not an object; write MSELoss\(\.\.\.\)"),
        ("grpo", "algorithm is the text 'grpo'; in Python give the object"),
        (3, r"algorithm must have loss\(policy, batch\) or be a function of them, got int"),
        (lambda batch: 0, r"cannot be an algorithm: it takes \(batch\), not \(policy, batch\)"),
    ],
)
def test_what_cannot_be_an_algorithm_is_refused(algorithm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Trainer, algorithm=algorithm)


def test_a_loss_of_pairs_with_other_batches_is_told() -> None:
    with pytest.raises(ConfigError, match="mse_loss compares a prediction with a target, which needs batches that are"):
        make(Trainer, algorithm=nn.functional.mse_loss).fit()


def test_features_and_targets_must_be_equally_long() -> None:
    with pytest.raises(DataError, match="equally long"):
        make(Trainer, data=(torch.zeros(4, 4), torch.zeros(3, 1)))


def test_another_architecture_in_the_same_run_is_told(tmp_path: Path) -> None:
    make(run=tmp_path / "run", training_steps=3).fit()
    wider = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1))
    with pytest.raises(CheckpointError) as caught:
        make(run=tmp_path / "run", policy=wider).fit()
    assert str(caught.value) == (
        "the checkpoint does not fit the policy, which has another architecture (0.weight is (8, 4) there and (16, 4) "
        "here and 2 more differ); give another run, or resume='never' to start afresh"
    )
