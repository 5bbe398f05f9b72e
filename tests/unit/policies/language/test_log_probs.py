"""Log-probabilities, entropy, values and the loss: equal to the textbook way, whatever is left out or shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError, DataError
from etude.policies.language import LanguageModel, head, layout
from etude.policies.language.layout import lay_out
from etude.types import Batch

from .samples import SMALL, Pair, make_batch, plain_log_probs
from .test_generation import other_kind

CPU = torch.device("cpu")
# Two prompts with several completions (one of a single token), a prompt of one token, and one that extends another.
PAIRS: list[Pair] = [
    ([5, 6, 7, 8], [9, 10, 0]),
    ([5, 6, 7, 8], [11]),
    ([5, 6, 7, 8], [9, 10, 12, 13]),
    ([20], [21, 22]),
    ([5, 6, 7, 8, 9], [10, 0]),
]


@pytest.fixture
def policy() -> LanguageModel:
    return LanguageModel.tiny(**SMALL, dtype="float64")


def gradients(policy: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=atol), name


def weights_like(values: Tensor) -> Tensor:
    return torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view_as(values)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_plain_forward_passes(policy: LanguageModel, temperature: float) -> None:
    batch = make_batch(PAIRS)
    ours = policy.log_probs(batch, temperature=temperature)
    theirs = plain_log_probs(policy.model, batch, temperature)
    assert torch.allclose(ours, theirs, atol=1e-9)
    assert (ours[:, 0] == 0).all() and (ours[batch["loss_mask"] == 0] == 0).all()
    weights = weights_like(ours)
    assert_same(gradients(policy, (ours * weights).sum()), gradients(policy, (theirs * weights).sum()))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_other_architectures_share_prompts_too(kind: str) -> None:
    policy = other_kind(kind).double()
    batch = make_batch(PAIRS)
    assert policy._shares_prompts()
    ours, theirs = policy.log_probs(batch), plain_log_probs(policy.model, batch)
    assert torch.allclose(ours, theirs, atol=1e-8)
    assert_same(gradients(policy, ours.sum()), gradients(policy, theirs.sum()))


def test_padding_changes_nothing_at_all(policy: LanguageModel) -> None:
    plain, wider, left = make_batch(PAIRS), make_batch(PAIRS, 3, extra=5), make_batch(PAIRS, 4, extra=2, left=True)
    wanted = policy.log_probs(plain)
    assert torch.equal(policy.log_probs(wider)[:, : wanted.shape[1]], wanted)
    found = policy.log_probs(left)
    assert torch.equal(found[left["loss_mask"].bool()], wanted[plain["loss_mask"].bool()])
    one, other = (gradients(policy, policy(batch).total) for batch in (plain, wider))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_shared_prompt_is_computed_once() -> None:
    found = lay_out(make_batch(PAIRS), share=True, device=CPU)
    # 4 + 2 + 0 + 3 tokens (the last of a row predicts nothing), then 1 + 1 and 5 + 1.
    assert found.tokens_RW.shape == (3, 9)
    assert found.target_N.tolist() == [9, 10, 0, 11, 9, 10, 12, 13, 21, 22, 10, 0]
    assert found.positions_RW[0].tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert found.mask_R1WW is not None and not found.mask_R1WW[0, 0, 6, 4]  # not its neighbour's tokens
    alone = lay_out(make_batch(PAIRS), share=False, device=CPU)
    assert alone.tokens_RW.shape == (5, 7) and alone.mask_R1WW is None


def test_long_lines_are_cut(policy: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(PAIRS)
    wanted = policy.log_probs(batch)
    monkeypatch.setattr(layout, "MAX_SHARED_WIDTH", 6)
    assert lay_out(batch, share=True, device=CPU).tokens_RW.shape[0] == 4
    assert torch.allclose(policy.log_probs(batch), wanted, atol=1e-9)


def test_turns_that_do_not_count_are_context(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    batch["loss_mask"][2, 5:7] = 0  # the reply of someone else, between two of ours
    ours = policy.log_probs(batch)
    assert torch.allclose(ours, plain_log_probs(policy.model, batch), atol=1e-9)
    assert ours[2, 7] != 0


def test_without_masks_every_token_counts(policy: LanguageModel) -> None:
    ids = make_batch(PAIRS)["input_ids"]
    everything = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones(ids.shape)}
    assert torch.allclose(policy.log_probs({"input_ids": ids}), plain_log_probs(policy.model, everything))
    assert policy({"input_ids": ids}).weight == ids.numel() - len(ids)


def test_entropy_and_its_gradient(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    found = policy.log_probs(batch, temperature=0.8, with_entropy=True)
    logs = torch.log_softmax(policy.model(batch["input_ids"]).logits[:, :-1] / 0.8, -1)
    counted = batch["loss_mask"][:, 1:]
    entropy = -(logs.exp() * logs).sum(-1) * counted
    assert torch.allclose(found.entropy[:, 1:], entropy)
    picked = logs.gather(2, batch["input_ids"][:, 1:, None]).squeeze(-1) * counted
    weights = weights_like(picked)
    ours = (found.entropy[:, 1:] * weights + found.log_probs[:, 1:] * weights.flip(0)).sum()
    assert_same(gradients(policy, ours), gradients(policy, (entropy * weights + picked * weights.flip(0)).sum()))


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_logits_in_chunks(policy: LanguageModel, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    batch = make_batch(PAIRS)
    wanted = policy.log_probs(batch)
    weights = weights_like(wanted)
    grads = gradients(policy, (wanted * weights).sum())
    monkeypatch.setattr(head, "KEPT_LOGITS", kept)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 300)
    found = policy.log_probs(batch)
    assert torch.allclose(found, wanted)
    assert_same(gradients(policy, (found * weights).sum()), grads)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_the_heads_gradients_are_autograds(
    monkeypatch: pytest.MonkeyPatch, with_entropy: bool, frozen: bool, kept: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 5), (11, 5), (11,))
    )
    weight.requires_grad_(not frozen), bias.requires_grad_(not frozen), hidden.requires_grad_()
    tokens = torch.tensor([1, 1, 4, 10, 0, 1, 7])
    monkeypatch.setattr(head, "KEPT_LOGITS", kept)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 33)  # chunks of three rows, blocks of two
    monkeypatch.setattr(head, "BLOCK_LOGITS", 22)

    def ours(*given: Tensor) -> tuple[Tensor, ...]:
        found = head.token_log_probs(*given, tokens, temperature=0.7, with_entropy=with_entropy)
        return found if with_entropy else found[:1]  # type: ignore[return-value]

    assert torch.autograd.gradcheck(ours, (hidden, weight, bias))
    logs = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / 0.7, -1)
    assert torch.allclose(ours(hidden, weight, bias)[0], logs.gather(1, tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_packed_text_is_computed_as_its_rows_are(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    policy = (LanguageModel.tiny(**SMALL) if kind == "llama" else other_kind(kind)).double()
    batch = make_batch(PAIRS)
    monkeypatch.setattr(layout, "PACK_ABOVE", 4)
    found = policy._lay_out(batch)
    # One line: 4 + 2 + 0 + 3 tokens, then 1 + 1 and 5 + 1, without padding.
    assert found.packing is not None and found.tokens_RW.shape == (1, 17) and found.mask_R1WW is None
    ours, theirs = policy.log_probs(batch), plain_log_probs(policy.model, batch)
    assert torch.allclose(ours, theirs, atol=1e-8)
    assert policy.causal.config._attn_implementation == "sdpa"
    assert_same(gradients(policy, ours.sum()), gradients(policy, theirs.sum()))
    policy.causal.gradient_checkpointing_enable()
    assert policy._lay_out(batch).packing is None


def test_what_is_packed() -> None:
    long = make_batch([([5, 6, 7], list(range(5, 90))) for _ in range(4)])
    assert lay_out(long, share=True, device=CPU, pack=True).packing is not None
    assert lay_out(long, share=True, device=CPU).packing is None
    short = make_batch([([5, 6, 7], [8, 9, 10, 11]) for _ in range(4)])
    assert lay_out(short, share=True, device=CPU, pack=True).packing is None
    long_prompt = make_batch([(list(range(5, 400)), [8, 9, 10, 11]) for _ in range(8)])
    assert lay_out(long_prompt, share=True, device=CPU, pack=True).packing is None


def test_a_second_backward_pass(policy: LanguageModel) -> None:
    total = policy(make_batch(PAIRS)).total
    policy.zero_grad()
    total.backward(retain_graph=True)
    once = [value.grad.clone() for value in policy.parameters()]
    total.backward()
    assert all(torch.allclose(value.grad, 2 * grad) for value, grad in zip(policy.parameters(), once))


def test_logits_that_are_more_than_linear(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    wanted = policy.log_probs(batch, with_entropy=True)
    policy.causal.config.logit_scale = 2.0  # Llama ignores it, but the longer road is taken
    found = policy.log_probs(batch, with_entropy=True)
    assert torch.allclose(found.log_probs, wanted.log_probs) and torch.allclose(found.entropy, wanted.entropy)


def test_the_loss_is_the_weighed_cross_entropy(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    batch["loss_mask"][0] *= 0.5
    loss = policy(batch)
    assert torch.allclose(loss.total, -plain_log_probs(policy.model, batch).sum())
    assert loss.weight == batch["loss_mask"].sum()
    assert torch.equal(policy(Batch(values=dict(batch))).total, loss.total)


def test_a_batch_in_which_nothing_counts(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    batch["loss_mask"].zero_()
    loss = policy(batch)
    assert loss.total == 0 and loss.weight == 0
    loss.total.backward()
    found = policy.log_probs(batch, with_entropy=True)
    assert found.log_probs.shape == batch["input_ids"].shape and found.log_probs.sum() == 0


def test_values_of_the_state_before_a_token() -> None:
    policy = LanguageModel.tiny(**SMALL, value_head=True)
    assert policy.value_head is not None
    batch = make_batch(PAIRS)
    assert (policy.log_probs(batch, with_values=True).values == 0).all()
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    values = policy.log_probs(batch, with_values=True).values
    hidden = policy.model.model(batch["input_ids"][:1]).last_hidden_state
    assert torch.allclose(values[0, 5], policy.value_head(hidden[0, 4]).squeeze(), atol=1e-5)
    assert (values[batch["loss_mask"] == 0] == 0).all() and values.requires_grad


def test_what_is_wrong_with_a_batch(policy: LanguageModel) -> None:
    batch = make_batch(PAIRS)
    with pytest.raises(DataError, match="loss_mask has the shape"):
        policy.log_probs({**batch, "loss_mask": batch["loss_mask"][:, 1:]})
    with pytest.raises(DataError, match="rows, tokens"):
        policy.log_probs({"input_ids": batch["input_ids"][0]})
    with pytest.raises(ConfigError, match="value_head=True"):
        policy.log_probs(batch, with_values=True)
