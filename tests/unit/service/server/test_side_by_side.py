"""Requests that run beside each other: who has to wait for whom is told by the order in which they end."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.served import KEY, Served

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]  # of the client's
PROMPT = [5, 6, 7, 8]


def ended(served: Served) -> list[tuple[str, str]]:
    """Return kinds and targets of requests in the order in which they ended."""
    with sqlite3.connect(f"file:{served.folder / 'service.db'}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT kind, target FROM requests WHERE finish IS NOT NULL ORDER BY finish").fetchall()
    db.close()
    return rows


def data(count: int, width: int) -> list[Any]:
    ids = [[4 + (row + at) % 90 for at in range(width + 1)] for row in range(count)]
    return [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(one[:-1]), loss_fn_inputs={"target_tokens": one[1:]})
        for one in ids
    ]


def test_a_sample_is_drawn_while_a_long_pass_runs_from_the_weights_it_was_asked_for(
    client: Any, served: Served
) -> None:
    trained = client.create_lora_training_client("tiny", rank=4, seed=1)
    sampler = trained.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints(PROMPT)
    before = sampler.compute_logprobs(prompt).result()
    trained.forward_backward(data(2, 8), "cross_entropy")
    trained.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    passing = trained.forward_backward(data(120, 250), "cross_entropy")  # thousands of tokens, and four drawn
    params = tinker.SamplingParams(max_tokens=2, seed=3, stop=[])
    drawn = [sampler.sample(prompt, 1, params).result().sequences[0].tokens for _ in range(3)]
    assert sampler.compute_logprobs(prompt).result() == before
    assert drawn == [drawn[0]] * 3
    so_far = ended(served)
    assert passing.result().metrics["loss:sum"] > 0
    assert [kind for kind, _ in so_far].count("forward_backward") == 1
    assert [kind for kind, _ in so_far].count("sample") == 5
    assert ended(served)[len(so_far)][0] == "forward_backward"


def test_a_short_request_joins_a_long_one_and_is_answered_first(client: Any, served: Served) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    prompt = tinker.ModelInput.from_ints(PROMPT)

    def draw(tokens: int, n: int = 1) -> list[list[int]]:
        params = tinker.SamplingParams(max_tokens=tokens, seed=3, stop=[])
        return [list(one.tokens) for one in sampler.sample(prompt, n, params).result().sequences]

    alone = draw(2)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(draw, 500, 48)
        assert draw(2) == alone
        assert not long.done()
        assert long.result()[0][:2] == alone[0]
        assert [len(one) for one in long.result()] == [500] * 48


def test_a_short_completion_joins_a_long_one_and_is_answered_first(served: Served) -> None:
    def draw(tokens: int, n: int = 1) -> list[list[int]]:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "seed": 3, "n": n, "ignore_eos": True}
        status, found = served.call("/v1/completions", asked, key=KEY)
        assert status == 200, found
        return [one["token_ids"] for one in found["choices"]]

    alone = draw(2)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(draw, 500, 48)
        assert draw(2) == alone
        assert not long.done()
        assert long.result()[0][:2] == alone[0]
        assert [len(one) for one in long.result()] == [500] * 48
