"""The process of a simulated robot: `python -m etude.deploy.simulated_process FD SETTINGS`, run by `SimulatedRobot`.

It steps by its own clock with the last command it has, and shows what it sees after each step, command or not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from etude.deploy.wire import WireError, pack, unpack
from etude.errors import EtudeError, one_line
from etude.registry import load_plugins


class RealTimeEnvironment:
    """An environment at its own pace.

    Args:
        pipe: The way to the other side.
        settings: What `SimulatedRobot` wrote.
    """

    def __init__(self, pipe: Connection, settings: dict[str, Any]) -> None:
        from etude.simulation.environments import make_environment

        self._pipe, self._parent, self._faults = pipe, settings["parent"], settings["faults"]
        self._env = make_environment(settings["env"], **settings["options"])
        rate_hz = float(settings["rate_hz"] or self._env.fps)
        self._period_s = 1.0 / rate_hz
        self._episode = self._steps = 0
        self._command: np.ndarray | None = None
        self._next_s = time.monotonic()
        self._seen: dict[str, np.ndarray] | None = None
        self._seen_s, self._is_done, self._reward = 0.0, False, 0.0
        self._success: bool | None = None
        features = {
            name: {
                "shape": list(one.shape), "dtype": one.dtype, "role": one.role, "classes": one.classes,
                "names": list(one.names or ()),
            }
            for name, one in self._env.spec.features.items()
        }  # fmt: skip
        self._send({"type": "hello", "task": self._env.task, "rate_hz": rate_hz, "features": features})

    def run(self) -> None:
        """Go on until the other side says so, or is gone."""
        while True:
            left_s = self._next_s - time.monotonic()
            if self._pipe.poll(max(0.0, left_s)):
                if not self._obey(unpack(self._pipe.recv_bytes())):
                    return
            elif time.monotonic() >= self._next_s:
                # The next step lies a period on; steps that were not made in time are not made up for.
                self._next_s = max(self._next_s + self._period_s, time.monotonic())
                self._step()
                self._show()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _obey(self, message: dict[str, Any]) -> bool:
        kind = message["type"]
        if kind == "reset":
            self._episode, self._command, self._steps = message["episode"], None, 0
            self._seen, self._is_done, self._success, self._reward = self._env.reset(message["seed"]), False, None, 0.0
            self._seen_s = time.monotonic()
            self._send({"type": "reset"})
            self._show()
        elif kind == "act":
            if self._command is None:  # halfway between commands: neither early nor late ones are lost or used twice
                self._next_s = time.monotonic() + 0.5 * self._period_s
            self._command = message["action"]
        elif kind == "stop":
            self._command = None
            self._send({"type": "stopped"})
        return bool(kind != "close")

    def _step(self) -> None:
        if self._command is None or self._is_done or self._seen is None:
            self._seen_s = time.monotonic()  # it stands still, and sees that
            return
        self._steps += 1
        if self._steps == self._faults["die_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps == self._faults["hang_at"]:
            while os.getppid() == self._parent:
                time.sleep(0.1)
            sys.exit(1)
        outcome = self._env.step(self._command)
        self._reward += float(outcome.reward)
        if outcome.success is not None:
            self._success = bool(self._success or outcome.success)
        self._is_done = bool(outcome.done) or self._steps >= self._env.max_steps
        self._seen, self._seen_s = outcome.observation, time.monotonic()

    def _show(self) -> None:
        frozen_at = self._faults["freeze_at"]
        if self._seen is None or (frozen_at is not None and self._steps >= frozen_at):
            return
        self._send(
            {
                "type": "seen", "episode": self._episode, "time_s": self._seen_s, "step": self._steps,
                "is_done": self._is_done, "success": self._success, "reward": self._reward, "observation": self._seen,
            }
        )  # fmt: skip

    def _send(self, message: dict[str, Any]) -> None:
        self._pipe.send_bytes(pack(message))


def main() -> None:
    """Serve one robot."""
    # Ctrl-C reaches the whole group: the other side decides what it means, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pipe, settings = Connection(int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path += [entry for entry in settings["path"] if entry not in sys.path]
    try:
        load_plugins(settings["plugins"])
        robot = RealTimeEnvironment(pipe, settings)
        try:
            robot.run()
        finally:
            robot.close()
    except (EOFError, ConnectionError):
        return  # whoever moved it is gone
    except (EtudeError, WireError) as error:
        _tell(pipe, one_line(error, 2000))
    except Exception as error:  # noqa: BLE001 - a simulator may fail in any way, and the other side is to know how
        _tell(pipe, f"the simulation failed: {type(error).__name__}: {one_line(error)}")


def _tell(pipe: Connection, message: str) -> None:
    try:
        pipe.send_bytes(pack({"type": "failed", "message": message}))
    except OSError:
        return


if __name__ == "__main__":
    main()
