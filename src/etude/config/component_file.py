"""Experiment files of models made of components: their own keys, put in the words of every other experiment.

    model: {component_config_paths, component_build_args, component_optims, find_unused_parameters}
    data: {datamodule, batch_size, num_workers, pin_memory, persistent_workers, prefetch_factor}
    train: {trainer, loss, project_name, save_dir, save_every, epoch, seed, load_dir, resume}

Beside these stand `plugins`, `seed` and sections of an ordinary experiment, which then say the last word.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from etude.builtins import TORCH_OPTIMIZERS
from etude.config.moving import FileTranslation, find_path, run_folder, text, truth
from etude.reading.interpolate import Interpolated
from etude.reading.origins import DEFAULT, Layer, Problem, lookup
from etude.reading.suggest import unknown
from etude.reading.yaml12 import Path

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACTING = ("horizon", "n_obs_steps", "image_obs_steps", "n_action_steps", "temporal_ensemble_coeff", "latency_steps")
DATASET_FACTORIES = ("lerobot_dataset_factory", "episodic_dataset_factory")
DATA_PATHS = ("root", "dataset_dir_l", "task_config_path")
"""Their parameters that are paths; those of other factories are their own affair."""
_OWN = ("schema_version", "plugins", "callbacks", "eval_data", "engine.type")


def is_component_file(values: Mapping[str, Any]) -> bool:
    """Tell by its shape whether a file is of this kind."""
    model, data, train = (values.get(key) for key in ("model", "data", "train"))
    return (
        (isinstance(model, dict) and any(str(key).startswith("component_") for key in model))
        or (isinstance(data, dict) and "datamodule" in data)
        or (isinstance(train, dict) and any(key in train for key in ("trainer", "epoch", "save_dir", "project_name")))
    )


def translate_component_file(layer: Layer, tree: Interpolated) -> tuple[Layer, Interpolated]:
    """Put a file of this kind in the words of an ordinary experiment; raise `ConfigError` with every mistake."""
    moving = _ComponentFile(layer, tree)
    moving.components()
    moving.data()
    moving.training()
    moving.own_sections()
    moving.loggers()
    moving.acting()
    return moving.finish()


def locate_components(layer: Layer, tree: Interpolated) -> None:
    """Find the model files and weights of an ordinary experiment beside the file that names them."""
    params = lookup(tree.values, ("policy", "params"))
    if not isinstance(params, dict) or lookup(tree.values, ("policy", "type")) != "components":
        return
    configs = params.get("configs")
    paths: list[Path] = [("policy", "params", "load_dir")]
    paths += [("policy", "params", "configs", name) for name in configs] if isinstance(configs, dict) else []
    for path in paths:
        written = lookup(tree.values, path)
        if isinstance(written, str):
            found, fault = find_path(written, layer, path)
            if path[-1] == "load_dir" and goes_on(os.path.dirname(layer.origin(path).file), _run_of(tree)):
                fault = ""  # what was loaded is in the run's checkpoints
            tree.problems.extend([Problem(path, fault)] if fault else [])
            same = lookup(tree.stored, path) == written  # else it comes from the environment, and stays as written
            lookup(tree.values, path[:-1])[path[-1]] = found
            if same:
                lookup(tree.stored, path[:-1])[path[-1]] = found


def goes_on(*directories: str) -> bool:
    """Tell whether one of these is a run that has a checkpoint, so that it takes its weights from there."""
    named = [glob.escape(folder) for folder in directories if folder and "\0" not in folder]
    return any(glob.glob(os.path.join(folder, "checkpoints", "step-*")) for folder in named)


def _run_of(tree: Interpolated) -> str:
    root, name = lookup(tree.values, ("run", "root")) or "runs", lookup(tree.values, ("run", "name"))
    is_named = isinstance(root, str) and isinstance(name, str)
    return os.path.join(os.path.expanduser(root), name) if is_named else ""


class _ComponentFile(FileTranslation):
    """One file under translation, section by section."""

    def components(self) -> None:
        """Put the models into the policy, and their optimizers under their names."""
        files = self.section("model.component_config_paths", "name a model file for each component")
        for name in files:
            where = f"model.component_config_paths.{name}"
            if not _NAME.fullmatch(str(name)):
                self.fault(where, "a component is called by letters, digits and _")
            elif not isinstance(files[name], str) or not files[name]:
                self.fault(where, "expected the path of a model file")
            else:
                self.move_path(where, f"policy.params.configs.{name}")
        flags = self._named("model.component_build_args", files, ("init", "freeze"))
        self.move("model.component_build_args", "policy.params.build")
        optimizers = self._named("model.component_optims", files, ("type", "params"))
        for name in optimizers:
            if isinstance(flags.get(name), dict) and flags[name].get("freeze") is True:
                self.fault(f"model.component_optims.{name}", f"{name} is frozen, and nothing is left to optimize")
            self._optimizer(f"model.component_optims.{name}", f"training.optimizers.{name}")
            self.put(f"training.optimizers.{name}.match", [name], f"model.component_optims.{name}")
        if files and not optimizers:
            self.fault("model.component_optims", "is missing: no component would be trained; name an optimizer")
        # Parameters that a step does not use never stop this loop, so that engines which do not ask meet both answers.
        if self.value("engine.type") == "torch":
            self.move("model.find_unused_parameters", "engine.params.find_unused_parameters")
        self.drop("model.find_unused_parameters", truth)
        self.put("policy.type", "components", "model")

    def data(self) -> None:
        """Put the dataset factory and what is asked of the loader in their places."""
        self.section("data.datamodule", "name what makes the dataset: {type, params}", short=True)
        self.move("data.datamodule", "data")
        self._locate_data()
        for key in ("batch_size", "num_workers", "pin_memory", "prefetch_factor"):
            self.move(f"data.{key}", f"training.{key}")
        workers = self.value("training.num_workers", self.value("data.num_workers", 0))

        def persist(value: Any) -> bool:
            if truth(value) and workers == 0:
                raise ValueError("needs num_workers of at least 1: there are no workers to keep")
            if not value and workers:
                raise ValueError("workers live as long as the run and cannot be made anew each epoch; write true")
            return bool(value)

        self.drop("data.persistent_workers", persist)
        if workers == 0 and self.value("data.prefetch_factor") is not None:
            self.fault("data.prefetch_factor", "needs num_workers of at least 1: nothing is made ahead without workers")

    def _locate_data(self) -> None:
        """Find data that lies beside the file; what is not there may lie in the working directory, or come later."""
        if lookup(self.value("data.datamodule"), ("type",)) not in DATASET_FACTORIES:
            return
        for key in DATA_PATHS:
            where = f"data.datamodule.params.{key}"
            written = self.value(where)
            paths = [written] if isinstance(written, str) else written
            if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
                continue
            found = [find_path(path, self.layer, tuple(where.split("."))) for path in paths]
            if any(not fault for _, fault in found) and not self.comes_from_environment(where):
                located = [path for path, _ in found]
                self.put(f"data.params.{key}", located[0] if isinstance(written, str) else located, where)

    def training(self) -> None:
        """Put the trainer, its loss, length, cadence, seeds and places where they belong."""
        self.section("train.trainer", "name the trainer: {type}", short=True)
        self.move("train.trainer", "trainer")
        self.move("train.loss", "loss")
        self.move("train.epoch", "training.duration", _epochs)
        self.move("train.save_every", "training.save_every", _epochs)
        self.move("seed", "policy.params.seed")
        self.move("seed", "training.seed")
        self.move("train.seed", "training.seed")
        folder = self.value("train.save_dir")
        is_later = isinstance(folder, str) and goes_on(os.path.expanduser(folder))
        self.move_path("train.load_dir", "policy.params.load_dir", wanted=not is_later)
        self.move("train.save_dir", "run.root", lambda path: os.path.dirname(run_folder(path)))
        self.move("train.save_dir", "run.name", lambda path: os.path.basename(run_folder(path)))
        self.move("train.resume", "run.resume", self._resume)
        self.drop("train.project_name", text)
        for key, value in {"precision": "auto", "keep_last": None, "log_every": 1}.items():
            self.put(f"training.{key}", value)

    def own_sections(self) -> None:
        """Let sections of an ordinary experiment say the last word."""
        for key in _OWN:
            self.move(key, key)
        self.move_own(("training", "run", "engine.params"))

    def loggers(self) -> None:
        """Call the W&B run after the file: its project is the task, its name the project."""
        named = {"project": lookup(self.value("data.datamodule"), ("params", "task_name"))}
        named["name"] = self.value("train.project_name")
        named = {key: word for key, word in named.items() if isinstance(word, str) and word}
        self.move("loggers", "loggers")
        given = self.value("loggers")
        if self.origin("loggers") == DEFAULT and named and importlib.util.find_spec("wandb") is not None:
            given = [*given, {"type": "wandb"}]
        if isinstance(given, list):
            for index, logger in enumerate(given):
                logger = {"type": logger} if isinstance(logger, str) else logger
                if isinstance(logger, dict) and logger.get("type") == "wandb":
                    params: Any = logger.get("params")
                    params = {**named, **params} if isinstance(params, dict) else params or named
                    given = [*given[:index], {**logger, "params": params}, *given[index + 1 :]]
            self.put("loggers", given, "loggers")

    def acting(self) -> None:
        """Let the trainer act, in chunks as long as those of the data."""
        trainer = self.value("train.trainer")
        kind = trainer.get("type") if isinstance(trainer, dict) else trainer
        if isinstance(kind, str):
            self.put("policy.params.actor.type", kind, "train.trainer")
        for key in ("action_horizon", "chunk_size"):
            horizon = lookup(self.value("data.datamodule"), ("params", key))
            if isinstance(horizon, int) and not isinstance(horizon, bool):
                self.put("policy.params.horizon", horizon, f"data.datamodule.params.{key}")
        params = lookup(self.value("data.datamodule"), ("params",))
        params = params if isinstance(params, dict) else {}
        for keys in (("obs_proprio_history", "obs_images_history"), ("robot_obs_size", "img_obs_size")):
            lengths = [params.get(key, 1) for key in keys]
            if not any(key in params for key in keys) or lengths == [1, 1]:
                continue
            for key, place, length in zip(keys, ("n_obs_steps", "image_obs_steps"), lengths, strict=True):
                self.put(f"policy.params.{place}", length, f"data.datamodule.params.{key}")
        for key in _ACTING:
            self.move(f"policy.params.{key}", f"policy.params.{key}")
        self.move("policy.params.actor.type", "policy.params.actor.type")
        self.move("policy.params.actor.params", "policy.params.actor.params")

    # -- parts ---------------------------------------------------------------------------------------------------

    def _named(self, where: str, components: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
        """Return a section by component; refuse names that no component has, and keys that none takes."""
        found = {}
        for name, options in self.section(where).items():
            if components and name not in components:
                self.fault(f"{where}.{name}", unknown(str(name), list(components)))
                continue
            found[name] = options
            if options is not None and not isinstance(options, dict):
                self.fault(f"{where}.{name}", f"expected a mapping of {' and '.join(known)}")
            for key in options if isinstance(options, dict) else ():
                if key not in known:
                    self.fault(f"{where}.{name}.{key}", unknown(str(key), list(known)))
        return found

    def _optimizer(self, theirs: str, ours: str) -> None:
        """Move one optimizer; torch's own are given their rate and decay beside the other parameters."""
        self.move(f"{theirs}.type", f"{ours}.type")
        params = self.value(f"{theirs}.params")
        kind = self.value(f"{theirs}.type")
        if kind is None:
            self.fault(theirs, "type is missing; name an optimizer, such as adamw")
        if not isinstance(kind, str) or kind not in TORCH_OPTIMIZERS or not isinstance(params, dict):
            self.move(f"{theirs}.params", f"{ours}.params")
            return
        for key in params:
            place = ours if key in ("lr", "weight_decay") else f"{ours}.params"
            self.move(f"{theirs}.params.{key}", f"{place}.{key}")

    def _resume(self, value: Any) -> str:
        if isinstance(value, bool):
            return "auto" if value else "never"
        if value in ("auto", "never"):
            return str(value)
        found, fault = find_path(text(value), self.layer, ("train", "resume"))
        if fault:
            raise ValueError(fault)
        return found


def _epochs(value: Any) -> str:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected a whole number of epochs, at least 1, got {value!r}")
    return f"{value} epochs"
