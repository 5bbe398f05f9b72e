"""LoRA on any layer: what peft computes is what is scored, drawn from and saved; the reference has none of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import ConfigError
from etude.policies.language import LanguageModel, Lora, Sampling, head, maps
from etude.policies.language.decoder import CachedDecoder
from etude.policies.language.llama import LlamaDecoder

from .samples import SMALL, make_batch, pairs_of, plain_log_probs

PAIRS = [([5, 6, 7, 8], [9, 10, 0]), ([5, 6, 7, 8], [11]), ([20], [21, 22])]
PROMPTS = ["12+34=", "What?\n"]
NEAR: Any = {"atol": 1e-5, "rtol": 1e-5}  # Llama's norms are float32, whatever its weights are
TARGETS = [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens", "q_proj"]]


def adapted(targets: Any, dtype: str = "float64", tied: bool = True, **options: Any) -> LanguageModel:
    """Return a model whose adapters are far from nothing."""
    policy = LanguageModel.tiny(**SMALL, dtype=dtype)
    if not tied:
        policy.causal.config.tie_word_embeddings = False
        policy.causal.lm_head.weight = torch.nn.Parameter(policy.causal.lm_head.weight.detach().clone())
    lora = Lora(rank=4, targets=targets, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = LanguageModel(lora.apply(policy.model), policy.tokenizer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return policy.eval()


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_and_their_gradients_are_those_of_pefts_own_forward(
    targets: list[str], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = adapted(targets, tied=tied), make_batch(PAIRS)
    wanted = plain_log_probs(policy.model, batch)
    base = LanguageModel.tiny(**SMALL, dtype="float64")
    assert (wanted - plain_log_probs(base.model, batch)).abs().max() > 0.1
    torch.testing.assert_close(policy.log_probs(batch), wanted, **NEAR)
    policy.zero_grad()
    wanted.sum().backward()
    grads = {name: value.grad.clone() for name, value in policy.named_parameters() if value.requires_grad}
    assert all(grad.abs().sum() > 0 for grad in grads.values())
    for kept in (1 << 20, 0):  # logits kept, or computed again
        monkeypatch.setattr(head, "KEPT_LOGITS", kept)
        monkeypatch.setattr(head, "CHUNK_LOGITS", 200)
        policy.zero_grad()
        policy.log_probs(batch, with_entropy=True).log_probs.sum().backward()
        for name, value in policy.named_parameters():
            if value.requires_grad:
                torch.testing.assert_close(value.grad, grads[name], **NEAR)


@pytest.mark.parametrize("targets", [*TARGETS, "all-linear"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("where", ["joined", "merged", "beside"])
def test_what_is_drawn_follows_pefts_own_forward(
    targets: list[str], tied: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where != "joined":
        monkeypatch.setattr(maps, "JOIN_BELOW", 0)  # as for weights that are large
        monkeypatch.setattr(maps, "MERGE_STEPS", 1 if where == "merged" else 1000)
    policy = adapted(targets, tied=tied)
    assert isinstance(policy._decoder(), LlamaDecoder)
    ids = torch.tensor([policy.encode(PROMPTS[0])])
    with torch.no_grad():
        found = policy._decoder().prefill(ids, [ids.shape[1]], 1)
        torch.testing.assert_close(found[0], policy.model(ids).logits[0, -1], **NEAR)
    groups = policy.generate(PROMPTS, Sampling(max_new_tokens=6), n=3)
    batch = make_batch(pairs_of(policy, PROMPTS, groups))
    drawn = torch.tensor([x for group in groups for one in group for x in one.logprobs], dtype=torch.float64)
    torch.testing.assert_close(plain_log_probs(policy.model, batch)[batch["loss_mask"].bool()], drawn, **NEAR)
    with policy.reference() as reference:
        plain = reference.generate(PROMPTS, Sampling(max_new_tokens=6))
    wanted = LanguageModel.tiny(**SMALL, dtype="float64").generate(PROMPTS, Sampling(max_new_tokens=6))
    assert [one.tokens for [one] in plain] == [one.tokens for [one] in wanted]
    for [one], [other] in zip(plain, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


@pytest.mark.parametrize("targets", TARGETS)
def test_a_saved_directory_computes_the_same_though_its_weights_were_tied(tmp_path: Path, targets: list[str]) -> None:
    policy, batch = adapted(targets, "float32"), make_batch(PAIRS)
    wanted = policy.log_probs(batch).detach()
    policy.save_pretrained(tmp_path)
    torch.testing.assert_close(LanguageModel.from_pretrained(tmp_path).log_probs(batch), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.log_probs(batch).detach(), wanted)  # nothing was merged into the policy itself


def test_adapters_of_weights_below_float32_are_not_rounded_away() -> None:
    policy = adapted(["q_proj", "lm_head"], "bfloat16")
    assert isinstance(policy._decoder(), CachedDecoder)
    groups = policy.generate(PROMPTS, Sampling(max_new_tokens=5), n=2)
    batch = make_batch(pairs_of(policy, PROMPTS, groups))
    drawn = torch.tensor([x for group in groups for one in group for x in one.logprobs])
    torch.testing.assert_close(policy.log_probs(batch)[batch["loss_mask"].bool()], drawn, atol=0.05, rtol=0)


def test_a_reference_has_no_dropout_and_leaves_every_mode_as_it_was() -> None:
    policy = LanguageModel.tiny(**SMALL, lora={"rank": 4, "dropout": 0.5})
    policy.causal.config.attention_dropout = 0.5
    for layer in policy.causal.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = make_batch(PAIRS)
    wanted = LanguageModel.tiny(**SMALL).log_probs(batch)
    policy.train()
    policy.causal.model.norm.eval()
    modes = {name: module.training for name, module in policy.named_modules()}
    with policy.reference() as reference:
        torch.testing.assert_close(reference.log_probs(batch), wanted)
    assert {name: module.training for name, module in policy.named_modules()} == modes


def test_learned_prompts_are_refused_by_name() -> None:
    peft = pytest.importorskip("peft")
    policy = LanguageModel.tiny(**SMALL)
    model = peft.get_peft_model(policy.model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="PromptTuningConfig puts learned tokens before every text"):
        LanguageModel(model, policy.tokenizer)
