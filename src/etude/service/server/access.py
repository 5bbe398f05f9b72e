"""Who may come in, and with how much: keys, and a limit for bodies."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from etude.errors import ConfigError

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
LOCAL: Final = "local"
"""Whose everything is where no keys are asked for."""
BODY_S: Final = 120.0
"""How long a body may take to arrive."""


class Keys:
    """The keys that open a service, each with the name of its owner."""

    def __init__(self, owners: Mapping[str, str] | None = None) -> None:
        """Take keys and the names of their owners; None asks for no key."""
        self._owners = None if owners is None else {_hashed(key): name for key, name in owners.items()}

    @classmethod
    def of(cls, host: str, file: Path | None) -> Keys:
        """Read keys from a file; without one, nobody but this machine may come in."""
        if file is None:
            if host not in LOOPBACK:
                raise ConfigError(
                    f"anybody could train at {host}: name a file with --keys, a line for each client with its name "
                    "and its key, or leave --host out"
                )
            return cls()
        owners: dict[str, str] = {}
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the keys in {file}: {error}") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            parts = line.split()
            if len(parts) != 2 or not parts[1].startswith("tml-") or len(parts[1]) < 16:
                raise ConfigError(
                    f"{file}, line {number}: a line is a name and a key, which begins with tml- (the client refuses "
                    "others) and has 16 characters at least"
                )
            if parts[1] in owners:
                raise ConfigError(f"{file}, line {number}: this key is there twice")
            owners[parts[1]] = parts[0]
        if not owners:
            raise ConfigError(f"{file} has no keys")
        return cls(owners)

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """Return who sends a request; None is nobody we know."""
        if self._owners is None:
            return LOCAL
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
        # Looked up by its hash: how long that takes says nothing about the keys.
        return self._owners.get(_hashed(given))


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def error_body(path: str, status: int, why: str) -> dict[str, Any]:
    """Return what is said about an error, in the shape that the clients of a path read."""
    if not path.startswith("/v1/"):
        return {"detail": why}
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": why, "type": kind, "param": None, "code": None}}


class BodyLimit:
    """ASGI middleware that takes in a body before anything else sees it, and refuses one that is too large or slow."""

    def __init__(self, app: Any, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        said = headers.get(b"content-length", b"0")
        if not said.isdigit() or int(said) > self._most:
            await _refuse(scope, send, 413, f"the body is too large: {self._most} bytes are the most")
            return
        if headers.get(b"content-encoding", b"identity") != b"identity":
            await _refuse(scope, send, 415, "compressed bodies are not read here; send it as it is")
            return
        try:
            body = await asyncio.wait_for(self._whole(receive), BODY_S)
        except TimeoutError:
            await _refuse(scope, send, 408, f"the body did not arrive within {BODY_S:.0f} s")
            return
        if body is None:
            await _refuse(scope, send, 413, f"the body is too large: {self._most} bytes are the most")
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        await self._app(scope, again, send)

    async def _whole(self, receive: Any) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return bytes(body)
            body += message.get("body", b"")
            if len(body) > self._most:
                return None
            if not message.get("more_body"):
                return bytes(body)


async def _refuse(scope: Any, send: Any, status: int, why: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(scope["path"], status, why)).encode()})
