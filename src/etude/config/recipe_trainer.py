"""The trainer of a recipe: who trains, by which service, on how many ranks and with which optimizer."""

from __future__ import annotations

import math
import os
from typing import Any

from etude.config.moving import FileTranslation, find_path, text
from etude.config.recipe_keys import (
    ACTOR,
    ADAM,
    BACKENDS,
    MODES,
    OPTIMIZER,
    REFUSED_OF_SERVICE,
    SERVICE,
    SERVICE_CONFIG,
)
from etude.config.recipe_values import clip, count, number, one_of, rank, refusing, trainer_type
from etude.reading.interpolate import Interpolated
from etude.reading.origins import Layer

SETTINGS = "trainer.params.settings"
"""Where the trainer finds what stood in its section."""
_LR = {"self-hosted": 1e-6, "training-service": 2e-6}
"""What a recipe trains with that names no rate: large models are ruined by more."""
_CONVERTED = {"grad_clip": clip}


class TrainerKeys(FileTranslation):
    """The half of a recipe that says who trains.

    Args:
        layer: The composed file.
        tree: Its values.
        mode: self-hosted or training-service, if the command line says which.
    """

    def __init__(self, layer: Layer, tree: Interpolated, mode: str | None) -> None:
        super().__init__(layer, tree)
        self.actors, self.teachers = self._find_services()
        self.mode, self.ranks = self._find_mode(mode), 1

    def _find_services(self) -> tuple[list[str], list[str]]:
        """Return where the services of the actor and of teachers stand, those with the last word behind."""
        actors: list[str] = []
        teachers: list[str] = []
        for place in ("service.train_service", "trainer.train_service"):
            found = self.section(place)
            inner = found.get("actor")
            is_one = any(key in found for key in SERVICE) or (
                isinstance(inner, dict) and not any(key in inner for key in SERVICE)
            )
            here = [place] if is_one else [f"{place}.{name}" for name in found]
            for one in here:
                role = self.section(one).get("role", "actor")
                (teachers if role == "teacher" else actors).append(one)
            named = [one for one in here if one in actors]
            if len(named) > 1:
                self.fault(
                    named[1], f"is an actor as {named[0]} is, and one run trains one model; give it role: teacher"
                )
        return actors, teachers

    def _find_mode(self, asked: str | None) -> str:
        """Return how the file is trained: what it says itself, and agrees with the command line."""
        says: list[tuple[str, str]] = []
        for place in self.actors:
            where, backend = f"{place}.backend", self.value(f"{place}.backend")
            if isinstance(backend, str) and backend in BACKENDS:
                says.append((BACKENDS[backend], where))
            elif backend is not None:
                self.fault(where, f"{backend!r} is no backend of a training service; known: {', '.join(BACKENDS)}")
        kind = self.value("trainer.type")
        if isinstance(kind, str) and kind.startswith(("self_hosted", "remote_api")):
            says.append((MODES[kind.startswith("remote_api")], "trainer.type"))
        for mode, where in says:
            other = asked if asked is not None else says[0][0]
            if mode != other:
                said = f"-m {asked}" if asked is not None else says[0][1]
                self.fault(where, f"{self.value(where)!r} means {mode}, which contradicts {said}")
        return asked or (says[0][0] if says else MODES[0])

    def trainer(self) -> None:
        """Name the class that trains, and give it the section it stands in."""
        self.section("trainer", "say how to train: trainer: {total_train_steps: 100}")
        self.put("trainer.type", "service", "trainer")
        ready = f"{'self_hosted' if self.mode == MODES[0] else 'remote_api'}_grpo"
        if self.value("trainer.custom_trainer_module_path") is not None:
            self.move_file("trainer.custom_trainer_module_path", "trainer.params.module_path")
            self.put("trainer.params.class_name", "CustomTrainer", "trainer.custom_trainer_module_path")
        else:
            self.put("trainer.params.class_name", ready, "trainer")
            if self.value("trainer.custom_trainer_class_name") is not None:
                self.fault("trainer.custom_trainer_class_name", "needs custom_trainer_module_path, the file it is in")
            self.move("trainer.type", "trainer.params.class_name", trainer_type)
        self.drop("trainer.type", trainer_type)
        self.move("trainer.custom_trainer_class_name", "trainer.params.class_name", text)
        if self.value("trainer.total_train_steps") is None:
            self.fault("trainer.total_train_steps", "is missing; say how many steps to train")
        self.move("trainer.total_train_steps", f"{SETTINGS}.total_train_steps")
        self.move("trainer.total_train_steps", "training.training_steps")
        self.section("trainer.algorithm")
        self.put(f"{SETTINGS}.algorithm", {}, "trainer")
        self.move("trainer.algorithm", f"{SETTINGS}.algorithm")
        self.move("trainer.teachers", f"{SETTINGS}.teachers")
        for key in ("identifier", "model_tag"):
            self.drop(f"trainer.{key}", text)

    def services(self) -> None:
        """Give the trainer its service, flat, and the optimizer what stands there about it."""
        self.put("training.lr", _LR[self.mode])
        self.put("training.log_every", 1)
        self.put(f"{SETTINGS}.train_service.backend", "self-hosted" if self.mode == MODES[0] else "tinker")
        for name in ("tinker_service", "weaver_service"):
            self._remote(f"service.{name}")
        for place in self.actors:
            for key in ("backend", "url"):
                self.move(f"{place}.{key}", f"{SETTINGS}.train_service.{key}")
            self._loss(place)
            for key in ("identifier", "role"):
                self.drop(f"{place}.{key}", text)
            self._ranks(place)
            self._optimizer(place)
            for key, why in REFUSED_OF_SERVICE.items():
                self.drop(f"{place}.{key}", refusing(why))
        for index, place in enumerate(self.teachers):
            self._teacher(place, index)

    def _loss(self, place: str) -> None:
        """Leave the loss to whoever computes it: the actor here, or a service."""
        read, idle = ("actor", "config") if self.mode == MODES[0] else ("config", "actor")
        keys = {"actor": ACTOR, "config": SERVICE_CONFIG}
        for key in keys[read]:
            self.move(f"{place}.{read}.{key}", f"{SETTINGS}.train_service.{read}.{key}")
        for key in keys[idle]:
            self.drop(f"{place}.{idle}.{key}", refusing(f"is not for {self.mode}; see {read}, or trainer.algorithm"))

    def _remote(self, place: str) -> None:
        self.section(place)
        self.move(f"{place}.base_url", f"{SETTINGS}.train_service.url")
        self.move(f"{place}.api_key", f"{SETTINGS}.train_service.api_key")
        self.move(f"{place}.lora_rank", "policy.params.lora", rank)
        self.drop(f"{place}.training_mode", one_of("lora", "full"))
        if self.value(f"{place}.training_mode") == "lora" and not self.value(f"{place}.lora_rank"):
            self.fault(f"{place}.training_mode", "needs lora_rank beside it")
        if self.value(f"{place}.training_mode") == "full" and self.value(f"{place}.lora_rank"):
            self.fault(f"{place}.lora_rank", "is for training_mode: lora; leave one of them out")

    def _teacher(self, place: str, index: int) -> None:
        if index == 0:
            if self.value("trainer.teachers") is not None:
                self.fault(place, "stands beside trainer.teachers; leave one of them out")
            self.put(f"{SETTINGS}.teachers", [{} for _ in self.teachers], place)
        for key in ("identifier", "role", "backend"):
            self.drop(f"{place}.{key}", text)
        if self.value(f"{place}.actor.model.path") is None:
            self.fault(f"{place}.actor.model.path", "is missing; name the model of the teacher")
        self.move_model(f"{place}.actor.model.path", f"{SETTINGS}.teachers.{index}.base_model")
        for key, why in REFUSED_OF_SERVICE.items():
            self.drop(f"{place}.{key}", refusing(why))

    def _ranks(self, place: str) -> None:
        """Find how many ranks are asked for: as many as said, or as pods and what each of them holds."""
        keys = [f"{place}.{key}" for key in ("world_size", "resource.world_size", "resource.gpus_per_pod")]
        for key in keys:
            self.drop(key, count)
        asked, pods, each = (self.written(key) for key in keys)
        if asked is not None and pods is not None:
            self.fault(keys[1], "is said twice; leave it out here or at world_size")
        ranks = [asked] if asked is not None else [pods, 1 if each is None else each]
        if all(isinstance(number, int) and number > 0 for number in ranks):
            self.ranks = math.prod(ranks)
            self.put(f"{SETTINGS}.train_service.world_size", self.ranks, keys[0 if asked is not None else 1])
            if self.value("launch_mode") == "ray":
                self.put("engine.params.num_workers", self.ranks, place)

    def _optimizer(self, place: str) -> None:
        config, actor = f"{place}.config", f"{place}.actor"
        self.move(f"{config}.learning_rate", "training.lr")
        if self.mode == MODES[1]:  # a service makes steps of its own Adam
            for key in ADAM:
                self.move(f"{config}.{key}", f"{SETTINGS}.train_service.config.{key}")
        else:
            self._adam(config)
        for key, ours in OPTIMIZER.items():
            if self.mode == MODES[0] or ours == "lr":
                self.move(f"{actor}.{key}", f"training.{ours}", _CONVERTED.get(key))
            else:
                self.drop(f"{actor}.{key}", refusing("is not for training-service; see config"))
        self.move(f"{actor}.optim.lr_warmup_steps_ratio", "training.warmup_steps", self._share_of_steps)

    def _adam(self, config: str) -> None:
        """Give the optimizer here what a service is told of its own."""
        self.move(f"{config}.weight_decay", "training.weight_decay")
        self.move(f"{config}.grad_clip_norm", "training.clip_norm", clip)
        self.move(f"{config}.eps", "training.optimizer_params.eps")
        for key in ("beta1", "beta2"):
            self.drop(f"{config}.{key}", number)
        betas = [self.written(f"{config}.{key}") for key in ("beta1", "beta2")]
        if betas != [None, None]:
            first, second = (0.9 if betas[0] is None else betas[0], 0.95 if betas[1] is None else betas[1])
            self.put("training.optimizer_params.betas", [first, second], config)

    def _share_of_steps(self, share: Any) -> int:
        steps = self.value("trainer.total_train_steps")
        if not 0 <= number(share) <= 1 or not isinstance(steps, int):
            raise ValueError(f"expected a share of the steps, from 0 to 1, got {share!r}")
        return int(share * steps)

    def move_model(self, theirs: str, ours: str) -> None:
        """Carry a model over: its folder where it is found, else a name that the hub may know."""
        written = self.value(theirs)
        if written == "tiny" and ours == "policy.params.path":
            self.put("policy.params.tiny", True, theirs)
            self.drop(theirs, text)
        elif isinstance(written, str) and not self.comes_from_environment(theirs):
            found, _ = find_path(written, self.layer, tuple(theirs.split(".")), here_first=True)
            is_path = written.startswith(("/", "./", "../", "~"))
            if is_path and found == written and not os.path.exists(os.path.expanduser(written)):
                self.fault(theirs, f"there is no model at {written}")
            self.move(theirs, ours, lambda _: found)
        else:
            self.move(theirs, ours)
