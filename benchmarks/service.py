"""What a training service costs and saves: `make bench-service`.

    python -m benchmarks.service                      # all of it: about ten minutes on two cores
    python -m benchmarks.service --only link,memory   # some of it

Every part starts a server process of its own (one thread that trains, one that samples) and asks it by the official
client. Contenders take turns, round by round, and the ratio of each round is one measurement.

SkyRL and Hatchery are measured where $ETUDE_SKYRL_PYTHON names a Python that has skyrl[tinker,jax] 0.3.0, and
$ETUDE_HATCHERY_PYTHON one that has hatchery-core 0.3.0; otherwise the comparison is with the best that was measured of
them before.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import service_peers
from benchmarks.spread import Spread
from etude.policies.language import LanguageModel, Lora, Sampling
from etude.rollouts.endpoint import CompletionEndpoint
from etude.service.server.bases import LORA_ALPHA

RANK, EXAMPLES, WIDTH = 32, 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CLIENTS = 8
EQUAL, UNEQUAL = (32,) * CLIENTS, (8, 64, 16, 56, 24, 48, 32, 40)
"""Tokens that each of eight clients asks for."""
DELAY_S = 0.05


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        spent = self.process.cpu_times()
        return float(spent.user + spent.system)

    @property
    def memory(self) -> int:
        """Bytes that are this process's alone."""
        return int(self.process.memory_full_info().uss)


@contextmanager
def serving(*models: str, options: Sequence[str] = ()) -> Iterator[Server]:
    """Context with a service of its own."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        offered = [word for model in models for word in ("--model", model)]
        command = [sys.executable, "-m", "etude", "serve", "--folder", f"{folder}/state", "--port", "0", *offered]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield Server(next(word for word in said.split() if word.startswith("http://")), psutil.Process(process.pid))
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """Context with the official client."""
    os.environ["TINKER_TELEMETRY"] = "0"
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key="tml-of-a-benchmark")
    try:
        yield client
    finally:
        client.close("success").result()
        del client
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def make_texts(policy: Any) -> list[list[int]]:
    """Return as many examples of the same width, each of other words."""
    found = []
    for number in range(EXAMPLES):
        text = f"Question: How much is {number} times {number + 7}? Answer: It is {number * (number + 7)}, of course. "
        found.append((policy.encode_continuation(text) * 3)[: WIDTH + 1])
    return found


def datum(tokens: list[int]) -> Any:
    import tinker

    given = tinker.ModelInput.from_ints(tokens[:-1])
    return tinker.Datum(model_input=given, loss_fn_inputs={"target_tokens": tokens[1:]})


def taking_turns(ways: dict[str, Callable[[], Any]], rounds: int, measure: Callable[[], Any]) -> dict[str, list[Any]]:
    """Return what each way adds to a measure, round by round; who goes first alternates, and one round warms up."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            before = measure()
            ways[name]()
            if number >= 0:
                found[name].append(tuple(b - a for a, b in zip(before, measure())))
    return found


def ratios(found: dict[str, list[Any]], above: str, below: str, at: int = 0) -> Spread:
    return Spread.of([a[at] / b[at] for a, b in zip(found[above], found[below])])


# ---- a step ----------------------------------------------------------------------------------------------------------


def step(rounds: int = 21) -> bool:
    """A step through the service over the same step in process."""
    import tinker

    lora = Lora(RANK, LORA_ALPHA, targets=TARGETS)
    policy = LanguageModel.smollm2(lora=lora, seed=0)
    optimizer = torch.optim.AdamW([one for one in policy.parameters() if one.requires_grad], lr=1e-4)
    texts = make_texts(policy)
    ids = torch.tensor(texts)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}

    def in_process() -> None:
        policy(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with serving("smollm2") as server, connected(server.url) as client:
        trained = client.create_lora_training_client("smollm2", rank=RANK, seed=0)
        data = [datum(text) for text in texts]

        def through() -> None:
            trained.forward_backward(data, "cross_entropy")
            trained.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()

        found = taking_turns(
            {"service": through, "in process": in_process}, rounds,
            lambda: (time.process_time() + server.cpu_s, time.perf_counter()),
        )  # fmt: skip
    cpu, clock = (ratios(found, "service", "in process", at) for at in (0, 1))
    own, other = (sum(one[0] for one in found[name]) / rounds for name in ("service", "in process"))
    print(f"step, SmolLM2 LoRA rank {RANK}, {EXAMPLES} x {WIDTH} tokens, through the service over in process: "
          f"{cpu} in CPU time, {clock} on the clock (goal 1.10); {own:.2f} and {other:.2f} CPU s on average, "
          "the snapshot of 20 steps included", flush=True)  # fmt: skip
    return cpu.median <= 1.10 and clock.median <= 1.10


# ---- a link with a delay ---------------------------------------------------------------------------------------------


@contextmanager
def delayed(url: str) -> Iterator[str]:
    """Context with the address of a service behind a slow link."""
    command = [sys.executable, "-m", "benchmarks.slow_link", url.rsplit(":", 1)[1], str(DELAY_S)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


def link(rounds: int = 9, steps: int = 4) -> bool:
    """Calls sent back to back over calls one after the other, over a link with a delay.

    The client sends a call when the one before it has been taken, so that two calls and their answers, which are four
    journeys one after the other, are three back to back; where the next step does not wait for the answers, two.
    """
    import tinker

    params = tinker.AdamParams(learning_rate=1e-3)
    with serving("tiny") as server, delayed(server.url) as url, connected(url) as client:
        trained = client.create_lora_training_client("tiny", rank=8, seed=0)
        data = [datum(list(range(5, 22)))]

        def sequential() -> None:
            for _ in range(steps):
                trained.forward_backward(data, "cross_entropy").result()
                trained.optim_step(params).result()

        def pipelined() -> None:
            for _ in range(steps):
                done, updated = trained.forward_backward(data, "cross_entropy"), trained.optim_step(params)
                done.result(), updated.result()

        def ahead() -> None:
            sent = [(trained.forward_backward(data, "cross_entropy"), trained.optim_step(params)) for _ in range(steps)]
            for done, updated in sent:
                done.result(), updated.result()

        ways = {"sequential": sequential, "pipelined": pipelined, "ahead": ahead}
        found = taking_turns(ways, rounds, lambda: (time.perf_counter(),))
    faster, further = (ratios(found, "sequential", name) for name in ("pipelined", "ahead"))
    spent = {name: 1000 * Spread.of([one[0] / steps for one in found[name]]).median for name in ways}
    print(f"link of {1000 * DELAY_S:.0f} ms each way, a step of a tiny model: {spent['sequential']:.0f} ms one call "
          f"after the other, {spent['pipelined']:.0f} ms with both calls of a step back to back: {faster} faster (goal "
          f"1.3); {spent['ahead']:.0f} ms with {steps} steps back to back: {further}", flush=True)  # fmt: skip
    return faster.median >= 1.3


# ---- sampling --------------------------------------------------------------------------------------------------------

Drawer = Callable[[int, int], int]
"""Draws so many tokens with a seed, and returns how many came."""


def rate(server: Server, draw: Drawer, plans: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the tokens a second, by the clock and by the server's CPU time, of clients that draw as many tokens each.

    A client draws so many tokens, and then so many, one request after the other.
    """

    def client(number: int) -> int:
        return sum(draw(length, 100 * number + at) for at, length in enumerate(plans[number]))

    started_s, cpu_s = time.perf_counter(), server.cpu_s
    with ThreadPoolExecutor(len(plans)) as pool:
        drawn = sum(pool.map(client, range(len(plans))))
    return drawn / (time.perf_counter() - started_s), drawn / (server.cpu_s - cpu_s)


def drawers(server: Server, client: Any) -> dict[str, Drawer]:
    """Return both doors: the OpenAI protocol with the base model, the official client with trained adapters."""
    import tinker

    endpoint = CompletionEndpoint(f"{server.url}/v1", "smollm2", concurrency=1, extra={"ignore_eos": True})
    trained = client.create_lora_training_client("smollm2", rank=RANK, seed=0)
    sampler = trained.save_weights_and_get_sampling_client()
    prompts = [list(range(100 + at, 110 + 2 * at)) for at in range(CLIENTS)]

    def completed(length: int, seed: int) -> int:
        text = f"Question: What is {seed % 10} plus {seed * 7 % 10}?\nAnswer:"
        return len(endpoint.generate([text], Sampling(length, seed=seed))[0][0].tokens)

    def sampled(length: int, seed: int) -> int:
        prompt = tinker.ModelInput.from_ints(prompts[seed % CLIENTS])
        params = tinker.SamplingParams(max_tokens=length, seed=seed, stop=[])
        return len(sampler.sample(prompt, 1, params).result().sequences[0].tokens)

    return {"completions of the base model": completed, "the client, LoRA": sampled}


def sampling(rounds: int = 3) -> bool:
    """Eight clients at once over one alone, in tokens a second."""
    is_met = True
    with serving("smollm2") as server, connected(server.url) as client:
        for door, draw in drawers(server, client).items():
            for name, lengths in (("equal", EQUAL), ("unequal", UNEQUAL)):
                rate(server, draw, [[length] for length in lengths])
                # Each of eight clients draws three of the lengths, and one client draws all of them.
                plans = [[lengths[(number + 3 * at) % CLIENTS] for at in range(3)] for number in range(CLIENTS)]
                pairs = [(rate(server, draw, [lengths]), rate(server, draw, plans)) for _ in range(rounds)]
                found, by_cpu = (Spread.of([many[at] / one[at] for one, many in pairs]) for at in (0, 1))
                one, many = (Spread.of([pair[at][0] for pair in pairs]).median for at in (0, 1))
                print(f"sampling, SmolLM2, {door}, {name} lengths: {one:.0f} tokens/s for one client, {many:.0f} for "
                      f"{CLIENTS} at once: {found} (goal 3), {by_cpu} in tokens a CPU second", flush=True)  # fmt: skip
                is_met &= found.median >= 3
    return is_met


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory() -> bool:
    """What one more LoRA model costs, over its adapters and what the optimizer remembers of them."""
    import tinker

    policy = LanguageModel.smollm2(lora=Lora(RANK, LORA_ALPHA, targets=TARGETS), seed=0)
    own = 3 * sum(one.numel() * one.element_size() for one in policy.parameters() if one.requires_grad)
    texts = make_texts(policy)
    held: dict[int, int] = {}
    with serving("smollm2") as server, connected(server.url) as client:
        kept = []
        for number in range(1, CLIENTS + 1):
            kept.append(trained := client.create_lora_training_client("smollm2", rank=RANK, seed=number))
            trained.forward_backward([datum(text) for text in texts[:4]], "cross_entropy")
            trained.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
            sampler = trained.save_weights_and_get_sampling_client()
            params = tinker.SamplingParams(max_tokens=4, seed=0)
            sampler.sample(tinker.ModelInput.from_ints(texts[0]), 1, params).result()
            held[number] = server.memory
    more = (held[CLIENTS] - held[2]) / (CLIENTS - 2)
    said = ", ".join(f"{held[number] / 2**20:,.0f} MiB with {number}" for number in (1, 2, CLIENTS))
    print(f"memory, SmolLM2 LoRA rank {RANK}, trained and sampled: {said}; one more costs {more / 2**20:.0f} MiB, "
          f"{more / own:.2f}x its adapters and optimizer (goal 1.2)", flush=True)  # fmt: skip
    return more <= 1.2 * own


# ---- others' servers -------------------------------------------------------------------------------------------------


def peers(rounds: int = 3) -> bool:
    """A step of 16 examples and tokens a second, beside other servers."""
    policy = LanguageModel.smollm2()
    with serving("smollm2") as server:
        return service_peers.compare(server.url, make_texts(policy), rounds)


PARTS: dict[str, Callable[..., bool]] = {
    "step": step, "link": link, "peers": peers, "sampling": sampling, "memory": memory,
}  # fmt: skip


def main() -> None:
    """Print all figures; exit 1 if one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, help="rounds of each part; a few to tens of them unless given")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    given = {} if options.rounds is None else {"rounds": options.rounds}
    missed = [name for name in chosen if not PARTS[name](**({} if name == "memory" else given))]
    print("all goals met" if not missed else f"missed: {', '.join(missed)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
