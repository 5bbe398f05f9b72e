"""The thread that trains: each model's requests in their order, once, and again from the last snapshot after a kill."""

from __future__ import annotations

import json
import sqlite3
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError, one_line
from etude.service.datums import AdamParams
from etude.service.server.checkpoints import Effects, load_into, save_sampler, save_state
from etude.service.server.codec import canonical_json, parse_message, training_bytes, work_of
from etude.service.server.trained import BrokenStep, TrainedModel
from etude.service.server.worker import Worker, explain, log

if TYPE_CHECKING:
    from etude.service.server.service import Service


class TrainingWorker(Worker):
    """Does what models are asked for, one request at a time, models taking turns."""

    name = "training"
    waiting = "kind!='sample'"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._resident: OrderedDict[str, TrainedModel] = OrderedDict()
        self._since: dict[str, int] = {}
        """Steps of each resident model since its snapshot."""
        self._began = time.time()

    @property
    def resident(self) -> list[str]:
        """The models in memory."""
        return list(self._resident)

    def _overdue(self) -> list[str]:
        """Name the models whose requests have waited too long for one before them."""
        before = time.time() - self._service.limits.gap_s
        query = "SELECT DISTINCT target FROM requests WHERE state='pending' AND kind!='sample' AND created<?"
        return [row["target"] for row in self._service.store.all(query, before)]

    def _forget(self, target: str) -> None:
        self._resident.pop(target, None)

    def _serve(self, target: str) -> bool:
        """Do the next request of a model; tell whether there was one."""
        store, name = self._service.store, target
        model = store.one("SELECT * FROM models WHERE id=?", name)
        seq = model["next_seq"]
        request = store.find("SELECT * FROM requests WHERE target=? AND seq=?", name, seq)
        if request is None:
            self._give_up_gap(name, seq)
            return False
        if request["state"] == "pending":
            self._do(model, request)
        else:
            with store.writing() as db:
                db.execute("UPDATE models SET next_seq=? WHERE id=?", (seq + 1, name))
        return True

    def _give_up_gap(self, name: str, seq: int) -> None:
        store, limit_s = self._service.store, self._service.limits.gap_s
        query = "SELECT * FROM requests WHERE target=? AND seq>? AND state='pending' ORDER BY seq"
        waiting = store.all(query, name, seq)
        # Nobody could arrive while the service was away.
        if not waiting or time.time() - max(self._began, min(row["created"] for row in waiting)) < limit_s:
            return
        with store.writing() as db:
            for row in waiting:
                store.finish(db, row["id"], error=f"request {seq} of {name}, which comes before, never arrived")
            db.execute("UPDATE models SET next_seq=? WHERE id=?", (waiting[-1]["seq"] + 1, name))
        self._service.tell([row["id"] for row in waiting])

    def _do(self, model: sqlite3.Row, request: sqlite3.Row) -> None:
        service, started_s = self._service, time.perf_counter()
        kind, trained = request["kind"], None
        effects = Effects()
        result: bytes | None = None
        error, category = None, "user"
        try:
            trained = self._get(model)
            result = self._answer(model, trained, request, effects)
        except EtudeError as found:
            error = str(found)
            if isinstance(found, BrokenStep):
                self._forget(model["id"])
        except Exception as found:  # noqa: BLE001 - told to the client as its result
            error, category = explain(found, "%s of %s failed", kind, model["id"]), "server"
            self._forget(model["id"])  # nobody knows how far it came: the next request finds what was before
        if error is not None:
            effects = Effects()
            service.counts.failures += 1
            if kind == "forward_backward" and trained is not None:
                trained.lose_gradients(f"an earlier forward_backward failed: {error}")
        with service.store.writing() as db:
            service.store.finish(db, request["id"], result=result, error=error, category=category)
            db.execute("UPDATE models SET next_seq=? WHERE id=?", (request["seq"] + 1, model["id"]))
            for write in effects.writes:
                write(db)
        service.store.drop_unused(effects.unused)
        service.tell([request["id"]])
        spent_s = time.perf_counter() - started_s
        service.counts.busy_s["training"] += spent_s
        log.info("%s %s of %s in %.3f s%s", kind, request["seq"], model["id"], spent_s, f": {error}" if error else "")

    def _answer(self, model: sqlite3.Row, trained: TrainedModel, request: sqlite3.Row, effects: Effects) -> bytes:
        kind, payload, service = request["kind"], request["payload"], self._service
        if kind in ("forward", "forward_backward"):
            passed = trained.run(work_of(parse_message(payload)))
            service.counts.trained_tokens += passed.tokens
            mean = passed.metrics["loss:sum"] / max(1, passed.tokens)
            effects.writes.append(lambda db: db.execute("UPDATE models SET loss=? WHERE id=?", (mean, model["id"])))
            if kind == "forward_backward":
                point = (model["id"], "loss", model["steps"], mean)
                effects.writes.append(lambda db: db.execute("INSERT OR REPLACE INTO curves VALUES (?, ?, ?, ?)", point))
            return training_bytes(passed.outputs, passed.metrics)
        given = json.loads(payload)
        if kind == "optim_step":
            metrics = trained.step(AdamParams(**given))
            service.counts.steps += 1
            effects.writes.append(lambda db: db.execute("UPDATE models SET steps=steps+1 WHERE id=?", (model["id"],)))
            self._since[model["id"]] += 1
            if self._since[model["id"]] >= service.limits.snapshot_steps:
                try:
                    self._snapshot(model, trained, request["seq"], effects)
                except OSError as error:  # the step was made, and its place in the journal is enough
                    log.warning("no snapshot of %s: %s; the next step tries again", model["id"], one_line(error))
            return canonical_json({"metrics": metrics, "type": "optim_step"})
        if kind == "create_model":
            return canonical_json({"model_id": model["id"], "type": "create_model"})
        if kind == "save_weights":
            path = save_state(service.store, model, trained, given, effects)
            return canonical_json({"path": path, "type": "save_weights"})
        if kind == "save_weights_for_sampler":
            found = save_sampler(service.store, model, trained, given, effects, keep=service.limits.keep_ephemeral)
            return canonical_json({**found, "type": "save_weights_for_sampler"})
        if kind == "load_weights":
            load_into(service.store, model, trained, given)
            # What it was loaded from may be gone tomorrow: a restart begins here.
            self._snapshot(model, trained, request["seq"], effects)
            return canonical_json({"path": given["path"], "model_id": model["id"], "type": "load_weights"})
        effects.writes.append(lambda db: db.execute("UPDATE models SET unloaded=1 WHERE id=?", (model["id"],)))
        self._resident.pop(model["id"], None)
        return canonical_json({"model_id": model["id"], "type": "unload_model"})

    def _snapshot(self, model: sqlite3.Row, trained: TrainedModel, seq: int, effects: Effects) -> None:
        """Write a model's state as the one to begin from; what was asked before is then not needed again."""
        name, _ = self._service.store.write_weights(trained.state())
        self._since[model["id"]] = 0
        given = (name, seq, model["id"])
        effects.writes += [
            lambda db: db.execute("UPDATE models SET snapshot=?, snapshot_seq=? WHERE id=?", given),
            lambda db: db.execute("UPDATE requests SET payload=NULL WHERE target=? AND seq<=?", (model["id"], seq)),
        ]
        effects.unused.append(model["snapshot"])

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _get(self, model: sqlite3.Row) -> TrainedModel:
        """Return a model as its last request left it, restored if it is not in memory."""
        name = model["id"]
        if name in self._resident:
            self._resident.move_to_end(name)
            return self._resident[name]
        while len(self._resident) >= self._service.limits.resident:
            old, _ = self._resident.popitem(last=False)
            self._since.pop(old, None)
        trained = self._restored(model)
        self._resident[name] = trained
        return trained

    def _restored(self, model: sqlite3.Row) -> TrainedModel:
        service = self._service
        adapter = service.adapter_of(model)
        assert adapter is not None
        trained = TrainedModel(service.bases.make(model["base"], adapter))
        if model["snapshot"]:
            trained.load(service.store.read_weights(model["snapshot"]), with_optimizer=True)
        query = "SELECT * FROM requests WHERE target=? AND seq>? AND seq<? ORDER BY seq"
        steps = 0
        for row in service.store.all(query, model["id"], model["snapshot_seq"], model["next_seq"]):
            steps += _replay(trained, row)
        self._since[model["id"]] = steps
        if steps:
            log.info("%s is back after %s repeated steps", model["id"], steps)
        return trained


def _replay(trained: TrainedModel, row: Any) -> int:
    """Repeat what a request did to a model; return how many steps that were."""
    if row["kind"] == "forward_backward":
        if row["state"] == "done":
            trained.run(work_of(parse_message(row["payload"])))
        elif row["state"] == "failed":
            trained.lose_gradients(f"an earlier forward_backward failed: {row['error']}")
    elif row["kind"] == "optim_step" and row["state"] == "done":
        trained.step(AdamParams(**json.loads(row["payload"])))
        return 1
    elif row["kind"] == "optim_step" and row["state"] == "failed":
        trained.clear()
    return 0
