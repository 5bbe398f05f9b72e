"""Whatever is sent, a service answers with a sentence, and goes on."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError
from etude.service.server.access import Keys
from etude.service.server.codec import message_of_json
from tests.served import KEY, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")

OTHER = "tml-another-key-for-tests"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "keys").write_text(f"# who may come in\nada {KEY}\nben {OTHER}\n")
    found = Served(folder / "state", "--keys", str(folder / "keys")).start()
    yield found
    found.stop()
    assert "Traceback" not in found.log.read_text()


@pytest.fixture(scope="module")
def session(served: Served) -> str:
    found: str = served.call("/api/v1/create_session", {})[1]["session_id"]
    return found


@pytest.fixture(scope="module")
def model(served: Served, session: str) -> str:
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    status, found = served.call("/api/v1/create_model", body)
    assert status == 200, found
    assert served.call("/api/v1/retrieve_future", {"request_id": found["request_id"]})[0] == 200
    name: str = found["model_id"]
    return name


def _request(model: str, **changes: Any) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": changes.pop("tokens", [5, 9, 12])}]},
        "loss_fn_inputs": changes.pop("inputs", {"target_tokens": {"data": [9, 12, 40], "dtype": "int64"}}),
    }
    given = {"data": [datum], "loss_fn": "cross_entropy", **changes}
    return {"model_id": model, "forward_backward_input": given}


def _floats(*values: float) -> dict[str, Any]:
    return {"data": list(values), "dtype": "float32"}


def _targets(*values: int) -> dict[str, Any]:
    return {"data": list(values), "dtype": "int64"}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"tokens": []}, "no tokens"),
        ({"tokens": [5, 9]}, "target_tokens has the shape"),
        ({"tokens": [5, 9, 5000]}, "knows 0 to"),
        ({"tokens": [5, 9, -1]}, "knows 0 to"),
        ({"tokens": [5] * 600, "inputs": {"target_tokens": _targets(*[5] * 600)}}, "sees 512 at most"),
        ({"inputs": {}}, "needs 'target_tokens'"),
        ({"inputs": {"target_tokens": _floats(1, 2, 3)}}, "whole numbers"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40), "weights": _floats(1, 2)}}, "weights has the shape"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40), "wieghts": _floats(1, 2, 3)}}, "takes no 'wieghts'"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40) | {"shape": [7]}}}, "do not fill the shape"),
        ({"loss_fn": "hinge"}, "unknown loss_fn 'hinge'"),
        ({"loss_fn": "ppo"}, "needs 'logprobs'"),
        ({"loss_fn_config": {"beta": 1.0}}, "has no option 'beta'"),
        ({"data": []}, "no data"),
        ({"data": 3}, "not a forward or backward request"),
    ],
)
def test_work_that_cannot_be_done_is_refused(served: Served, model: str, changes: Any, sentence: str) -> None:
    body = _request(model, **changes)
    status, found = served.call("/api/v1/forward_backward", body)
    assert status == 400
    assert sentence in found["detail"]


def test_refused_work_does_not_hold_up_what_follows(served: Served, model: str) -> None:
    served.call("/api/v1/forward_backward", _request(model, loss_fn="hinge"))
    _, sent = served.call("/api/v1/forward_backward", _request(model))
    status, found = served.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]})
    assert (status, "loss:sum" in found["metrics"]) == (200, True)


@pytest.mark.parametrize(
    "call, body, status, sentence",
    [
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": "fast"}}, 422, "learning_rate"),
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": -1.0}}, 422, "learning_rate"),
        ("optim_step", {"model_id": "M", "adam_params": {"momentum": 1.0}}, 422, "momentum"),
        ("optim_step", {"model_id": "M", "optimizer_params": {"type": "dimuon"}}, 422, "adam_params"),
        ("optim_step", {"model_id": "none", "adam_params": {}}, 404, "there is no model 'none'"),
        ("get_info", {"model_id": "none"}, 404, "there is no model"),
        ("get_info", b"{", 422, "JSON"),
        ("get_info", b"\xff\xfe", 422, "JSON"),
        ("create_model", {"session_id": "S", "model_seq_id": 7, "base_model": "gpt-9"}, 400, "offers tiny"),
        ("create_model", {"session_id": "none", "model_seq_id": 7, "base_model": "tiny"}, 404, "no session"),
        ("load_weights", {"model_id": "M", "path": "x", "optimizer": False, "session_id": "S"}, 400, "send model_id"),
        ("create_sampling_session", {"session_id": "S", "sampling_session_seq_id": 9}, 400, "needs base_model"),
        ("retrieve_future", {"request_id": "none"}, 404, "there is no request"),
        ("cancel_future", {"request_id": "none"}, 404, "there is no request"),
        ("weights_info", {"tinker_path": "tinker://M/weights/../../etc"}, 400, "is no checkpoint"),
        ("weights_info", {"tinker_path": "/etc/passwd"}, 400, "is no checkpoint"),
        ("create_custom_loss", {}, 404, "does not offer POST /api/v1/create_custom_loss"),
        ("save_weights_external", {}, 404, "does not offer"),
    ],
)
def test_calls_that_cannot_be_served_say_why(
    served: Served, session: str, model: str, call: str, body: Any, status: int, sentence: str
) -> None:
    names = {"M": model, "S": session}
    if isinstance(body, dict):
        body = {key: names.get(value, value) if isinstance(value, str) else value for key, value in body.items()}
    found = served.call(f"/api/v1/{call}", body)
    assert found[0] == status
    assert sentence in found[1]["detail"]


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", ".hidden", "", "x" * 200, "a\0b", "\u00fc"])
def test_names_cannot_be_places(served: Served, model: str, name: str) -> None:
    status, found = served.call("/api/v1/save_weights", {"model_id": model, "path": name})
    assert status == 200
    _, found = served.call("/api/v1/retrieve_future", {"request_id": found["request_id"]})
    assert "is no name for a checkpoint" in found["error"]
    assert found["category"] == "user"


@pytest.mark.parametrize("key", ["", "tml-a-wrong-key-for-tests", "Bearer"])
def test_strangers_stay_outside(served: Served, model: str, key: str) -> None:
    for path, body in (("/api/v1/get_info", {"model_id": model}), ("/api/v1/training_runs", None), ("/metrics", None)):
        assert served.call(path, body, key=key)[0] == 401
    assert served.call("/healthz", key=key) == (200, {"status": "ok"})


def test_each_key_sees_its_own_and_what_was_published(served: Served, session: str, model: str) -> None:
    _, sent = served.call("/api/v1/save_weights_for_sampler", {"model_id": model, "path": "shown"})
    path = served.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]})[1]["path"]
    assert served.call("/api/v1/get_info", {"model_id": model}, key=OTHER)[0] == 404
    assert served.call("/api/v1/retrieve_future", {"request_id": sent["request_id"]}, key=OTHER)[0] == 404
    assert served.call("/api/v1/training_runs", key=OTHER)[1]["training_runs"] == []
    other = served.call("/api/v1/create_session", {}, key=OTHER)[1]["session_id"]
    begin = {"session_id": other, "sampling_session_seq_id": 0, "model_path": path}
    assert served.call("/api/v1/create_sampling_session", begin, key=OTHER)[0] == 400
    place = f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/shown"
    assert served.call(place, method="DELETE", key=OTHER)[0] == 404
    assert served.call(f"{place}/publish", method="POST")[0] == 200
    assert served.call("/api/v1/create_sampling_session", begin, key=OTHER)[0] == 200
    assert served.call(place, method="DELETE", key=OTHER)[0] == 404


def test_bodies_that_are_too_large_are_refused_unread(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as line:
        line.sendall(
            f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n"
            f"Content-Length: {1 << 40}\r\n\r\n".encode()
        )
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_damaged_protobuf_is_refused_and_nothing_else_happens(served: Served, model: str) -> None:
    message = message_of_json(_request(model) | {"seq_id": 900}, forward_only=False)
    whole = message.SerializeToString()
    generator = random.Random(2)
    for _ in range(150):
        body = bytearray(whole)
        for _ in range(generator.randint(1, 6)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        status, found = served.call("/api/v1/forward_backward", bytes(body), Content_Type="application/x-protobuf")
        assert status in (200, 400, 404, 409), found
        assert status == 200 or found["detail"]
    assert served.call("/healthz")[0] == 200


def test_slow_clients_do_not_stop_a_fast_one(served: Served) -> None:
    lines = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(200)]
    try:
        for line in lines:
            line.sendall(f"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nContent-Le".encode())
        done = threading.Event()

        def ask() -> None:
            if served.call("/api/v1/get_server_capabilities")[0] == 200:
                done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
        assert done.is_set()
    finally:
        for line in lines:
            line.close()


def test_the_figures_are_told_to_prometheus(served: Served, model: str) -> None:
    status, text = served.call("/metrics")
    assert status == 200
    assert b"etude_models 1.0" in text
    assert b"etude_busy_seconds_total" in text


def test_only_this_machine_comes_in_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keys"):
        Keys.of("0.0.0.0", None)
    assert Keys.of("127.0.0.1", None).owner({}) == "local"
    (tmp_path / "keys").write_text("ada short\n")
    with pytest.raises(ConfigError, match="line 1"):
        Keys.of("0.0.0.0", tmp_path / "keys")
