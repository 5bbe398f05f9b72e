"""The robot's end of a policy server: numpy, msgpack and websockets, no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from etude.deploy.wire import PROTOCOL_VERSION, ServeError, check_key, key_from_environment, pack, unpack
from etude.extras import import_extra

_UNAUTHORIZED = 401


class PolicyClient:
    """Ask a policy server for actions; one client is one robot.

    Args:
        url: Where the server listens, such as ws://127.0.0.1:8765.
        key: The server's key, if it has one; ETUDE_POLICY_KEY in the environment unless given.
        timeout_s: How long to wait for the server, at the start and for each answer.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 10.0) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.latency_ms = 0.0
        """What the last action took inside the server."""
        self.round_trip_ms = 0.0
        """What the last action took as seen from here."""
        key = key or key_from_environment()
        self._open = ExitStack()
        self._socket = _connect(self._open, url, check_key(key) if key else None, timeout_s)
        self.server = self._receive("hello")
        """What the server tells about its policy: policy, observation, action, executor, fps."""
        if self.server.get("protocol") != PROTOCOL_VERSION:
            self.close()
            raise ServeError(
                f"{url} speaks version {self.server.get('protocol')} of the protocol, this client "
                f"{PROTOCOL_VERSION}; install the same Etude on both sides"
            )

    def reset(self, seed: int | None = None) -> None:
        """Start an episode: forget plans and history; a seed makes the noise of generative policies repeatable."""
        self._ask({"type": "reset", "seed": seed}, "reset")

    def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """Return the action for what the robot sees now.

        Args:
            observation: Arrays by LeRobot feature name, without a batch dimension; images as (H, W, C) or (C, H, W).
        """
        arrays = {name: np.asarray(value) for name, value in observation.items()}
        started = time.perf_counter()
        reply = self._ask({"type": "act", "observation": arrays}, "action")
        self.round_trip_ms = 1e3 * (time.perf_counter() - started)
        action, self.latency_ms = reply.get("action"), float(reply.get("latency_ms", 0.0))
        if not isinstance(action, np.ndarray):
            raise ServeError(f"{self.url} answered without an action")
        return action

    def close(self) -> None:
        """Leave; the server forgets this robot."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, message: Mapping[str, Any], expected: str) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(pack(message))
        except ConnectionClosed as error:
            raise ServeError(_ended(self.url, error)) from None
        return self._receive(expected)

    def _receive(self, expected: str) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            reply = unpack(self._socket.recv(timeout=self.timeout_s))
        except TimeoutError:
            self.close()  # a late answer must not be taken for the answer to the next question
            raise ServeError(f"{self.url} did not answer within {self.timeout_s:g} s; connect again") from None
        except ConnectionClosed as error:
            raise ServeError(_ended(self.url, error)) from None
        if reply["type"] == "error":
            raise ServeError(f"{self.url} refused: {reply.get('message')}")
        if reply["type"] != expected:
            self.close()
            raise ServeError(f"{self.url} answered {reply['type']!r} where {expected!r} was due")
        return reply


def _connect(stack: ExitStack, url: str, key: str | None, timeout_s: float) -> Any:
    client = import_extra("websockets.sync.client", "sim")
    exceptions = import_extra("websockets.exceptions", "sim")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # No proxy: a robot's policy is near, and a proxy of the environment would be asked for loopback, too.
        connection = client.connect(
            url, additional_headers=headers, open_timeout=timeout_s, close_timeout=1.0, compression=None, proxy=None
        )
        return stack.enter_context(connection)
    except exceptions.InvalidStatus as error:
        if error.response.status_code == _UNAUTHORIZED:
            raise ServeError(f"{url} wants its key; pass key=... or set ETUDE_POLICY_KEY") from None
        raise ServeError(f"{url} refused the connection: {error}") from None
    except exceptions.InvalidURI:
        raise ServeError(f"{url!r} is no address of a policy server; write ws://HOST:PORT") from None
    except (OSError, exceptions.WebSocketException) as error:
        raise ServeError(f"{url} cannot be reached: {error}; start it with etude serve-policy") from None


def _ended(url: str, error: Any) -> str:
    closed = error.rcvd or error.sent
    reason = f": {closed.code} {closed.reason}".rstrip() if closed is not None else ""
    return f"{url} ended the connection{reason}"
