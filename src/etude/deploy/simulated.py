"""A simulated robot: any environment in a process of its own, which goes on by its own clock, as an arm does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from etude.deploy.robot import Array
from etude.deploy.wire import pack, unpack
from etude.errors import ConfigError, RobotError
from etude.plugins import loaded_plugins
from etude.simulation.environments import split_name
from etude.types import DataSpec, Feature

_POSITIONS = ("aloha", "pusht")
"""Environments whose actions are positions: to repeat one is to stay."""
_LEAVE_S = 2.0


class SimulatedRobot:
    """An environment that runs in real time: without a command in time it repeats the last one, as a real arm would.

    Steps lie halfway between commands that come at its own rate. It stands still until its first command.

    Args:
        env: The environment, such as metaworld/pick-place, pusht or gym:Pendulum-v1.
        env_options: Parameters of the environment.
        rate_hz: Steps in a second; the environment's own rate unless given.
        latency_ms: How long observations take to arrive.
        jitter_ms: Up to how much longer some of them take.
        drop: Share of the observations that never arrive.
        freeze_at: Step from which no new observation comes.
        hang_at: Step at which its process stops answering.
        die_at: Step at which its process dies.
        start_s: Seconds that its process may take to start, or to reset.
    """

    def __init__(
        self,
        env: str,
        env_options: dict[str, Any] | None = None,
        rate_hz: float | None = None,
        latency_ms: float = 0.0,
        jitter_ms: float = 0.0,
        drop: float = 0.0,
        freeze_at: int | None = None,
        hang_at: int | None = None,
        die_at: int | None = None,
        start_s: float = 120.0,
    ) -> None:
        if rate_hz is not None and not rate_hz > 0:
            raise ConfigError(f"simulated: rate_hz must be above 0, got {rate_hz}")
        if latency_ms < 0 or jitter_ms < 0 or not 0 <= drop < 1:
            raise ConfigError("simulated: latency_ms and jitter_ms are from 0, drop is from 0 to below 1")
        self.env, self.name = str(env), f"simulated {env}"
        self._options, self._rate_hz, self._start_s = dict(env_options or {}), rate_hz, start_s
        self._latency_s, self._jitter_s, self._drop = latency_ms / 1e3, jitter_ms / 1e3, drop
        self._faults = {"freeze_at": freeze_at, "hang_at": hang_at, "die_at": die_at}
        self._draw = random.Random(0)
        self.hold = "repeat" if split_name(self.env)[0] in _POSITIONS else "zero"
        self.task, self.rate_hz, self.spec = "", rate_hz or 0.0, DataSpec({})
        self.is_done, self.success, self.reward = False, None, 0.0
        self.age_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._arrived = threading.Condition()
        self._coming: deque[tuple[float, dict[str, Any]]] = deque()
        self._newest: dict[str, Any] | None = None
        self._episode = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self._lost = ""

    # ---- what a robot does -------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Start the process and make the environment in it."""
        here, there = socket.socketpair()
        settings = {
            "env": self.env, "options": self._options, "rate_hz": self._rate_hz, "plugins": loaded_plugins(),
            "faults": self._faults, "parent": os.getpid(), "path": [entry for entry in sys.path if entry],
        }  # fmt: skip
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "etude.deploy.simulated_process", str(there.fileno()), json.dumps(settings)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._pipe = Connection(here.detach())
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="simulated robot", daemon=True).start()
        hello = self._wait_for("hello")
        self.task, self.rate_hz = str(hello["task"]), float(hello["rate_hz"])
        features = {
            name: Feature(tuple(one["shape"]), one["dtype"], one["role"], one["classes"], _names(one["names"]))
            for name, one in hello["features"].items()
        }
        self.spec = DataSpec(features, self.rate_hz)

    @property
    def pid(self) -> int | None:
        """The process of the robot."""
        return None if self._process is None else self._process.pid

    def reset(self, seed: int) -> None:
        """Begin the episode of a seed."""
        with self._arrived:
            self._episode += 1
            self._coming.clear()
            self._newest, self.is_done, self.success = None, False, None
            self._answers.pop("reset", None)
        self._send({"type": "reset", "seed": seed, "episode": self._episode})
        self._wait_for("reset")

    def observe(self) -> dict[str, Array]:
        """Return the newest observation that has arrived; wait for the first of an episode."""
        limit_s = time.monotonic() + self._start_s
        with self._arrived:
            while True:
                now = time.monotonic()
                while self._coming and self._coming[0][0] <= now:
                    self._newest = self._coming.popleft()[1]
                if self._lost:
                    raise RobotError(self._lost)
                if self._newest is not None:
                    break
                if now >= limit_s:
                    raise RobotError(f"{self.name} shows nothing after {self._start_s:g} s")
                self._arrived.wait(min(0.05, limit_s - now))
            seen = self._newest
        self.age_s = time.monotonic() - seen["time_s"]
        self.is_done, self.success, self.reward = seen["is_done"], seen["success"], seen["reward"]
        return dict(seen["observation"])

    def act(self, action: Array) -> None:
        """Send a command."""
        self._send({"type": "act", "action": np.asarray(action)})

    def stop(self) -> None:
        """Stand still; a process that is gone stands still already."""
        if self._process is None or self._lost:
            return
        with self._arrived:
            self._answers.pop("stopped", None)
        with contextlib.suppress(RobotError):
            self._send({"type": "stop"})
        try:
            self._wait_for("stopped", within_s=_LEAVE_S)
        except RobotError:
            if self._is_gone():
                return
            self._end()  # it hangs; a simulation without its process does not move
            raise

    def close(self) -> None:
        """End the process."""
        self._end()

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(pack({"type": "close"}))
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_LEAVE_S)

    # ---- the way there -----------------------------------------------------------------------------------------------

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._lost or self._process is None:
            raise RobotError(self._lost or f"{self.name} is not connected")
        try:
            with self._sending:
                self._pipe.send_bytes(pack(message))
        except OSError:
            raise RobotError(self._farewell()) from None

    def _wait_for(self, kind: str, within_s: float | None = None) -> dict[str, Any]:
        within_s = self._start_s if within_s is None else within_s
        limit_s = time.monotonic() + within_s
        with self._arrived:
            while kind not in self._answers:
                if self._lost:
                    raise RobotError(self._lost)
                left_s = limit_s - time.monotonic()
                if left_s <= 0:
                    raise RobotError(f"{self.name} does not answer: no {kind!r} within {within_s:g} s")
                self._arrived.wait(left_s)
            return self._answers.pop(kind)

    def _listen(self) -> None:
        lost = ""
        try:
            while True:
                message = unpack(self._pipe.recv_bytes())
                if message["type"] == "failed":
                    lost = f"{self.name}: {message['message']}"
                with self._arrived:
                    self._take(message)
                    self._arrived.notify_all()
        except (OSError, EOFError):
            pass
        with self._arrived:
            self._lost = lost or self._farewell()
            self._arrived.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] != "seen":
            self._answers[message["type"]] = message
            return
        if message["episode"] != self._episode or (self._newest is not None and self._draw.random() < self._drop):
            return
        at_s = message["time_s"] + self._latency_s + self._draw.uniform(0.0, self._jitter_s)
        last_s = self._coming[-1][0] if self._coming else -math.inf
        self._coming.append((max(at_s, last_s), message))

    def _is_gone(self) -> bool:
        return bool(self._lost)

    def _farewell(self) -> str:
        process = self._process
        if process is None:
            return f"{self.name} is not connected"
        try:
            code = process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} ended the connection"
        return f"the process of {self.name} ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _names(names: Any) -> tuple[str, ...] | None:
    return tuple(names) if names else None
