"""What was trained is loaded again: policies of the user's own, modules that hold a policy, and what callbacks see."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import yaml

import etude
from etude.engines.lightning import load_checkpoint, load_policy
from etude.errors import CheckpointError
from etude.policies.base import PolicyModule
from etude.policies.mlp import MLP
from tests.unit.engines.lightning.parts import MovesModule, Net, loader, make, same, saved, weights


class MyMLP(MLP):
    """A user's policy on top of ours, registered nowhere."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(hidden=[width])


class Other(MLP):
    """Another class of the user's."""


class Holder(lightning.LightningModule):
    """A module that holds a policy without shapes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.policy = MLP(hidden=[width])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.policy(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_a_policy_of_the_users_own_is_loaded(tmp_path: Path) -> None:
    policy = MyMLP(width=6)
    make(tmp_path, {"every_n_epochs": 1}, max_epochs=1).fit(policy, MovesModule())
    (checkpoint,) = saved(tmp_path)
    found = [load_policy(tmp_path / "saved", cls=MyMLP), MyMLP.from_pretrained(checkpoint)]
    found.append(etude.load_policy(checkpoint, cls=MyMLP))
    for loaded in found:
        assert type(loaded) is MyMLP
        assert same(weights(policy), weights(loaded))
    for attempt in (load_policy, PolicyModule.from_pretrained, Other.from_pretrained):
        with pytest.raises(CheckpointError, match=r"load_policy\(path, cls=MyMLP\) or MyMLP.from_pretrained\(path\)"):
            attempt(checkpoint)


def test_one_function_loads_a_policy_wherever_it_was_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_policy is etude.load_policy
    policy = MLP(hidden=[6])
    trainer = make(tmp_path, max_epochs=1, logger=None, enable_checkpointing=True)
    trainer.fit(policy, MovesModule())
    version = tmp_path / "lightning_logs" / "version_0"
    trainer.save_checkpoint(tmp_path / "without-a-suffix")
    trainer.save_checkpoint(version / "checkpoints" / "last.ckpt")
    for source in (version, version / "checkpoints", tmp_path / "without-a-suffix"):
        assert same(weights(policy), weights(load_policy(source)))
    (version / "checkpoints" / "last.ckpt" / "model.safetensors").write_bytes(b"")
    assert same(weights(policy), weights(load_policy(version / "checkpoints" / "last.ckpt")))
    assert "last.ckpt: model.safetensors" in caplog.text and "instead" in caplog.text
    with pytest.raises(CheckpointError, match="holds several runs; name one of them"):
        load_policy(tmp_path / "lightning_logs")


SCRIPT = """
import sys
from etude.policies.mlp import MLP

class Scripted(MLP):
    def __init__(self, width=8):
        super().__init__(hidden=[width])

if __name__ == "__main__":
    from tests.unit.engines.lightning.parts import Moves
    policy = Scripted()
    policy.build(Moves().spec)
    policy.save_pretrained(sys.argv[1])
"""


def test_a_policy_of_a_script_is_loaded_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripted.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["scripted.py", str(tmp_path / "saved")])
    runpy.run_path(str(tmp_path / "scripted.py"), run_name="__main__")
    assert "__main__:Scripted" in (tmp_path / "saved" / "config.json").read_text()
    monkeypatch.syspath_prepend(str(tmp_path))
    from scripted import Scripted  # type: ignore[import-not-found]

    assert type(Scripted.from_pretrained(tmp_path / "saved")) is Scripted
    assert type(etude.load_policy(tmp_path / "saved", cls=Scripted)) is Scripted


def test_a_module_that_holds_a_lazy_policy_is_loaded(tmp_path: Path) -> None:
    module = Holder(width=6)
    make(tmp_path, {"every_n_epochs": 1}, max_epochs=1).fit(module, MovesModule().train_dataloader())
    (checkpoint,) = saved(tmp_path)
    for path in (checkpoint, str(checkpoint), tmp_path / "saved"):
        loaded = Holder.load_from_checkpoint(path)
        assert same(weights(module), weights(loaded))
    again = Holder(width=6)
    again.load_state_dict(load_checkpoint(checkpoint)["state_dict"])
    assert same(weights(module), weights(again))
    seen = {"observation.state": torch.ones(1, 3)}
    assert torch.equal(again.eval().policy.select_action(seen), module.eval().policy.select_action(seen))
    with pytest.raises(CheckpointError, match=r"load it with YourModule\.load_from_checkpoint"):
        load_policy(checkpoint)


def test_single_files_of_lightnings_own_are_loaded_as_before(tmp_path: Path) -> None:
    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

    module = Plain()
    content = {"state_dict": module.state_dict(), "pytorch-lightning_version": lightning.__version__}
    torch.save({**content, "epoch": 0, "global_step": 0, "loops": None}, tmp_path / "plain.ckpt")
    assert same(weights(module), weights(Plain.load_from_checkpoint(tmp_path / "plain.ckpt")))


# -- what callbacks and files see ------------------------------------------------------------------------------------


def test_callbacks_find_the_policys_own_methods(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Curious(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen["horizon"] = pl_module.horizon
            seen["action"] = pl_module.select_action({"observation.state": torch.ones(1, 3)})
            pl_module.note = "of the module"
            pl_module.temperature = 0.5

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.save_pretrained(tmp_path / "policy")
            with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
                _ = pl_module.nonsense

    policy = MLP(hidden=[8], chunk_size=2)
    policy.temperature = 1.0  # type: ignore[assignment]
    make(tmp_path, max_epochs=1, callbacks=[Curious()]).fit(policy, MovesModule())
    assert seen["horizon"] == 2 and seen["action"].shape == (1, 2)
    assert policy.temperature == 0.5 and not hasattr(policy, "note")
    assert same(weights(MLP.from_pretrained(tmp_path / "policy")), weights(policy))


def test_hyperparameters_record_nothing_that_is_not_done(tmp_path: Path) -> None:
    make(tmp_path, max_epochs=1, logger=None).fit(Net(), loader())
    (file,) = tmp_path.rglob("hparams.yaml")
    recorded = yaml.safe_load(file.read_text())
    assert recorded["optimizer"]["lr"] == 1e-2
    assert not {"clip_norm", "match"} & recorded["optimizer"].keys()
