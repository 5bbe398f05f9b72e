"""Endpoints: what is sent, what is made of answers, and what happens when a server fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from etude.errors import ConfigError, DataError
from etude.policies.language import Sampling
from etude.rollouts.endpoint import ChatEndpoint, CompletionEndpoint, EndpointError

Answer = tuple[int, Any, dict[str, str]]
OLD_FORM = {"choices": [{"text": " 4", "finish_reason": "stop", "logprobs": {"token_logprobs": [None, -0.5]}}]}


@contextmanager
def served(answer: Callable[[int, dict[str, Any], Any], Answer]) -> Iterator[tuple[str, list[Any]]]:
    """Serve answers made from (number of the request, its body, its headers); yield the url and what was asked."""
    asked: list[Any] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append((self.path, body))
                number = len(asked)
            status, content, headers = answer(number, body, self.headers)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client has given up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join(timeout=60)
        server.server_close()


def test_one_request_per_completion_each_with_its_own_seed() -> None:
    def echo(_: int, body: dict[str, Any], __: Any) -> Answer:
        return 200, {"choices": [{"text": f"{body['prompt']}|{body['seed']}", "finish_reason": "length"}]}, {}

    sampling = Sampling(max_new_tokens=7, temperature=0.5, top_k=3, stop=("\n",), seed=1)
    with served(echo) as (url, asked):
        endpoint = CompletionEndpoint(url, "m", concurrency=4, extra={"min_p": 0})
        found = endpoint.generate(["a", "b", "c"], sampling, n=2, keys=[5, 6, 7])
        again = CompletionEndpoint(url, "m", concurrency=1).generate(["c"], sampling, n=2, keys=[7])
    assert [[one.text[:2] for one in group] for group in found] == [["a|"] * 2, ["b|"] * 2, ["c|"] * 2]
    assert len({one.text for group in found for one in group}) == 6
    assert again[0] == found[2]
    path, body = asked[0]
    assert path == "/v1/completions"
    wanted = {"model": "m", "max_tokens": 7, "temperature": 0.5, "top_k": 3, "stop": ["\n"], "min_p": 0}
    assert wanted.items() <= body.items()
    assert found[0][0].finish_reason == "length" and found[0][0].tokens == [] and found[0][0].logprobs == []


def test_both_forms_of_log_probabilities() -> None:
    content = [{"id": 3, "token": " ", "logprob": -0.25}, {"id": 4, "token": "4", "logprob": -0.5}]
    new_form = {"choices": [{"message": {"content": " 4"}, "finish_reason": "stop", "logprobs": {"content": content}}]}
    with served(lambda *_: (200, new_form, {})) as (url, asked):
        one = ChatEndpoint(url).generate(["2+2?"])[0][0]
    assert (one.text, one.tokens, one.logprobs, one.finish_reason) == (" 4", [3, 4], [-0.25, -0.5], "stop")
    assert asked[0][1]["messages"] == [{"role": "user", "content": "2+2?"}]
    with served(lambda *_: (200, OLD_FORM, {})) as (url, _):
        assert CompletionEndpoint(url).generate([[1, 2]])[0][0].logprobs == [-0.5]


def test_what_may_pass_is_tried_again() -> None:
    def busy(number: int, *_: Any) -> Answer:
        return (503, b"loading", {}) if number < 3 else (200, OLD_FORM, {})

    with served(busy) as (url, asked):
        assert CompletionEndpoint(url, backoff_s=0.001).generate(["2+2="])[0][0].text == " 4"
    assert len(asked) == 3


def test_a_server_that_asks_for_patience_gets_it() -> None:
    moments = []

    def limited(number: int, *_: Any) -> Answer:
        moments.append(time.monotonic())
        return (
            (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.3"}) if number == 1 else (200, OLD_FORM, {})
        )

    with served(limited) as (url, _):
        CompletionEndpoint(url, backoff_s=0.001).generate(["2+2="])
    assert moments[1] - moments[0] >= 0.3


def test_a_refusal_is_told_at_once_and_in_one_sentence() -> None:
    answer: Answer = (400, {"error": {"message": "no such\nmodel"}}, {})
    refused = pytest.raises(EndpointError, match="refused a request: HTTP 400: no such model")
    with served(lambda *_: answer) as (url, asked), refused:
        CompletionEndpoint(url).generate(["a"])
    assert len(asked) == 1


def test_a_server_that_never_answers() -> None:
    free = threading.Event()

    def hang(*_: Any) -> Answer:
        free.wait(20)
        return 200, OLD_FORM, {}

    with served(hang) as (url, asked):
        with pytest.raises(EndpointError, match=r"failed 2 times; at last: .*timed out"):
            CompletionEndpoint(url, timeout_s=0.2, retries=1, backoff_s=0.001).generate(["a"])
        free.set()
    assert len(asked) == 2


def test_a_server_that_is_not_there() -> None:
    with served(lambda *_: (200, OLD_FORM, {})) as (url, _):
        pass
    with pytest.raises(EndpointError, match=r"failed 2 times; at last: .*refused"):
        CompletionEndpoint(url, retries=1, backoff_s=0.001).generate(["a"])


@pytest.mark.parametrize("content", [{"choices": []}, {"error": "x"}, b"<html>", [1]])
def test_an_answer_that_is_none(content: Any) -> None:
    refused = pytest.raises(EndpointError, match=r"no completion|not answer with JSON")
    with served(lambda *_: (200, content, {})) as (url, _), refused:
        CompletionEndpoint(url).generate(["a"])


def test_a_key_is_sent_and_never_shown() -> None:
    def check(_: int, __: Any, headers: Any) -> Answer:
        return 401, {"error": {"message": f"bad {headers['Authorization']}"}}, {}

    with served(check) as (url, _), pytest.raises(EndpointError) as caught:
        CompletionEndpoint(url, api_key="hunter2-hunter2").generate(["a"])
    assert "bad Bearer ***" in str(caught.value) and "hunter2" not in str(caught.value)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="http"):
        CompletionEndpoint("file:///etc/passwd")
    with pytest.raises(ConfigError, match="concurrency"):
        CompletionEndpoint("http://127.0.0.1", concurrency=0)
    endpoint = CompletionEndpoint("http://127.0.0.1:9")
    with pytest.raises(DataError, match="ChatEndpoint"):
        endpoint.generate([[{"role": "user", "content": "hi"}]])
    with pytest.raises(DataError, match="no tokens"):
        ChatEndpoint("http://127.0.0.1:9").generate([[1, 2]])
    with pytest.raises(DataError, match="one key per prompt"):
        endpoint.generate(["a"], keys=[])
    assert endpoint.generate([]) == []


@pytest.mark.slow
def test_a_third_party_server(child_env: dict[str, str]) -> None:
    """xllamacpp serves the embedded model's own file: its greedy answers come back with tokens and log-probs."""
    pytest.importorskip("xllamacpp")
    from etude.policies.language.smollm2 import smollm2_gguf

    program = Path(__file__).with_name("serve_gguf.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(smollm2_gguf())],
        env=child_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdin is not None
        line = next(line for line in process.stdout if line.startswith("listening "))
        url = line.split()[1] + "/v1"
        greedy = Sampling(max_new_tokens=4, greedy=True)
        prompts = ["The capital of France is", "2+2="]
        assert CompletionEndpoint(url, timeout_s=60).generate(prompts, greedy)[0][0].text.startswith(" Paris")
        said = ChatEndpoint(url, timeout_s=60).generate(["Say hi.", [{"role": "user", "content": "Say hi."}]], greedy)
        assert said[0] == said[1] and said[0][0].text and len(said[0][0].logprobs) == 4
        found = CompletionEndpoint(url, timeout_s=60).generate(prompts, Sampling(max_new_tokens=4), n=2)
        again = CompletionEndpoint(url, timeout_s=60, concurrency=1).generate(prompts, Sampling(max_new_tokens=4), n=2)
        assert [[one.text for one in group] for group in found] == [[one.text for one in group] for group in again]
        for one in [one for group in found for one in group]:
            assert len(one.tokens) == len(one.logprobs) == 4 and max(one.logprobs) <= 0
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        process.stdout.close()


def test_tokens_are_taken_from_a_server_that_returns_them() -> None:
    choice = {"text": "ab", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -1.0]}, "token_ids": [7, 8]}

    def answer(number: int, _: dict[str, Any], __: Any) -> Answer:
        return 200, {"choices": [choice if number == 1 else {**choice, "token_ids": [7]}]}, {}

    with served(answer) as (url, _):
        endpoint = CompletionEndpoint(url)
        [[found]] = endpoint.generate(["a"])
        assert (found.tokens, found.logprobs) == ([7, 8], [-0.5, -1.0])
        with pytest.raises(EndpointError, match="1 tokens, but 2 log-probabilities"):
            endpoint.generate(["a"])
