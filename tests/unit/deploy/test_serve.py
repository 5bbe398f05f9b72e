"""A served policy acts as the module does, for each robot by itself, whatever strangers send."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from etude.deploy import PolicyClient, PolicyServer
from etude.deploy.wire import ServeError, pack, unpack
from etude.errors import ConfigError
from etude.policies import ACT, MLP, FlowMatching, PolicyModule
from tests.unit.deploy.serving import act_alone, built, make_spec, see, serving

SMALL_ACT = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
pytestmark = pytest.mark.slow  # each server is a process that imports torch


def save_policy(folder: Path) -> PolicyModule:
    policy = built(ACT(chunk_size=6, n_action_steps=4, **SMALL_ACT), make_spec(camera=0, tasks=3))
    policy.save_pretrained(folder / "policy")
    return policy


@pytest.fixture
def served(tmp_path: Path) -> PolicyModule:
    return save_policy(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PolicyModule, str]]:
    """A policy, and the address of one server of it, which must outlive whatever tests send there."""
    folder = tmp_path_factory.mktemp("shared")
    policy = save_policy(folder)
    with serving(folder / "policy", {**os.environ, "HOME": str(folder), "PYTHONUNBUFFERED": "1"}) as (url, _):
        yield policy, url


@pytest.mark.parametrize(
    "policy",
    [
        ACT(chunk_size=6, n_action_steps=4, **SMALL_ACT),
        ACT(chunk_size=6, temporal_ensemble_coeff=0.01, **SMALL_ACT),
        MLP(hidden=[16], chunk_size=5, n_obs_steps=2, latency_steps=1),
        FlowMatching(horizon=8, n_obs_steps=2, n_action_steps=3, down_dims=[16], num_inference_steps=3),
    ],
    ids=["queue", "ensemble", "history and latency", "noise"],
)
def test_served_actions_are_the_modules(policy: PolicyModule, tmp_path: Path, child_env: dict[str, str]) -> None:
    spec = make_spec(tasks=3)
    policy = built(policy, spec)
    policy.save_pretrained(tmp_path / "policy")
    episodes = [see(spec, 15, seed) for seed in (0, 1)]
    expected = [act_alone(policy, episode, seed=7) for episode in episodes]
    with serving(tmp_path / "policy", child_env) as (url, process), PolicyClient(url) as robot:
        for episode, actions in zip(episodes, expected, strict=True):
            robot.reset(seed=7)
            served = np.stack([robot.act(seen) for seen in episode])
            np.testing.assert_allclose(served, actions, rtol=0, atol=1e-6)
        assert 0 < robot.latency_ms < robot.round_trip_ms
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert re.search(r"30 actions: p50 [\d.]+ ms, p95 [\d.]+ ms, max [\d.]+ ms; \d+ chunks: p50", out)


def test_images_travel_as_cameras_give_them(tmp_path: Path, child_env: dict[str, str]) -> None:
    spec = make_spec(camera=32)
    policy = built(MLP(hidden=[8], chunk_size=2, image_backbone="resnet10_small"), spec)
    policy.save_pretrained(tmp_path / "policy")
    episode = see(spec, 4)
    with serving(tmp_path / "policy", child_env) as (url, _), PolicyClient(url) as robot:
        served = np.stack([robot.act(seen) for seen in episode])
    np.testing.assert_allclose(served, act_alone(policy, episode), rtol=0, atol=1e-6)


def test_two_robots_at_once_are_independent(shared: tuple[PolicyModule, str]) -> None:
    served, url = shared
    first, second = see(served.spec, 12, 1), see(served.spec, 12, 2)
    with PolicyClient(url) as one:
        actions: list[list[np.ndarray]] = [[one.act(first[0])], []]
        with PolicyClient(url) as two:
            for step in range(11):
                actions[1].append(two.act(second[step]))
                actions[0].append(one.act(first[step + 1]))
                if step == 5:
                    two.reset()
    np.testing.assert_allclose(actions[0], act_alone(served, first), rtol=0, atol=1e-6)
    np.testing.assert_allclose(actions[1][:6], act_alone(served, second[:6]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(actions[1][6:], act_alone(served, second[6:11]), rtol=0, atol=1e-6)


def test_whatever_comes_gets_an_answer_and_the_next_robot_is_served(shared: tuple[PolicyModule, str]) -> None:
    served, url = shared
    (good,) = see(served.spec, 1)
    wrong = {
        "observation lacks observation.state": {"task_index": 1},
        r"shape \(4,\), this policy sees \(5,\)": {**good, "observation.state": np.zeros(4, np.float32)},
        "not finite": {**good, "observation.state": np.full(5, np.nan)},
        "tasks 0 to 2": {**good, "task_index": np.asarray(3)},
        "not an array": {**good, "observation.state": "five"},
        "a map from feature names": None,
    }
    with connect(url, proxy=None) as raw:
        assert unpack(raw.recv())["type"] == "hello"
        for complaint, observation in wrong.items():
            raw.send(pack({"type": "act", "observation": observation}))
            reply = unpack(raw.recv())
            assert reply["type"] == "error"
            assert re.search(complaint, reply["message"]), reply["message"]
        for frame in (b"\xc1\xff", b"", "text", pack({"type": "dance"}), pack({"type": "reset", "seed": "x"})):
            raw.send(frame)
            assert unpack(raw.recv())["type"] == "error"
        raw.send(pack({"type": "act", "observation": good}))
        assert unpack(raw.recv())["type"] == "action"
    with connect(url, proxy=None) as raw:
        raw.recv()
        raw.send(b"x" * (1 << 21))
        with pytest.raises(ConnectionClosed, match="1009"):
            raw.recv()
    with PolicyClient(url) as robot:
        with pytest.raises(ServeError, match="refused: the observation lacks"):
            robot.act({})
        assert robot.act(good).shape == (3,)
        with pytest.raises(ServeError, match="ended the connection: 1009"):
            robot.act({**good, "extra": np.zeros(1 << 19)})


def test_pages_in_a_browser_are_not_let_in(shared: tuple[PolicyModule, str]) -> None:
    from websockets.exceptions import InvalidStatus

    with pytest.raises(InvalidStatus, match="403"):
        connect(shared[1], proxy=None, origin="http://evil.example").__enter__()  # type: ignore[arg-type]


def test_a_key_is_wanted_and_never_shown(served: PolicyModule, tmp_path: Path, child_env: dict[str, str]) -> None:
    (good,) = see(served.spec, 1)
    env = {**child_env, "ETUDE_POLICY_KEY": "correct-horse"}
    with serving(tmp_path / "policy", env, "--host", "0.0.0.0") as (url, process):
        url = url.replace("0.0.0.0", "127.0.0.1")
        for key in (None, "wrong-horse"):
            with pytest.raises(ServeError, match="wants its key"):
                PolicyClient(url, key=key)
        with PolicyClient(url, key="correct-horse") as robot:
            assert robot.act(good).shape == (3,)
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert "correct-horse" not in out + err


def test_latency_is_printed_meanwhile(served: PolicyModule, tmp_path: Path, child_env: dict[str, str]) -> None:
    program = (
        "import sys\nfrom etude.deploy import PolicyServer\nfrom etude.policies import PolicyModule\n"
        "PolicyServer(PolicyModule.from_pretrained(sys.argv[1]), port=0, report_interval_s=0.02,\n"
        "    say=lambda text: print(text, flush=True)).run()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "policy")]
    with subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with PolicyClient(process.stdout.readline().split()[-1]) as robot:
            robot.act(see(served.spec, 1)[0])
            assert re.match(r"1 actions: p50 .*; 1 chunks: .*; 1 connected", process.stdout.readline())
        process.terminate()


def test_other_addresses_than_loopback_need_a_key() -> None:
    policy = built(MLP(hidden=[4]), make_spec())
    for host in ("0.0.0.0", "::", "192.168.1.2", "robot.local", ""):
        with pytest.raises(ServeError, match="give a key"):
            PolicyServer(policy, host=host)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.1"):
        PolicyServer(policy, host=host)
    with pytest.raises(ServeError, match="8 or more"):
        PolicyServer(policy, host="0.0.0.0", key="short")


def test_what_cannot_be_served_is_said() -> None:
    from torch import nn

    with pytest.raises(ConfigError, match="Linear cannot be served"):
        PolicyServer(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_an_absent_server_is_one_sentence() -> None:
    with pytest.raises(ServeError, match=r"ws://127\.0\.0\.1:9 cannot be reached.*etude serve-policy"):
        PolicyClient("ws://127.0.0.1:9")
    with pytest.raises(ServeError, match="write ws://HOST:PORT"):
        PolicyClient("127.0.0.1:9")


def test_the_client_needs_no_torch() -> None:
    program = (
        "import sys\nfrom etude.deploy import PolicyClient\nfrom etude.deploy.wire import ServeError\n"
        "try:\n    PolicyClient('ws://127.0.0.1:9')\nexcept ServeError:\n    pass\n"
        "assert not {'torch', 'pydantic', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
