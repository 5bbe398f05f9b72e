"""Other servers of the same protocol, side by side: a step of 16 examples, and tokens a second of one request.

They are started by a Python of their own and asked by a client that they understand; ours by the official one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.spread import Spread
from etude.policies.language import LanguageModel

TOKENS, RANK = 32, 32
START_S = 300.0


class Contender(Protocol):
    def step(self) -> float:
        """Train on all examples once; return the seconds that took."""

    def sample(self) -> float:
        """Draw for one prompt; return the tokens a second."""


@dataclass(frozen=True)
class Peer:
    """A server, the variable that names a Python which has it, and the best that was measured of it before.

    Measured with SmolLM2-135M on two cores of another day: a warm step, and tokens a second.
    """

    name: str
    variable: str
    program: str
    """Serves and asks."""
    step_s: float
    tokens_per_s: float
    client: str = ""
    """The folder of `.venv/clients` with the client that it understands; one of its own unless named."""


PEERS = (
    Peer("SkyRL 0.3.0", "ETUDE_SKYRL_PYTHON", "service_skyrl.py", 10.0, 23.0, client="tinker-0.24.1"),
    Peer("Hatchery core 0.3.0", "ETUDE_HATCHERY_PYTHON", "service_hatchery.py", 6.9, 9.0),
)


class Ours:
    """A service of ours, asked by the official client."""

    def __init__(self, client: Any, texts: Sequence[list[int]]) -> None:
        import tinker

        from benchmarks.service import datum

        self._trained = client.create_lora_training_client("smollm2", rank=RANK, seed=0)
        self._data = [datum(text) for text in texts]
        self._params = tinker.AdamParams(learning_rate=1e-4)
        self._prompt = tinker.ModelInput.from_ints(texts[0])
        self._sampling = tinker.SamplingParams(max_tokens=TOKENS, stop=[], seed=0)
        self._sampler = self._trained.save_weights_and_get_sampling_client()

    def step(self) -> float:
        started_s = time.perf_counter()
        self._trained.forward_backward(self._data, "cross_entropy")
        self._trained.optim_step(self._params).result()
        return time.perf_counter() - started_s

    def sample(self) -> float:
        started_s = time.perf_counter()
        found = self._sampler.sample(self._prompt, 1, self._sampling).result()
        return len(found.sequences[0].tokens) / (time.perf_counter() - started_s)


class Theirs:
    """A program that serves and asks, told what to do line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _tell(self, word: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def step(self) -> float:
        return float(self._tell("step")[0])

    def sample(self) -> float:
        seconds, count = self._tell("sample")
        return float(count / seconds)


@contextmanager
def started(peer: Peer, python: str, model: Path, texts: Sequence[list[int]]) -> Iterator[Theirs]:
    """Context with a server of another kind; its log goes to `runs/bench-service.log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(__file__).with_name(peer.program)
    path = Path("runs/bench-service.log")
    path.parent.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if peer.client:
        environment["PYTHONPATH"] = str(Path(sys.prefix, "clients", peer.client))
    with path.open("ab") as log:
        process = subprocess.Popen(
            [python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment,
        )  # fmt: skip
    theirs = Theirs(process)
    try:
        given = {"model": str(model), "port": port, "rank": RANK, "tokens": TOKENS, "texts": list(texts)}
        if theirs._tell(json.dumps(given)) != "ready":
            raise RuntimeError(f"{peer.name} did not start; see {path}")
        yield theirs
    finally:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()  # it then ends what it has started, and itself
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


def compare(url: str, texts: Sequence[list[int]], rounds: int) -> bool:
    """Print both figures of each server that is installed, and tell whether ours is ahead of all."""
    from benchmarks.service import connected

    installed = [(peer, python) for peer in PEERS if (python := os.environ.get(peer.variable))]
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {"etude": Ours(stack.enter_context(connected(url)), texts)}
        if installed:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            LanguageModel.smollm2().save_pretrained(folder)
        for peer, python in installed:
            contenders[peer.name] = stack.enter_context(started(peer, python, folder, texts))
        steps: dict[str, list[float]] = {name: [] for name in contenders}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(-1, rounds):  # the first round warms up
            for name, contender in contenders.items():
                pair = contender.step(), contender.sample()
                if number >= 0:
                    steps[name].append(pair[0])
                    rates[name].append(pair[1])
    for name in contenders:
        step, rate = Spread.of(steps[name]), Spread.of(rates[name])
        print(f"peers, SmolLM2 LoRA rank {RANK}, {name}: {step.median:.2f} s ({step.low:.2f} to {step.high:.2f}) a "
              f"step of {len(texts)} x {len(texts[0]) - 1} tokens, {rate.median:.1f} tokens/s ({rate.low:.1f} to "
              f"{rate.high:.1f})", flush=True)  # fmt: skip
    print(
        f"peers, processes that wanted one of {os.cpu_count()} cores at the end: {os.getloadavg()[0]:.1f}", flush=True
    )
    is_ahead = True
    for peer in PEERS:
        if peer.name in contenders:
            how = "round by round"
            faster = Spread.of([other / own for own, other in zip(steps["etude"], steps[peer.name], strict=True)])
            more = Spread.of([own / other for own, other in zip(rates["etude"], rates[peer.name], strict=True)])
        else:
            how = "not installed, its best of before"
            faster = Spread.of([peer.step_s / own for own in steps["etude"]])
            more = Spread.of([own / peer.tokens_per_s for own in rates["etude"]])
        print(f"peers, over {peer.name} ({how}): {faster} the steps, {more} the tokens (goal: more than 1)", flush=True)
        is_ahead &= faster.median > 1 and more.median > 1
    return is_ahead
