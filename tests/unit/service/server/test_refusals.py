"""Whatever is sent, a service answers with a sentence, and goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from etude.errors import ConfigError
from etude.service.server.access import Keys
from etude.service.server.bases import Bases
from etude.service.server.codec import message_of_json
from tests.served import KEY, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")

OTHER = "tml-another-key-for-tests"


@pytest.mark.parametrize("given", ["=tiny", " =tiny", "tiny=", "="])
def test_a_model_without_a_name_or_a_name_without_a_model_is_not_offered(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^'{given}' offers no model: write NAME=MODEL, or MODEL alone$"):
        Bases([given])


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
    served.result(found)
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


def _ppo(**inputs: Any) -> dict[str, Any]:
    return {"loss_fn": "ppo", "inputs": {"target_tokens": _targets(9, 12, 40), **inputs}}


def _sparse(rows: int, columns: int) -> dict[str, Any]:
    found = _targets(9) | {"shape": [rows, columns], "sparse_col_indices": [0]}
    return found | {"sparse_crow_indices": [0, *[1] * rows] if rows < 9 else [0, 1]}


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
        ({"inputs": {"target_tokens": _targets(9, 12, 40) | {"shape": [1] * 9}}}, "shape of 9 sizes"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40) | {"shape": [0, 1 << 60]}}}, "do not fill the shape"),
        ({"inputs": {"target_tokens": {"data": [9.5, 12, 40], "dtype": "int64"}}}, "whole numbers"),
        ({"tokens": [5, 9.5, 12]}, "whole numbers"),
        ({"tokens": [5, 1 << 40, 12]}, "not a forward or backward request"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40), "weights": _floats(1, float("nan"), 1)}}, "holds nan"),
        ({"inputs": {"target_tokens": _targets(9, 12, 40), "weights": _floats(1, 1e300, 1)}}, "holds inf"),
        (_ppo(logprobs=_floats(-1, -1, -1), advantages=_floats(1, float("inf"), 1)), "advantages holds inf"),
        (_ppo(logprobs=_floats(-1, float("-inf"), -1), advantages=_floats(1, 1, 1)), "logprobs holds -inf"),
        (_ppo(logprobs=_floats(-1, -1), advantages=_floats(1, 1, 1)), "logprobs has the shape [2]"),
        ({**_ppo(), "loss_fn_config": {"clip_low_threshold": float("nan")}}, "must be finite"),
        ({"inputs": {"target_tokens": _sparse(1 << 20, 1 << 10)}}, "when written out"),
        ({"inputs": {"target_tokens": _sparse(3, 4) | {"sparse_col_indices": [9]}}}, "do not fit its shape"),
    ],
)
def test_work_that_cannot_be_done_is_refused(served: Served, model: str, changes: Any, sentence: str) -> None:
    body = _request(model, **changes)
    status, found = served.call("/api/v1/forward_backward", body)
    assert status == 400
    assert sentence in found["detail"]


def _create(**lora: Any) -> dict[str, Any]:
    return {"session_id": "S", "model_seq_id": 70, "base_model": "tiny", "lora_config": lora}


def _draw(**params: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"tokens": [5]}]}
    return {"prompt": prompt, "sampling_params": params, "sampling_session_id": "none", "seq_id": 1}


def test_refused_work_does_not_hold_up_what_follows(served: Served, model: str) -> None:
    served.call("/api/v1/forward_backward", _request(model, loss_fn="hinge"))
    _, sent = served.call("/api/v1/forward_backward", _request(model))
    assert "loss:sum" in served.result(sent)["metrics"]


@pytest.mark.parametrize(
    "call, body, status, sentence",
    [
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": "fast"}}, 422, "learning_rate"),
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": -1.0}}, 422, "learning_rate"),
        ("optim_step", {"model_id": "M", "adam_params": {"momentum": 1.0}}, 422, "momentum"),
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": float("nan")}}, 422, "finite number"),
        ("optim_step", {"model_id": "M", "adam_params": {"beta2": float("inf")}}, 422, "beta2"),
        ("optim_step", {"model_id": "M", "adam_params": {"learning_rate": 1e300}}, 422, "learning_rate"),
        ("optim_step", {"model_id": "M", "adam_params": {}, "seq_id": 1 << 70}, 422, "seq_id"),
        ("optim_step", {"model_id": "M", "optimizer_params": {"type": "dimuon"}}, 422, "adam_params"),
        ("optim_step", {"model_id": "none", "adam_params": {}}, 404, "there is no model 'none'"),
        ("get_info", {"model_id": "none"}, 404, "there is no model"),
        ("get_info", b"{", 422, "JSON"),
        ("get_info", b"\xff\xfe", 422, "JSON"),
        ("create_model", {"session_id": "S", "model_seq_id": 7, "base_model": "gpt-9"}, 400, "offers tiny"),
        ("create_model", _create(rank=-4), 400, "rank must be between 0 (all weights) and 512, got -4"),
        ("create_model", _create(rank=100_000), 400, "rank must be between 0"),
        ("create_model", _create(rank=10**30), 422, "rank"),
        ("create_model", _create(seed=1 << 64), 422, "seed"),
        ("create_model", _create() | {"user_metadata": {"a": float("nan")}}, 422, "JSON"),
        ("create_model", _create() | {"user_metadata": {"a": "x" * 70_000}}, 422, "larger than 65536 bytes"),
        ("create_session", b'{"user_metadata": {"a": "\\ud800"}}', 400, "half a character"),
        ("create_session", b'{"display_name": "\xed\xa0\x80"}', 400, "half a character"),
        ("create_session", '{"display_name": "\\ud800"}'.encode("utf-16"), 400, "half a character"),
        ("save_weights", b'{"model_id": "M", "path": "a", "user_metadata": {"a": "\\ud800"}}', 400, "half a char"),
        ("create_session", b'{"user_metadata": {"a":' + b"[" * 200 + b"]" * 200 + b"}}", 422, "nested deeper than 32"),
        ("create_session", b"[" * 100_000, 400, "nested too deep"),
        ("create_session", b'{"tags": [], "tags": ["x"]}', 400, "says 'tags' twice"),
        ("get_info", b'{"model_id": "a", "\\ud800": 1}', 400, "half a character"),
        ("retrieve_futures", {"target": {"sampling_session_id": "x", "cloned_sampler_id": 1 << 60}}, 422, "cloned"),
        ("asample", _draw(), 404, "there is no sampler"),
        ("asample", _draw(max_tokens=1 << 40), 422, "max_tokens"),
        ("asample", _draw(temperature=1e-300), 422, "temperatures are 0, or 1e-06 at least"),
        ("asample", _draw(temperature=float("inf")), 422, "temperature"),
        ("asample", _draw(top_k=1 << 80), 422, "top_k"),
        ("asample", _draw() | {"num_samples": 100_000}, 422, "num_samples"),
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


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "/etc", ".hidden", "", "x" * 200, "a\0b", "\u00fc", "tinker://M/weights/x", "a\n"]
)
def test_names_cannot_be_places(served: Served, model: str, name: str) -> None:
    for call in ("save_weights", "save_weights_for_sampler"):
        status, found = served.call(f"/api/v1/{call}", {"model_id": model, "path": name})
        assert status == 400
        assert "is no name for a checkpoint" in found["detail"]
    place = f"/api/v1/training_runs/{model}/checkpoints/weights/{quote(name, safe='')}"
    for path, method in ((place, "DELETE"), (f"{place}/archive", "GET"), (f"{place}/archive.tar", "GET")):
        assert 400 <= served.call(path, method=method)[0] < 500
    for path in (f"tinker://{model}/weights/{name}", name):
        status, found = served.call("/api/v1/weights_info", {"tinker_path": path})
        assert status == 400
        assert "no checkpoint" in found["detail"]


@pytest.mark.parametrize("key", ["", "tml-a-wrong-key-for-tests", "Bearer"])
def test_strangers_stay_outside(served: Served, model: str, key: str) -> None:
    for path, body in (("/api/v1/get_info", {"model_id": model}), ("/api/v1/training_runs", None), ("/metrics", None)):
        assert served.call(path, body, key=key)[0] == 401
    assert served.call("/healthz", key=key) == (200, {"status": "ok"})


def test_each_key_sees_its_own_and_what_was_published(served: Served, session: str, model: str) -> None:
    _, sent = served.call("/api/v1/save_weights_for_sampler", {"model_id": model, "path": "shown"})
    path = served.result(sent)["path"]
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


def _future(served: Served, sent: Any) -> Any:
    return served.result(sent)


def test_what_would_poison_the_weights_is_undone(served: Served, session: str) -> None:
    """Numbers that are finite by themselves, and whose products are not."""
    body = {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    model = served.call("/api/v1/create_model", body)[1]["model_id"]
    work, step = _request(model), {"model_id": model, "adam_params": {"learning_rate": 1e-3}}

    def do(call: str, body: Any) -> Any:
        return _future(served, served.call(f"/api/v1/{call}", body)[1])

    first = do("forward_backward", work)
    huge = _request(model, inputs={"target_tokens": _targets(9, 12, 40), "weights": _floats(3e38, 3e38, 3e38)})
    assert "loss is not finite" in do("forward_backward", huge)["error"]
    assert "no step was made: an earlier forward_backward failed" in do("optim_step", step)["error"]
    for adam in ({"eps": 0.0}, {"eps": 1e-300}):  # 0 / 0 where a gradient is 0
        do("forward_backward", work)
        found = do("optim_step", step | {"adam_params": adam})
        assert "not finite, and was taken back" in found["error"]
        assert do("forward_backward", work) == first
        assert "grad_norm:mean" in do("optim_step", step | {"adam_params": {"learning_rate": 0.0}})["metrics"]
    status, found = served.call("/status")
    assert (status, [one["loss"] > 0 for one in found["models"] if one["id"] == model]) == (200, [True])


def test_too_much_to_draw_is_refused(served: Served, session: str) -> None:
    begin = {"session_id": session, "sampling_session_seq_id": 5, "base_model": "tiny"}
    sampler = served.call("/api/v1/create_sampling_session", begin)[1]["sampling_session_id"]
    for params, more, sentence in (
        ({}, {"num_samples": 1024}, "262144 tokens in one request are the most"),
        ({}, {"prompt": {"chunks": [{"tokens": [5] * 513}]}}, "the model takes 1 to 512"),
        ({}, {"prompt": {"chunks": [{"tokens": [5000]}]}}, "the model knows 0 to"),
        ({}, {"prompt": {"chunks": []}}, "the prompt has 0 tokens"),
        ({"stop": [""]}, {}, "stop holds an empty text"),
    ):
        status, found = served.call("/api/v1/asample", _draw(**params) | {"sampling_session_id": sampler} | more)
        assert status == 400
        assert sentence in found["detail"]
    half = {"prompt": "\ud800"}
    for more, sentence in (
        (half, "half a character"),
        ({"n": 1000}, "n:"),
        ({"max_tokens": 1 << 19}, "context"),
        ({"model": "../x"}, "no model"),
    ):
        status, found = served.call("/v1/completions", {"model": "tiny", "prompt": "a", **more})
        assert status in (400, 404)
        assert sentence in found["error"]["message"]


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


def test_only_this_machine_comes_in_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keys"):
        Keys.of("0.0.0.0", None)
    assert Keys.of("127.0.0.1", None).owner({}) == "local"
    (tmp_path / "keys").write_text("ada short\n")
    with pytest.raises(ConfigError, match="line 1"):
        Keys.of("0.0.0.0", tmp_path / "keys")
