"""`Service`: sessions, models, requests and their results, for whatever carries them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from etude.errors import ConfigError, EtudeError
from etude.service.server.access import Refusal
from etude.service.server.bases import MAX_RANK, Adapter, Bases
from etude.service.server.codec import Work, canonical_json, work_of
from etude.service.server.sampling import SamplingWorker
from etude.service.server.store import Store
from etude.service.server.trained import require_work
from etude.service.server.training import TrainingWorker

__all__ = ["CREATE_SEQ", "Counts", "Limits", "Refusal", "Service", "require_models"]

CREATE_SEQ: Final = 0
"""The place of a model's creation among its requests; the client counts the others from 1."""


SESSION_S: Final = 3600.0
"""How long a session that is not heard of counts as open; its client sends a heartbeat every 10 s."""


@dataclass(frozen=True)
class Limits:
    """How much a service takes on."""

    body_bytes: int = 64 << 20
    """Largest body of a request."""
    queue: int = 1000
    """Requests of one model, or of one sampling session, that may wait."""
    queue_bytes: int = 1 << 30
    """What they may hold in all."""
    sessions: int = 1000
    """Sessions of one key that may be open: begun or heard of within the last hour."""
    drawn_tokens: int = 1 << 18
    """Tokens that one request may ask to draw, over all its completions."""
    poll_s: float = 25.0
    """How long a result is waited for before the client is told to ask again; it gives up after 45."""
    snapshot_steps: int = 20
    """Steps of a model after which its state is written, so that a restart repeats no more than these."""
    resident: int = 16
    """Models that are kept in memory; others are restored when they are asked for."""
    keep_results_s: float = 24 * 3600.0
    """How long results can be fetched."""
    keep_ephemeral: int = 32
    """Weights for sampling without a name that are kept for each model."""
    gap_s: float = 60.0
    """How long requests wait for one that should have come before them; a client tries again every 30 s at least."""


@dataclass
class Counts:
    """What happened since the start."""

    trained_tokens: int = 0
    drawn_tokens: int = 0
    steps: int = 0
    failures: int = 0
    busy_s: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "sampling": 0.0})


class Service:
    """Trains and samples for many clients, one request of a model after the other, and forgets nothing it has said."""

    def __init__(self, folder: Path, models: list[str], limits: Limits | None = None) -> None:
        self.limits, self.counts = limits or Limits(), Counts()
        self.bases = Bases(models)
        self.store = Store(folder)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_ending = False
        """Whether nobody is to wait any longer: results are fetched from the next start on."""
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._waiting_lock = threading.Lock()
        self.training, self.sampling = TrainingWorker(self), SamplingWorker(self)

    def start(self) -> None:
        """Begin to work, first of all on what was left undone."""
        self.training.start()
        self.sampling.start()

    def stop(self) -> None:
        """End the work after what is being done; the rest waits for the next start."""
        self.training.stop()
        self.sampling.stop()
        self.store.close()

    # ---- sessions and models -----------------------------------------------------------------------------------------

    def create_session(self, owner: str, about: Mapping[str, Any]) -> str:
        """Return the name of a new session."""
        name, now = f"session-{secrets.token_hex(8)}", time.time()
        row = {"id": name, "owner": owner, "created": now, "seen": now, "about": json.dumps(about)}
        with self.store.writing() as db:
            query = "SELECT COUNT(*) AS n FROM sessions WHERE owner=? AND seen>?"
            count = int(db.execute(query, (owner, now - SESSION_S)).fetchone()["n"])
            if count >= self.limits.sessions:
                raise Refusal(
                    429, f"{count} sessions of this key are open, which is the most; use one of them, or wait for an "
                    "hour after the last call of some (the service is told the number by --sessions)",
                )  # fmt: skip
            self.store.insert("sessions", row, db=db)
        return name

    def hear_session(self, name: str, owner: str) -> None:
        """Note that a session's client is there, every few minutes."""
        now = time.time()
        if now - self.owned("sessions", name, owner)["seen"] > SESSION_S / 10:
            with self.store.writing() as db:
                db.execute("UPDATE sessions SET seen=? WHERE id=?", (now, name))

    def forget_sessions(self) -> None:
        """Forget sessions that nobody has used: without a model or a sampler, and not heard of for a day."""
        unused = "NOT EXISTS (SELECT 1 FROM {0} WHERE {0}.session=sessions.id)"
        where = " AND ".join(unused.format(table) for table in ("models", "samplers"))
        with self.store.writing() as db:
            db.execute(f"DELETE FROM sessions WHERE seen<? AND {where}", (time.time() - 24 * SESSION_S,))

    def owned(self, table: str, name: str, owner: str) -> sqlite3.Row:
        """Return the row of something that belongs to a client; what belongs to another does not exist."""
        found = self.store.find(f"SELECT * FROM {table} WHERE id=? AND owner=?", name, owner)
        if found is None:
            raise Refusal(404, f"there is no {table[:-1]} {name[:200]!r}")
        return found

    def create_model(
        self, owner: str, session: str, number: int, base: str, lora: Mapping[str, Any], about: Any
    ) -> tuple[str, str]:
        """Return the names of a model to be, and of the request that makes it."""
        self.owned("sessions", session, owner)
        self.bases.require(base)
        seed = lora.get("seed")
        chosen = {name: bool(lora.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
        rank = int(lora.get("rank", 32))
        if not 0 <= rank <= MAX_RANK:
            raise Refusal(400, f"rank must be between 0 (all weights) and {MAX_RANK}, got {rank}")
        if rank and not any(chosen.values()):
            raise Refusal(400, "nothing would be trained: switch on train_attn, train_mlp or train_unembed")
        adapter = Adapter(rank, secrets.randbits(62) if seed is None else int(seed), **chosen)
        name = f"{session}:train:{number}"
        now = time.time()
        row = {
            "id": name, "owner": owner, "session": session, "base": base, "adapter": json.dumps(asdict(adapter)),
            "about": json.dumps(about), "created": now, "asked": now,
        }  # fmt: skip
        payload = canonical_json({"base": base, "lora": dict(lora), "about": about})
        return name, self.submit(owner, name, CREATE_SEQ, "create_model", payload, new_model=row)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit_work(self, owner: str, message: Any) -> str:
        """Take a forward pass; what the model cannot do is refused, and counts as its turn taken."""
        model = self.owned("models", message.model_id, owner)
        kind = "forward" if message.forward_only else "forward_backward"
        seq = message.seq_id if message.HasField("seq_id") and message.seq_id > 0 else None
        payload = message.SerializeToString(deterministic=True)
        try:
            work = work_of(message)
            self._require(work, model["base"])
        except EtudeError as error:
            self.submit(owner, model["id"], seq, kind, payload, refused=str(error))
            raise Refusal(400, str(error)) from None
        return self.submit(owner, model["id"], seq, kind, payload)

    def _require(self, work: Work, base: str) -> None:
        require_work(work, context=self.bases.context(base), vocabulary=self.bases.vocabulary(base))

    def submit(
        self,
        owner: str,
        target: str,
        seq: int | None,
        kind: str,
        payload: bytes,
        *,
        same: bytes | None = None,
        new_model: Mapping[str, Any] | None = None,
        refused: str | None = None,
    ) -> str:
        """Write a request down and return its name: the same one for the same request sent again.

        Args:
            owner: Whose request it is.
            target: The model or sampling session.
            seq: Its place among the requests of the target; None is the next one.
            kind: What is asked.
            payload: All that is needed to do it.
            same: What must be equal in a request sent again; None is the payload.
            new_model: The model that this request makes.
            refused: Why it will not be done: it has then taken its turn.
        """
        digest = hashlib.sha256(kind.encode() + b"\0" + (payload if same is None else same)).hexdigest()
        with self.store.writing() as db:
            if seq is None:
                last = db.execute("SELECT MAX(seq) AS n FROM requests WHERE target=?", (target,)).fetchone()["n"]
                seq = 1 if last is None else int(last) + 1
            known = db.execute("SELECT * FROM requests WHERE target=? AND seq=?", (target, seq)).fetchone()
            if known is not None:
                if known["digest"] != digest:
                    raise Refusal(409, f"request {seq} of {target} was sent before, and asked for something else")
                return str(known["id"])
            self._require_room(db, target)
            if new_model is not None:
                self.store.insert("models", new_model, db=db)
            elif kind != "sample":
                self._require_open(db, target, seq)
            name = self._insert(db, owner, target, seq, kind, digest=digest, payload=payload, refused=refused)
        (self.sampling if kind == "sample" else self.training).notice(target)
        return name

    def pass_turn(self, owner: str, target: str, seq: int, kind: str, why: str) -> None:
        """Count a call that was refused as the turn it would have been, unless that turn is taken or far off."""
        with self.store.writing() as db:
            model = db.execute("SELECT * FROM models WHERE id=? AND owner=?", (target, owner)).fetchone()
            if model is None or not model["next_seq"] <= seq <= model["next_seq"] + self.limits.queue:
                return
            if db.execute("SELECT 1 FROM requests WHERE target=? AND seq=?", (target, seq)).fetchone() is None:
                self._insert(db, owner, target, seq, kind, digest="", payload=b"", refused=why)
        self.training.notice(target)

    def _insert(
        self, db: sqlite3.Connection, owner: str, target: str, seq: int, kind: str, *, digest: str, payload: bytes,
        refused: str | None,
    ) -> str:  # fmt: skip
        name = f"request-{hashlib.sha256(f'{target} {seq}'.encode()).hexdigest()[:24]}"
        row = {
            "id": name, "owner": owner, "target": target, "seq": seq, "kind": kind, "digest": digest,
            "payload": None if refused else payload, "state": "refused" if refused else "pending",
            "error": refused, "category": "user" if refused else None, "created": time.time(),
            "finished": time.time() if refused else None,
        }  # fmt: skip
        self.store.insert("requests", row, db=db)
        return name

    def _require_room(self, db: sqlite3.Connection, target: str) -> None:
        query = "SELECT COUNT(*) AS n, SUM(LENGTH(payload)) AS size FROM requests WHERE target=? AND state='pending'"
        found = db.execute(query, (target,)).fetchone()
        waiting, size = int(found["n"]), int(found["size"] or 0)
        if waiting >= self.limits.queue or size >= self.limits.queue_bytes:
            raise Refusal(429, f"{waiting} requests of {target} are waiting, which is the most; try again later")

    def _require_open(self, db: sqlite3.Connection, target: str, seq: int) -> None:
        model = db.execute("SELECT * FROM models WHERE id=?", (target,)).fetchone()
        if model["unloaded"]:
            raise Refusal(400, f"{target} was unloaded; make a training client from one of its saved states")
        if seq < model["next_seq"]:
            raise Refusal(409, f"request {seq} of {target} comes too late: {model['next_seq']} is the next")
        db.execute("UPDATE models SET asked=? WHERE id=?", (time.time(), target))

    def request(self, name: str, owner: str) -> sqlite3.Row:
        """Return a request of a client."""
        return self.owned("requests", name, owner)

    def cancel(self, name: str, owner: str) -> None:
        """Leave a sample undrawn, if nobody has begun; other requests are parts of an order and stay."""
        row = self.request(name, owner)
        if row["kind"] != "sample":
            raise Refusal(400, f"a {row['kind']} cannot be cancelled: later requests of its model build on it")
        if row["state"] == "pending":
            with self.store.writing() as db:
                self.store.finish(db, name, error="the sample was cancelled")
            self.tell([name])

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def tell(self, names: list[str]) -> None:
        """Wake whoever waits for requests; called from any thread, after the result is on the disk."""
        with self._waiting_lock:
            events = [event for name in names for event in self._waiting.get(name, ())]
        if events and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_set_all, events)

    def end_waiting(self) -> None:
        """Send home whoever waits for a result."""
        self.is_ending = True
        self.tell(list(self._waiting))

    @contextmanager
    def listening(self, name: str) -> Iterator[asyncio.Event]:
        """Context with an event that is set when something is told of a name: begin to listen, and then look."""
        event = asyncio.Event()
        with self._waiting_lock:
            self._waiting.setdefault(name, []).append(event)
        try:
            yield event
        finally:
            with self._waiting_lock:
                self._waiting[name].remove(event)
                if not self._waiting[name]:
                    del self._waiting[name]

    # ---- sampling ----------------------------------------------------------------------------------------------------

    def create_sampler(self, owner: str, session: str, number: int, base: str | None, path: str | None) -> str:
        """Return the name of a sampling session on a base model or on saved weights."""
        from etude.service.server.checkpoints import find_checkpoint

        self.owned("sessions", session, owner)
        name = f"{session}:sample:{number}"
        row: dict[str, Any] = {"id": name, "owner": owner, "session": session, "created": self.store.now()}
        if path is not None:
            found = find_checkpoint(self.store, path, owner)
            if base is not None and base != found["base"]:
                raise Refusal(400, f"{path} was trained on {found['base']!r}, not on {base!r}")
            row |= {"base": found["base"], "adapter": found["adapter"], "path": path, "file": found["file"]}
        elif base is not None:
            self.bases.require(base)
            row |= {"base": base}
        else:
            raise Refusal(400, "a sampling session needs base_model or model_path")
        with self.store.writing() as db:
            known = db.execute("SELECT * FROM samplers WHERE id=?", (name,)).fetchone()
            if known is None:
                self.store.insert("samplers", row, db=db)
            elif any(known[key] != row.get(key) for key in ("base", "path")):
                raise Refusal(409, f"sampling session {number} was created before, of other weights")
        return name

    def adapter_of(self, row: Mapping[str, Any] | sqlite3.Row) -> Adapter | None:
        """Return what a model, a checkpoint or a sampler trains; None is a base model."""
        return None if row["adapter"] is None else Adapter(**json.loads(row["adapter"]))


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


def require_models(names: list[str]) -> list[str]:
    """Return the models to offer; without a name the tiny one."""
    if len(set(names)) != len(names):
        raise ConfigError("a model is named twice")
    return names or ["tiny"]
