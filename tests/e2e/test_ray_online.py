"""Acting and training at the same time on a real Ray: named actors, rollout workers, and each of them killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
import ray

from etude.data import Windows
from etude.engines.ray import cluster, fetch_weights, find_actors, start_actors
from etude.errors import ConfigError, RankError
from etude.policies import MLP
from etude.runs.checkpoint import CheckpointStore
from etude.runs.directory import Run
from etude.runs.metrics import read_rows
from tests.e2e.test_ray import wait_until_gone
from tests.processes import reap, spawn, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
untyped: Any = ray
LIMIT_S = 500.0
POINTS = """\
import os
import numpy as np
from etude.callbacks import Callback
from etude.registry import CALLBACK_REGISTRY, ENVIRONMENT_REGISTRY
from etude.simulation.environments.base import StepOutcome
from etude.types import DataSpec, Feature


@ENVIRONMENT_REGISTRY.register("guided_point")
class GuidedPoint:
    fps, task, max_steps = 10.0, "Reach the goal", 20

    def __init__(self):
        state, action = Feature((4,), "float32", "state"), Feature((2,), "float32", "action")
        self.spec = DataSpec({"observation.state": state, "action": action}, self.fps)

    def reset(self, seed):
        draw = np.random.default_rng(seed)
        self.point, self.goal = draw.uniform(-1, 1, 2), draw.uniform(-1, 1, 2)
        return self.seen()

    def seen(self):
        return {"observation.state": np.concatenate([self.point, self.goal]).astype(np.float32)}

    def step(self, action):
        self.point = self.point + 0.2 * np.clip(action, -1, 1)
        left = float(np.abs(self.goal - self.point).max())
        return StepOutcome(self.seen(), -left, left < 0.1, False, left < 0.1, {})

    def expert_action(self):
        return np.clip(5.0 * (self.goal - self.point), -1, 1).astype(np.float32)

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        pass


@CALLBACK_REGISTRY.register("stop_when_told")
class StopWhenTold(Callback):
    def on_step_end(self, trainer, metrics):
        if os.path.exists("stop"):
            trainer.stop("told to")
"""
CONFIG = """\
plugins: [points.py]
policy: {type: mlp, params: {hidden: [16], normalization: {observation.state: identity, action: identity}}}
algorithm: bc
online: {env: guided_point, label: expert, episodes_per_round: 2, updates_per_round: 20, warmup_episodes: 3, workers: 2}
training: {batch_size: 8, training_steps: 200, save_every: 20, log_every: 20, lr: 3e-3}
engine: {type: ray, params: {max_failures: 1}}
loggers: []
"""


def write_project(folder: Path) -> None:
    (folder / "points.py").write_text(POINTS)
    (folder / "x.yaml").write_text(CONFIG)


def in_driver(work: Callable[[], object], said: Path) -> None:
    sys.stdout = sys.stderr = said.open("a", buffering=1)
    work()


def drive(work: Callable[[], object], said: Path) -> None:
    """Run something in a process of its own: one that has Ray's threads must not fork."""
    codes = reap(spawn(lambda: in_driver(work, said)), LIMIT_S)
    assert codes == [0], said.read_text()


def wait_until(found: Callable[[], Any], what: str, limit_s: float = 280.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


def living(kind: str) -> list[dict[str, Any]]:
    """Return what Ray knows of this job's living actors of a class."""
    job = ray.get_runtime_context().get_job_id()
    table = untyped._private.state.actors().values()
    return [a for a in table if a["ActorClassName"] == kind and a["State"] == "ALIVE" and a["JobID"] == job]


def processes(kind: str) -> list[int]:
    return [actor["Pid"] for actor in living(kind)]


def kill_one(kind: str) -> int:
    (pid, *_) = wait_until(lambda: processes(kind), f"a {kind}")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in processes(kind), f"the end of a {kind}")
    return int(pid)


# -- the actors --------------------------------------------------------------------------------------------------------


def episode(number: int) -> dict[str, Any]:
    draw = np.random.default_rng(number)
    arrays = {name: draw.normal(size=(6, 2)).astype(np.float32) for name in ("observation.state", "action")}
    return {**arrays, "reward": np.zeros(6, np.float32), "terminated": True, "success": True}


def kill_replay(folder: Path) -> None:
    with cluster.quiet(), cluster.connected(None, 1, False):
        no_acknowledged_episode_is_lost(start_actors(folder).replay_buffer)


def the_missing_actor_is_named() -> None:
    with pytest.raises(ConfigError, match="no actor called 'replay_buffer' runs in the namespace"):
        find_actors()
    actors = start_actors(namespace="online_rl")
    assert find_actors().replay_buffer == actors.replay_buffer, "the namespace of the original is looked into too"
    untyped.kill(actors.policy_state_manager)
    wait_until(lambda: raises(find_actors), "the end of the manager")
    with pytest.raises(ConfigError, match=r"no actor called 'policy_state_manager' runs in .* and 'online_rl'"):
        find_actors()
    untyped.kill(actors.replay_buffer)


def raises(work: Callable[[], object]) -> bool:
    try:
        work()
    except ConfigError:
        return True
    return False


def weights_pass_by_reference_to_each_consumer(manager: Any) -> None:
    assert fetch_weights(manager) == (0, None), "there are none yet"
    arrays = {"w": np.arange(300_000, dtype=np.float32)}
    assert ray.get(manager.update_weights.remote([ray.put(arrays)])) == 1
    version, found = ray.get(manager.get_weights.remote())
    assert version == 1 and isinstance(found[0], ray.ObjectRef), "the manager has never held them"
    assert np.array_equal(ray.get(found[0])["w"], arrays["w"])
    assert ray.get(manager.get_weights.remote(1)) == (1, None), "a consumer that is up to date gets the version"
    states = [ray.get(manager.get_state.remote(name)) for name in ("robot", "labeller", "robot")]
    assert [state is None for state in states] == [False, False, True], "each consumer sees each version, once"
    assert ray.get(manager.update_state.remote({"head": {"module.w": arrays["w"][:3]}})) == 2
    version, nested = fetch_weights(manager, 1)
    assert version == 2 and nested is not None and nested["head"]["w"].tolist() == [0.0, 1.0, 2.0]


def no_acknowledged_episode_is_lost(replay: Any) -> None:
    """Kill the actor while episodes come in, twice; everything that was acknowledged is there, once."""
    acknowledged: list[int] = []

    def add() -> None:
        acknowledged.extend(ray.get(replay.add.remote(episode(number))) for number in range(60))

    adding = threading.Thread(target=add)
    adding.start()
    for least in (5, 25):
        wait_until(lambda least=least: len(acknowledged) >= least, "episodes")
        pid = ray.get(replay.__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
    adding.join(timeout=120)
    assert acknowledged == list(range(60)), "calls that Ray repeats count once"
    assert ray.get(replay.size.remote()) == 360
    rows = ray.get(replay.sample.remote(batch_size=20_000))["action"]
    assert {row.tobytes() for row in rows} == {row.tobytes() for n in range(60) for row in episode(n)["action"]}


@pytest.mark.nightly
def test_no_acknowledged_episode_is_lost_however_often_the_actor_is_killed(
    tmp_path: Path, on_ray_cluster: None
) -> None:
    drive(lambda: kill_replay(tmp_path / "replay"), tmp_path / "said")


# -- a run -------------------------------------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills processes of a run on its way, and notes which episodes were there before."""

    def __init__(self, run: Path, kinds: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.kinds = run, kinds
        self.killed: list[str] = []
        self.kept: set[str] = set()
        self.versions: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            wait_until(ray.is_initialized, "a connection")
            for number, kind in enumerate(self.kinds):
                wait_until(lambda number=number: len(self.episodes()) >= 4 + 4 * number, "episodes")
                self.kept |= self.episodes()
                kill_one(kind)
                self.killed.append(kind)
                if kind == "StateManager":
                    manager = find_actors().policy_state_manager
                    wait_until(lambda manager=manager: fetch_weights(manager)[1], "weights after the manager's end")
            enough = len(self.episodes()) + 8
            wait_until(lambda: len(self.episodes()) >= enough, "episodes after the last kill")
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error
        Path("stop").touch()

    def episodes(self) -> set[str]:
        return played(self.run_dir)


def train_and_kill(run: Path, kinds: tuple[str, ...], overrides: list[str]) -> None:
    from etude.cli.output import show_log
    from etude.config.build import build
    from etude.config.load import load

    show_log()
    killer = Killer(run, kinds)
    trainer = build(load("x.yaml", overrides), run=run)
    killer.start()
    result = trainer.fit()
    killer.join(timeout=10)
    assert killer.error is None and killer.killed == list(kinds), (killer.error, killer.killed)
    assert result.stopped == "told to" and killer.kept <= killer.episodes()


KINDS = ("RolloutWorker", "ReplayActor", "StateManager", "RayTrainWorker")


def test_every_process_of_a_run_may_be_killed(
    tmp_path: Path, on_ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    run = tmp_path / "run"
    longer = ["training.training_steps=1000000", "callbacks=[stop_when_told]"]
    drive(lambda: train_and_kill(run, KINDS, longer), tmp_path / "said")
    said = (tmp_path / "said").read_text()
    assert said.count("not bit for bit") == 1 and "rollout worker" in said and "another takes its place" in said, said
    assert "Ray has started the group again" in said and "resuming from" in said
    rows = read_rows(run / "metrics.jsonl")
    last = {name: value for row in rows for name, value in row.items()}
    wanted = ("success", "buffer_frames", "weights_age", "updates_per_env_step", "episodes")
    assert {f"train/online/{name}" for name in wanted} <= last.keys()
    assert last["train/online/episodes"] >= 20
    assert "online/success" in said and "online/weights_age" in said and "online/updates_per_env_step" in said
    assert CheckpointStore(run / "checkpoints").load("last").step == Run(run).status()["step"]


# -- inside any TorchTrainer -------------------------------------------------------------------------------------------

COMPONENTS = """\
seed: 0
model:
  component_config_paths: {info_embedder: info_embedder.yaml, action_decoder: action_decoder.yaml}
  component_optims:
    info_embedder: {type: adamw, params: {lr: 1e-3}}
    action_decoder: {type: adamw, params: {lr: 1e-3}}
data:
  datamodule:
    type: episodic_dataset_factory
    params:
      dataset_dir_l: demos
      task_config: {observations: {observation.state: state}, actions: action}
      chunk_size: 4
  batch_size: 4
train: {trainer: naive_flow_matching_policy_trainer, save_dir: run, save_every: 1, epoch: 2}
policy: {params: {n_action_steps: 1, actor: {params: {n_steps: 1}}}}
loggers: []
"""
EMBEDDER = """\
schema_version: 1
model:
  graph:
    inputs: {state: {shape: [B, 2]}}
    modules: {layers: {_type_: Linear, in_features: 2, out_features: 4}}
    nodes: [{name: condition, call: module:layers, args: [$state]}]
    outputs: [$condition]
"""
DECODER = """\
schema_version: 1
model:
  graph:
    inputs: {noisy: {shape: [B, 4, 2]}, time: {shape: [B]}, condition: {shape: [B, 4]}}
    modules: {layers: {_type_: Linear, in_features: 13, out_features: 8}}
    nodes:
      - {name: flat, call: op:flatten, args: [$noisy, 1]}
      - {name: step, call: op:unsqueeze, args: [$time, 1]}
      - {name: all, call: op:cat, args: [[$flat, $step, $condition], 1]}
      - {name: found, call: module:layers, args: [$all]}
      - {name: velocity, call: op:reshape, args: [$found, [-1, 4, 2]]}
    outputs: [$velocity]
"""


def write_components(folder: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (folder / "demos").mkdir()
    draw = np.random.default_rng(0)
    for number in range(2):
        with h5py.File(folder / "demos" / f"{number}.hdf5", "w") as file:
            for name in ("state", "action"):
                file[name] = draw.normal(size=(6, 2)).astype(np.float32)
    for name, text in {"x": COMPONENTS, "info_embedder": EMBEDDER, "action_decoder": DECODER}.items():
        (folder / f"{name}.yaml").write_text(text)


OURS = """\
plugins: [points.py]
policy: {type: mlp, params: {hidden: [16], normalization: {observation.state: identity, action: identity}}}
algorithm: bc
online: {env: guided_point, label: expert, episodes_per_round: 2, updates_per_round: 4, start_after: 0}
training: {batch_size: 8, training_steps: 8, save_every: 4, log_every: 1}
run: {root: ., name: ours}
loggers: []
"""


def run_inside(folder: Path, workers: int, name: str, config: dict[str, Any]) -> None:
    """Train what a file describes in a job of Ray Train that is nobody's but the test's."""
    import ray.train.torch

    from etude.engines.ray import train_func

    trainer: Any = ray.train.torch.TorchTrainer(
        train_func, train_loop_config=config, scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder / "ray")),
    )  # fmt: skip
    trainer.fit()


def point_episode(number: int) -> dict[str, Any]:
    """What somebody else has played of the points."""
    draw = np.random.default_rng(number)
    shapes = {"observation.state": (6, 4), "action": (6, 2)}
    arrays = {name: draw.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    return {**arrays, "reward": np.zeros(6, np.float32), "terminated": True, "success": True}


def an_experiment_of_ours_trains(folder: Path) -> None:
    """Nothing but what others played: as many episodes as its rounds ask for, and the actors of another namespace."""
    actors = start_actors(namespace="ours")
    ray.get([actors.replay_buffer.add.remote(point_episode(number)) for number in range(4)])
    run_inside(folder, 1, "ours", {"config_path": str(folder / "ours.yaml"), "namespace": "ours"})
    rows = [row for row in read_rows(folder / "ours/metrics.jsonl") if "train/loss" in row]
    assert rows[-1]["step"] == 8 and rows[-1]["train/online/episodes"] == 4
    saved = CheckpointStore(folder / "ours/checkpoints").load("last").tree["policy"]
    _, weights = fetch_weights(actors.policy_state_manager)
    assert weights is not None and all(np.array_equal(weights[name], saved[name].numpy()) for name in saved)
    actors.end()


def a_buffer_that_is_too_small_is_not_waited_for() -> None:
    """Refuse one that cannot hold the rows of a batch; begin where one that can is full before it has two batches."""
    from etude import Trainer
    from etude.engines.ray.online import ActorData, RaySource
    from etude.types.protocols import Place

    place = Place(batch_size=8)
    rows = {"observation.state": np.zeros((9, 2), np.float32), "action": np.zeros((9, 2), np.float32)}
    for frames, is_refused in ((3, True), (13, False)):
        actors = start_actors(namespace=f"small-{frames}", max_frames=frames)
        source = RaySource(actors)
        trainer = Trainer(MLP(hidden=[4]), ActorData(Windows(rows, [9], {"action": [0]}), source), run=False)
        trainer.data.open(place)
        if is_refused:
            with pytest.raises(ConfigError, match="holds at most 3 frames, less than the 4 rows of a batch"):
                trainer.data.attach(trainer)
            actors.end()
            continue
        trainer.data.attach(trainer)
        for number, is_enough in enumerate((False, False, True)):  # the third makes the first leave
            ray.get(actors.replay_buffer.add.remote(episode(number)))
            assert source._has_enough(0) is is_enough
        actors.end()


def train_inside(folder: Path, workers: int) -> None:
    with cluster.quiet(), cluster.connected(None, workers, False):
        the_missing_actor_is_named()
        actors = start_actors(namespace="mine")
        weights_pass_by_reference_to_each_consumer(actors.policy_state_manager)
        ray.get([actors.replay_buffer.add.remote(episode(number)) for number in range(4)])
        a_buffer_that_is_too_small_is_not_waited_for()
        config = {"config_path": str(folder / "x.yaml"), "namespace": "mine", "publish_every": 1}
        run_inside(folder, workers, "job", config)
        version, weights = fetch_weights(actors.policy_state_manager)
        assert version > 2 and weights is not None and weights.keys() == {"info_embedder", "action_decoder"}
        saved = CheckpointStore(folder / "run/checkpoints").load("last").tree["policy"]
        found = {f"{part}.{name}": value for part, inside in weights.items() for name, value in inside.items()}
        assert found.keys() == saved.keys(), "no prefix of DDP"
        assert all(np.array_equal(found[name], saved[name].numpy()) for name in found), "the last ones are published"
        an_experiment_of_ours_trains(folder)
    shares = [row["train/online/share"] for row in read_rows(folder / "run/metrics.jsonl") if "train/loss" in row]
    assert shares and set(shares) == {0.5}, "what was played is half of each batch"


def test_train_func_trains_an_experiment_of_either_kind_inside_a_torch_trainer(
    tmp_path: Path, on_ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_components(tmp_path)
    (tmp_path / "points.py").write_text(POINTS)
    (tmp_path / "ours.yaml").write_text(OURS)
    drive(lambda: train_inside(tmp_path, workers=2), tmp_path / "said")


# -- the command, and several hosts ------------------------------------------------------------------------------------


def played(run: Path) -> set[str]:
    return {path.name for path in (run / "replay").glob("*.safetensors")}


@pytest.mark.nightly
def test_a_command_that_is_interrupted_ends_all_it_started_and_the_next_one_goes_on(
    tmp_path: Path, child_env: dict[str, str]
) -> None:
    write_project(tmp_path)
    run = tmp_path / "runs/here"
    command = [sys.executable, "-W", "error", "-m", "etude", "train", "x.yaml", "run.name=here"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": child_env, "stdout": subprocess.DEVNULL, "text": True}
    first = subprocess.Popen([*command, "training.training_steps=100000"], stderr=subprocess.PIPE, **options)
    wait_for_step(run / "checkpoints", 20, LIMIT_S)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 130, said
    assert wait_until_gone(tmp_path, 60.0) == []
    before, step = played(run), Run(run).status()["step"]
    assert before and CheckpointStore(run / "checkpoints").load("last").step == step
    words = [f"training.training_steps={step + 40}", "training.log_every=20"]
    second = subprocess.run([*command, *words], stderr=subprocess.PIPE, timeout=LIMIT_S, check=False, **options)
    assert second.returncode == 0, second.stderr
    assert f"at step {step}" in second.stderr and before < played(run), second.stderr
    assert re.search(r"online/success \S+.*online/weights_age", second.stderr), second.stderr


class Idle:
    """Stands for a rollout worker that holds its CPU."""

    def __init__(self, *told: Any) -> None:
        self.told = told

    def run(self) -> None:
        time.sleep(LIMIT_S)


def trainers_that_wait_get_a_place() -> None:
    """Fill a cluster with rollout workers, as the loss of a node does, and ask for a place as Ray Train does."""
    from ray.util.placement_group import placement_group

    from etude.engines.ray import crew as module

    module.RolloutWorker = Idle  # type: ignore[assignment,misc]
    module.LOOK_EVERY_S, module.WAITS_FOR_S = 0.0, 0.5
    with cluster.quiet(), cluster.connected("local", 2, False):
        crew = module.Crew(2, None, start_actors(), None, {})
        wait_until(lambda: len(living("Idle")) == 2, "both workers")
        assert crew.watch() is None and len(crew._running) == 2, "nobody waits"
        first: Any = placement_group([{"CPU": 1.0}])
        wait_until(lambda: crew.watch() or len(crew._running) == 1, "a worker that gives way")
        ray.get(first.ready(), timeout=LIMIT_S)
        time.sleep(2 * module.WAITS_FOR_S)
        assert crew.watch() is None and len(crew._running) == 1, "one was enough"
        placement_group([{"CPU": 1.0}])
        with pytest.raises(RankError, match="no room for the trainers and a rollout worker; add a node"):
            raise wait_until(crew.watch, "the end")


@pytest.mark.nightly
def test_rollout_workers_give_way_to_trainers_that_find_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    drive(trainers_that_wait_get_a_place, tmp_path / "said")


def lose_a_node(run: Path) -> None:
    from ray.cluster_utils import Cluster

    from etude.cli.output import show_log
    from etude.config.build import build
    from etude.config.load import load

    show_log()
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    other = nodes.add_node(num_cpus=1)  # without it there is a CPU too few
    os.environ["RAY_ADDRESS"] = nodes.address
    lost: list[Any] = []
    stays: list[bool] = []

    def lose() -> None:
        wait_until(lambda: len(played(run)) >= 6 and len(processes("RolloutWorker")) == 2, "episodes")
        lost.append(played(run))
        on = {kind: living(kind)[0]["Address"]["NodeID"] for kind in ("Mailbox", "ReplayActor", "StateManager")}
        stays.append(set(on.values()) == {ray.get_runtime_context().get_node_id()})
        nodes.remove_node(other)

    losing = threading.Thread(target=lose, daemon=True)
    losing.start()
    try:
        result = build(load("x.yaml", ["engine.params.max_failures=3"]), run=run).fit()
    finally:
        nodes.shutdown()
    assert result.steps == 200 and len(lost) == 1 and lost[0] < played(run)
    assert stays == [True], "what there is one of is on the node of the driver"


@pytest.mark.nightly
def test_a_run_on_two_nodes_survives_the_loss_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    write_project(tmp_path)
    drive(lambda: lose_a_node(tmp_path / "run"), tmp_path / "said")
