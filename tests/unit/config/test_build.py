"""From configuration to objects: every component gets its parameters, and the trainer all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.build import build
from etude.config.load import Loaded, load
from etude.errors import ConfigError
from etude.trainer import Trainer

Config = Callable[..., Loaded]

PLUGIN = '''
import torch
from torch import nn

from etude import registry
from etude.trainer import Trainer


@registry.POLICY_REGISTRY.register("eager")
class Eager(nn.Module):
    """A policy that makes its weights at once."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        if width > 100:
            raise ValueError("width is too large")
        self.layer = nn.Linear(2, width)

    def forward(self, batch):
        return {"loss": self.layer(batch["x"]).square().mean()}


@registry.DATASET_BUILDER_REGISTRY.register("made")
class Made:
    def build(self, opt_params, params):
        self.last = (opt_params, params)
        Made.seen = dict(opt_params)
        rows = [{"x": torch.full((2,), float(i))} for i in range(params["count"])]
        if params.get("split") == "broken":
            return rows
        return {"dataset": rows, "norm_stats": {"x": {"mean": 1.0, "std": 2.0}}}


@registry.DATASET_BUILDER_REGISTRY.register("unpacked")
class Unpacked:
    def build(self, opt_params, params):
        return {"dataset": (lambda count, scale=1: [{"x": torch.zeros(2)}] * count)(**params)}


@registry.TRAINER_REGISTRY.register("own")
class Own(Trainer):
    def __init__(self, *args, smoothing: float = 0.1, **kwargs):
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing


@registry.TRAINER_REGISTRY.register("stepper")
class Stepper:
    def __init__(self, models, optimizers, loss, device, momentum: float = 0.0):
        self.models, self.optimizers, self.loss = models, optimizers, loss

    def train_step(self, data, **kwargs):
        self.seen = data["x"]
        loss = self.loss(self.models["policy"].layer(data["x"]), torch.zeros(()))
        self.optimizers["policy"].zero_grad()
        loss.backward()
        self.optimizers["policy"].step()
        return {"loss": loss}


@registry.LOSS_BUILDER_REGISTRY.register("power")
class PowerLoss:
    """Errors to a power."""

    def __init__(self, power: float = 2.0) -> None:
        self.power = power

    def build(self, reduction: str = "sum"):
        return Power(self.power, reduction)


class Power(nn.Module):
    def __init__(self, power, reduction):
        super().__init__()
        self.power, self.reduction = power, reduction

    def forward(self, found, wanted):
        return getattr((found - wanted).abs() ** self.power, self.reduction)()


@registry.OPTIMIZER_BUILDER_REGISTRY.register("own_rate")
class OwnRate:
    def __init__(self, lr: float = 3e-4) -> None:
        self.lr = lr

    def build(self, params):
        return torch.optim.SGD(params, lr=self.lr)


@registry.ALGORITHM_REGISTRY.register("squares")
class Squares:
    def __init__(self, power: int = 2): self.power = power
    def loss(self, policy, batch): ...
'''
BASE = """\
plugins: [components.py, parts.py]
policy: {type: eager, params: {width: 5}}
data: {type: made, params: {count: 8}}
eval_data: {type: made, params: {count: 2, split: validation}}
engine: {type: stub, params: {strategy: x}}
loggers: [{type: sink, params: {project: q}}]
callbacks: [{type: beep, params: {times: 2}}]
training: {seed: 3, lr: 1e-4}
"""


@pytest.fixture
def built(config: Config, folder: Path) -> Callable[..., Any]:
    (folder / "parts.py").write_text(PLUGIN)

    def make(more: str = "", *overrides: str, run: Any = None) -> Any:
        return build(config(more, *overrides, base=BASE), run=run)

    return make


def test_components_get_their_parameters(built: Callable[..., Any]) -> None:
    trainer = built("algorithm: {type: squares, params: {power: 3}}\n")
    assert type(trainer) is Trainer
    assert trainer.policy.layer.out_features == 5
    assert trainer.algorithm.power == 3
    assert trainer.engine.strategy == "x"
    assert trainer.callbacks[0].__class__.__name__ == "Beep"
    assert trainer._loggers[0].project == "q"
    assert trainer.config.lr == 1e-4
    assert trainer.eval_data.norm_stats == trainer.data.norm_stats == {"x": {"mean": 1.0, "std": 2.0}}


def test_the_stored_configuration_is_handed_to_the_trainer(built: Callable[..., Any], folder: Path) -> None:
    trainer = built("run: {name: fine, root: kept}\n")
    described = dict(trainer.describe())
    assert described["training"]["lr"] == 1e-4
    assert described["run"] == {"name": "fine", "root": "kept"}
    assert trainer.run_request == Path("kept/fine")
    (folder / "again.yaml").write_text(json.dumps(described))
    assert load("again.yaml").stored() == described


def test_weights_made_at_once_follow_from_the_seed(built: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    first = built().policy.layer.weight
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)  # building leaves the user's generator alone
    assert torch.equal(built().policy.layer.weight, first)
    assert not torch.equal(built("", "training.seed=4").policy.layer.weight, first)


def test_losses_in_the_box_get_every_parameter_of_the_configuration(built: Callable[..., Any]) -> None:
    assert built("trainer: stepper\nloss: {type: l2_loss, params: {reduction: sum}}\n").algorithm.reduction == "sum"
    loss = "{type: sinkhorn_knopp, params: {p: 2, lam_state: 0.5, blur: 0.1, debias: false, scaling: 0.8}}"
    transport = built(f"trainer: stepper\nloss: {loss}\n").algorithm
    made = transport.transport
    assert (made.p, transport.lam_state, made.blur, made.debias, made.scaling) == (2, 0.5, 0.1, False, 0.8)
    with pytest.raises(ConfigError, match=r"loss.params.reductoin: unknown key; did you mean 'reduction'\?"):
        built("trainer: stepper\nloss: {type: l2_loss, params: {reductoin: sum}}\n")
    with pytest.raises(ConfigError, match="p must be 1 or 2, got 5"):
        built("trainer: stepper\nloss: {type: sinkhorn_knopp, params: {p: 5}}\n")


def test_dataset_factories_are_told_where_they_run(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.registry import DATASET_BUILDER_REGISTRY

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    built(run="somewhere")
    made: Any = DATASET_BUILDER_REGISTRY.get("made")
    assert made.seen == {"local_rank": 1, "dist_enabled": True, "save_dir": "somewhere"}


def test_parameters_that_a_factory_does_not_read_are_refused(built: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        built("", "data.params.cuont=9")
    assert str(caught.value).startswith(
        "override 'data.params.cuont=9': data.params.cuont: unknown key; 'made' does not"
    )
    assert built("", "data={type: unpacked, params: {count: 3, scale: 2}}").data is not None


def test_a_factory_must_return_a_dataset(built: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"x.yaml:3:1: data: build\(\) of 'made' must return \{'dataset': ...\}"):
        built("", "data.params.split=broken")


def test_a_value_that_a_component_refuses_is_told_with_its_place(built: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^x.yaml:2:1: policy: width is too large$"):
        built("", "policy.params.width=101")


def test_a_trainer_class_of_ones_own_gets_its_own_parameters(built: Callable[..., Any]) -> None:
    assert built("trainer: {type: own, params: {smoothing: 0.5}}\n").smoothing == 0.5
    with pytest.raises(ConfigError, match=r"trainer.params.smothing: unknown key; did you mean 'smoothing'\?"):
        built("trainer: {type: own, params: {smothing: 0.5}}\n")
    with pytest.raises(ConfigError, match=r"trainer.params.lr: unknown key"):
        built("trainer: {type: own, params: {lr: 0.5}}\n")


def test_a_trainer_with_its_own_step_is_wrapped(built: Callable[..., Any]) -> None:
    trainer = built("trainer: {type: stepper, params: {momentum: 0.5}}\n")
    assert isinstance(trainer, Trainer)
    assert hasattr(trainer, "train_step")
    with pytest.raises(ConfigError, match=r"trainer.params.models: is passed by the framework"):
        built("trainer: {type: stepper, params: {models: 3}}\n")


def test_a_loss_gets_its_parameters_whether_constructor_or_build_takes_them(built: Callable[..., Any]) -> None:
    trainer = built("trainer: stepper\nloss: {type: power, params: {power: 3, reduction: mean}}\n")
    assert (trainer.algorithm.power, trainer.algorithm.reduction) == (3.0, "mean")
    assert built("trainer: stepper\nloss: power\n").algorithm.reduction == "sum"


@pytest.mark.parametrize(
    "more, message",
    [
        ("loss: {type: power, params: {powr: 3}}", "loss.params.powr: unknown key; did you mean 'power'?"),
        ("loss: {type: power, params: {power: x}}", "loss.params.power: expected a number, got 'x'"),
        ("loss: pwoer", "loss.type: unknown loss 'pwoer'; did you mean 'power'?"),
        ("loss: power\nalgorithm: squares", "loss: stands beside an algorithm"),
        ("loss: power\ntrainer: own", "loss: is for a trainer made from (models, optimizers, loss, device)"),
        ("loss: power\ntrainer: null", "loss: is for a trainer made from (models, optimizers, loss, device)"),
    ],
)
def test_a_loss_that_is_wrong_or_for_nobody_is_refused(built: Callable[..., Any], more: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built("trainer: stepper\n" * ("trainer" not in more) + more + "\n")
    assert message in str(caught.value)


def test_statistics_losses_and_rates_of_factories_reach_the_loop(built: Callable[..., Any], folder: Path) -> None:
    settings = ["training={training_steps: 1, batch_size: 2, shuffle: false, optimizer: own_rate, seed: 3}"]
    settings += ["engine=torch", "loggers=[]", "callbacks=[]", "eval_data=null"]
    trainer = built("trainer: stepper\nloss: power\n", *settings, run="here")
    assert "lr" not in trainer.describe()["training"]  # left to the factory, also when the run is resumed
    trainer.fit()
    assert trainer.inner.seen.tolist() == [[-0.5, -0.5], [0.0, 0.0]]
    assert trainer.optimizer.param_groups[0]["lr"] == 3e-4
    again = build(load(trainer.run.dir / "config.yaml"), run="here")
    assert again.config.named_optimizers()["policy"].model_fields_set.isdisjoint({"lr", "weight_decay"})


def test_the_first_experiment_can_be_built(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = build(load(repository / "configs" / "digits.yaml"))
    assert len(trainer._loggers or ()) == 1
    assert not list(tmp_path.iterdir())  # nothing is written before fit
