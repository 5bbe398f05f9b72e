"""Who may come in, and with how much: keys, and limits for bodies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from etude.errors import ConfigError, EtudeError

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
LOCAL: Final = "local"
"""Whose everything is where no keys are asked for."""
BODY_S: Final = 120.0
"""How long a body may take to arrive."""
DRAIN_S: Final = 5.0
"""How long a body that is refused is read, and dropped: a line that is cut while it sends loses the answer."""
BEGIN_S: Final = 1.0
"""How long the beginning of a body is waited for before it is refused: who hears of it may hang up at once, and what
had come is lost with the line."""
JSON_BYTES: Final = 4 << 20
"""Largest body of all calls but those that bring data to train on."""
BODIES_IN_ALL: Final = 8
"""Bodies of the largest size that may be in memory together."""
PROTOBUF: Final = "application/x-protobuf"
ENDS_BYTES: Final = 1 << 16
"""How much of the beginning and of the end of a body that is refused is looked at for the turn it would have taken."""
UNREAD: Final = frozenset({413, 415})
"""Refusals before a body is read that its client does not try again."""
OPEN: Final = frozenset({"/", "/healthz", "/api/v1/healthz", "/openapi.json"})
"""What needs no key."""
BRINGS_DATA: Final = frozenset({"/api/v1/forward", "/api/v1/forward_backward"})
_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(:[0-9]{1,5})?")


PassTurn = Callable[[str, str, bytes, bool, str], Awaitable[None]]
"""Told of a body that was refused unread: path, owner, what is known of it, whether that is protobuf, and why."""


class Refusal(EtudeError):
    """A request that cannot be served, with the status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        """Return who sends a request with these headers, their names in small letters; None is nobody we know."""
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


class Door:
    """ASGI middleware that looks at who comes, takes in a body before anything else sees it, and refuses the rest.

    Strangers are turned away before their body is read; a body that is too large or too slow is not kept.
    """

    def __init__(self, app: Any, keys: Keys, most: int, pass_turn: PassTurn | None = None) -> None:
        self._app, self._keys, self._most, self._pass_turn = app, keys, most, pass_turn
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _Room(self) as room:
            try:
                body = await self._take(scope, receive, room)
            except Refusal as refusal:
                await self._refuse(scope, None if room.is_whole else receive, send, refusal, room)
                return
            if body is None:
                return  # the client has gone, and nobody knows the rest of what it asked
            parts = [{"type": "http.request", "body": body, "more_body": False}]

            async def again() -> Any:
                return parts.pop() if parts else await receive()

            await self._app(scope, again, send)

    async def _refuse(self, scope: Any, receive: Any, send: Any, refusal: Refusal, room: _Room) -> None:
        """Answer, and then read for a while what the client still sends, if that may be something, to drop it."""
        given = _Headers(scope["headers"])
        if receive is not None and refusal.status in UNREAD and not room.ends.known and "expect" not in given:
            receive = await _begin(receive, room.ends)
        content = error_json(scope["path"], refusal.status, str(refusal))
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        if receive is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(_drop(receive, room.ends), DRAIN_S)
        if self._pass_turn is not None and refusal.status in UNREAD:
            owner, kind = self._keys.owner(given), given.get("content-type", "")
            if owner is not None:
                await self._pass_turn(scope["path"], owner, room.ends.known, kind.startswith(PROTOBUF), str(refusal))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _take(self, scope: Any, receive: Any, room: _Room) -> bytes | None:
        """Return the body of a request that may come in; None where its client has gone."""
        headers, path = dict(scope["headers"]), scope["path"]
        if not _HOST.fullmatch(headers.get(b"host", b"")):
            raise Refusal(400, "the header Host names no host")
        if path not in OPEN and self._keys.owner(_Headers(scope["headers"])) is None:
            raise Refusal(401, "the key (header X-API-Key) is missing or unknown")
        most = self._most if path in BRINGS_DATA else min(self._most, JSON_BYTES)
        too_large = Refusal(413, f"the body is too large: {most} bytes are the most")
        said = headers.get(b"content-length", b"0")
        if not said.isdigit() or len(said) > 18 or int(said) > most:
            raise too_large
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise Refusal(415, "compressed bodies are not read here; send it as it is")
        try:
            body = await asyncio.wait_for(_whole(receive, most, too_large, room), BODY_S)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {BODY_S:.0f} s") from None
        if body:
            _require_form(path, headers.get(b"content-type", b"").decode("latin-1"), body)
        return body


class _Headers(dict[str, str]):
    """The headers of a request by their names; of those that are there twice the first."""

    def __init__(self, raw: Any) -> None:
        super().__init__()
        for name, value in raw:
            self.setdefault(name.decode("latin-1"), value.decode("latin-1"))


class _Ends:
    """The beginning and the end of a body."""

    def __init__(self) -> None:
        self._first, self._last = b"", b""

    def add(self, part: bytes) -> None:
        """Take the next part."""
        room = ENDS_BYTES - len(self._first)
        self._first += part[:room]
        if len(part) > room:
            self._last = (self._last + part[room:][-ENDS_BYTES:])[-ENDS_BYTES:]

    @property
    def known(self) -> bytes:
        """Both, as far as they have come."""
        return self._first + self._last


class _Room:
    """What a request takes of the memory for bodies, until it is answered."""

    def __init__(self, door: Door) -> None:
        self._door, self._own = door, 0
        self.is_whole = False
        """Whether all of the body has come."""
        self.ends = _Ends()
        """Of a body that is refused."""

    def add(self, size: int) -> None:
        """Take more; refuse what is too much with that of others."""
        if self._door._held + size > BODIES_IN_ALL * self._door._most:
            raise Refusal(429, "too many large bodies are under way; try again later")
        self._own += size
        self._door._held += size

    def __enter__(self) -> _Room:
        return self

    def __exit__(self, *_: object) -> None:
        self._door._held -= self._own


async def _whole(receive: Any, most: int, too_large: Refusal, room: _Room) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part, room.is_whole = message.get("body", b""), not message.get("more_body")
        if len(body) + len(part) > most:
            room.ends.add(bytes(body[:ENDS_BYTES]))
            room.ends.add(part)
            raise too_large
        room.add(len(part))
        body += part
        if room.is_whole:
            return bytes(body)


def _require_form(path: str, kind: str, body: bytes) -> None:
    """Refuse a body that is not of the kind that a call reads, and JSON of which not all can be told again."""
    kind = kind.split(";")[0].strip().lower()
    if path in BRINGS_DATA:
        if kind not in (PROTOBUF, "application/json"):
            raise Refusal(415, f"the body must be {PROTOBUF} or application/json, and its Content-Type must say so")
        return
    if kind != "application/json":
        raise Refusal(415, "the body must be JSON, and its Content-Type application/json")
    try:
        found = json.loads(body, object_pairs_hook=_once)
        if not body.isascii() or b"\\u" in body or b"\0" in body:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise Refusal(400, "the JSON of the body is nested too deep") from None
    except UnicodeEncodeError:
        raise Refusal(400, "the JSON of the body holds half a character, as \\ud800 is one") from None
    except ValueError:
        return  # whoever reads it says what is wrong with it


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refusal(400, f"the JSON of the body says {name[:80]!r} twice")
        found[name] = value
    return found


async def _begin(receive: Any, ends: _Ends) -> Any:
    """Take the first part of a body, if one comes; return what receives the rest, None where there is none."""
    try:
        message = await asyncio.wait_for(receive(), BEGIN_S)
    except TimeoutError:
        return receive
    ends.add(message.get("body", b""))
    return receive if message.get("more_body") else None


async def _drop(receive: Any, ends: _Ends) -> None:
    while (message := await receive())["type"] == "http.request":
        ends.add(message.get("body", b""))
        if not message.get("more_body"):
            return


def error_json(path: str, status: int, why: str) -> bytes:
    """Return the same as bytes; what is no text in it (halves of characters, from JSON) is written as such."""
    return json.dumps(error_body(path, status, why)).encode()
