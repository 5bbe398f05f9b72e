"""CPU time of generating with `LanguageModel` over Hugging Face's `generate`, and of log-probs with their gradient.

One process, one thread, float32 everywhere, the same weights; the two take turns, round by round, and the ratio of
each round is one measurement. Tokens are those before and including the end token: what `generate` computes for rows
that have ended is time spent, not tokens won. Log-probs are compared to the plain way: a forward pass over the padded
rows, log_softmax over all logits, gather.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from etude.policies.language import LanguageModel, Sampling

ROUNDS = 5
CASES: dict[str, dict[str, int]] = {
    "tiny": {"prompts": 4, "n": 8, "tokens": 16, "repeat": 5},
    "smollm2": {"prompts": 2, "n": 8, "tokens": 32, "repeat": 1},
    "smollm2 lora": {"prompts": 2, "n": 8, "tokens": 32, "repeat": 1},
}
LORA = {"rank": 32, "targets": "all-linear"}


def make_prompts(count: int) -> list[str]:
    return [f"Question: What is {3 * at % 10}+{7 * at % 10}?\nAnswer:" for at in range(count)]


def generators(policy: LanguageModel, case: dict[str, int]) -> dict[str, Callable[[int], int]]:
    """Return both ways to generate; each returns how many tokens it won."""
    prompts = make_prompts(case["prompts"])
    ends = set(policy.end_tokens)

    def ours(seed: int) -> int:
        found = policy.generate(prompts, Sampling(max_new_tokens=case["tokens"], seed=seed), n=case["n"])
        return sum(len(one.tokens) for group in found for one in group)

    def theirs(seed: int) -> int:
        torch.manual_seed(seed)
        rows = [policy.encode(prompt) for prompt in prompts for _ in range(case["n"])]
        ids = torch.tensor(rows)
        with torch.inference_mode():
            out = policy.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=case["tokens"], pad_token_id=policy.pad_token_id,
            )  # fmt: skip
        won = 0
        for row in out[:, ids.shape[1] :].tolist():
            won += next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        return won

    return {"ours": ours, "theirs": theirs}


def make_batch(policy: LanguageModel, case: dict[str, int]) -> dict[str, Tensor]:
    prompts = make_prompts(case["prompts"])
    found = policy.generate(prompts, Sampling(max_new_tokens=case["tokens"], seed=1), n=case["n"])
    pairs = [(policy.encode(prompt), one.tokens) for prompt, group in zip(prompts, found) for one in group]
    width = max(len(prompt) + len(tokens) for prompt, tokens in pairs)
    ids = torch.full((len(pairs), width), policy.pad_token_id)
    attention, counted = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(pairs):
        end = len(prompt) + len(tokens)
        ids[row, :end] = torch.tensor(prompt + tokens)
        attention[row, :end] = 1
        counted[row, len(prompt) : end] = 1
    return {"input_ids": ids, "attention_mask": attention, "loss_mask": counted}


def learners(policy: LanguageModel, case: dict[str, int]) -> dict[str, Callable[[int], int]]:
    """Return both ways to get log-probs and their gradient."""
    batch = make_batch(policy, case)

    def finish(log_probs: Tensor) -> int:
        (-log_probs.sum()).backward()
        policy.zero_grad(set_to_none=True)
        return int(batch["loss_mask"].sum())

    def ours(_: int) -> int:
        return finish(policy.log_probs(batch))

    def theirs(_: int) -> int:
        logits = policy.model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        logs = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(-1)
        return finish(logs * batch["loss_mask"][:, 1:])

    return {"ours": ours, "theirs": theirs}


def compare(ways: dict[str, Callable[[int], int]], rounds: int, repeat: int) -> dict[str, Any]:
    """Return tokens per CPU second of both, and the ratio of our CPU time per token to theirs, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:  # who goes first alternates
            started, won = time.process_time(), 0
            for again in range(repeat):
                won += ways[name](100 * (number + 1) + again)
            if number >= 0:  # the first round warms up
                seconds[name].append((time.process_time() - started) / won)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["theirs"])]
    speeds = {name: 1 / statistics.median(found) for name, found in seconds.items()}
    return {"speeds": speeds, "ratios": ratios}


def main() -> dict[str, float]:
    """Print two lines for each model and return the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    print(f"CPU time per token over Hugging Face's, one thread, median of {options.rounds} rounds:")
    for name in (name for name in CASES if options.only in name):
        case = CASES[name]
        policy = (
            LanguageModel.tiny() if name == "tiny" else LanguageModel.smollm2(lora=LORA if "lora" in name else None)
        )
        policy.eval()
        for what, make in (("generate", generators), ("log_probs + backward", learners)):
            result = compare(make(policy, case), options.rounds, case["repeat"])
            ratio = found[f"{name} {what}"] = statistics.median(result["ratios"])
            print(f"  {name:12s} {what:21s} {case['prompts']} prompts x {case['n']}, {case['tokens']:2d} tokens: "
                  f"etude {result['speeds']['ours']:8,.0f} tokens/s  theirs {result['speeds']['theirs']:8,.0f}  "
                  f"time {ratio:.2f}x ({min(result['ratios']):.2f} to {max(result['ratios']):.2f})",
                  flush=True)  # fmt: skip
    return found


if __name__ == "__main__":
    main()
