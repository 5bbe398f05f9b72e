"""A call that is refused has had its turn: those after it do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.service.server.codec import canonical_json, message_of_json
from etude.service.server.service import Limits, Service
from etude.service.server.turns import turn_of

pytest.importorskip("peft")
pytest.importorskip("fastapi")
STEP = canonical_json({"learning_rate": 1e-3})


def _whole(model: str = "m", seq: int = 7) -> bytes:
    chunk = {"type": "encoded_text", "tokens": [5, 9]}
    datum = {
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {"target_tokens": {"data": [9, 12], "dtype": "int64"}},
    }
    body = {
        "model_id": model,
        "seq_id": seq,
        "forward_backward_input": {"loss_fn": "cross_entropy", "data": [datum]},
    }
    found: bytes = message_of_json(body, forward_only=False).SerializeToString()
    return found


@pytest.mark.parametrize(
    "body, found",
    [
        (b'{"model_id": "m", "seq_id": 7, "adam_params": {"learning_rate": "fast"}}', ("m", 7)),
        (b'{"model_id": "m", "seq_id": "7"}', ("m", 7)),
        (b'{"model_id": "m", "seq_id": 7, "adam_params": {"lear', ("m", 7)),
        (b'{"model_id": "m", "seq_id": 7, "x": "\xff"}', ("m", 7)),
        (b'{"model_id": "m", "seq_id": 7, "seq_id": 8, ', None),  # which of them?
        (b'{"model_id": "m", "seq_id": 0}', None),
        (b'{"model_id": "m", "seq_id": -7}', None),
        (b'{"model_id": "m", "seq_id": 7.5}', None),
        (b'{"model_id": 3, "seq_id": 7}', None),
        (b'{"model_id": "m"}', None),
        (b"[7]", None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_the_turn_is_read_from_what_can_be_read_of_json(body: bytes, found: Any) -> None:
    assert turn_of(body, is_proto=False) == found


def test_the_turn_is_read_from_what_can_be_read_of_protobuf() -> None:
    whole = _whole()
    assert turn_of(whole, is_proto=True) == ("m", 7)
    cut = [turn_of(whole[:size], is_proto=True) for size in range(len(whole))]
    assert set(cut) == {None, ("m", 7)}
    assert cut[5:] == [("m", 7)] * (len(whole) - 5)
    assert turn_of(b"\xff" * 40, is_proto=True) is None


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    found = Service(tmp_path / "state", ["tiny"], Limits(gap_s=0.0, queue=10))
    yield found
    found.store.close()


def _model(service: Service) -> str:
    session = service.create_session("ada", {})
    model, _ = service.create_model("ada", session, 0, "tiny", {"rank": 2, "seed": 1}, None)
    assert service.training._serve(model)
    return model


def test_a_turn_passes_once_for_its_owner_and_only_nearby(service: Service) -> None:
    model = _model(service)
    service.pass_turn("ben", model, 1, "optim_step", "another's")
    service.pass_turn("ada", "no-such-model", 1, "optim_step", "of nothing")
    service.pass_turn("ada", model, 1000, "optim_step", "far off")
    assert not service.training._serve(model)
    service.pass_turn("ada", model, 1, "optim_step", "a sentence")
    service.pass_turn("ada", model, 1, "optim_step", "a sentence")
    request = service.submit("ada", model, 2, "optim_step", STEP)
    assert service.training._serve(model)
    assert service.training._serve(model)
    assert service.request(request, "ada")["state"] == "done"


def test_what_never_arrives_is_waited_for_only_so_long(service: Service) -> None:
    model = _model(service)
    waiting = [service.submit("ada", model, seq, "optim_step", STEP) for seq in (2, 3)]
    assert not service.training._serve(model)
    for name in waiting:
        row = service.request(name, "ada")
        assert (row["state"], row["error"]) == ("failed", f"request 1 of {model}, which comes before, never arrived")
    after = service.submit("ada", model, 4, "optim_step", STEP)
    assert service.training._serve(model)
    assert service.request(after, "ada")["state"] == "done"
