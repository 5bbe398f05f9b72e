"""Recipes: what becomes of each key, and what is said of mistakes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from etude.config.load import Loaded, load
from etude.config.recipe_file import asked_ranks
from etude.config.recipe_keys import REFUSED, REFUSED_OF_SERVICE
from etude.errors import ConfigError
from etude.reading import yaml12
from etude.reading.origins import lookup

RECIPE = """\
project_name: demo
experiment_name: first
launch_mode: local
logger: {backend: [console, wandb]}
resume: {mode: auto}
data:
  type: torch
  seed: 3
  data_files: [tasks.jsonl]
  batch_size: 4
  rollout_repeat_n: 2
  prompt_key: question
  filter_prompts: true
  max_prompt_length: 12
  max_response_length: 8
  shuffle: false
rollout_worker:
  type: simple
  temperature: 0.7
  max_sequence_length: 20
  reward_module_path: "judge.py:score"
trajectory_pool: {batch_size: 8, group_size: 2, key_list: [group_id], check_batch_ready_function: batch_size_reached}
trainer:
  custom_trainer_module_path: "mine.py"
  custom_trainer_class_name: "Mine"
  total_train_steps: 40
  save_freq: 10
  checkpoint_path: out/kept
  remove_previous_ckpt: true
  algorithm: {my_param: 0.5}
weight: {sync_mode: sync}
validate:
  data: {data_files: held.jsonl, prompt_key: question}
  eval: {validate_freq: 5}
service:
  inference_service: {model: tiny, max_tokens: 8}
  train_service:
    student:
      role: actor
      backend: self-hosted
      resource: {world_size: 2, gpus_per_pod: 1}
      actor:
        ppo_mini_batch_size: 4
        ppo_micro_batch_size: 2
        ppo_epochs: 2
        clip_ratio: 0.1
        grad_clip: 0.5
        optim: {lr: 1.0e-4, lr_warmup_steps_ratio: 0.1}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").mkdir()
    for name in ("tasks.jsonl", "held.jsonl"):
        (tmp_path / "recipe" / name).write_text('{"question": "1+1=", "answer": "2"}\n')
    (tmp_path / "recipe" / "mine.py").write_text("class Mine: ...\n")
    (tmp_path / "recipe" / "judge.py").write_text("def score(task, text): return 1.0\n")
    (tmp_path / "recipe" / "x.yaml").write_text(RECIPE)
    return tmp_path


def read(*overrides: str, text: str | None = None, mode: str | None = None) -> Loaded:
    if text is not None:
        Path("recipe/x.yaml").write_text(text)
    return load("recipe/x.yaml", overrides, mode)


def refusal(*overrides: str, text: str | None = None, mode: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*overrides, text=text, mode=mode)
    return str(caught.value)


def test_every_key_is_put_in_our_words(project: Path) -> None:
    stored = read().stored()
    folder = project / "recipe"
    assert stored["policy"] == {"type": "language", "params": {"tiny": True}}
    tasks = {"prompt_key": "question", "max_prompt_length": 12}
    assert stored["data"] == {
        "type": "rollouts",
        "params": {
            "tasks": {"type": "file", "params": {"path": [str(folder / "tasks.jsonl")], **tasks}},
            "prompts_per_step": 4,
            "group_size": 2,
            "max_new_tokens": 8,
            "temperature": 0.7,
            "reward": f"{folder / 'judge.py'}:score",
            "pool": {"batch_size": 8, "group_size": 2, "key_list": ["group_id"], "ready": "batch_size_reached"},
        },
    }
    assert stored["trainer"] == {
        "type": "service",
        "params": {
            "class_name": "Mine",
            "module_path": str(folder / "mine.py"),
            "settings": {
                "total_train_steps": 40,
                "algorithm": {"my_param": 0.5, "minibatches": 2},
                "train_service": {
                    "backend": "self-hosted",
                    "world_size": 2,
                    "actor": {"ppo_epochs": 2, "clip_ratio": 0.1},
                },
            },
        },
    }
    said = {"training_steps": 40, "save_every": 10, "keep_last": 1, "seed": 3, "shuffle": False, "batch_size": 2}
    said |= {"lr": 1e-4, "clip_norm": 0.5, "warmup_steps": 4, "log_every": 1}
    assert {key: stored["training"][key] for key in said} == said
    assert stored["run"] == {"root": str(project / "out"), "name": "kept", "resume": "auto"}
    assert stored["loggers"] == [{"type": "wandb", "params": {"project": "demo", "name": "first"}}]
    (validation,) = stored["callbacks"]
    assert validation["type"] == "evaluate_rewards"
    assert validation["params"]["every"] == 5
    assert validation["params"]["tasks"]["params"] == {"path": str(folder / "held.jsonl"), "prompt_key": "question"}
    assert validation["params"]["reward"] == stored["data"]["params"]["reward"]


def test_what_is_stored_is_no_recipe_and_loads_to_the_same(project: Path) -> None:
    first = read()
    (project / "stored.yaml").write_text(yaml12.write(first.stored()))
    again = load("stored.yaml")
    assert again.stored() == first.stored()
    assert again.config == first.config
    assert asked_ranks(again.config.trainer) == 2


def test_own_sections_say_the_last_word() -> None:
    overrides = ["training.lr=0.5", "run.name=other", "rollouts.top_p=0.9", "policy.params.tiny={layers: 1}"]
    stored = read(*overrides, "loggers=[]", "trainer.train_service.world_size=1").stored()
    assert stored["training"]["lr"] == 0.5
    assert stored["run"]["name"] == "other"
    assert stored["data"]["params"]["top_p"] == 0.9
    assert stored["policy"]["params"]["tiny"] == {"layers": 1}
    assert stored["loggers"] == []
    assert lookup(stored, ("trainer", "params", "settings", "train_service", "world_size")) == 1


def test_files_are_tried_from_the_working_directory_first(project: Path) -> None:
    (project / "mine.py").write_text("class Mine: ...\n")
    assert read().config.trainer.params["module_path"] == str(project / "mine.py")  # type: ignore[union-attr]
    message = refusal("trainer.custom_trainer_module_path=gone.py")
    assert message.endswith(f"trainer.custom_trainer_module_path: there is no {project / 'gone.py'}")
    message = refusal(text=RECIPE.replace("mine.py", "gone.py"))
    place = "recipe/x.yaml:24:3: trainer.custom_trainer_module_path"
    assert message == f"{place}: there is neither {project / 'gone.py'} nor {project / 'recipe' / 'gone.py'}"


def test_a_custom_class_has_a_name_unless_told() -> None:
    loaded = read(text=RECIPE.replace('  custom_trainer_class_name: "Mine"\n', ""))
    assert loaded.config.trainer.params["class_name"] == "CustomTrainer"  # type: ignore[union-attr]


# -- how it is trained ------------------------------------------------------------------------------------------------

SMALL = """\
trainer:
  total_train_steps: 2
  train_service: {backend: BACKEND}
data: {type: digits}
service: {inference_service: {model: tiny}}
"""


@pytest.mark.parametrize(
    "backend, mode, name",
    [
        ("self-hosted", "self-hosted", "self_hosted_grpo"),
        ("direct-zmq", "self-hosted", "self_hosted_grpo"),
        ("tinker", "training-service", "remote_api_grpo"),
        ("weaver", "training-service", "remote_api_grpo"),
    ],
)
def test_the_mode_is_read_from_the_file(backend: str, mode: str, name: str) -> None:
    text = SMALL.replace("BACKEND", backend)
    assert read(text=text).config.trainer.params["class_name"] == name  # type: ignore[union-attr]
    assert read(text=text, mode=mode).stored() == read(text=text).stored()
    other = "self-hosted" if mode == "training-service" else "training-service"
    assert refusal(text=text, mode=other) == (
        f"recipe/x.yaml:3:19: trainer.train_service.backend: {backend!r} means {mode}, which contradicts -m {other}"
    )


def test_the_command_line_decides_where_the_file_does_not() -> None:
    text = SMALL.replace("  train_service: {backend: BACKEND}\n", "")
    assert read(text=text).config.trainer.params["class_name"] == "self_hosted_grpo"  # type: ignore[union-attr]
    remote = read(text=text, mode="training-service").config.trainer
    assert remote is not None
    assert remote.params["class_name"] == "remote_api_grpo"
    assert remote.params["settings"]["train_service"]["backend"] == "tinker"


def test_a_type_that_contradicts_its_service_is_refused() -> None:
    message = refusal("trainer.type=remote_api_grpo", text=SMALL.replace("BACKEND", "self-hosted"))
    assert message == (
        "override 'trainer.type=remote_api_grpo': trainer.type: 'remote_api_grpo' means training-service, which "
        "contradicts trainer.train_service.backend"
    )


def test_a_mode_is_for_recipes_only(project: Path) -> None:
    (project / "plain.yaml").write_text("policy: mlp\ndata: digits\n")
    with pytest.raises(
        ConfigError, match=r"plain.yaml: -m self-hosted is for recipes, which this is not; leave it out"
    ):
        load("plain.yaml", mode="self-hosted")


def test_the_service_of_a_remote_recipe_is_passed_on() -> None:
    text = SMALL.replace("{backend: BACKEND}", "{backend: tinker, url: 'http://x:1', config: {CONFIG}}")
    text = text.replace("CONFIG", "loss_fn: ppo, learning_rate: 2e-5, beta2: 0.99, grad_clip_norm: 0")
    stored = read("service.tinker_service.lora_rank=8", text=text).stored()
    service = stored["trainer"]["params"]["settings"]["train_service"]
    adam = {"beta2": 0.99, "grad_clip_norm": 0}
    assert service == {"backend": "tinker", "url": "http://x:1", "config": {"loss_fn": "ppo", **adam}}
    assert stored["policy"]["params"] == {"lora": 8, "tiny": True}
    assert stored["training"]["lr"] == 2e-5


def test_the_optimizer_of_a_service_is_ours_where_it_is_hosted_here() -> None:
    text = SMALL.replace("{backend: BACKEND}", "{backend: self-hosted, config: {CONFIG}}")
    training = read(text=text.replace("CONFIG", "learning_rate: 1e-4, beta2: 0.99, grad_clip_norm: 0")).config.training
    assert (training.lr, training.optimizer_params, training.clip_norm) == (1e-4, {"betas": [0.9, 0.99]}, None)


def test_services_may_stand_in_either_place_and_the_trainer_says_the_last_word() -> None:
    text = SMALL.replace("{backend: BACKEND}", "{world_size: 4}")
    stored = read("service.train_service.main={backend: direct-zmq, world_size: 2}", text=text).stored()
    service = stored["trainer"]["params"]["settings"]["train_service"]
    assert service == {"backend": "direct-zmq", "world_size": 4}


def test_what_a_service_is_told_of_the_loss_is_known_here() -> None:
    from etude.config.recipe_keys import SERVICE_CONFIG, TRAINERS
    from etude.service.in_process import LOSSES
    from etude.service.loading import TYPES

    assert {name for options in LOSSES.values() for name in options} <= set(SERVICE_CONFIG)
    assert set(TRAINERS) == set(TYPES)


def test_options_of_the_other_mode_are_refused() -> None:
    said = refusal(text=SMALL.replace("{backend: BACKEND}", "{backend: self-hosted, config: {loss_fn: ppo}}"))
    assert said.endswith("config.loss_fn: is not for self-hosted; see actor, or trainer.algorithm")
    said = refusal(text=SMALL.replace("{backend: BACKEND}", "{backend: tinker, actor: {clip_ratio: 0.1}}"))
    assert said.endswith("actor.clip_ratio: is not for training-service; see config, or trainer.algorithm")


def test_ray_starts_the_ranks_of_its_recipes() -> None:
    stored = read("launch_mode=ray", "trainer.train_service.world_size=4").stored()
    assert stored["engine"] == {"type": "ray", "params": {"num_workers": 4}}


def test_a_teacher_is_a_service_too() -> None:
    teacher = "{role: teacher, backend: self-hosted, actor: {model: {path: smollm2}}}"
    stored = read("trainer.type=self_hosted_opd", f"service.train_service.other={teacher}").stored()
    assert stored["trainer"]["params"]["settings"]["teachers"] == [{"base_model": "smollm2"}]


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*REFUSED, *(f"service.train_service.student.{key}" for key in REFUSED_OF_SERVICE)])
def test_keys_that_mean_nothing_here_say_what_does(key: str) -> None:
    (line,) = refusal(f"{key}=x").splitlines()
    assert line.startswith(f"override '{key}=x': {key}: ")
    reason = line.removeprefix(f"override '{key}=x': {key}: ")
    assert "unknown key" not in reason
    assert any(word in reason for word in ("leave", "write", "use", "give", "take", "say", "run", ":", "comes"))
    read(f"{key}=false")  # asks for nothing


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.total_train_step=3", "trainer.total_train_step: unknown key; did you mean 'total_train_steps'?"),
        ("trainer.total_train_steps=0", "trainer.total_train_steps: must be at least 1, got 0"),
        ("trainer.total_train_steps=null", "trainer.total_train_steps: is missing; say how many steps to train"),
        ("trainer.type=grpo", "trainer.type: 'grpo' is no trainer; known: self_hosted_grpo, "),
        ("trainer.algorithm=3", "trainer.algorithm: expected a mapping"),
        (
            "service.inference_service=null",
            "model: is missing; name a model: a path, a name of the hub, smollm2 or tiny",
        ),
        ("service.inference_service.model=./gone", "there is no model at ./gone"),
        ("service.inference_service.max_tokens=9", "is 9, but data.max_response_length is 8; write one of them"),
        ("service.train_service.student.backend=mock", "'mock' is no backend of a training service"),
        ("service.train_service.student.world_size=2", "is said twice; leave it out here or at world_size"),
        ("service.train_service.second={backend: self-hosted}", "one run trains one model; give it role: teacher"),
        ("trainer.train_service.world_size=3", "data.batch_size: 4 prompts of a step cannot be shared by 3 ranks"),
        ("data.data_files=null", "data.data_files: is missing; name the files that hold the prompts, or another type"),
        ("data.data_files=gone.csv", "data.data_files: there is no "),
        ("data.type=mock", "there is no mock data; for a quick run take type: digits"),
        ("data.type=digits", "data.data_files: goes with files of prompts, and type is 'digits'; leave it out"),
        ("data={type: sums}", "unknown source of tasks 'sums'"),
        ("rollout_worker.reward_module_path=judge.py", "name what to take from the file: judge.py:NAME"),
        (
            "rollout_worker.evaluator_module_path=recipe/judge.py:E",
            "stands beside reward_module_path; leave one of them",
        ),
        (
            "rollout_worker.max_sequence_length=19",
            "is less than max_prompt_length and max_response_length together, 20",
        ),
        ("rollout_worker.type=nexau", "expected simple or agent, got 'nexau'"),
        ("weight.sync_mode=fully-async", "rollouts are at most one step old here; take sync_mode: batch-async"),
        ("weight.sync_method=network", "weights need no transport, for who trains also draws; leave it out"),
        ("validate.data=null", "validate.eval.validate_freq: needs validate.data, the tasks to validate on"),
        ("logger.backend=swanlab", "'swanlab' is no logger; known: console, wandb, mlflow, tensorboard, trackio"),
        ("resume.mode=from_path", "resume.mode: needs resume_path, the checkpoint or run to go on from"),
        ("resume.resume_path=x", "resume.resume_path: goes with mode: from_path"),
        ("experiment_name=a/b", "experiment_name: names a run, and cannot be a path; got 'a/b'"),
        ("rollouts.top_q=1", "rollouts.top_q: unknown key; did you mean 'top_p'?"),
        ("service.train_service.student.actor.ppo_mini_batch_size=3", "the 8 rollouts of a step cannot be cut"),
    ],
)
def test_mistakes_are_told_in_a_sentence(override: str, message: str) -> None:
    said = refusal(override)
    assert message in said
    assert all(line.startswith(("override ", "recipe/x.yaml:")) for line in said.splitlines())


def test_what_comes_from_the_environment_stays_out_of_what_is_stored(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_TEST_DATA", str(project / "recipe"))
    stored = read("data.data_files=${env:ETUDE_TEST_DATA}/tasks.jsonl").stored()
    assert stored["data"]["params"]["tasks"]["params"]["path"] == "${env:ETUDE_TEST_DATA}/tasks.jsonl"
    monkeypatch.setenv("ETUDE_TEST_RANKS", "2")
    said = refusal("trainer.train_service.world_size=${env:ETUDE_TEST_RANKS}")
    assert "trainer.train_service.world_size: cannot come from the environment; write it out" in said


# -- files that are put together --------------------------------------------------------------------------------------


def test_files_beside_are_found_by_name_as_hydra_does(project: Path) -> None:
    (project / "recipe" / "common.yaml").write_text(RECIPE)
    stored = read(text="defaults: [common, _self_]\ntrainer: {total_train_steps: 7}\n").stored()
    assert stored["training"]["training_steps"] == 7
    assert stored["data"]["params"]["group_size"] == 2


def test_own_keys_come_last_and_nowhere_else() -> None:
    said = refusal(text="defaults: [_self_, common]\ntrainer: {total_train_steps: 7}\n")
    assert said == "recipe/x.yaml:1:12: defaults: a file's own keys come last; move _self_ to the end"


# -- thousands of damaged ones ----------------------------------------------------------------------------------------

VALUES: list[Any] = [None, 7, -1, 0.5, True, "text", "", [], {}, [1, "x"], {"a": 1}, "${data.seed}", "${nowhere}", "\0"]
FREE = ("trainer", "algorithm")


def mutated(draw: random.Random) -> tuple[dict[str, Any], bool]:
    """Return a recipe with one or two things changed, and whether it must be refused."""
    tree: Any = yaml12.read(RECIPE).value
    must_fail, changes = False, draw.randint(1, 2)
    for _ in range(changes):
        path: list[Any] = []
        place = tree
        while draw.random() < 0.75:
            inner = [key for key in place if isinstance(place[key], dict) and place[key]]
            if not inner:
                break
            path.append(draw.choice(inner))
            place = place[path[-1]]
        key = draw.choice(list(place))
        kind = draw.choice(["value", "add", "drop", "rename"])
        if kind == "value":
            place[key] = draw.choice(VALUES)
        elif kind == "add":
            place[f"{key}_x"] = draw.choice(VALUES[1:])
        elif kind == "drop" and len(place) > 1:
            del place[key]
        else:
            place[f"{key[:-1]}_{key[-1]}"] = place.pop(key)
        # What is called as the user likes it: a service, and what a trainer of one's own reads.
        named = tuple(path) in (FREE, ("service", "train_service"))
        must_fail = changes == 1 and kind in ("add", "rename") and not named  # of two, one may undo the other
    return tree, must_fail


def check_mutations(count: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        tree, must_fail = mutated(draw)
        text = yaml12.write(tree)
        try:
            read(text=text)
        except ConfigError as error:
            lines = str(error).splitlines()
            assert lines, text
            assert all(len(line) < 700 for line in lines), text
            assert all(line.startswith(("recipe/x.yaml", "override")) for line in lines), (text, lines)
        else:
            assert not must_fail, text


def test_changed_recipes_are_read_or_refused_in_sentences() -> None:
    check_mutations(150, 0)


@pytest.mark.nightly
def test_many_changed_recipes_are_read_or_refused_in_sentences() -> None:
    check_mutations(2000, 1)
