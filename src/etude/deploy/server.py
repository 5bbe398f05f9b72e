"""A policy behind a WebSocket: each connection is one robot with plans and history of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etude.deploy.latency import Latency
from etude.deploy.slots import ActingPolicy, PolicySlots
from etude.deploy.wire import PROTOCOL_VERSION, ServeError, WireError, check_key, pack, unpack
from etude.errors import EtudeError
from etude.extras import import_extra
from etude.secrets import redact, register_secret

DEFAULT_PORT = 8765
MIN_MESSAGE_BYTES = 1 << 20
WORST_BYTES_PER_NUMBER = 8
MAX_SEED = 2**63 - 1
_TRY_LATER = 1013


class PolicyServer:
    """Serve a policy to robots until told to stop.

    Args:
        policy: A built policy, or an exported one.
        host: Address to listen at; other than loopback only with a key.
        port: Port to listen at; 0 takes a free one.
        key: What clients must know, as `Authorization: Bearer KEY`.
        max_clients: Robots at once.
        max_message_bytes: Longest message accepted; None is twice what an observation can need, or 1 MiB.
        report_interval_s: Seconds between reports of latency.
        say: Takes each line meant for people.
    """

    def __init__(
        self,
        policy: ActingPolicy,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        key: str | None = None,
        max_clients: int = 16,
        max_message_bytes: int | None = None,
        report_interval_s: float = 30.0,
        say: Callable[[str], None] = print,
    ) -> None:
        if key is None and not is_loopback(host):
            raise ServeError(
                f"{host} can be reached from elsewhere; give a key (--key or ETUDE_POLICY_KEY) to serve there"
            )
        if key is not None:
            register_secret(check_key(key))
        self.host, self.port, self.max_clients = host, port, max_clients
        self._key, self._say, self._report_interval_s = key, say, report_interval_s
        self._slots = PolicySlots(policy)
        numbers = sum(math.prod(feature.shape) for feature in self._slots.wanted.values())
        needed = max(MIN_MESSAGE_BYTES, 2 * WORST_BYTES_PER_NUMBER * numbers)
        self.max_message_bytes = needed if max_message_bytes is None else max_message_bytes
        self.actions, self.chunks = Latency(), Latency()
        self._clients = 0
        # One thread computes for all: policies are not made for two at once, and the network stays responsive.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="policy")

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM, then print what actions took."""
        asyncio.run(self._serve())

    def report(self) -> str:
        """Return one line about the latency of actions, and of those for which a chunk was computed."""
        return f"{self.actions.count} actions: {self.actions}; {self.chunks.count} chunks: {self.chunks}"

    async def _serve(self) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        quiet = logging.getLogger("etude.deploy.websockets")
        quiet.propagate = False
        quiet.addHandler(logging.NullHandler())  # a stranger's broken handshake is no news
        try:
            # No origins: pages in a browser on this machine have no business here.
            server = await import_extra("websockets.asyncio.server", "sim").serve(
                self._talk, self.host, self.port, process_request=self._admit, origins=[None], compression=None,
                max_size=self.max_message_bytes, max_queue=4, close_timeout=1.0, logger=quiet,
            )  # fmt: skip
        except OSError as error:
            raise ServeError(f"cannot listen at {self.host}:{self.port}: {error.strerror or error}") from None
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            self._say(f"serving {self._describe()['policy']} at ws://{_in_url(self.host)}:{self.port}")
            reports = asyncio.create_task(self._report_at_times())
            await stop.wait()
            reports.cancel()
        self._worker.shutdown()
        self._say(self.report())

    async def _report_at_times(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(self._report_interval_s)
            if self.actions.count > reported:
                reported = self.actions.count
                self._say(f"{self.report()}; {self._clients} connected")

    def _admit(self, connection: Any, request: Any) -> Any:
        """Return a refusal for a client without the key; None lets it in."""
        if self._key is None:
            return None
        given = ", ".join(request.headers.get_all("Authorization"))
        if hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            return None
        return connection.respond(401, "this policy server wants its key\n")

    async def _talk(self, connection: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        if self._clients >= self.max_clients:
            await connection.close(_TRY_LATER, f"{self.max_clients} robots are connected already")
            return
        loop, slot = asyncio.get_running_loop(), None
        self._clients += 1
        try:
            slot = await loop.run_in_executor(self._worker, self._slots.open)
            await connection.send(pack(self._describe()))
            async for frame in connection:
                started = time.perf_counter()
                await connection.send(await loop.run_in_executor(self._worker, self._answer, slot, frame, started))
        except ConnectionClosed:
            pass  # also after a message that is too long, which ends the connection
        finally:
            self._clients -= 1
            if slot is not None:
                with contextlib.suppress(RuntimeError):  # the worker has gone home: so has everything it knew
                    self._worker.submit(self._slots.close, slot)

    def _answer(self, slot: int, frame: bytes | str, started: float) -> bytes:
        try:
            return pack(self._reply(slot, unpack(frame), started))
        except EtudeError as error:
            return pack({"type": "error", "message": redact(str(error))})
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._say(f"the policy failed: {reason}")
            return pack({"type": "error", "message": f"the policy failed: {reason}"})

    def _reply(self, slot: int, message: dict[str, Any], started: float) -> dict[str, Any]:
        kind = message["type"]
        if kind == "reset":
            seed = message.get("seed")
            if seed is not None and not (type(seed) is int and 0 <= seed <= MAX_SEED):
                raise WireError("the seed of a reset is a whole number from 0 on")
            self._slots.reset(slot, seed)
            return {"type": "reset"}
        if kind != "act":
            raise WireError(f"a message of type {kind[:40]!r} came; one of reset, act")
        action, was_due = self._slots.act(slot, message.get("observation"))
        latency_ms = 1e3 * (time.perf_counter() - started)
        self.actions.add(latency_ms)
        if was_due:
            self.chunks.add(latency_ms)
        return {"type": "action", "action": action, "latency_ms": latency_ms}

    def _describe(self) -> dict[str, Any]:
        policy = self._slots.policy
        action = policy.spec[policy.action_name]
        return {
            "type": "hello",
            "protocol": PROTOCOL_VERSION,
            "policy": str(getattr(policy, "name", type(policy).__name__)),
            "observation": {
                name: {"shape": list(feature.shape), "role": feature.role, "classes": feature.classes}
                for name, feature in self._slots.wanted.items()
            },
            "action": {"shape": list(action.shape), "names": list(action.names) if action.names else None},
            "executor": {"horizon": policy.executor.horizon, **policy.executor.settings()},
            "fps": policy.spec.fps,
        }


def is_loopback(host: str) -> bool:
    """Tell whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
