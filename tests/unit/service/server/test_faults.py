"""A service that is killed, asked twice, or asked in the wrong order loses no step and makes none twice."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.service.server.codec import message_of_json
from etude.service.server.messages import message_class
from etude.service.server.store import Store
from tests.faulty import FAULTS, FaultyLine
from tests.served import Preloaded, Served, connected

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]
TOKENS = [[5, 9, 12, 40, 7], [33, 20, 21, 22], [60, 61, 62, 63, 64, 65]]


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    found = Preloaded()
    yield found
    found.close()


def _data(number: int) -> list[Any]:
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0 + number % 3] * (len(ids) - 1)},
        )
        for ids in TOKENS
    ]


def _train(client: Any, steps: int, each: Any = None) -> tuple[str, list[float]]:
    """Train a model through a client; return the hash of its weights and every loss."""
    trained = client.create_lora_training_client("tiny", rank=4, seed=1)
    told = []
    for number in range(steps):
        if each is not None:
            each(number)
        done = trained.forward_backward(_data(number), "cross_entropy")
        updated = trained.optim_step(tinker.AdamParams(learning_rate=1e-3))
        told.append(done.result().metrics["loss:sum"])
        updated.result()
    return trained.save_state("end").result().path, told


def _hash(folder: Path, path: str) -> str:
    """Return the hash of saved weights and optimizer and of the number of steps; the service must have ended."""
    store = Store(folder)
    try:
        model, kind, name = path.removeprefix("tinker://").split("/")
        row = store.one("SELECT * FROM checkpoints WHERE model=? AND kind=? AND name=?", model, kind, name)
        tensors = store.read_weights(row["file"])
        steps = store.one("SELECT steps FROM models WHERE id=?", model)["steps"]
    finally:
        store.close()
    found = hashlib.sha256(str(steps).encode())
    for key in sorted(tensors):
        found.update(key.encode() + tensors[key].numpy().tobytes())
    return found.hexdigest()


def _kill_and_restart(served: Served) -> None:
    served.kill()
    served.start()


def _compare(tmp_path: Path, preloaded: Preloaded, steps: int, kills: list[int], share: float = 0.0) -> None:
    """Train through a good line and a bad one, to a service that is killed at some steps; compare every bit."""
    calm, rough = (
        Served(tmp_path / name, "--snapshot-steps", "7", preloaded=preloaded).start() for name in ("calm", "rough")
    )
    generator, line = random.Random(1), FaultyLine(rough.url, share=share, seed=2)
    killers: list[threading.Thread] = []

    def disturb(number: int) -> None:
        if number in kills:

            def soon() -> None:
                time.sleep(generator.random() * 0.05)
                _kill_and_restart(rough)

            killers.append(threading.Thread(target=soon))
            killers[-1].start()

    try:
        with connected(calm) as client:
            expected, told = _train(client, steps)
        with connected(line) as client:
            path, heard = _train(client, steps, disturb)
        for killer in killers:
            killer.join()
    finally:
        line.close()
        calm.stop()
        rough.stop()
    assert not share or set(line.seen) == {"", *FAULTS}
    assert heard == told
    found, wanted = _hash(tmp_path / "rough", path), _hash(tmp_path / "calm", expected)
    print(f"{steps} steps, {len(killers)} kills, calls {dict(line.seen)}: {found[:16]}, undisturbed {wanted[:16]}")
    assert found == wanted


@pytest.mark.timeout(300)
def test_sixty_steps_with_three_kills_end_in_the_same_bits(tmp_path: Path, preloaded: Preloaded) -> None:
    _compare(tmp_path, preloaded, 60, [13, 30, 47])


@pytest.mark.timeout(300)
def test_a_bad_line_changes_no_bit(tmp_path: Path, preloaded: Preloaded) -> None:
    _compare(tmp_path, preloaded, 10, [], share=0.4)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_a_thousand_steps_over_a_bad_line_with_twenty_kills_end_in_the_same_bits(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    _compare(tmp_path, preloaded, 1000, list(range(25, 1000, 49)), share=0.2)


def _body(model: str, seq: int, *, weight: float = 1.0) -> bytes:
    given = {
        "model_id": model, "seq_id": seq,
        "forward_backward_input": {
            "loss_fn": "cross_entropy",
            "data": [{
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 9, 12]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [9, 12, 40], "dtype": "int64", "shape": [3]},
                    "weights": {"data": [weight] * 3, "dtype": "float32", "shape": [3]},
                },
            }],
        },
    }  # fmt: skip
    found: bytes = message_of_json(given, forward_only=False).SerializeToString()
    return found


def _result(served: Served, request: str) -> Any:
    status, found = served.call("/api/v1/retrieve_future", {"request_id": request}, Accept="application/json")
    assert status == 200, found
    return found


def _send(served: Served, body: bytes) -> tuple[int, Any]:
    return served.call("/api/v1/forward_backward", body, Content_Type="application/x-protobuf")


def test_requests_run_in_order_and_once_also_over_a_kill(tmp_path: Path, preloaded: Preloaded) -> None:
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    try:
        _, session = served.call("/api/v1/create_session", {"tags": [], "sdk_version": "0"})
        asked = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
        asked["lora_config"] = {"rank": 4, "seed": 1}
        (_, first), (_, again) = (served.call("/api/v1/create_model", asked) for _ in range(2))
        assert first == again
        assert served.call("/api/v1/create_model", asked | {"lora_config": {"rank": 5}})[0] == 409
        model = first["model_id"]
        assert _result(served, first["request_id"])["model_id"] == model
        step = {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1e-2}}
        _, third = served.call("/api/v1/optim_step", step)
        _, second = _send(served, _body(model, 2))
        served.kill()  # two requests wait for the first: nobody has begun on them
        served.start()
        (status, sent), (_, repeated) = (_send(served, _body(model, 1)) for _ in range(2))
        assert (status, sent) == (200, repeated)
        assert _send(served, _body(model, 1, weight=2.0))[0] == 409
        one, two = (_result(served, name["request_id"]) for name in (sent, second))
        assert one == two
        assert _result(served, third["request_id"])["metrics"]["grad_norm:mean"] > 0
        assert served.call("/api/v1/optim_step", step) == (200, third)
        served.kill()
        served.start()
        assert _result(served, sent["request_id"]) == one
        status, four = served.call("/api/v1/optim_step", step | {"seq_id": 4})
        assert _result(served, four["request_id"])["metrics"]["grad_norm:mean"] == 0
    finally:
        served.stop()
    store = Store(tmp_path / "state")
    assert store.one("SELECT steps, next_seq FROM models")["steps"] == 2
    store.close()


def test_samples_that_were_asked_for_are_drawn_after_a_kill(tmp_path: Path, preloaded: Preloaded) -> None:
    served = Served(tmp_path / "state", preloaded=preloaded).start()
    try:
        _, session = served.call("/api/v1/create_session", {})
        asked = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "tiny"}
        _, sampler = served.call("/api/v1/create_sampling_session", asked)
        body = {
            "sampling_session_id": sampler["sampling_session_id"], "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 9]}]},
            "sampling_params": {"max_tokens": 400, "stop": []},
        }  # fmt: skip
        names = [served.call("/api/v1/asample", body | {"seq_id": number})[1]["request_id"] for number in range(6)]
        served.kill()
        served.start()
        assert served.call("/api/v1/asample", body | {"seq_id": 5})[1]["request_id"] == names[5]
        assert served.call("/api/v1/asample", body | {"seq_id": 5, "num_samples": 1})[0] == 409
        for name in names:
            assert [len(one["tokens"]) for one in _result(served, name)["sequences"]] == [400, 400]
        target = {"type": "sampling_session", "sampling_session_id": sampler["sampling_session_id"]}
        _, many = served.call("/api/v1/retrieve_futures", {"target": target})
        assert sorted(one["request_id"] for one in many["completions"]) == sorted(names)
        assert {one["state"] for one in many["completions"]} == {"finished"}
        later = {"target": target, "prev_cursor": many["cursor"], "timeout": 0.1}
        assert served.call("/api/v1/retrieve_futures", later)[1]["completions"] == []
        late = served.call("/api/v1/asample", body | {"seq_id": 6})[1]["request_id"]
        assert served.call("/api/v1/cancel_future", {"request_id": late})[0] == 200
    finally:
        served.stop()


def test_our_messages_are_those_of_the_client() -> None:
    from tinker.proto import tinker_public_pb2 as theirs

    for name in (
        "ForwardBackwardRequest",
        "ForwardBackwardOutput",
        "SampleResponse",
        "Datum",
        "Tensor",
        "TopkLogprobs",
    ):
        own = {field.name: field.number for field in message_class(name).DESCRIPTOR.fields}
        other = {field.name: field.number for field in getattr(theirs, name).DESCRIPTOR.fields}
        assert own.items() <= other.items()
