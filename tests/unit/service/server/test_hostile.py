"""Whatever bytes arrive, a service answers with a result or a sentence, and nobody else notices."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faulty import FaultyLine
from tests.hostile import PROTOBUF, Sender, Sent, broken_json, broken_protobuf, is_right
from tests.served import KEY, Served, connected

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
OTHER = "tml-another-key-for-tests"
IDS = [5, 9, 12, 40, 7]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "keys").write_text(f"ada {KEY}\nben {OTHER}\n")
    found = Served(folder / "state", "--keys", str(folder / "keys")).start()
    yield found
    found.kill()  # it may be drawing what nobody waits for
    assert "Traceback" not in found.log.read_text()


@pytest.fixture(scope="module")
def recorded(served: Served) -> list[Sent]:
    """What the official client sends in one life: training in every form, saving, loading, sampling, looking around."""
    line = FaultyLine(served.url, share=0.0, seed=0)
    number = [1.0] * 4
    try:
        with connected(line) as client:
            trained = client.create_lora_training_client("tiny", rank=4, seed=1, user_metadata={"why": "test"})
            for loss_fn, inputs in (
                ("cross_entropy", {"target_tokens": IDS[1:], "weights": number}),
                ("importance_sampling", {"target_tokens": IDS[1:], "logprobs": number, "advantages": number}),
                ("ppo", {"target_tokens": IDS[1:], "logprobs": number, "advantages": number}),
            ):
                datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)
                trained.forward_backward([datum] * 2, loss_fn).result()
            trained.forward([datum], "ppo").result()
            trained.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
            path = trained.save_state("one").result().path
            trained = client.create_training_client_from_state_with_optimizer(path)
            sampler = trained.save_weights_and_get_sampling_client()
            trained.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
            sampler.sample(
                tinker.ModelInput.from_ints(IDS), 1, tinker.SamplingParams(max_tokens=4, seed=1, stop=["a"])
            ).result()
            with pytest.warns(FutureWarning, match="RestClient"):
                rest = client.create_rest_client()
            rest.list_checkpoints(trained.model_id).result()
            rest.get_training_run(trained.model_id).result()
            rest.publish_checkpoint_from_tinker_path(path).result()
    finally:
        line.close()
    found = [Sent(method, path, body, kind) for method, path, kind, body in line.heard]
    openai = b'{"model": "tiny", "prompt": "ab", "max_tokens": 2, "logprobs": 1, "stop": ["x"], "temperature": 0.5}'
    found.append(Sent("POST", "/v1/completions", openai))
    found.append(
        Sent("POST", "/v1/chat/completions", b'{"model": "tiny", "messages": [{"role": "a", "content": "b"}]}')
    )
    found.append(Sent("GET", f"/v1/models/{path}"))
    found.append(Sent("POST", f"/api/v1/training_runs/{trained.model_id}/curves", b'{"values": {"reward": 1.0}}'))
    found.append(Sent("GET", f"/api/v1/training_runs/{trained.model_id}/checkpoints/weights/one/archive"))
    assert {one.kind for one in found if "forward" in one.path} == {PROTOBUF}
    return found


def _train(served: Served, steps: int, is_over: threading.Event | None = None) -> tuple[list[Any], int]:
    """Train as the other key, until told to stop; return every number that came of the first steps, and the steps."""
    session = served.call("/api/v1/create_session", {}, key=OTHER)[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 1}}
    model = served.call("/api/v1/create_model", asked, key=OTHER)[1]["model_id"]
    datum = {
        "model_input": {"chunks": [{"tokens": IDS[:-1]}]},
        "loss_fn_inputs": {"target_tokens": {"data": IDS[1:], "dtype": "int64"}},
    }
    given = {"model_id": model, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    step = {"model_id": model, "adam_params": {"learning_rate": 1e-3}}
    told: list[Any] = []
    done = 0
    while done < steps or (is_over is not None and not is_over.is_set()):
        for call, body in (("forward_backward", given), ("optim_step", step)):
            status, sent = served.call(f"/api/v1/{call}", body, key=OTHER)
            assert status == 200, sent
            found = served.result(sent, key=OTHER)
            assert "error" not in found, found
            if done < steps:
                told.append(found)
        done += 1
    return told, done


def _disturb(served: Served, recorded: list[Sent], count: int, seed: int) -> Counter[int]:
    """Send broken requests in two threads while another key trains; return how they were answered."""
    calm, _ = _train(served, 6)
    protobuf = [one for one in recorded if one.kind == PROTOBUF]
    json_ones = [one for one in recorded if one.kind != PROTOBUF]
    senders = [Sender(served.port, KEY) for _ in range(2)]

    def send(number: int) -> None:
        draw = random.Random(seed + number)
        for _ in range(count // 2):
            if draw.random() < 0.6:
                senders[number].send(broken_protobuf(draw.choice(protobuf), draw))
            else:
                senders[number].send(broken_json(draw.choice(json_ones), draw))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    is_over, beside = threading.Event(), []
    trainer = threading.Thread(target=lambda: beside.append(_train(served, 6, is_over)))
    for thread in (*threads, trainer):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    trainer.join()
    for sender in senders:
        sender.close()
    assert not (wrong := [one for sender in senders for one in sender.wrong]), "\n".join(wrong[:20])
    assert beside, "the client that trained beside failed"
    assert beside[0][0] == calm
    return senders[0].seen + senders[1].seen


def test_broken_requests_are_refused_and_disturb_nobody(served: Served, recorded: list[Sent]) -> None:
    seen = _disturb(served, recorded, 400, seed=1)
    assert seen.total() == 400
    assert {200, 400, 404, 415, 422} <= set(seen)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thousands_of_broken_requests_are_refused_and_disturb_nobody(served: Served, recorded: list[Sent]) -> None:
    seen = _disturb(served, recorded, 7000, seed=100)
    print(f"7,000 broken requests: {dict(sorted(seen.items()))}")
    assert seen.total() == 7000


def _explore(served: Served, examples: int, seed: int) -> Counter[int]:
    """Send what schemathesis makes of our description of ourselves: what fits it, and what does not."""
    import hypothesis

    schemathesis = pytest.importorskip("schemathesis")

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    seen: Counter[int] = Counter()
    wrong: list[str] = []
    quiet = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:

            @quiet
            @hypothesis.seed(seed)
            @hypothesis.given(operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answer = case.call(headers={"X-API-Key": KEY}, timeout=60)
                seen[answer.status_code] += 1
                if not is_right(answer.status_code, answer.content, case.method):
                    wrong.append(
                        f"{case.method} {case.path}: {answer.status_code} {answer.content[:300]!r} {case.body!r}"[:800]
                    )

            try:
                ask()
            except hypothesis.errors.Unsatisfiable:  # everything fits some operations
                continue
    assert not wrong, "\n".join(wrong[:20])
    return seen


def test_our_own_description_leads_to_no_failure(served: Served, recorded: list[Sent]) -> None:
    seen = _explore(served, 4, seed=1)
    assert seen.total() > 100
    assert seen[200]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thousands_of_requests_from_our_own_description_lead_to_no_failure(
    served: Served, recorded: list[Sent]
) -> None:
    seen = _explore(served, 100, seed=2)
    print(f"{seen.total()} requests of schemathesis: {dict(sorted(seen.items()))}")
    assert seen.total() > 3000
