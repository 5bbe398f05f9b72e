"""The rollouts of a recipe: the model that draws, its tasks, who judges, and what is validated."""

from __future__ import annotations

from typing import Any

from etude.config.moving import find_path, text, truth
from etude.config.recipe_keys import MODES, REFUSED
from etude.config.recipe_trainer import SETTINGS, TrainerKeys
from etude.config.recipe_values import count, count_from_zero, one_of, only, refusing

PROMPTS, COMPLETIONS = 4, 8
"""What `TextRollouts` draws in a step unless told."""
_OF_FILES = ("data_files", "prompt_key", "answer_key", "id_key", "max_prompt_length")


class RolloutKeys(TrainerKeys):
    """The half of a recipe that says what is trained, on what."""

    def model(self) -> None:
        """Find the model: what the actor trains is what draws."""
        inference = "service.inference_service"
        self.put("policy.type", "language", "service")
        for key in ("model", "model_path"):
            self.drop(f"{inference}.{key}", text)
        places = [f"{place}.actor.model.path" for place in reversed(self.actors)]
        places += [f"{inference}.model_path", f"{inference}.model"]
        found = [place for place in places if self.value(place) is not None]
        own = self.section("policy.params")
        if not found and not any(own.get(key) for key in ("path", "gguf", "tiny")):
            self.fault(f"{inference}.model", "is missing; name a model: a path, a name of the hub, smollm2 or tiny")
        paths = [place for place in found if not place.endswith("inference_service.model")]
        for other in paths[1:]:
            if self.value(other) != self.value(paths[0]):
                self.fault(other, f"is another model than {paths[0]}, and what is trained also draws; name one")
        for place in found[:1]:
            self.move_model(place, "policy.params.path")
        for place in places[:-2]:
            self.drop(place, text)
        for key in ("service.inference_service.tokenizer", "data.tokenizer_path", "rollout_worker.tokenizer"):
            same = [self.value(place) for place in found]
            self.drop(key, refusing("the model's own tokenizer is used; leave it out", same))
        self.drop(f"{inference}.identifier", text)
        self.drop(f"{inference}.freeze_for_weight_sync", truth)
        own_service = ("tinker", "weaver") if self.mode == MODES[1] else ()
        self.drop(f"{inference}.backend", refusing(REFUSED["service.inference_service.base_url"], own_service))

    def data(self) -> None:
        """Say where the tasks come from, and how many rollouts a step has."""
        self.put("data.type", "rollouts", "data")
        self.section("data", "say what the prompts are: data: {data_files: tasks.jsonl, prompt_key: prompt}")
        self._tasks("data", "data.params.tasks")
        self.move("data.batch_size", "data.params.prompts_per_step")
        self.move("data.rollout_repeat_n", "data.params.group_size")
        prompts = self.value("data.batch_size", PROMPTS)
        if isinstance(prompts, int) and prompts > 0 and prompts % self.ranks:
            self.fault("data.batch_size", f"{prompts} prompts of a step cannot be shared by {self.ranks} ranks")
        self.move("data.seed", "training.seed")
        self.move("seed", "training.seed")
        self.move("data.shuffle", "training.shuffle")
        # What a step draws is a function of (seed, step): batches keep their order and are whole, whatever is asked.
        self.drop("data.keep_batch_order", truth)
        self.drop("data.drop_last", truth)
        lengths = ("data.max_response_length", "rollout_worker.max_response_length")
        self.move_agreed((*lengths, "service.inference_service.max_tokens"), "data.params.max_new_tokens")

    def _tasks(self, theirs: str, ours: str) -> None:
        """Carry over a source of tasks: files, or one that `etude list tasks` knows."""
        kind = self.value(f"{theirs}.type", "torch")
        given = self.section(theirs)
        if kind == "mock":
            self.fault(f"{theirs}.type", "there is no mock data; for a quick run take type: digits")
        if kind in ("torch", "mock"):
            self.drop(f"{theirs}.type", text)
            self.put(f"{ours}.type", "file", theirs)
            if given and self.value(f"{theirs}.data_files") is None:
                self.fault(f"{theirs}.data_files", "is missing; name the files that hold the prompts, or another type")
            self._move_files(f"{theirs}.data_files", f"{ours}.params.path")
            for key in _OF_FILES[1:]:
                self.move(f"{theirs}.{key}", f"{ours}.params.{key}")
        else:
            self.move(f"{theirs}.type", f"{ours}.type")
            self.move(f"{theirs}.params", f"{ours}.params")
            for key in _OF_FILES:
                self.drop(
                    f"{theirs}.{key}", refusing(f"goes with files of prompts, and type is {kind!r}; leave it out")
                )
        self.drop(f"{theirs}.filter_prompts", truth)

    def _move_files(self, theirs: str, ours: str) -> None:
        written = self.value(theirs)
        names = written if isinstance(written, list) else [written]
        if self.comes_from_environment(theirs) or not all(isinstance(name, str) for name in names):
            self.move(theirs, ours)
            return
        found = [find_path(name, self.layer, tuple(theirs.split(".")), here_first=True) for name in names]
        for fault in dict.fromkeys(fault for _, fault in found if fault):
            self.fault(theirs, fault)
        paths = [path for path, _ in found]
        self.move(theirs, ours, lambda _: paths if isinstance(written, list) else paths[0])

    def rollouts(self) -> None:
        """Say who draws, who judges, and which rollouts make a batch."""
        worker = "rollout_worker"
        self.section(worker)
        self.drop(f"{worker}.type", one_of("simple", "agent"))
        self.drop(f"{worker}.need_llm_inference", only(True, "something must be drawn; leave it out"))
        self.drop(f"{worker}.enable_trace_prefix_merge", only(True, "turns that share a prefix are always merged"))
        self.move(f"{worker}.temperature", "data.params.temperature")
        self.move(f"{worker}.reward", "data.params.reward")
        self.move_named(f"{worker}.reward_module_path", "data.params.reward")
        self.move_named(f"{worker}.evaluator_module_path", "data.params.reward")
        self.move_named(f"{worker}.agent_cls", "data.params.agent")
        module, name = f"{worker}.custom_rollout_worker_module_path", f"{worker}.custom_rollout_worker_class_name"
        self.drop(name, text)
        if self.value(module) is None and self.value(name) is not None:
            self.fault(name, "needs custom_rollout_worker_module_path, the file it is in")
        self.move_file(module, "data.params.agent", f":{self.value(name, 'CustomRolloutWorker')}")
        judges = [
            key for key in ("reward", "reward_module_path", "evaluator_module_path") if self.value(f"{worker}.{key}")
        ]
        for other in judges[1:]:
            self.fault(f"{worker}.{other}", f"stands beside {judges[0]}; leave one of them out")
        self.drop(f"{worker}.max_prompt_length", count)
        self.drop(f"{worker}.max_sequence_length", self._sequence)
        pool = "trajectory_pool"
        self.section(pool)
        self.drop(f"{pool}.type", one_of("default", "simple", "grouped", "hierarchical"))
        if self.value(pool) is not None:
            self.put("data.params.pool.batch_size", self._rollouts_per_step(), pool)
        for key in ("batch_size", "group_size", "key_list"):
            self.move(f"{pool}.{key}", f"data.params.pool.{key}")
        self.move(f"{pool}.check_batch_ready_function", "data.params.pool.ready")
        for place in self.actors:
            self.move(f"{place}.actor.ppo_mini_batch_size", f"{SETTINGS}.algorithm.minibatches", self._minibatches)

    def _rollouts_per_step(self) -> int:
        prompts, completions = (self.written(f"data.{key}") for key in ("batch_size", "rollout_repeat_n"))
        return (prompts if isinstance(prompts, int) else PROMPTS) * (
            completions if isinstance(completions, int) else COMPLETIONS
        )

    def _minibatches(self, size: Any) -> int:
        rollouts = self.value("trajectory_pool.batch_size")
        rollouts = rollouts if isinstance(rollouts, int) else self._rollouts_per_step()
        if rollouts % count(size):
            raise ValueError(f"the {rollouts} rollouts of a step cannot be cut into updates of {size}")
        return rollouts // count(size)

    def _sequence(self, longest: Any) -> None:
        lengths = [self.value(f"data.max_{part}_length", self.value(f"rollout_worker.max_{part}_length", 0))
                   for part in ("prompt", "response")]  # fmt: skip
        if sum(length for length in lengths if isinstance(length, int)) > count(longest):
            raise ValueError(f"is less than max_prompt_length and max_response_length together, {sum(lengths)}")

    def weights(self) -> None:
        """Take over how far rollouts may lie behind the weights."""
        self.section("weight")
        self.drop("weight.type", text)
        self.drop("weight.sync_mode", one_of("sync", "batch-async", instead={
            "fully-async": "rollouts are at most one step old here; take sync_mode: batch-async"}))  # fmt: skip
        allowed = ("tinker", "weaver") if self.mode == MODES[1] else ()
        self.drop("weight.sync_method", refusing(REFUSED["weight.sync_weight_path"], allowed))
        self.drop("weight.staleness_threshold", count_from_zero)
        stale = self.value("weight.staleness_threshold", 1)
        if self.value("weight.sync_mode") == "batch-async" and stale != 0:
            if isinstance(stale, int) and stale > 1:
                self.fault(
                    "weight.staleness_threshold", f"rollouts are at most one step old here; write 1, not {stale}"
                )
            self.put("data.params.ahead", 1, "weight.sync_mode")

    def validation(self) -> None:
        """Measure the reward on tasks of their own every so often."""
        self.section("validate")
        self.section("validate.eval")
        self.drop("validate.eval.type", text)
        self.move("callbacks", "callbacks")
        given = self.value("callbacks")
        if self.value("validate.data") is None:
            for key in ("weight.validate_freq", "validate.eval.validate_freq"):
                if self.value(key):
                    self.fault(key, "needs validate.data, the tasks to validate on")
                self.drop(key, count_from_zero)
            return
        given = given if isinstance(given, list) else []
        self.put("callbacks", [*given, {"type": "evaluate_rewards", "params": {}}], "validate")
        ours = f"callbacks.{len(given)}.params"
        self._tasks("validate.data", f"{ours}.tasks")
        self.move_agreed(("validate.eval.validate_freq", "weight.validate_freq"), f"{ours}.every")
        for key in ("batch_size", "keep_batch_order", "shuffle", "drop_last", "seed"):
            self.drop(f"validate.data.{key}", lambda _: None)  # all tasks are drawn once, in one order
        self.move("validate.data.rollout_repeat_n", f"{ours}.completions")
        self.move("validate.data.max_response_length", f"{ours}.max_new_tokens")
        if self.value("rollout_worker.reward_module_path") is not None:
            self.move_named("rollout_worker.reward_module_path", f"{ours}.reward")
        elif self.value("rollout_worker.evaluator_module_path") is not None:
            self.move_named("rollout_worker.evaluator_module_path", f"{ours}.reward")
        else:
            self.move("rollout_worker.reward", f"{ours}.reward")
