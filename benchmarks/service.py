"""Tokens a second that the service draws for eight clients at once, over those for one alone; both ask the same.

A server process of its own, one thread; clients send one prompt a request and wait for the answer. The two take turns,
round by round, and the ratio of each round is one measurement.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.policies.language.sampling import Sampling
from etude.rollouts.endpoint import CompletionEndpoint

GOAL = 3.0
ROUNDS = 5
CLIENTS = 8
TOKENS = {"tiny": 128, "smollm2": 32}


@contextmanager
def serving(model: str) -> Iterator[str]:
    """Context with the url of a service of one model."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        options = ["--folder", f"{folder}/state", "--port", "0", "--model", model]
        command = [sys.executable, "-m", "etude", "serve", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield next(word for word in said.split() if word.startswith("http://"))
        finally:
            process.terminate()
            process.communicate(timeout=60)


def rate(url: str, model: str, clients: int, seed: int) -> float:
    """Return the tokens a second of as many clients, each with two requests."""
    endpoint = CompletionEndpoint(f"{url}/v1", model, concurrency=clients, extra={"ignore_eos": True})
    prompts = [f"Question: What is {at % 10} plus {at * 7 % 10}?\nAnswer:" for at in range(2 * clients)]
    started_s = time.perf_counter()
    found = endpoint.generate(prompts, Sampling(TOKENS[model], seed=seed))
    return sum(len(one.tokens) for group in found for one in group) / (time.perf_counter() - started_s)


def main(model: str = "smollm2") -> float:
    """Print both rates and their ratio; return it."""
    with serving(model) as url:
        rate(url, model, CLIENTS, 99)
        pairs = [(rate(url, model, 1, seed), rate(url, model, CLIENTS, seed)) for seed in range(ROUNDS)]
    one, many = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(many / one for one, many in pairs)
    print(f"service, {model}: {one:.0f} tokens/s for one client, {many:.0f} for {CLIENTS} at once: {ratio:.2f} times")
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(TOKENS), default="smollm2")
    sys.exit(0 if main(parser.parse_args().model) >= GOAL else 1)
