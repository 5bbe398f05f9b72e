"""Generation: what is sampled, how likely it was, when it ends, and what it does not depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, DataError, NonFiniteError
from etude.policies.language import LanguageModel, Sampling
from etude.policies.language.generation import WantedText, choose
from etude.policies.language.llama import LlamaDecoder
from etude.policies.language.sampling import uniforms
from etude.rng import fold

from .samples import SMALL, make_batch, pairs_of

PROMPTS = ["12+34=", "What?\n", "a longer prompt than the others: "]


@pytest.fixture(scope="module")
def policy() -> LanguageModel:
    return LanguageModel.tiny(**SMALL)


@pytest.fixture(scope="module")
def exact() -> LanguageModel:
    """In double precision the shape of a batch cannot change which token is drawn."""
    return LanguageModel.tiny(**SMALL, dtype="float64")


def other_kind(kind: str) -> LanguageModel:
    """Return a small model of another architecture, which transformers itself must decode."""
    import transformers

    torch.manual_seed(0)
    tokenizer = LanguageModel.tiny(**SMALL).tokenizer
    size = len(tokenizer)
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0
        )
    else:
        config = transformers.Qwen2Config(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
        )  # fmt: skip
    return LanguageModel(transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer)


def flat(groups: Any) -> list[Any]:
    return [one for group in groups for one in group]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_log_probs_are_those_of_a_forward_pass(policy: LanguageModel, kind: str) -> None:
    model = policy if kind == "llama" else other_kind(kind)
    groups = model.generate(PROMPTS, Sampling(max_new_tokens=9, temperature=0.7), n=3, keys=[4, 5, 6])
    batch = make_batch(pairs_of(model, PROMPTS, groups))
    found = model.log_probs(batch, temperature=0.7)[batch["loss_mask"].bool()]
    sampled = torch.tensor([logprob for one in flat(groups) for logprob in one.logprobs])
    assert torch.allclose(found, sampled, atol=1e-4)
    assert sampled.std() > 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_greedy_is_the_greedy_of_transformers(policy: LanguageModel, kind: str) -> None:
    model = policy if kind == "llama" else other_kind(kind)
    for prompt, (ours,) in zip(PROMPTS, model.generate(PROMPTS, Sampling(max_new_tokens=12, greedy=True)), strict=True):
        ids = torch.tensor([model.encode(prompt)])
        theirs = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert ours.tokens == theirs[0, ids.shape[1] :].tolist()


def test_llama_is_decoded_by_our_own_loop(policy: LanguageModel) -> None:
    assert isinstance(policy._decoder(), LlamaDecoder)
    assert not isinstance(other_kind("gpt2")._decoder(), LlamaDecoder)


def test_a_prompt_is_computed_once_for_all_its_completions(
    policy: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    prefill = LlamaDecoder.prefill

    def counting(self: LlamaDecoder, tokens: Any, lengths: Any, room: int) -> Any:
        seen.append(tuple(tokens.shape))
        return prefill(self, tokens, lengths, room)

    monkeypatch.setattr(LlamaDecoder, "prefill", counting)
    policy.generate(["12+34=", "98+76=", "12+34="], Sampling(max_new_tokens=2), n=8)
    assert seen == [(2, 6)]
    assert policy.stats.prompt_tokens == 12


def test_completions_follow_from_seed_key_and_index_alone(exact: LanguageModel) -> None:
    sampling = Sampling(max_new_tokens=10, seed=3)
    together = exact.generate(PROMPTS, sampling, n=4, keys=[11, 12, 13])
    torch.manual_seed(1)
    alone = [exact.generate([prompt], sampling, n=4, keys=[key])[0] for prompt, key in zip(PROMPTS, [11, 12, 13])]
    assert [one.tokens for one in flat(together)] == [one.tokens for one in flat(alone)]
    fewer = exact.generate(PROMPTS[::-1], sampling, n=2, keys=[13, 12, 11])
    assert [[one.tokens for one in group] for group in fewer[::-1]] == [
        [one.tokens for one in group[:2]] for group in together
    ]
    assert len({tuple(one.tokens) for one in flat(together)}) == 12


@pytest.mark.parametrize("change", [{"seed": 4}, {"keys": [1, 12, 13]}])
def test_another_seed_or_key_gives_other_completions(exact: LanguageModel, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"seed": 3, "keys": [11, 12, 13], **change}
    base = exact.generate(PROMPTS, Sampling(max_new_tokens=10, seed=3), keys=[11, 12, 13])
    other = exact.generate(PROMPTS, Sampling(max_new_tokens=10, seed=given["seed"]), keys=given["keys"])
    assert base[0][0].tokens != other[0][0].tokens


def test_batches_of_rows_change_nothing(exact: LanguageModel) -> None:
    whole = exact.generate(PROMPTS, Sampling(max_new_tokens=10), n=5)
    exact.max_rows = 4
    try:
        parts = exact.generate(PROMPTS, Sampling(max_new_tokens=10), n=5)
    finally:
        exact.max_rows = 64
    assert [one.tokens for one in flat(whole)] == [one.tokens for one in flat(parts)]


def test_the_same_call_gives_the_same_bits_and_leaves_the_generators_alone(policy: LanguageModel) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = policy.generate(PROMPTS, Sampling(max_new_tokens=10), n=3)
    assert torch.equal(states[0], torch.get_rng_state()) and np.array_equal(states[1], np.random.get_state()[1])
    assert first == policy.generate(PROMPTS, Sampling(max_new_tokens=10), n=3)


def test_generation_sees_weights_that_have_just_changed() -> None:
    policy = LanguageModel.tiny(**SMALL)
    before = policy.generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True))
    with torch.no_grad():
        for value in policy.parameters():
            value.add_(0.3 * torch.sin(torch.arange(value.numel(), dtype=torch.float32)).view_as(value))
    after = policy.generate(PROMPTS, Sampling(max_new_tokens=8, greedy=True))
    assert before != after
    batch = make_batch(pairs_of(policy, PROMPTS, after))
    logprobs = torch.tensor([value for one in flat(after) for value in one.logprobs])
    assert torch.allclose(policy.log_probs(batch)[batch["loss_mask"].bool()], logprobs, atol=1e-4)


def test_an_end_token_is_kept_and_ends_the_completion(policy: LanguageModel) -> None:
    """Padding is the end token too: only the length tells them apart."""
    assert policy.pad_token_id == policy.eos_token_id
    groups = policy.generate(PROMPTS, Sampling(max_new_tokens=60), n=20)
    stopped = [one for one in flat(groups) if one.finish_reason == "stop"]
    assert stopped and len(stopped) < 60
    for one in flat(groups):
        assert len(one.tokens) == len(one.logprobs)
        assert policy.eos_token_id not in one.tokens[:-1]
        assert (one.tokens[-1] == policy.eos_token_id) == (one.finish_reason == "stop")
        assert one.finish_reason == "stop" or len(one.tokens) == 60
    batch = make_batch(pairs_of(policy, PROMPTS, groups), pad=policy.pad_token_id)
    assert policy(batch).weight == sum(len(one.tokens) for one in flat(groups))


def test_finished_rows_leave_the_batch(policy: LanguageModel) -> None:
    policy.generate(PROMPTS, Sampling(max_new_tokens=60), n=20)
    stats = policy.stats
    assert stats.new_tokens <= stats.row_steps + 60 < 60 * 60
    assert stats.row_steps < 1.15 * stats.new_tokens


def test_tokens_to_stop_at(policy: LanguageModel) -> None:
    free = policy.generate(PROMPTS, Sampling(max_new_tokens=20, seed=1), n=2)
    halt = free[0][0].tokens[4]
    stopped = policy.generate(PROMPTS, Sampling(max_new_tokens=20, seed=1, stop_tokens=(halt,)), n=2)
    for one, other in zip(flat(free), flat(stopped), strict=True):
        end = one.tokens.index(halt) + 1 if halt in one.tokens else len(one.tokens)
        assert other.tokens == one.tokens[:end]
    assert stopped[0][0].finish_reason == "stop"


def test_texts_to_stop_at_may_cross_tokens(policy: LanguageModel) -> None:
    free = policy.generate(PROMPTS, Sampling(max_new_tokens=20, seed=2))
    text = free[1][0].text
    stop = text[5:8]  # a token per character: three tokens
    (one,) = policy.generate(PROMPTS, Sampling(max_new_tokens=20, seed=2, stop=(stop, "never")))[1]
    assert one.finish_reason == "stop"
    assert one.text == text[: text.index(stop)]
    assert policy.decode(one.tokens) == one.text + stop
    assert len(one.tokens) == len(one.logprobs)


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 0.5]])
    draws = (np.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = choose(logits.repeat(20_000, 1), draws, Sampling(temperature=2.0))
    wanted = torch.softmax(logits[0] / 2, -1)
    assert torch.allclose(torch.bincount(tokens, minlength=5) / 20_000, wanted, atol=1e-4)
    assert torch.allclose(logprobs, wanted.log()[tokens])


@pytest.mark.parametrize(
    "limits, allowed",
    [({"top_k": 2}, {1, 3}), ({"top_p": 0.5}, {3}), ({"top_p": 0.7}, {1, 3}), ({"top_k": 3, "top_p": 0.99}, {1, 3, 4})],
)
def test_limits_on_what_is_drawn(limits: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 0.5]])  # probabilities .08 .22 0 .60 .13
    draws = (np.arange(1000) + 0.5) / 1000
    tokens, logprobs = choose(logits.repeat(1000, 1), draws, Sampling(**limits))
    assert set(tokens.tolist()) == allowed
    assert torch.allclose(logprobs, torch.log_softmax(logits[0], -1)[tokens])  # of the whole distribution


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_last_number_draws_no_impossible_token(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 1000, dtype=dtype)
    logits[0, 700:] = -torch.inf
    tokens, _ = choose(logits, np.array([1 - 2.0**-53]), Sampling())
    assert tokens.item() == 699


def test_numbers_are_those_of_fold() -> None:
    found = uniforms(7, [3, 4], [0, 2], 5)
    assert found.shape == (2, 5)
    assert found[1, 4] == (fold(7, 4, 2, 4) >> 11) * 2.0**-53
    assert found.min() >= 0 and found.max() < 1


def test_generation_has_no_dropout_and_leaves_every_mode_as_it_was() -> None:
    model = other_kind("gpt2")
    wanted = model.generate(PROMPTS, Sampling(max_new_tokens=5, greedy=True))
    model.train()
    model.model.transformer.ln_f.eval()
    assert model.generate(PROMPTS, Sampling(max_new_tokens=5, greedy=True)) == wanted
    assert model.training and model.model.training and not model.model.transformer.ln_f.training


def test_prompts_may_be_tokens(policy: LanguageModel) -> None:
    tokens = [policy.encode(prompt) for prompt in PROMPTS]
    assert policy.generate(tokens, Sampling(max_new_tokens=5)) == policy.generate(PROMPTS, Sampling(max_new_tokens=5))
    assert policy.generate([]) == []


def test_broken_weights_are_noticed() -> None:
    policy = LanguageModel.tiny(**SMALL)
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="NaN"):
        policy.generate(PROMPTS)


def test_what_cannot_be_generated(policy: LanguageModel) -> None:
    with pytest.raises(DataError, match="one key per prompt, got 1 keys for 3"):
        policy.generate(PROMPTS, keys=[1])
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        policy.generate([[3], []])
    with pytest.raises(DataError, match="exceeds the model's context of 512"):
        policy.generate(PROMPTS, Sampling(max_new_tokens=510))
    with pytest.raises(DataError, match="n=0"):
        policy.generate(PROMPTS, n=0)


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"stop": ("",)}]
)
def test_wrong_sampling(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_sampling_from_a_configuration() -> None:
    assert Sampling(stop=["a", "b"], stop_tokens=[1]) == Sampling(stop=("a", "b"), stop_tokens=(1,))  # type: ignore[arg-type]
    assert Sampling(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert Sampling(temperature=0).is_greedy and Sampling(temperature=0).scale == 1


class Guests:
    """A source whose completions are asked for at different times, and have different lengths."""

    top = 0

    def __init__(self, policy: LanguageModel, arrivals: dict[int, list[tuple[str, int, int]]]) -> None:
        self._policy, self._arrivals = policy, dict(arrivals)
        self.rooms: list[int] = []
        self.order: list[tuple[str, int]] = []
        self.found: dict[tuple[str, int], Any] = {}

    def take(self, rows: int) -> list[WantedText]:
        now, self.rooms = len(self.rooms), [*self.rooms, rows]
        new = self._arrivals.pop(now, [])
        return [WantedText(self._policy.encode(text), key, 0, most, (text, key)) for text, key, most in new]

    def hear(self, place: Any, token: int, logprob: float, top: Any) -> bool:
        return True

    def finish(self, place: Any, completion: Any) -> None:
        self.order.append(place)
        self.found[place] = completion


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("greedy", [False, True])
def test_completions_that_join_others_are_what_they_are_alone(exact: LanguageModel, kind: str, greedy: bool) -> None:
    model = exact if kind == "llama" else other_kind(kind).double()
    arrivals = {
        0: [(PROMPTS[0], 1, 20), (PROMPTS[1], 2, 3)],
        2: [(PROMPTS[2], 3, 4)],  # wider than what is there
        5: [("a", 4, 2), (PROMPTS[0], 5, 9), (PROMPTS[0], 6, 9)],  # narrower, and two of the same prompt
        6: [("bc", 7, 30)],  # has more before it than all others
    }
    source, sampling = Guests(model, arrivals), Sampling(seed=3, ends=False, greedy=greedy)
    model.draw(source, sampling)
    stats, asked = model.stats, [one for group in arrivals.values() for one in group]
    assert source.found.keys() == {(text, key) for text, key, _ in asked}
    for text, key, most in asked:
        alone = Sampling(max_new_tokens=most, seed=3, ends=False, greedy=greedy)
        [[wanted]] = model.generate([text], alone, keys=[key])
        found = source.found[text, key]
        assert (found.tokens, found.finish_reason) == (wanted.tokens, "length")
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    if kind == "llama":
        assert source.order[:3] == [(PROMPTS[1], 2), (PROMPTS[2], 3), ("a", 4)]  # as each is done
        assert stats.new_tokens == sum(most for *_, most in asked)
        assert stats.row_steps < 1.3 * stats.new_tokens
    else:
        assert set(source.rooms[1:20]) == {0}  # whoever comes meanwhile waits


def test_more_than_fit_wait_for_those_that_are_done(exact: LanguageModel) -> None:
    wanted = [(f"{number}", number, 2 + number % 5) for number in range(20)]
    source = Guests(exact, {0: wanted})
    kept, exact.max_rows = exact.max_rows, 4
    exact.draw(source, Sampling(seed=3, ends=False))
    exact.max_rows = kept
    assert len(source.found) == 20
    for text, key, most in wanted:
        [[one]] = exact.generate([text], Sampling(max_new_tokens=most, seed=3, ends=False), keys=[key])
        assert source.found[text, key].tokens == one.tokens
