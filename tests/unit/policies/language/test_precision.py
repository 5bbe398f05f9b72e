"""Below float32: the model's own logits, and everything that is made of them in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude import Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO
from etude.algorithms.sft import SFT
from etude.data.text import TextData
from etude.policies.language import LanguageModel, Sampling, head
from etude.policies.language.generation import choose
from etude.policies.language.head import entropy_of, token_log_probs
from etude.policies.language.llama import LlamaDecoder
from etude.rollouts.text import TextRollouts
from tests.callbacks import KeepRows

from .samples import SMALL, make_batch, pairs_of

HALVES = ["bfloat16", "float16"]
PAIRS = [([5, 6, 7, 8], [9, 10, 0]), ([5, 6, 7, 8], [11]), ([20], [21, 22])]
PROMPTS = ["12+34=", "What?\n", "a longer prompt than the others: "]


@pytest.mark.parametrize("dtype", HALVES)
def test_tokens_are_drawn_from_the_float32_softmax(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2000, generator=generator).to(getattr(torch, dtype))
    draws = (np.arange(40_000) + 0.5) / 40_000
    wanted = torch.softmax(logits[0].double(), -1)
    counts = torch.zeros(2000, dtype=torch.float64)
    for part in np.split(draws, 20):
        tokens, logprobs = choose(logits.expand(2000, -1), part, Sampling())
        counts += torch.bincount(tokens, minlength=2000)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), wanted[tokens].log(), atol=1e-5, rtol=0)
    # Evenly spread numbers: each token comes within one of as often as it should, and none of 40,000 goes astray.
    assert (counts - 40_000 * wanted).abs().max() < 1.5
    assert 0.5 * (counts / 40_000 - wanted).abs().sum() < 0.02
    assert ((counts - 40_000 * wanted) ** 2 / (40_000 * wanted)).sum() < 2000


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_float32_log_softmax_of_the_models_own_logits(dtype: str, temperature: float) -> None:
    policy = LanguageModel.tiny(**SMALL, dtype=dtype)
    with torch.no_grad():
        policy.causal.model.norm.weight.mul_(40)  # logits of about 20, which bfloat16 knows to 1/8
    batch = make_batch(PAIRS)
    found = policy.log_probs(batch, temperature=temperature, with_entropy=True)
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32
    hidden = policy.model.model(batch["input_ids"][2:, :2]).last_hidden_state[0]
    logits = policy.model.lm_head(hidden)
    assert logits.dtype == getattr(torch, dtype) and logits.abs().max() > 8
    wanted = torch.log_softmax(logits.float() / temperature, -1)
    picked = wanted[torch.arange(2), torch.tensor([21, 22])]
    given, _ = token_log_probs(
        hidden, policy.model.lm_head.weight, None, torch.tensor([21, 22]), temperature=temperature
    )
    torch.testing.assert_close(given, picked, atol=1e-5, rtol=0)
    # Rows computed together round their states a little differently; the logits of whole rows agree all the same.
    torch.testing.assert_close(policy.logits(batch)[2, 1:3], logits.float(), atol=0.3, rtol=0)
    scores = policy.logits(batch)
    own = torch.log_softmax(scores / temperature, -1).gather(2, batch["input_ids"][..., None]).squeeze(-1)
    counted = batch["loss_mask"] != 0
    torch.testing.assert_close(found.log_probs[counted], own[counted], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kept", [1 << 20, 0])
def test_gradients_of_the_head_are_those_of_float32_rounded_once(
    dtype: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).to(kind) for shape in ((12, 16), (50, 16)))
    bias, tokens = torch.randn(50, generator=generator).to(kind), torch.randint(50, (12,), generator=generator)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    theirs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    monkeypatch.setattr(head, "CHUNK_LOGITS", 150)  # chunks of 3 rows
    monkeypatch.setattr(head, "KEPT_LOGITS", kept)
    log_probs, entropy = token_log_probs(*ours, tokens, temperature=0.8, with_entropy=True)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    logs = torch.log_softmax(torch.nn.functional.linear(*theirs).float() / 0.8, -1)
    (logs.gather(1, tokens[:, None]).sum() + 0.1 * -(logs.exp() * logs).sum()).backward()
    torch.testing.assert_close(log_probs, logs.gather(1, tokens[:, None]).squeeze(1))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=0.02, rtol=0.02)


def test_entropy_beside_a_token_that_cannot_come() -> None:
    hidden = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0, 0.0])
    tokens = torch.tensor([0, 1, 5])
    log_probs, entropy = token_log_probs(hidden, weight, bias, tokens, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    kept = [0, 1, 3, 4, 5]
    logs = torch.log_softmax((hidden.detach() @ weight.detach().T)[:, kept], -1)
    torch.testing.assert_close(entropy.detach(), torch.distributions.Categorical(logits=logs).entropy())
    found = hidden.grad.clone()
    again = hidden.detach().requires_grad_()
    logs = torch.log_softmax((again @ weight.detach().T)[:, kept], -1)
    (logs[torch.arange(3), torch.tensor([0, 1, 4])].sum() - (logs.exp() * logs).sum()).backward()
    torch.testing.assert_close(found, again.grad)
    assert torch.isfinite(weight.grad).all()
    scores = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    entropy_of(torch.log_softmax(scores, -1)).sum().backward()
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_drawn_has_the_log_probs_that_training_finds(dtype: str, autocast: bool) -> None:
    policy = LanguageModel.tiny(**SMALL, dtype="float32" if autocast else dtype)
    with torch.autocast("cpu", dtype=getattr(torch, dtype), enabled=autocast):
        assert isinstance(policy._decoder(), LlamaDecoder)
        groups = policy.generate(PROMPTS, Sampling(max_new_tokens=9), n=3)
        batch = make_batch(pairs_of(policy, PROMPTS, groups))
        found = policy.log_probs(batch)[batch["loss_mask"].bool()]
    drawn = torch.tensor([value for group in groups for one in group for value in one.logprobs])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, drawn, atol=0.02, rtol=0)  # states rounded in another order, no more
    assert len(set((drawn * 8 % 1).tolist())) > 10  # nothing is quantised to eighths


def test_a_float16_decoder_with_large_states_writes_what_transformers_would() -> None:
    policy = LanguageModel.tiny(**SMALL, dtype="float16")
    with torch.no_grad():
        policy.causal.model.embed_tokens.weight.mul_(30_000)  # states of length 3,000: a float16 square overflows
        policy.causal.model.norm.weight.mul_(1e-3)
    ids = torch.tensor([policy.encode(PROMPTS[0])])
    with torch.no_grad():
        wanted = policy.model(ids).logits[0, -1].float()
        decoder = LlamaDecoder(policy.causal)
        found = decoder.prefill(ids, [ids.shape[1]], 2)[0].float()
        assert wanted.abs().max() > 10 and torch.isfinite(found).all()
        torch.testing.assert_close(found, wanted, atol=0.5, rtol=0.02)
        following = decoder.step(wanted.argmax()[None])[0].float()
        longer = torch.cat((ids, wanted.argmax()[None, None]), 1)
        torch.testing.assert_close(following, policy.model(longer).logits[0, -1].float(), atol=0.5, rtol=0.02)
    (one,) = policy.generate(PROMPTS[:1], Sampling(max_new_tokens=4))[0]
    assert one.tokens and all(np.isfinite(one.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision, dtype, lora",
    [
        ("bf16", "float32", None),
        ("fp16", "float32", None),
        ("float32", "bfloat16", None),
        ("fp16", "float16", 8),  # float16 weights themselves are beyond Adam, whose eps is 0 in float16
    ],
)
def test_a_run_below_float32_learns_from_text_and_from_rewards(precision: Any, dtype: str, lora: int | None) -> None:
    rows = [{"prompt": f"say {n}: ", "completion": str(n)} for n in range(8)]
    config: dict[str, Any] = {"precision": precision, "log_every": 1, "batch_size": 8, "lr": 1e-2 if lora else 3e-3}

    def train(data: Any, algorithm: Any, steps: int) -> list[dict[str, float]]:
        notes, policy = KeepRows(), LanguageModel.tiny(seed=0, dtype=dtype, lora=lora)
        settings = TrainingConfiguration(**config, training_steps=steps)
        quiet: dict[str, Any] = {"run": False, "loggers": [], "show_progress": False, "callbacks": [notes]}
        Trainer(policy, data, algorithm, config=settings, **quiet).fit()
        return notes.rows

    losses = [row["train/loss"] for row in train(TextData(rows), SFT(), 15)]
    assert losses[-1] < (0.85 if lora else 0.6) * losses[0]
    data = TextRollouts("digits", prompts_per_step=4, group_size=4, max_new_tokens=8)
    found = train(data, GRPO(kl_coef=0.01), 20)
    rewards = [row["train/reward"] for row in found]
    assert lora or np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    # The policy that is trained is the one that drew: the first update of each experience begins at a ratio of one.
    assert max(row["train/old_kl"] for row in found) < 1e-4
