"""Policies on simulated robots in processes of their own: recorded, interrupted, killed and hanging."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack")
pytest.importorskip("gymnasium")
pytest.importorskip("pyarrow")

from etude.data.lerobot.reader import LeRobotDataset
from etude.deploy import ActionLimits, ControlSettings, RobotSession, SimulatedRobot
from etude.errors import ConfigError, Interrupted, RobotError
from etude.policies import MLP, PolicyModule
from tests.unit.simulation.conftest import PENDULUM, build

pytestmark = pytest.mark.slow  # each robot is a process that imports torch
# A busy machine must change no outcome: a step of 50 ms, and minutes for what is not about time.
PATIENT: dict[str, Any] = {"rate_hz": 20.0, "watchdog_s": 60.0, "max_misses": 1000, "max_age_s": 60.0, "hold": "zero"}


class KeptRobot(SimulatedRobot):
    """A robot whose process serves several tests."""

    def connect(self) -> None:
        if self.pid is None:
            super().connect()

    def close(self) -> None:
        """Leave it to the fixture."""


class StillRobot:
    """A robot that does nothing."""

    def observe(self) -> dict[str, np.ndarray]:
        return {"observation.state": np.zeros(3, np.float32)}

    def act(self, action: np.ndarray) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def arm() -> Iterator[KeptRobot]:
    robot = KeptRobot(PENDULUM, {"render": False, "max_steps": 30}, rate_hz=20.0)
    yield robot
    SimulatedRobot.close(robot)


@pytest.fixture
def policy() -> PolicyModule:
    return build(MLP(hidden=[16], chunk_size=4, n_action_steps=1))


def run(policy: PolicyModule, robot: Any, **options: Any) -> RobotSession:
    settings = ControlSettings(**{**PATIENT, **options.pop("settings", {})})
    session = RobotSession(policy, robot, settings, **{"steps": 12, "lead": 0, **options})
    session.run()
    return session


def test_what_is_recorded_is_what_the_policy_saw_and_did(policy: PolicyModule, arm: KeptRobot, tmp_path: Path) -> None:
    session = run(policy, arm, episodes=2, record=tmp_path / "trial", limits=ActionLimits(high=0.02))
    told = session.to_dict()
    assert told["stopped"] is None
    assert [episode["ended"] for episode in told["episodes"]] == ["all steps taken"] * 2
    dataset = LeRobotDataset(tmp_path / "trial")
    frames = [dataset[index] for index in range(len(dataset))]
    assert 0 < told["recorded"]["frames"] == len(frames) <= sum(episode["steps"] for episode in told["episodes"])
    for frame in frames:
        wanted = policy.predict_action_chunk({"observation.state": frame["observation.state"][None]})[0, 0]
        if not frame["control.missed"]:
            torch.testing.assert_close(frame["control.planned"], wanted, atol=1e-6, rtol=0)
        assert float(frame["action"]) <= 0.02 + 1e-6
        assert bool(frame["control.clamped"]) == bool(float(frame["control.planned"]) > 0.02)
    starts = [frame["observation.state"] for frame in frames if frame["frame_index"] == 0]
    assert not torch.equal(*starts), "each episode has its seed"


def test_a_recording_can_be_trained_on(policy: PolicyModule, arm: KeptRobot, tmp_path: Path) -> None:
    from etude import Trainer, TrainingConfiguration
    from etude.algorithms import BehaviorCloning
    from etude.data import LeRobotDataModule

    run(policy, arm, record=tmp_path / "trial")
    data = LeRobotDataModule(root=tmp_path / "trial")
    learner = MLP(hidden=[8], chunk_size=2)
    config = TrainingConfiguration(training_steps=2, batch_size=4)
    Trainer(learner, data, BehaviorCloning(), config=config, run=tmp_path / "run").fit()
    assert sorted(learner.spec.features) == ["action", "observation.state", "task_index"]


def test_an_interruption_stops_the_robot_and_keeps_the_recording(
    policy: PolicyModule, arm: KeptRobot, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(session: RobotSession, tally: Any) -> None:
        if tally.steps == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        run(policy, arm, steps=1000, episodes=3, record=tmp_path / "trial", on_step=interrupt)
    assert stopped.value.code == 130
    assert "simulated gym:Pendulum-v1 was stopped" in stopped.value.message
    before = len(LeRobotDataset(tmp_path / "trial"))
    assert 0 < before <= 5, "a step at which the robot had no time for a command is no frame"
    assert signal.getsignal(signal.SIGINT) is handler
    run(policy, arm, steps=3, record=tmp_path / "trial")
    assert len(LeRobotDataset(tmp_path / "trial")) > before, "the robot can be used again, and the dataset goes on"


def test_a_robot_says_when_its_episode_is_done(policy: PolicyModule, arm: KeptRobot) -> None:
    session = run(policy, arm, steps=None)
    assert session.tallies[0].ended == "done"
    assert session.tallies[0].success is None


def test_a_robot_that_is_killed_ends_the_session_and_keeps_the_recording(policy: PolicyModule, tmp_path: Path) -> None:
    robot = SimulatedRobot(PENDULUM, {"render": False}, rate_hz=20.0)

    def kill(session: RobotSession, tally: Any) -> None:
        if tally.steps == 5:
            assert robot.pid is not None
            os.kill(robot.pid, signal.SIGKILL)

    with pytest.raises(RobotError, match=r"^the process of simulated gym:Pendulum-v1 ended \(signal 9\)$") as died:
        run(policy, robot, steps=10_000, record=tmp_path / "trial", on_step=kill)
    assert died.value.exit_code == 13
    assert len(LeRobotDataset(tmp_path / "trial"))
    robot.stop()


def test_a_robot_that_hangs_is_noticed_and_its_process_ended(policy: PolicyModule, tmp_path: Path) -> None:
    robot = SimulatedRobot(PENDULUM, {"render": False}, rate_hz=20.0, hang_at=3)
    with pytest.raises(RobotError, match=r"no new observation for 4 s; stop\(\) failed: .* does not answer"):
        run(
            policy, robot, steps=10_000, record=tmp_path / "trial",
            settings={"watchdog_s": 4.0, "max_age_s": 0.5, "rate_hz": 10.0},
        )  # fmt: skip
    assert len(LeRobotDataset(tmp_path / "trial"))
    assert robot._process is not None and robot._process.poll() is not None


@pytest.mark.parametrize("hangs", [False, True])
def test_a_robot_that_cannot_be_switched_off_is_told_of(policy: PolicyModule, hangs: bool) -> None:
    gone = threading.Event()

    class Stuck(StillRobot):
        def close(self) -> None:
            if not hangs:
                raise OSError("port is gone")
            gone.wait(60)

    says = (
        "close.. did not return within 0.2 s; its motors may still be on" if hangs else "close.. failed: OSError: port"
    )
    with pytest.raises(RobotError, match=says):
        run(policy, Stuck(), settings={"stop_s": 0.1})
    with pytest.raises(ConfigError, match=f"lies above high.*; {says}"):
        run(policy, Stuck(), settings={"stop_s": 0.1}, limits=ActionLimits(low=1.0, high=0.0))
    gone.set()


def test_an_environment_that_cannot_be_made_says_why(policy: PolicyModule) -> None:
    with pytest.raises(RobotError, match="simulated gym:Nothing-v9: Gymnasium cannot make the environment"):
        run(policy, SimulatedRobot("gym:Nothing-v9"))


def test_observations_arrive_late_or_not_at_all_as_told() -> None:
    robot = SimulatedRobot(PENDULUM, latency_ms=50.0, jitter_ms=10.0, drop=0.5)
    robot._episode = 1
    seen = {"type": "seen", "episode": 1, "time_s": 100.0, "observation": {}}
    for number in range(200):
        robot._take({**seen, "time_s": 100.0 + number})
        robot._newest = seen
    delays = [at_s - message["time_s"] for at_s, message in robot._coming]
    assert 60 < len(delays) < 140
    assert 0.05 <= min(delays) < max(delays) <= 0.06 + 1e-9
    robot._take({**seen, "episode": 2})
    assert all(message["episode"] == 1 for _, message in robot._coming), "of another episode"


@pytest.mark.parametrize(
    "robot, options, match",
    [
        (lambda: SimulatedRobot(PENDULUM, drop=1.0), {}, "drop is from 0 to below 1"),
        (lambda: SimulatedRobot(PENDULUM, rate_hz=0.0), {}, "rate_hz must be above 0"),
        (StillRobot, {"steps": None}, "StillRobot does not say when an episode is done .* --steps or --seconds"),
        (StillRobot, {"limits": ActionLimits(high=[1.0, 2.0])}, r"high has \[1.0, 2.0\]"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    policy: PolicyModule, robot: Any, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        run(policy, robot(), **options)
