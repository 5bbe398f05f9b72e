"""Experiment files of models made of components: what becomes of each key, and what is said of mistakes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.cli.train import train_config
from etude.config.build import build
from etude.config.load import Loaded, load
from etude.errors import ConfigError, DataError
from etude.policies import ComponentPolicy
from tests.mutations import check_mutations

EXPERIMENT = """\
plugins:                        # list of importable modules that register components
  - "components/dataloader.py"
  - "components/trainer.py"

seed: 123                       # base RNG seed (same on all ranks for weight init)

model:
  find_unused_parameters: false # DDP flag for conditional model paths (e.g. MoE)
  component_config_paths:       # maps component name to a model's YAML
    head_backbone: "experiment_models/exp1/head_backbone.yaml"
    info_embedder: "experiment_models/exp1/info_embedder.yaml"
    action_decoder: "experiment_models/exp1/action_decoder.yaml"
  component_build_args:         # per-component flags
    head_backbone: { init: false, freeze: false }
    info_embedder: { init: true, freeze: false }
  component_optims:             # per-component optimizer config
    head_backbone:
      type: "peak_rate"
      params: { peak_lr: 1.0e-2, total_steps: 200000, warmup_steps: 2000 }
    action_decoder:
      type: "adamw"
      params: { lr: 1e-2, betas: [0.9, 0.95] }

data:
  datamodule:
    type: "chunks"              # registry key
    params: { repo_id: "demo", action_horizon: 2, task_name: "reach" }
  batch_size: 4
  num_workers: 1
  pin_memory: true
  persistent_workers: true
  prefetch_factor: 2

train:
  trainer: { type: "chunk_trainer" }
  loss: { type: "distance", params: { p: 1 } }
  project_name: "my_experiment"
  save_dir: "~/checkpoints"
  save_every: 3                  # save every N epochs
  epoch: 6
  seed: 0
"""

DATA = """\
import torch
from torch.utils.data import Dataset

from etude.registry import DATASET_BUILDER_REGISTRY


class Chunks(Dataset):
    def __init__(self, horizon):
        generator = torch.Generator().manual_seed(0)
        self.states = 3 * torch.randn(8, 5, generator=generator) + 1
        self.actions = torch.randn(8, horizon, 3, generator=generator)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"observation.state": self.states[index], "action": self.actions[index]}


@DATASET_BUILDER_REGISTRY.register("chunks")
class ChunksFactory:
    def build(self, opt_params, params) -> dict:
        assert set(opt_params) == {"local_rank", "dist_enabled", "save_dir"}
        data = Chunks(params["action_horizon"]) if params["repo_id"] else None
        state = {"mean": data.states.mean(0), "std": data.states.std(0)}
        return {"dataset": data, "norm_stats": {"observation.state": state}}
"""

TRAINER = """\
import torch
from torch import nn

from etude.registry import LOSS_BUILDER_REGISTRY, OPTIMIZER_BUILDER_REGISTRY, TRAINER_REGISTRY


@TRAINER_REGISTRY.register("chunk_trainer")
class ChunkTrainer:
    def __init__(self, models, optimizers, loss, device):
        self.models, self.optimizers, self.loss = models, optimizers, loss
        self.average = torch.zeros(())

    def train_step(self, data, **kwargs) -> dict:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        chunk = data["observation.state"]
        for name in ("head_backbone", "info_embedder", "action_decoder"):
            chunk = self.models[name](chunk)
        total = self.loss(chunk.reshape(data["action"].shape) + torch.randn(1), data["action"])
        total.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.average = 0.9 * self.average + 0.1 * total.detach()
        return {"total": total, "average": self.average, "epoch_now": kwargs["epoch"], "of": kwargs["total_epochs"]}


@LOSS_BUILDER_REGISTRY.register("distance")
class DistanceFactory:
    def __init__(self, p: int = 2):
        self.p = p

    def build(self) -> nn.Module:
        return nn.L1Loss() if self.p == 1 else nn.MSELoss()


@OPTIMIZER_BUILDER_REGISTRY.register("peak_rate")
class PeakRateFactory:
    def __init__(self, peak_lr: float, total_steps: int = 1, warmup_steps: int = 0):
        self.rate = peak_lr

    def build(self, params) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.rate)
"""

MODEL = "schema_version: 1\nmodel: {{sequential: {{inputs: [x], layers: [{{_type_: Linear, _args_: [{}, {}]}}]}}}}\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, and beside it a project with plugins, model files and the experiment."""
    home, folder = tmp_path / "home", tmp_path / "project"
    monkeypatch.setenv("HOME", str(home))
    for path in (home, folder / "components", folder / "experiment_models" / "exp1"):
        path.mkdir(parents=True)
    (folder / "components" / "dataloader.py").write_text(DATA)
    (folder / "components" / "trainer.py").write_text(TRAINER)
    for name, sizes in {"head_backbone": (5, 4), "info_embedder": (4, 4), "action_decoder": (4, 6)}.items():
        (folder / "experiment_models" / "exp1" / f"{name}.yaml").write_text(MODEL.format(*sizes))
    (folder / "x.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(folder)
    return folder


ALONE = ("data.num_workers=0", "data.prefetch_factor=null", "data.persistent_workers=null", "loggers=[]")


def read(*overrides: str, file: str = "x.yaml") -> Loaded:
    return load(file, [*ALONE, *overrides])


def fit(loaded: Loaded, **options: Any) -> Any:
    trainer = build(loaded, **options)
    trainer.show_progress = False
    trainer.fit()
    return trainer


def refusal(*overrides: str, text: str | None = None) -> str:
    if text is not None:
        Path("x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("x.yaml", overrides)
    return str(caught.value)


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- the file as it stands -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_file_trains_as_it_stands(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "etude"):
        trainer = fit(load("x.yaml", ["loggers=[]"]))
    run = tmp_path / "home" / "checkpoints"
    assert trainer.run.dir == run
    assert trainer.progress.epochs == 6
    assert sorted(path.name for path in run.glob("epoch_*")) == ["epoch_3", "epoch_6"]
    assert {path.name for path in (run / "epoch_6").iterdir()} >= {
        "head_backbone.safetensors", "info_embedder.safetensors", "action_decoder.safetensors",
        "head_backbone_opt.safetensors", "action_decoder_opt.safetensors",
    }  # fmt: skip
    assert set(json.loads((run / "dataset_stats.json").read_text())) == {"observation.state"}
    assert list(trainer.optimizers) == ["head_backbone", "action_decoder"]
    assert trainer.optimizers["head_backbone"].param_groups[0]["lr"] == 0.01
    assert trainer.optimizers["action_decoder"].param_groups[0]["betas"] == (0.9, 0.95)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 12  # every iteration
    assert rows[-1]["train/loss"] == rows[-1]["train/total"]
    assert rows[-1]["train/epoch_now"] == 5
    assert rows[-1]["train/of"] == 6
    assert [text for text in caplog.messages if "info_embedder" in text] == [
        "info_embedder has neither an optimizer nor freeze: it is not updated"
    ]
    assert not any(path.name.startswith("~") for path in Path().iterdir())


def test_the_option_and_the_argument_read_the_same_file() -> None:
    train_config(Path("x.yaml"), [*ALONE, "train.epoch=1"], "auto")
    assert (Path.home() / "checkpoints" / "epoch_1").is_dir()


def test_a_run_goes_on_exactly_from_its_stored_configuration(tmp_path: Path) -> None:
    whole = fit(read())
    first = fit(read("train.save_dir=parts", "train.epoch=3"))
    stored = first.run.dir / "config.yaml"
    assert "component_config_paths" not in stored.read_text()
    rest = fit(load(stored, ["training.duration=6 epochs"]), run=first.run.dir)
    assert same(weights(whole.policy), weights(rest.policy))
    assert torch.equal(whole.inner.average, rest.inner.average)


def test_a_run_goes_on_without_its_model_files(project: Path) -> None:
    first = fit(read("train.epoch=3"))
    shutil.rmtree(project / "experiment_models")
    rest = fit(load(first.run.dir / "config.yaml", ["training.duration=4 epochs"]), run=first.run.dir)
    assert rest.progress.epochs == 4


def test_a_model_file_that_has_changed_is_named(project: Path, caplog: Any) -> None:
    fit(read("train.epoch=1"))
    file = project / "experiment_models" / "exp1" / "info_embedder.yaml"
    file.write_text(file.read_text().replace("]}]", "]}, {_type_: Dropout}]"))
    with caplog.at_level(logging.INFO, "etude"):
        fit(read("train.epoch=2"))
    assert "changed since the last session: policy.params.configs.info_embedder.model.sequential" in caplog.text


def test_what_the_file_says_reaches_its_place() -> None:
    loaded = load("x.yaml")
    training, run = loaded.config.training, loaded.config.run
    assert (training.num_workers, training.prefetch_factor, training.pin_memory) == (1, 2, True)
    assert (training.batch_size, training.seed, training.keep_last, training.precision) == (4, 0, None, "auto")
    assert (str(training.duration), str(training.save_every)) == ("6 epochs", "3 epochs")
    assert (Path(run.root), run.name) == (Path.home(), "checkpoints")
    assert loaded.config.policy.params["horizon"] == 2
    assert loaded.config.engine.params["find_unused_parameters"] is False
    assert loaded.origin("training.optimizers.head_backbone.params.peak_lr").line == 19
    assert loaded.origin("training.batch_size").line == 28


@pytest.mark.parametrize(
    "histories, seen",
    [
        ("obs_proprio_history: 3, obs_images_history: 3", (3, 3)),
        ("obs_proprio_history: 3, obs_images_history: 1", (3, 1)),
        ("robot_obs_size: 2", (2, 1)),
        ("img_obs_size: 1", (None, None)),
    ],
)
def test_the_policy_sees_as_many_frames_as_it_is_trained_on(histories: str, seen: tuple[int | None, ...]) -> None:
    loaded = read(f"data.datamodule.params={{repo_id: demo, action_horizon: 2, {histories}}}")
    params = loaded.config.policy.params
    assert (params.get("n_obs_steps"), params.get("image_obs_steps")) == seen


def test_sections_of_an_ordinary_experiment_say_the_last_word() -> None:
    loaded = read(
        "training.precision=bf16", "training.keep_last=2", "training.duration=7 steps", "run.name=here",
        "policy.params.horizon=3", "training.optimizers.head_backbone.clip_norm=null", "engine.type=lightning",
    )  # fmt: skip
    training = loaded.config.training
    assert (training.precision, training.keep_last, str(training.duration)) == ("bf16", 2, "7 steps")
    assert loaded.config.run.name == "here"
    assert loaded.config.policy.params["horizon"] == 3
    assert loaded.config.engine.type == "lightning"
    assert training.optimizers["head_backbone"].params["peak_lr"] == 0.01


def test_a_file_may_build_on_others(project: Path) -> None:
    (project / "more").mkdir()
    (project / "more" / "y.yaml").write_text(
        "defaults:\n  - base: ../x.yaml\ndata: {batch_size: 2}\ntrain: {epoch: 1}\n"
    )
    loaded = load("more/y.yaml", ALONE)
    assert (loaded.config.training.batch_size, str(loaded.config.training.duration)) == (2, "1 epochs")


# -- seeds, weights, resuming ----------------------------------------------------------------------------------------


def test_the_first_seed_decides_the_weights_and_the_second_everything_else() -> None:
    assert read("train.seed=null").config.training.seed == 123
    assert read("seed=null").config.training.seed == 0
    same_weights = [weights(build(read(f"train.seed={seed}")).policy) for seed in (0, 1)]
    assert same(*same_weights)
    assert not same(same_weights[0], weights(build(read("seed=5")).policy))
    unsaid = [weights(build(read("seed=null", f"train.seed={seed}")).policy) for seed in (0, 1)]
    assert not same(*unsaid)


def test_weights_are_loaded_by_component(project: Path, caplog: Any) -> None:
    trained = fit(read("train.epoch=3"))
    policy = build(read("train.load_dir=~/checkpoints/epoch_3", "train.save_dir=other")).policy
    assert same(weights(policy), weights(trained.policy))
    folder = project / "weights"
    folder.mkdir()
    assert isinstance(policy, ComponentPolicy)
    torch.save(policy["head_backbone"].state_dict(), folder / "head_backbone.pt")
    (folder / "dataset_stats.pkl").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "etude"):
        build(read("train.load_dir=weights"))
    assert "no weights of info_embedder, action_decoder" in caplog.text
    assert "json.dump(stats, open" in caplog.text


def test_a_pickle_of_statistics_is_answered_with_how_to_turn_it_into_json(tmp_path: Path) -> None:
    from etude.data.statistics import NormStats

    with pytest.raises(DataError, match=r"(?s)is not read.*pickle\.load.*json\.dump"):
        NormStats.from_any(tmp_path / "dataset_stats.pkl")


def test_resume_says_what_to_begin_with() -> None:
    assert read().config.run.resume == "auto"
    assert read("train.resume=true").config.run.resume == "auto"
    assert read("train.resume=false").config.run.resume == "never"
    fit(read("train.epoch=3"))
    checkpoint = Path.home() / "checkpoints" / "epoch_3"
    loaded = read(f"train.resume={checkpoint}")
    assert loaded.config.run.resume == str(checkpoint)
    train_config(Path("x.yaml"), [*ALONE, f"train.resume={checkpoint}", "train.save_dir=more"], "auto")
    rows = Path("more/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["step"] == 7
    assert "there is no" in refusal("train.resume=nowhere")


# -- loggers ---------------------------------------------------------------------------------------------------------


def test_the_wandb_run_is_called_after_the_file() -> None:
    expected = {"project": "reach", "name": "my_experiment"}
    for overrides in ([], ["loggers=[wandb]"], ["loggers=[{type: wandb}]"]):
        loggers = load("x.yaml", overrides).config.loggers
        assert next(logger.params for logger in loggers if logger.type == "wandb") == expected
    chosen = load("x.yaml", ["loggers=[{type: wandb, params: {project: mine}}]"]).config.loggers[0]
    assert chosen.params == {"project": "mine", "name": "my_experiment"}
    unnamed = load("x.yaml", ["train.project_name=null", "data.datamodule.params.task_name=null"]).config.loggers
    assert [logger.type for logger in unnamed] == ["tensorboard"]


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, after, words",
    [
        ("epoch: 6", "epcoh: 6", "x.yaml:40:3: train.epcoh: unknown key; did you mean 'epoch'?"),
        ("epoch: 6", "epoch: 0", "x.yaml:40:3: train.epoch: expected a whole number of epochs, at least 1, got 0"),
        ("epoch: 6", "epoch: many", "train.epoch: expected a whole number of epochs"),
        ("save_every: 3", "save_every: true", "train.save_every: expected a whole number of epochs"),
        ("init: true", "innit: true", "x.yaml:15:22: model.component_build_args.info_embedder.innit: unknown key"),
        ("init: true", "init: 3", "model.component_build_args.info_embedder.init: expected true or false"),
        ("init: false, freeze: false", "freeze: true", "component_optims.head_backbone: head_backbone is frozen"),
        ("    info_embedder: {", "    info_embeder: {", "component_build_args.info_embeder: unknown key; did you mean"),
        ('type: "adamw"', 'type: "adamv"', "x.yaml:21:7: model.component_optims.action_decoder.type: unknown"),
        ("lr: 1e-2", "rl: 1e-2", "x.yaml:22:17: model.component_optims.action_decoder.params.rl: unknown key"),
        ("lr: 1e-2", "lr: fast", "model.component_optims.action_decoder.params.lr: expected a number"),
        ("peak_lr: 1.0e-2, ", "", "model.component_optims.head_backbone.params.peak_lr: required, and missing"),
        ('type: "chunks"', 'type: "chunk"', "x.yaml:26:5: data.datamodule.type: unknown data 'chunk'"),
        ("batch_size: 4", "batch_size: none", "x.yaml:28:3: data.batch_size: expected a whole number"),
        ("pin_memory: true", "pin_memory: 7", "data.pin_memory: expected true or false"),
        ("num_workers: 1", "num_workers: 0", "x.yaml:31:3: data.persistent_workers: needs num_workers of at least 1"),
        ("num_workers: 1", "num_workers: 0", "x.yaml:32:3: data.prefetch_factor: needs num_workers of at least 1"),
        ("persistent_workers: true", "persistent_workers: false", "workers live as long as the run"),
        ('{ type: "chunk_trainer" }', "3", "x.yaml:35:3: train.trainer: expected a mapping"),
        ('type: "distance"', 'type: "distanse"', "x.yaml:36:11: train.loss.type: unknown loss 'distanse'"),
        ("p: 1", "q: 1", "x.yaml:36:39: train.loss.params.q: unknown key"),
        ('save_dir: "~/checkpoints"', "save_dir: 3", "train.save_dir: expected text, got 3"),
        ("find_unused_parameters: false", "find_unused_parameters: 3", "model.find_unused_parameters: expected true"),
        ("seed: 123", "seed: abc", "x.yaml:5:1: seed: expected a whole number"),
        ("seed: 123", "sead: 123", "x.yaml:5:1: sead: unknown key; did you mean 'seed'?"),
        ("exp1/head_backbone.yaml", "exp2/head_backbone.yaml", "component_config_paths.head_backbone: there is no "),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_the_files_own_line_and_key(before: str, after: str, words: str) -> None:
    assert before in EXPERIMENT
    message = refusal(text=EXPERIMENT.replace(before, after, 1))
    assert words in message
    assert "policy.params" not in message
    assert "training." not in message


@pytest.mark.parametrize(
    "key, words",
    [
        ("model.component_config_paths", "is missing; name a model file for each component"),
        ("model.component_optims", "is missing: no component would be trained"),
        ("data.datamodule", "is missing; name what makes the dataset"),
        ("train.trainer", "is missing; name the trainer"),
    ],
)
def test_what_is_missing_is_named(key: str, words: str) -> None:
    assert f"{key}: {words}" in refusal(f"{key}=null")


def test_a_path_is_looked_for_beside_its_file_and_in_the_working_directory(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    policy = load(project / "x.yaml", ALONE).config.policy
    assert policy.params["configs"]["head_backbone"] == str(project / "experiment_models/exp1/head_backbone.yaml")
    (project / "x.yaml").write_text(EXPERIMENT.replace("exp1/head_backbone", "exp2/head_backbone"))
    with pytest.raises(ConfigError) as caught:
        load(project / "x.yaml", ALONE)
    tried = [folder / "experiment_models/exp2/head_backbone.yaml" for folder in (project, elsewhere)]
    assert f"there is neither {tried[0]} nor {tried[1]}" in str(caught.value)
    tried[1].parent.mkdir(parents=True)
    tried[1].write_text(MODEL.format(5, 4))
    assert load(project / "x.yaml", ALONE).config.policy.params["configs"]["head_backbone"] == str(tried[1])


def test_an_ordinary_experiment_finds_its_components_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "y.yaml").write_text(
        "plugins: [components/dataloader.py, components/trainer.py]\n"
        "policy: {type: components, params: {configs: {head: experiment_models/exp1/head_backbone.yaml}}}\n"
        "data: {type: chunks, params: {action_horizon: 2}}\ntrainer: chunk_trainer\n"
    )
    monkeypatch.chdir(project.parent)
    found = load("project/y.yaml").config.policy.params["configs"]["head"]
    assert found == str(project / "experiment_models/exp1/head_backbone.yaml")
    with pytest.raises(ConfigError, match=r"override .*: there is no .*/nope.yaml"):
        load("project/y.yaml", ["policy.params.configs.head=nope.yaml"])


def test_a_misspelt_section_of_an_ordinary_experiment_is_still_that(project: Path) -> None:
    (project / "y.yaml").write_text("policy: mlp\ndata: digits\ntrain: {lr: 1e-3}\n")
    with pytest.raises(ConfigError, match="train: unknown key; did you mean 'trainer'"):
        load("y.yaml")


# -- many mistakes ---------------------------------------------------------------------------------------------------


def check(count: int, seed: int) -> None:
    def own(tree: Any) -> list[Any]:
        return [tree["data"]["datamodule"]["params"]]  # whose keys are the factory's own affair

    def read_changed(text: str) -> None:
        Path("x.yaml").write_text(text)
        load("x.yaml")

    check_mutations(count, seed, EXPERIMENT, read_changed, "x.yaml", own)


def test_changed_files_are_read_or_refused_in_sentences() -> None:
    check(100, 0)


@pytest.mark.nightly
def test_many_changed_files_are_read_or_refused_in_sentences() -> None:
    check(2000, 1)


# -- what is asked of the loader and of the machine ------------------------------------------------------------------


def test_what_is_asked_of_the_loader_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.data import MapData
    from etude.types.protocols import Place

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # where memory is pinned at all
    data = MapData([{"x": torch.zeros(1)}] * 4)
    for asked, (ahead, pinned) in {(None, None): (2, True), (5, False): (5, False), (1, True): (1, True)}.items():
        place = Place(num_workers=1, prefetch_factor=asked[0], pin_memory=asked[1])
        loader = data.start_workers(place, 1)._loader
        assert (loader.prefetch_factor, loader.pin_memory, loader.persistent_workers) == (ahead, pinned, True)


def test_what_cannot_be_made_ahead_is_an_error() -> None:
    from etude import TrainingConfiguration
    from etude.data import StreamData
    from etude.types.protocols import Place

    with pytest.raises(DataError, match="leave out prefetch_factor"):
        StreamData(iter([])).open(Place(num_workers=1, prefetch_factor=2))
    with pytest.raises(DataError, match="leave out pin_memory"):
        StreamData(iter([])).open(Place(pin_memory=True))
    with pytest.raises(ConfigError, match="prefetch_factor: needs num_workers of at least 1"):
        TrainingConfiguration(prefetch_factor=2)


def test_arithmetic_is_chosen_by_the_device() -> None:
    from etude.loop.precision import Precision

    assert Precision("auto", torch.device("cuda")).name == "bf16"
    assert Precision("auto", torch.device("cpu")).name == "float32"


def test_components_are_exported_as_files(tmp_path: Path) -> None:
    from etude.cli.export import export_source

    trained = fit(read("train.epoch=1"))
    export_source(str(trained.run.dir), tmp_path / "out", kind="components", which="auto")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    weights_of = [f"{name}.safetensors" for name in ("action_decoder", "head_backbone", "info_embedder")]
    assert names == sorted([*weights_of, "dataset_stats.json", "README.md"])
    policy = build(read(f"train.load_dir={tmp_path / 'out'}")).policy
    assert same(weights(policy), weights(trained.policy))


def test_a_dataset_without_statistics_trains(project: Path) -> None:
    text = DATA.replace(', "norm_stats": {"observation.state": state}', "")
    (project / "components" / "dataloader.py").write_text(text)
    fit(read("train.epoch=1"))
    assert not (Path.home() / "checkpoints" / "dataset_stats.json").exists()
