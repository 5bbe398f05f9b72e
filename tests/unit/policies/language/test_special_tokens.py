"""Special tokens: where a text begins and nowhere else, and as stops."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch

from etude import Trainer, TrainingConfiguration
from etude.algorithms.grpo import GRPO
from etude.algorithms.preference import DPO
from etude.algorithms.sft import SFT
from etude.data.text import Padding, TextData
from etude.errors import ConfigError
from etude.policies.language import Completion, LanguageModel, Sampling
from etude.rollouts.conversation import Turn
from etude.rollouts.text import TextRollouts
from etude.types import Batch

from .samples import SMALL, make_batch, plain_log_probs

KINDS = ["<s> $A", "<s> $A </s>"]
CHAT = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}:"


def policy_that_adds(template: str) -> LanguageModel:
    """Return a tiny model whose tokenizer begins (and ends) every text with a token of its own."""
    import transformers

    policy = LanguageModel.tiny(**SMALL)
    tokenizer = policy.tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_end|>"]})
    inner = tokenizer.backend_tokenizer
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<|im_end|>"], clean_up_tokenization_spaces=False, chat_template=CHAT,
    )  # fmt: skip
    policy.model.resize_token_embeddings(len(made))
    return LanguageModel(policy.model, made)


def characters(policy: LanguageModel, text: str) -> list[int]:
    return [policy.tokenizer.convert_tokens_to_ids(one) for one in text]


@pytest.mark.parametrize("template", KINDS)
def test_a_prompt_begins_once_and_does_not_end(template: str) -> None:
    policy = policy_that_adds(template)
    first = policy.tokenizer.bos_token_id
    assert policy.tokenizer("ab")["input_ids"][0] == first
    assert policy.encode("ab") == [first, *characters(policy, "ab")]
    assert policy.encode("<s>ab") == [first, *characters(policy, "ab")]
    assert policy.encode("") == [first]
    assert policy.encode_continuation("ab") == characters(policy, "ab")
    assert policy.encode_chat([{"role": "user", "content": "ab"}]) == [first, *characters(policy, "ab:")]
    assert LanguageModel.tiny(**SMALL).encode("ab") == LanguageModel.tiny(**SMALL).encode_continuation("ab")


@pytest.mark.parametrize("template", KINDS)
@pytest.mark.parametrize("chat", [False, True])
def test_rows_of_text_hold_one_first_token(template: str, chat: bool) -> None:
    policy = policy_that_adds(template)
    first, last = policy.tokenizer.bos_token_id, policy.eos_token_id
    head = [first, *characters(policy, "ab:" if chat else "ab")]
    data = TextData([{"prompt": "ab", "completion": "cd"}], chat=chat)
    assert data._encode(policy, data.rows[0]) == {
        "input_ids": [*head, *characters(policy, "cd"), last],
        "loss_mask": [0] * len(head) + [1, 1, 1],
    }
    data = TextData([{"prompt": "ab", "chosen": "cd", "rejected": "e"}], chat=chat)
    found = data._encode(policy, data.rows[0])
    assert found["chosen_input_ids"] == [*head, *characters(policy, "cd"), last]
    assert found["rejected_input_ids"] == [*head, *characters(policy, "e"), last]


@pytest.mark.parametrize("template", KINDS)
def test_losses_of_text_are_those_of_rows_made_by_hand(template: str) -> None:
    policy = policy_that_adds(template)
    first, last = policy.tokenizer.bos_token_id, policy.eos_token_id
    rows = [([first, *characters(policy, "ab")], [*characters(policy, text), last]) for text in ("cd", "e")]
    wanted = plain_log_probs(policy.model, make_batch(rows)).sum(1).detach()
    data = TextData([{"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "e"}])
    loss = SFT().loss(policy, _whole(data, policy))
    assert loss.total.item() == pytest.approx(-wanted.sum().item(), rel=1e-5) and loss.weight == 5
    pairs = TextData([{"prompt": "ab", "chosen": "cd", "rejected": "e"}])
    metrics = DPO().loss(policy, DPO().experience(policy, _whole(pairs, policy))).metrics
    assert float(metrics["chosen_log_prob"]) == pytest.approx(wanted[0].item(), rel=1e-5)
    assert float(metrics["rejected_log_prob"]) == pytest.approx(wanted[1].item(), rel=1e-5)


def _whole(data: TextData, policy: LanguageModel) -> Batch:
    return Batch.of(Padding(policy.pad_token_id)([data._encode(policy, row) for row in data.rows]))


class Partner:
    """Says one thing."""

    def __init__(self, task: Any) -> None:
        pass

    def respond(self, text: str) -> Turn:
        return Turn("xy")


@pytest.mark.parametrize("template", KINDS)
def test_a_later_turn_begins_no_text(template: str) -> None:
    policy = policy_that_adds(template)
    data = TextRollouts(["ab"], prompts_per_step=1, group_size=2, max_new_tokens=3, conversation=Partner, max_turns=2)
    for rollout in data.draw(policy, [0], 0, data.tasks):
        heard = [token for token, mask in zip(rollout.tokens, rollout.loss_mask) if not mask]
        assert heard == [policy.tokenizer.bos_token_id, *characters(policy, "abxy")]


def test_a_special_token_is_a_stop() -> None:
    policy = policy_that_adds(KINDS[0])
    stop = policy.tokenizer.convert_tokens_to_ids("<|im_end|>")
    free = policy.generate(["ab"], Sampling(max_new_tokens=40), n=40)[0]
    chosen = next(at for at, one in enumerate(free) if stop in one.tokens[1:])
    at = free[chosen].tokens.index(stop)
    found = policy.generate(["ab"], Sampling(max_new_tokens=40, stop=("<|im_end|>", "never")), n=40)[0]
    for one, other in zip(free, found, strict=True):
        end = one.tokens.index(stop) + 1 if stop in one.tokens else len(one.tokens)
        assert other.tokens == one.tokens[:end] and len(other.logprobs) == end
        assert other.finish_reason == ("stop" if stop in one.tokens else one.finish_reason)
        assert other.text == policy.decode(other.tokens)
    before = policy.decode(free[chosen].tokens[at - 1 : at])
    assert before
    mixed = policy.generate(["ab"], Sampling(max_new_tokens=40, stop=(f"{before}<|im_end|>",)), n=40)[0][chosen]
    assert mixed.tokens == free[chosen].tokens[: at + 1]
    assert mixed.text == policy.decode(free[chosen].tokens[: at - 1]) and mixed.finish_reason == "stop"


class WithoutTokens:
    """Answers as servers do that tell no ids."""

    def generate(self, prompts: Any, sampling: Any, *, n: int = 1, keys: Any = None) -> Any:
        return [[Completion([], [-1.0], "7", "stop") for _ in range(n)] for _ in prompts]


class WithoutLogprobs:
    """Answers with ids alone."""

    def generate(self, prompts: Any, sampling: Any, *, n: int = 1, keys: Any = None) -> Any:
        return [[Completion([3 + i, 4], [], "..", "stop") for i in range(n)] for _ in prompts]


def reinforce(generator: Any) -> tuple[LanguageModel, TextRollouts, Trainer]:
    policy = LanguageModel.tiny(**SMALL)
    data = TextRollouts("digits", prompts_per_step=2, group_size=4, generator=generator, reward=_by_turns)
    config = TrainingConfiguration(batch_size=8, training_steps=1)
    return policy, data, Trainer(policy, data, GRPO(), config=config, run=False, loggers=[], show_progress=False)


_calls = iter(range(1_000_000))


def _by_turns(task: Any, text: str) -> float:
    return float(next(_calls) % 2)


def test_completions_without_token_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="WithoutTokens returns completions without the ids of their tokens"):
        reinforce(WithoutTokens())[2].fit()


def test_completions_without_log_probs_are_scored_by_the_policy_and_trained_on() -> None:
    policy, data, trainer = reinforce(WithoutLogprobs())
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}
    trainer.fit()
    assert all(rollout.logprobs is None for rollout in data.rollouts)
    assert any(not torch.equal(value, before[name]) for name, value in policy.named_parameters())


def test_the_first_token_of_a_row_has_no_part_in_the_mean() -> None:
    policy = LanguageModel.tiny(**SMALL, dtype="float64")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
    attention = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    logs = torch.log_softmax(policy.model(ids).logits, -1)
    expected = -sum(logs[0, t - 1, ids[0, t]] for t in (1, 2, 3)) - sum(logs[1, t - 1, ids[1, t]] for t in (1, 2))
    loss = SFT().loss(policy, {"input_ids": ids, "attention_mask": attention, "loss_mask": attention})
    assert loss.weight == 5 and loss.total.item() == pytest.approx(expected.item())
    shifted = {"input_ids": ids.roll(1, 1)[1:], "attention_mask": attention.roll(1, 1)[1:]}
    left = SFT().loss(policy, {**shifted, "loss_mask": shifted["attention_mask"]})  # padded on the left
    assert left.weight == 2
    data = TextData([{"prompt": "", "completion": "abc"}], end=False)
    assert data._encode(policy, data.rows[0])["loss_mask"] == [0, 1, 1]
    assert SFT().loss(policy, {"input_ids": ids, "loss_mask": torch.ones(2, 4)}).weight == 6
