"""Requests that no client would send: real ones, recorded, with something broken in them."""

from __future__ import annotations

import gzip
import http.client
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np

from etude.service.server.messages import message_class

PROTOBUF = "application/x-protobuf"
TRICKS = (
    "../../etc/passwd", "/etc/passwd", "..", "a/../b", "a\0b", "\u202e\U0001f480", "x" * 5000, "tinker://",
    "tinker://../weights/x", "tinker://a/weights/..", "tinker://a/b/c/d", "file:///etc/passwd", "%2e%2e%2f", "\\",
    "'; --", "<script>alert(1)</script>", "{{7*7}}", "\r\nX-Evil: 1", " ", "",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63) - 1, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), [], {}, [[]], [None], {"x": None}, [0] * 3000, "\ud800", *TRICKS,
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD")
KINDS = ("application/json", PROTOBUF, "text/plain", "multipart/form-data", "application/json; charset=utf-16", "", "x")
_VARINTS = (b"\xff" * 9 + b"\x01", b"\xff" * 11, b"\x80" * 10 + b"\x00", b"\xff\xff\xff\xff\x0f", b"\x00")


@dataclass(frozen=True)
class Sent:
    """A request: what a client sends."""

    method: str
    path: str
    body: bytes | None = None
    kind: str = "application/json"
    encoding: str = ""


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _flip(body: bytes, draw: random.Random) -> bytes:
    found = bytearray(body)
    for _ in range(draw.randint(1, 6)):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _cut(body: bytes, draw: random.Random) -> bytes:
    at, to = sorted(draw.randrange(len(body) + 1) for _ in range(2))
    return draw.choice((body[:at], body[at:], body[:at] + body[to:]))


def _grow(body: bytes, draw: random.Random) -> bytes:
    at, to = sorted(draw.randrange(len(body) + 1) for _ in range(2))
    more = draw.choice((body[at:to] * draw.randint(2, 20), draw.randbytes(draw.choice((1, 7, 300, 20_000))), body))
    return body[:at] + more + body[at:]


def _nest(body: bytes, draw: random.Random) -> bytes:
    tag = bytes([draw.choice((0x1A, 0x12, 0x0A, 0x3A, 0x1B, 0x13))])
    for _ in range(draw.choice((1, 3, 99, 101, 600))):
        body = tag + _varint(len(body)) + body if tag[0] & 7 == 2 else tag + body
    return body


def _renumber(body: bytes, draw: random.Random) -> bytes:
    """Put another number where a number, a length or the tag of a field may be."""
    at = draw.randrange(len(body))
    return body[:at] + draw.choice(_VARINTS) + body[at + 1 :]


def _retype(body: bytes, draw: random.Random) -> bytes:
    found = bytearray(body)
    at = draw.randrange(min(len(found), 200))
    found[at] = found[at] & 0xF8 | draw.randrange(8)
    return bytes(found)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _fields(body: bytes, draw: random.Random) -> bytes:
    """Change what a message says, not how it is written."""
    message = message_class("ForwardBackwardRequest")()
    message.ParseFromString(body)
    datum = draw.choice(message.data)
    tensor = datum.loss_fn_inputs[draw.choice(list(datum.loss_fn_inputs))]
    text = datum.model_input[0].encoded_text if datum.model_input else None
    sizes = (-1, 0, 1, 2, 7, 1 << 31, 1 << 62)
    changes: list[Callable[[], object]] = [
        lambda: setattr(message, "loss_fn", draw.choice(("", "hinge", "ppo", "gspo", "x" * 3000))),
        lambda: setattr(message, "model_id", draw.choice(TRICKS)),
        lambda: setattr(message, "seq_id", draw.choice((-1, 0, (1 << 31) - 1, -(1 << 31)))),
        lambda: message.ClearField(draw.choice(("data", "model_id", "loss_fn", "seq_id"))),
        lambda: tensor.shape.extend(draw.choice(sizes) for _ in range(draw.choice((1, 2, 70)))),
        lambda: setattr(tensor, "dtype", draw.choice((-1, 0, 1, 2, 3, 4, 5, 1 << 30))),
        lambda: setattr(tensor, "dense", np.float32(draw.choice((np.nan, np.inf, -np.inf, 3e38))).tobytes() * 4),
        lambda: setattr(tensor, "dense", draw.randbytes(draw.choice((0, 1, 3, 8, 4001)))),
        lambda: setattr(tensor.sparse_csr, "crow_indices", np.array([0, draw.choice(sizes)]).tobytes()),
        lambda: tensor.shape.__setitem__(slice(None), [1, 1 << 40]) if tensor.shape else None,
        lambda: datum.ClearField(draw.choice(("model_input", "loss_fn_inputs"))),
        lambda: datum.loss_fn_inputs[draw.choice(("", "mask", "advantages", "x" * 900))].CopyFrom(tensor),
        lambda: datum.model_input.add(image={}),
        lambda: text and setattr(text, "tokens", np.array([draw.choice((-1, 5, 1 << 30))] * 4, np.int32).tobytes()),
        lambda: text and setattr(text, "tokens", np.zeros(draw.choice((0, 513, 5000)), np.int32).tobytes()),
        lambda: message.loss_fn_config.__setitem__(draw.choice(("beta", "clip_low_threshold")), float("nan")),
        lambda: message.data.extend([datum] * draw.choice((3, 40))),
    ]
    for _ in range(draw.randint(1, 3)):
        draw.choice(changes)()
    found: bytes = message.SerializeToString()
    return found


BREAKS = (_flip, _cut, _grow, _nest, _renumber, _retype, _fields, _fields)


def broken_protobuf(sent: Sent, draw: random.Random) -> Sent:
    """Return a recorded request in protobuf with something broken."""
    body = sent.body or b"\0"
    for _ in range(draw.choice((1, 1, 1, 2))):
        body = draw.choice(BREAKS)(body, draw) if body is sent.body else draw.choice(BREAKS[:6])(body or b"\0", draw)
    found = replace(sent, body=body)
    odds = draw.random()
    if odds < 0.05:
        return replace(found, kind=draw.choice(KINDS))
    if odds < 0.1:
        bomb = draw.choice((gzip.compress(bytes(1 << 20)), b"\x28\xb5\x2f\xfd" + body, body))
        return replace(found, body=bomb, encoding=draw.choice(("gzip", "zstd", "br", "deflate", "identity", "x")))
    return found


# ---- JSON and paths --------------------------------------------------------------------------------------------------


def broken_json(sent: Sent, draw: random.Random) -> Sent:
    """Return a recorded request in JSON with something broken: its values, its text, its path or its method."""
    odds = draw.random()
    if odds < 0.2 or not sent.body:
        return _elsewhere(sent, draw)
    tree = json.loads(sent.body)
    places: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict | list) and node:
            places.append(node)
            for inner in node.values() if isinstance(node, dict) else node:
                visit(inner)

    visit(tree)
    if places:
        place = draw.choice(places)
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        how = draw.randrange(5)
        if how == 0 and isinstance(place, dict):
            del place[key]
        elif how == 1 and isinstance(place, dict):
            place[draw.choice(("x", "\ud800", "", "type", "__class__"))] = draw.choice(ODD)
        else:
            place[key] = draw.choice(ODD)
    text = json.dumps(tree)
    if odds > 0.9:
        deep = draw.choice((90, 2000, 100_000))
        text = draw.choice((
            text[: draw.randrange(len(text) + 1)], "[" * deep, '{"user_metadata":' * deep + "1" + "}" * deep,
            text.replace("{", '{"model_id": "a", "model_id": "b", ', 1), "[1, 2]", "null", "9" * 5000,
            '{"user_metadata": {"a": ' + "[" * deep + "]" * deep + "}}",
        ))  # fmt: skip
    body = text.encode("utf-8", "surrogatepass")
    if odds > 0.97:
        body = draw.choice((b"\xff" + body, text.encode("utf-16", "surrogatepass"), _flip(body or b"\0", draw)))
    kind = draw.choice(KINDS) if odds > 0.95 else sent.kind
    return replace(sent, body=body, kind=kind)


def _elsewhere(sent: Sent, draw: random.Random) -> Sent:
    parts = sent.path.split("/")
    if len(parts) > 2 and draw.random() < 0.8:
        parts[draw.randrange(2, len(parts))] = quote(draw.choice(TRICKS), safe=draw.choice(("", "/")))
    path = "/".join(parts)
    if draw.random() < 0.3:
        value = quote(str(draw.choice((-1, 0, 10**30, "x", "\0", 1e308, "9" * 5000))))
        path += f"?{draw.choice(('limit', 'offset', 'x'))}={value}"
    return replace(sent, path=path, method=draw.choice((sent.method, draw.choice(METHODS))))


# ---- sending ---------------------------------------------------------------------------------------------------------


class Sender:
    """Sends requests over one connection, and judges the answers."""

    def __init__(self, port: int, key: str) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._key = key
        self.seen: Counter[int] = Counter()
        self.wrong: list[str] = []

    def send(self, sent: Sent) -> None:
        """Send a request; note the answer if it is neither right nor a refusal with a sentence."""
        headers = {"X-API-Key": self._key}
        if sent.kind:
            headers["Content-Type"] = sent.kind
        if sent.encoding:
            headers["Content-Encoding"] = sent.encoding
        try:
            self._line.request(sent.method, sent.path, sent.body, headers)
            answer = self._line.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._line.close()
            self.wrong.append(f"{sent.method} {sent.path[:100]}: {error!r} for {(sent.body or b'')[:300]!r}")
            return
        self.seen[answer.status] += 1
        if not is_right(answer.status, content, sent.method):
            asked = f"{sent.method} {sent.path[:100]} {sent.kind} {(sent.body or b'')[:300]!r}"
            self.wrong.append(f"{asked} was answered {answer.status} {content[:300]!r}")

    def close(self) -> None:
        """Hang up."""
        self._line.close()


def is_right(status: int, content: bytes, method: str) -> bool:
    """Tell whether an answer is a success, or a refusal that says why."""
    if 200 <= status < 400:
        return True
    if not 400 <= status < 500 or b"Traceback" in content:
        return False
    if method == "HEAD":
        return True
    try:
        found = json.loads(content)
    except ValueError:
        return False
    if status == 408 and found.get("type") == "try_again":
        return True
    why = found.get("detail") or found.get("error", {}).get("message")
    return isinstance(why, str) and len(why) > 10
