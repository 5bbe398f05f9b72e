"""Recipes: a trainer of one's own, its service, its data and its rollouts, put in the words of every other experiment.

    trainer: {custom_trainer_module_path, custom_trainer_class_name, total_train_steps, train_service, algorithm}
    data: {data_files, prompt_key, batch_size, rollout_repeat_n}
    rollout_worker: {reward_module_path, agent_cls, temperature}
    service: {inference_service: {model, max_tokens}}

`recipe_keys` holds what is carried over as it is and what is refused. `policy.params`, `rollouts`, `training`, `run`,
`engine`, `loggers`, `callbacks` and `plugins` of an ordinary experiment say the last word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from etude.config.moving import find_path, run_folder, text, truth
from etude.config.recipe_keys import AT_TOP, IN_TRAINER, REFUSED
from etude.config.recipe_rollouts import RolloutKeys
from etude.config.recipe_values import every, loggers, one_of, only, refusing, run_name
from etude.reading.interpolate import Interpolated
from etude.reading.origins import DEFAULT, Layer


def is_recipe(values: Mapping[str, Any]) -> bool:
    """Tell by its shape whether a file is a recipe."""
    trainer = values.get("trainer")
    return any(key in values for key in AT_TOP) or (
        isinstance(trainer, dict) and any(key in trainer for key in IN_TRAINER)
    )


def translate_recipe(layer: Layer, tree: Interpolated, mode: str | None = None) -> tuple[Layer, Interpolated]:
    """Put a recipe in the words of an ordinary experiment; raise `ConfigError` with every mistake.

    Args:
        layer: The composed file.
        tree: Its values.
        mode: self-hosted or training-service, if the command line says which.
    """
    moving = _Recipe(layer, tree, mode)
    moving.trainer()
    moving.services()
    moving.model()
    moving.data()
    moving.rollouts()
    moving.weights()
    moving.validation()
    moving.run()
    moving.loggers()
    moving.own_sections()
    moving.refuse()
    return moving.finish()


def asked_ranks(trainer: Any) -> int:
    """Return how many ranks the recipe behind a trainer's configuration asks for."""
    if trainer is None or trainer.type != "service":
        return 1
    service = (trainer.params.get("settings") or {}).get("train_service") or {}
    return int(service.get("world_size") or 1)


class _Recipe(RolloutKeys):
    """One recipe under translation, section by section."""

    def run(self) -> None:
        """Say where the run is kept, how often it is saved, and what it goes on from."""
        self.drop("launch_mode", one_of("local", "ray"))
        if self.value("launch_mode") == "ray":
            self.put("engine.type", "ray", "launch_mode")
        self.move("trainer.save_freq", "training.save_every", every)
        self.move("trainer.remove_previous_ckpt", "training.keep_last", lambda yes: 1 if truth(yes) else None)
        self.drop("project_name", text)
        self.move("experiment_name", "run.name", run_name)
        self.move("trainer.checkpoint_path", "run.root", lambda path: os.path.dirname(run_folder(path)))
        self.move("trainer.checkpoint_path", "run.name", lambda path: os.path.basename(run_folder(path)))
        self.section("resume")
        self.move("resume.mode", "run.resume", self._resume)
        self.drop("resume.resume_path", text)
        if self.value("resume.resume_path") is not None and self.value("resume.mode") != "from_path":
            self.fault("resume.resume_path", "goes with mode: from_path")
        self.drop("resume.resume_dataloader", only(True, "the place in the data belongs to a checkpoint; leave it out"))

    def _resume(self, mode: Any) -> str:
        one_of("disable", "auto", "from_path")(mode)
        if mode != "from_path":
            return "never" if mode == "disable" else "auto"
        written = self.value("resume.resume_path")
        if written is None:
            raise ValueError("needs resume_path, the checkpoint or run to go on from")
        found, fault = find_path(text(written), self.layer, ("resume", "resume_path"), here_first=True)
        if fault:
            raise ValueError(fault)
        return found

    def loggers(self) -> None:
        """Name the loggers, and the run in them."""
        self.section("logger")
        self.move("loggers", "loggers")
        self.drop("logger.backend", loggers)
        wanted = self.written("logger.backend")
        if wanted is None:
            return
        names = {"project": self.written("project_name"), "name": self.written("experiment_name")}
        names = {key: word for key, word in names.items() if isinstance(word, str) and word}
        listed = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
        made: list[dict[str, Any]] = []
        for name in listed:
            if name in ("wandb", "trackio"):
                made.append({"type": name, "params": dict(names)})
            elif name == "mlflow":
                renamed = {"experiment" if key == "project" else key: word for key, word in names.items()}
                made.append({"type": name, "params": renamed})
            elif name == "tensorboard":
                made.append({"type": name})
        if self.origin("loggers") == DEFAULT:
            self.put("loggers", made, "logger.backend")

    def own_sections(self) -> None:
        """Let sections of an ordinary experiment say the last word."""
        for key in ("schema_version", "plugins"):
            self.move(key, key)
        if self.origin("engine.type") != DEFAULT or self.value("launch_mode") != "ray":
            self.move("engine.type", "engine.type")
        else:
            self.drop("engine.type", text)
        for key in self.section("rollouts"):
            named = f"{key}.type" if isinstance(self.value(f"rollouts.{key}"), dict) else key
            if key in ("agent", "reward"):
                self.move_named(f"rollouts.{named}", f"data.params.{named}")
                self.move(f"rollouts.{key}.params", f"data.params.{key}.params")
            else:
                self.move(f"rollouts.{key}", f"data.params.{key}", keep_null=True)
        self.drop("policy.type", one_of("language"))
        if any(self.value(f"policy.params.{key}") for key in ("path", "gguf", "tiny")):
            for key in ("path", "gguf", "tiny"):
                self.put(f"policy.params.{key}", None)
        self.move_own(("training", "run", "engine.params", "policy.params"))

    def refuse(self) -> None:
        """Say of every key that means nothing here what does."""
        for key, why in REFUSED.items():
            self.drop(key, refusing(why))
