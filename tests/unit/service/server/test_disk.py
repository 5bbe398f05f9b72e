"""A service whose disk fills up, whose files are torn, or whose folder is not its own: nothing it has said is lost."""

from __future__ import annotations

import http.client
import os
import re
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from etude.errors import CheckpointError, ConfigError
from etude.runs.durable import process_alive
from etude.service.server.store import Store
from tests.served import Preloaded, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    found = Preloaded()
    yield found
    found.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk]
    if subprocess.run(command, capture_output=True, check=False, timeout=100).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True, timeout=100)


class Client:
    """Trains one model over HTTP, a request at a time, and sends again what was not taken."""

    def __init__(self, served: Served) -> None:
        self._served, self._seq = served, 0
        session = self.send("create_session", {})["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
        self.model = self.send("create_model", asked)["model_id"]

    def send(self, call: str, body: Any) -> Any:
        status, found = self._served.call(f"/api/v1/{call}", body)
        assert status == 200, found
        return found

    def post(self, call: str, **body: Any) -> tuple[int, Any]:
        """Send the next request of the model; it is the next again unless it was taken."""
        status, found = self._served.call(f"/api/v1/{call}", {"model_id": self.model, "seq_id": self._seq + 1, **body})
        self._seq += status == 200
        return status, found

    def result(self, sent: Any) -> Any:
        for _ in range(100):
            status, found = self._served.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]})
            if status != 408:
                return found
        raise AssertionError(sent)

    def forget_last(self) -> None:
        """Take it that the last request was not answered: it is sent again."""
        self._seq -= 1

    def train(self, steps: int) -> list[Any]:
        datum = {
            "model_input": {"chunks": [{"tokens": [5, 9, 12]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [9, 12, 40], "dtype": "int64"}},
        }
        told = []
        for _ in range(steps):
            given = {"data": [datum], "loss_fn": "cross_entropy"}
            told.append(self.result(self.post("forward_backward", forward_backward_input=given)[1])["metrics"])
            told.append(self.result(self.post("optim_step", adam_params={"learning_rate": 1e-2})[1])["metrics"])
        return told


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded) -> list[Any]:
    """What twelve steps come to where nothing happens."""
    served = Served(tmp_path_factory.mktemp("calm") / "state", preloaded=preloaded).start()
    try:
        return Client(served).train(12)
    finally:
        served.stop()


def test_a_full_disk_refuses_and_loses_nothing(small_disk: Path, preloaded: Preloaded, calm: list[Any]) -> None:
    served = Served(small_disk / "state", "--snapshot-steps", "3", preloaded=preloaded)
    served.log = small_disk.parent / "full.log"
    served.start()
    try:
        client = Client(served)
        told = client.train(4)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        status, found = client.post("save_weights", path="full")
        for _ in range(200):  # the journal has some room left within itself
            if status != 200:
                break
            status, found = client.post("optim_step", adam_params={"learning_rate": 0.0})
        assert status == 503
        assert "full" in found["detail"]
        assert served.call("/healthz")[0] == 200
        filler.unlink()
        state, sent = client.post("save_weights", path="later")
        assert state == 200
        assert client.result(sent)["path"].endswith("/later")
        served.kill()
        served.start()
        status, found = client.post("save_weights", path="again")
        assert client.result(found)["path"].endswith("/again")
        assert "Traceback" not in served.log.read_text()
    finally:
        served.kill()
    assert told == calm[:8]


def test_a_snapshot_that_cannot_be_written_fails_no_step(tmp_path: Path, preloaded: Preloaded, calm: list[Any]) -> None:
    """The weights' folder is gone for a while: steps go on, saves fail, and a restart repeats what was done."""
    served = Served(tmp_path / "state", "--snapshot-steps", "2", preloaded=preloaded).start()
    try:
        client = Client(served)
        told = client.train(3)
        weights = tmp_path / "state" / "weights"
        weights.rename(tmp_path / "away")
        told += client.train(4)
        found = client.result(client.post("save_weights", path="one")[1])
        assert "cannot write or read its files" in found["error"]
        assert found["category"] == "server"
        (tmp_path / "away").rename(weights)
        served.kill()
        served.start()
        told += client.train(5)
        assert client.result(client.post("save_weights", path="one")[1])["path"].endswith("/one")
        assert "Traceback" not in served.log.read_text()
    finally:
        served.kill()
    assert told == calm


@pytest.mark.parametrize("torn", ["half a record", "rubbish", "cut"])
def test_a_journal_whose_last_record_is_torn_is_read_up_to_it(
    tmp_path: Path, preloaded: Preloaded, calm: list[Any], torn: str
) -> None:
    """A kill of the machine may leave the beginning of a record that nobody was told of."""
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    client = Client(served)
    told = client.train(6)
    served.kill()
    journal = tmp_path / "state" / "service.db-wal"
    whole = journal.read_bytes()
    assert len(whole) > 5000
    if torn == "cut":
        served.start()
        status, found = client.post("optim_step", adam_params={"learning_rate": 0.0})
        assert status == 200, found
        served.kill()
        more = journal.read_bytes()
        assert more != whole
        journal.write_bytes(more[:-100])
        client.forget_last()
    else:
        journal.write_bytes(whole + (whole[-3000:] if torn == "half a record" else os.urandom(3000)))
    served.start()
    try:
        if torn != "cut":
            told += client.train(6)
            assert told == calm
        else:
            client.result(client.post("optim_step", adam_params={"learning_rate": 0.0})[1])
            assert (told + client.train(6))[:13] == calm[:13]
    finally:
        served.stop()


def test_a_file_that_is_no_journal_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "service.db").write_bytes(b"this is not a database, and never was one" * 200)
    with pytest.raises(CheckpointError, match=r"service\.db cannot be used: file is not a database"):
        Store(tmp_path)
    (tmp_path / "service.db").unlink()
    with sqlite3.connect(tmp_path / "service.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Store(tmp_path)


def _refused(preloaded: Preloaded, folder: Path, log: Path, port: int = 0) -> str:
    """Start a service that cannot be; return what it says."""
    pid = preloaded.fork(["serve", "--folder", str(folder), "--port", str(port)], log)
    deadline_s = time.monotonic() + 60
    while process_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    said = log.read_text()
    assert "Traceback" not in said
    return said


def test_a_folder_that_another_service_has_or_that_cannot_be_written_is_refused(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    try:
        said = _refused(preloaded, tmp_path / "state", tmp_path / "one.log")
        assert re.search(rf"another service \(process \d+.*\) is writing {tmp_path / 'state'}", said)
        said = _refused(preloaded, tmp_path / "other", tmp_path / "four.log", port=served.port)
        assert f"cannot listen at 127.0.0.1:{served.port}: Address already in use; --port names another port" in said
        assert served.call("/healthz")[0] == 200
    finally:
        served.stop()
    (tmp_path / "file").write_text("")
    assert "cannot use" in _refused(preloaded, tmp_path / "file", tmp_path / "two.log")
    assert "cannot use" in _refused(preloaded, Path("/proc/etude"), tmp_path / "three.log")


def test_a_signal_ends_a_service_though_clients_wait(tmp_path: Path, preloaded: Preloaded) -> None:
    """Whoever waits is told to ask again, and nothing is cut off in the middle."""
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    client = Client(served)
    sent = client.post("optim_step", adam_params={})[1]
    client.result(sent)
    late = served.call("/api/v1/optim_step", {"model_id": client.model, "seq_id": 9, "adam_params": {}})[1]
    found: list[Any] = []
    long = {"model": "tiny", "prompt": "ab", "max_tokens": 500, "n": 8, "ignore_eos": True}
    asks = [
        ("/api/v1/retrieve_future", {"request_id": late["request_id"]}),
        *[("/v1/completions", long | {"temperature": 1.0 + number}) for number in range(30)],
    ]
    threads = [threading.Thread(target=lambda one=one: found.append(served.call(*one))) for one in asks]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + 60
    while served.call("/status")[1]["waiting"]["live"] < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    served.stop()
    for thread in threads:
        thread.join(60)
    statuses = [status for status, _ in found]
    assert 408 in statuses
    assert set(statuses) <= {200, 408, 503}
    assert 503 in statuses
    log = served.log.read_text()
    assert "Traceback" not in log
    assert "graceful shutdown exceeded" not in log


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_makes_nothing_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [2_000_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    store = Store(tmp_path)
    first = store.now()
    now[0] -= 86_400.0
    second = store.now()
    assert second > first
    row = {"model": "m", "kind": "weights", "name": "a", "owner": "o", "file": None, "created": second}
    with store.writing() as db:
        store.insert("checkpoints", row, db=db)
    store.close()
    again = Store(tmp_path)
    assert again.now() > second
    again.close()


# ---- kills in the middle of things -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save_weights", "load_weights", "archive"])
def test_a_kill_in_the_middle_of_a_save_leaves_all_of_it_or_nothing(
    tmp_path: Path, preloaded: Preloaded, call: str
) -> None:
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    try:
        client = Client(served)
        client.train(2)
        path = client.result(client.post("save_weights", path="kept")[1])["path"]
        for number in range(2):
            asked: dict[str, Any] = {"path": f"at-{number}"}
            if call == "load_weights":
                asked = {"path": path, "optimizer": True}
            place = f"/api/v1/training_runs/{client.model}/checkpoints/weights/kept/archive.tar"
            killer = threading.Timer(0.002 + 0.01 * number, served.kill)
            if call == "archive":
                asker = threading.Thread(target=_ask_quietly, args=(served, place))
                asker.start()
                killer.start()
                asker.join(60)
                killer.join()
                served.start()
                status, found = served.call(place)
                assert (status, len(found) > 1000) == (200, True)
                continue
            status, sent = client.post(call, **asked)
            killer.start()
            killer.join()
            served.start()
            assert status == 200
            assert client.result(sent)["path"] == path if call == "load_weights" else "error" not in client.result(sent)
        client.train(1)
    finally:
        served.stop()
    store = Store(tmp_path / "state")
    names = {row["file"] for row in store.all("SELECT file FROM checkpoints")}
    names |= {row["snapshot"] for row in store.all("SELECT snapshot FROM models") if row["snapshot"]}
    assert {one.name for one in (tmp_path / "state" / "weights").iterdir()} == names
    for name in names:
        assert store.read_weights(name)
    store.close()
    left = {one.name for one in (tmp_path / "state").iterdir()}
    assert left <= {"weights", "service.db", "service.db-wal", "service.db-shm", ".lock"}


def _ask_quietly(served: Served, place: str) -> None:
    with suppress(OSError, http.client.HTTPException):  # it is killed
        served.call(place)
