"""Weights laid out for the rows they are multiplied with: what is drawn is what the stored ones draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.policies.language import LanguageModel, Lora, Sampling, maps
from etude.policies.language.generation import WantedText
from etude.policies.language.llama import LlamaDecoder

from .samples import SMALL, make_batch, pairs_of

PROMPTS = ["12+34=", "What?\n", "a longer prompt than the others: "]
pytestmark = pytest.mark.skipif(not maps.CAN_PACK, reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small models count as large ones."""
    monkeypatch.setattr(maps, "LAY_OUT_ABOVE", 0)
    monkeypatch.setattr(maps, "MERGE_STEPS", 1)


def adapted() -> LanguageModel:
    policy = LanguageModel.tiny(**SMALL)
    policy = LanguageModel(Lora(rank=4, targets=["q_proj", "up_proj", "lm_head"]).apply(policy.model), policy.tokenizer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if "lora_" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return policy.eval()


@pytest.mark.parametrize("make", [adapted, lambda: LanguageModel.tiny(**SMALL)])
@pytest.mark.parametrize("prompts, n", [(PROMPTS[:1], 1), (PROMPTS[:1], 3), (PROMPTS, 4)])
def test_what_is_drawn_has_the_log_probs_of_a_forward_pass(make: Any, prompts: list[str], n: int) -> None:
    policy = make()
    decoder = policy._decoder(9, len(prompts) * n)
    assert isinstance(decoder, LlamaDecoder) and decoder.is_laid_out
    assert (decoder._weights.row is None) == (len(prompts) * n > 1)
    groups = policy.generate(prompts, Sampling(max_new_tokens=9, temperature=0.7), n=n)
    batch = make_batch(pairs_of(policy, prompts, groups))
    found = policy.log_probs(batch, temperature=0.7)[batch["loss_mask"].bool()]
    drawn = torch.tensor([value for group in groups for one in group for value in one.logprobs])
    torch.testing.assert_close(found, drawn, atol=1e-5, rtol=0)
    assert policy.generate(prompts, Sampling(max_new_tokens=9, temperature=0.7), n=n) == groups  # bit for bit


class _Guest:
    """A source of a completion, and of another one that joins it after three tokens."""

    top = 0

    def __init__(self, prompts: list[list[int]]) -> None:
        self._prompts, self._asked = prompts, 0
        self.found: dict[int, Any] = {}

    def take(self, rows: int) -> list[WantedText]:
        self._asked += 1
        number = {1: 0, 4: 1}.get(self._asked)
        return [] if number is None else [WantedText(self._prompts[number], number, 0, 9, number)]

    def hear(self, place: Any, token: int, logprob: float, top: Any) -> bool:
        return True

    def finish(self, place: Any, completion: Any) -> None:
        self.found[place] = completion


def test_a_row_that_is_joined_by_another_draws_what_it_draws_alone() -> None:
    policy = adapted()
    guest = _Guest([policy.encode(PROMPTS[0]), policy.encode(PROMPTS[2])])
    policy.draw(guest, Sampling(ends=False))
    for number, prompt in enumerate((PROMPTS[0], PROMPTS[2])):
        [[one]] = policy.generate([prompt], Sampling(9, ends=False), keys=[number])
        assert guest.found[number].tokens == one.tokens
        assert guest.found[number].logprobs == pytest.approx(one.logprobs, abs=1e-5)


def test_products_of_a_row_have_the_same_bits_whatever_goes_with_it() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    product = maps.MapsForMany(weight)
    with torch.inference_mode():
        (together,) = product(x)
        for rows in range(1, 9):
            assert torch.equal(product(x[:rows])[0], together[:rows])
        torch.testing.assert_close(together, x @ weight.t())


def test_weights_are_laid_out_anew_for_every_call_unless_they_are_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    laid_out = maps.Layouts._laid_out

    def counting(self: Any, for_one: bool) -> Any:
        made.append(for_one)
        return laid_out(self, for_one)

    monkeypatch.setattr(maps.Layouts, "_laid_out", counting)
    policy, sampling = adapted(), Sampling(max_new_tokens=4, greedy=True)
    before = policy.generate(PROMPTS[:1], sampling)
    assert policy.generate(PROMPTS[:1], sampling) == before
    assert made == [True, True]
    policy.decoders.keeps = True
    for _ in range(3):
        assert policy.generate(PROMPTS[:1], sampling) == before
        policy.generate(PROMPTS, sampling)
    assert made == [True, True, True, False]
    with torch.no_grad():
        policy.causal.model.norm.weight.mul_(3.0)
        policy.causal.lm_head.base_layer.weight.mul_(-1.0)
    policy.decoders.forget()
    assert policy.generate(PROMPTS[:1], sampling) != before
    assert made[4:] == [True]


def test_small_or_other_models_and_few_tokens_leave_the_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not LanguageModel.tiny(**SMALL)._decoder(0)._layouts.is_laid_out  # type: ignore[attr-defined]
    assert not LanguageModel.tiny(**SMALL, dtype="float64")._decoder(9)._layouts.is_laid_out  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert not LanguageModel.tiny(**SMALL)._decoder(99)._layouts.is_laid_out  # type: ignore[attr-defined]
