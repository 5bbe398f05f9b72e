"""The Ray engine, as far as it needs no cluster: parameters, what is refused, what is packed, how errors travel."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
from ray import cloudpickle

from etude import Trainer, TrainingConfiguration
from etude.config.load import load
from etude.data import Digits
from etude.engines.ray import RayEngine
from etude.engines.ray.cluster import _join
from etude.engines.ray.log_forwarding import ForwardedDisplay, ForwardedStream, ForwardingHandler, Listener
from etude.engines.ray.outcome import describe, explain_failure, revive
from etude.engines.ray.shipping import pack, restore_weights, unpack
from etude.errors import ConfigError, DataError, Interrupted, MissingExtraError, NonFiniteError, RankError
from etude.policies import MLP
from etude.secrets import redact, register_secret
from tests.crash.workload import Net, Noisy, WeightedTrainer

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "digits.yaml"


def make(kind: type[Trainer] = WeightedTrainer, **options: Any) -> Trainer:
    config = TrainingConfiguration(training_steps=2, batch_size=4, **options.pop("config", {}))
    parts = {"engine": RayEngine(), "run": False, "show_progress": False, **options}
    return kind(Net(dropout=False), Noisy(8, augment=False), config=config, **parts)


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, complaint",
    [
        ({"num_workers": 0}, "num_workers"),
        ({"max_failures": -1}, "max_failures"),
        ({"resources_per_worker": {"CPU": -1.0}}, "resources_per_worker.CPU"),
    ],
)
def test_values_that_make_no_sense_are_refused(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RayEngine(**params)


def test_parameters_of_a_configuration_are_checked() -> None:
    loaded = load(
        CONFIG, ["engine.type=ray", "engine.params.num_workers=2", "engine.params.resources_per_worker={CPU: 2}"]
    )
    assert loaded.config.engine.params == {"num_workers": 2, "resources_per_worker": {"CPU": 2.0}}
    with pytest.raises(ConfigError, match=r"engine\.params\.workers: unknown key"):
        load(CONFIG, ["engine.type=ray", "engine.params.workers=2"])
    with pytest.raises(ConfigError, match=r"engine\.params\.num_workers"):
        load(CONFIG, ["engine.type=ray", "engine.params.num_workers=two"])


def test_a_worker_has_a_cpu_unless_told_otherwise() -> None:
    assert RayEngine().needs == {"CPU": 1.0}
    assert RayEngine(use_gpu=True).needs == {"CPU": 1.0, "GPU": 1.0}
    assert RayEngine(resources_per_worker={"CPU": 3, "TPU": 1}).needs == {"CPU": 3, "TPU": 1}


@pytest.mark.parametrize(
    "params, device, complaint",
    [({}, "cuda", "use_gpu: true"), ({}, "cuda:1", "use_gpu: true"), ({"use_gpu": True}, "cpu", "use auto or cuda")],
)
def test_the_device_must_fit_what_the_workers_get(params: dict[str, Any], device: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make(engine=RayEngine(**params), config={"device": device}).fit()


def test_torchrun_has_no_place_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="leave torchrun out"):
        make().fit()


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1:1", "nowhere.invalid:6379", "127.0.0.1:0x"])
def test_an_address_where_no_cluster_is_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match=address):
        make(engine=RayEngine(address=address)).fit()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without_ray(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return plain(name, *rest)

    monkeypatch.delitem(sys.modules, "etude.engines.ray.engine")
    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(MissingExtraError, match=r"pip install 'etude\[ray\]'"):
        importlib.import_module("etude.engines.ray.engine")


def test_nothing_but_the_engine_imports_ray() -> None:
    program = "import sys, etude.registry, etude.engines.ray; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- what is sent ------------------------------------------------------------------------------------------------------


def travelled(trainer: Trainer, directory: Path | None = None) -> Trainer:
    """Send a trainer as Ray does, without its store."""
    return unpack(pack(trainer, directory, cloudpickle.dumps), cloudpickle.loads)


def test_a_trainer_comes_out_as_it_went_in(tmp_path: Path) -> None:
    class Local(WeightedTrainer):
        scale = 3

    trainer = make(Local, run=tmp_path / "run")
    arrived = travelled(trainer, tmp_path / "run")
    assert type(arrived).__name__ == "Local" and type(arrived).scale == 3  # type: ignore[attr-defined]
    assert arrived.run_request.dir == tmp_path / "run"  # type: ignore[union-attr]
    weights = trainer.policy.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in arrived.policy.state_dict().items())
    assert trainer.run_request == tmp_path / "run" and isinstance(trainer.engine, RayEngine), (
        "the original is untouched"
    )


def test_a_trainer_that_has_trained_here_can_be_sent() -> None:
    trainer = make(engine="torch")
    trainer.fit()
    assert not hasattr(travelled(trainer), "session")


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    trainer = make()
    trainer.policy.body.guard = threading.Lock()  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"^trainer\.policy\S*\.guard \(lock\) cannot be sent to the Ray workers: .*lock"
    ):
        travelled(trainer)
    trainer = make(callbacks=[])
    trainer.callbacks.append((tmp_path / "log").open("w"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^trainer\.callbacks\[0\] \(TextIOWrapper\)"):
        travelled(trainer)
    trainer.callbacks.pop().close()  # type: ignore[attr-defined]


def test_variables_of_the_trackers_travel_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "one")
    monkeypatch.setenv("PRIVATE_KEY", "two")
    parcel = pack(make(), None, cloudpickle.dumps)
    assert parcel.variables["WANDB_PROJECT"] == "one" and "PRIVATE_KEY" not in parcel.variables
    assert parcel.working_dir == os.getcwd() and parcel.num_threads == 1


def test_secrets_stay_secret_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    register_secret("correct-horse-battery")
    parcel = pack(make(), None, cloudpickle.dumps)
    monkeypatch.setattr("etude.secrets._spellings", ())
    unpack(parcel, cloudpickle.loads)
    assert redact("the key is correct-horse-battery") == "the key is ***"


def test_a_policy_that_was_not_built_becomes_the_trained_one() -> None:
    config = TrainingConfiguration(training_steps=2, precision="float64", freeze=["*bias"])
    trained = Trainer(MLP(hidden=[4]), Digits(), config=config, run=False, show_progress=False)
    trained.fit()
    weights = {name: value.numpy() for name, value in trained.policy.state_dict().items()}
    policy = MLP(hidden=[4])
    draw = torch.get_rng_state()
    restore_weights(Trainer(policy, Digits(), config=config), {"spec": trained.data.spec, "weights": weights})
    assert torch.equal(torch.get_rng_state(), draw), "nothing is drawn from the driver's generators"
    assert policy.is_built and all(
        torch.equal(v, trained.policy.state_dict()[n]) for n, v in policy.state_dict().items()
    )
    assert [p.requires_grad for p in policy.parameters()] == [p.requires_grad for p in trained.policy.parameters()]


# -- errors ------------------------------------------------------------------------------------------------------------


class Polite(Exception):
    """Can be made again."""


class Stubborn(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return revive(describe(caught, rank=1)["error"])


@pytest.mark.parametrize(
    "error",
    [DataError("no row 7"), NonFiniteError("loss at step 3"), OSError("disk"), SystemExit(3), Polite("mine", 3)],
)
def test_errors_keep_their_class_and_their_words(error: BaseException) -> None:
    arrived = raised(error)
    assert type(arrived) is type(error) and str(arrived) == str(error)
    assert getattr(arrived, "exit_code", None) == getattr(error, "exit_code", None)
    assert "raised in rank 1" in arrived.__notes__[0] and "in raised" in arrived.__notes__[0]


def test_an_error_that_cannot_travel_keeps_its_text() -> None:
    arrived = raised(Stubborn(3, "home"))
    assert type(arrived) is RuntimeError and str(arrived) == "Stubborn: 3 at home"
    assert "raise error" in arrived.__notes__[0]


def test_an_interruption_keeps_its_signal() -> None:
    arrived = raised(Interrupted(15, "interrupted by SIGTERM"))
    assert isinstance(arrived, Interrupted) and (arrived.code, arrived.signum) == (143, 15)


def test_lost_workers_are_a_rank_error_that_says_what_to_do() -> None:
    failure = RuntimeError("x")
    failure.worker_failures = {1: RuntimeError("gone")}  # type: ignore[attr-defined]
    error = explain_failure(failure, 0)
    assert isinstance(error, RankError) and "rank 1" in str(error) and "max_failures" in str(error)
    failure.worker_failures[0] = RankError("rank 1 died in phase 'loss' at step 23; ending rank 0")  # type: ignore[attr-defined]
    assert str(explain_failure(failure, 2)).startswith("rank 1 died in phase 'loss' at step 23")
    assert "again 2 times" in str(explain_failure(failure, 2))
    assert "no placement" in str(explain_failure(RuntimeError("no placement\nlong tale"), 0))


# -- what is said ------------------------------------------------------------------------------------------------------


def test_what_a_worker_says_is_shown_by_the_driver(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    stream = ForwardedStream(listener.show, "out", sys.__stdout__)
    stream.write("half ")
    assert capsys.readouterr().out == ""
    stream.write("a line\nrest")
    assert capsys.readouterr().out == "half a line\n"
    stream.flush()
    ForwardedStream(listener.show, "err", sys.__stderr__).write("oh\n")
    ForwardedDisplay(listener.show).update(3, 10, {"loss": 0.5}, 2.0, None)
    listener.close()
    shown = capsys.readouterr()
    assert shown.out == "rest" and shown.err.startswith("oh\nstep 3/10  loss 0.5")
    with caplog.at_level(logging.INFO, "etude"):
        handler = ForwardingHandler(listener.show)
        handler.emit(logging.LogRecord("etude", logging.INFO, "x.py", 1, "resuming from %s", ("here",), None))
        handler.emit(logging.LogRecord("ray.train", logging.ERROR, "x.py", 1, "chatter", (), None))
    assert [record.getMessage() for record in caplog.records] == ["resuming from here"]


def test_a_cluster_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        _join("127.0.0.1:1")
