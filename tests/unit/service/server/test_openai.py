"""The official OpenAI client, unmodified, against a real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.build import build
from etude.config.load import load
from etude.errors import ConfigError
from etude.policies.language import Sampling
from etude.rng import STREAM_ROLLOUT, fold
from etude.rollouts.text import TextRollouts
from etude.service.server.bases import Bases
from tests.served import KEY, Served, connected

openai = pytest.importorskip("openai")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the clients'
BASES = Bases(["tiny"])
OTHER_KEY = "tml-the-key-of-another"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    talker, keys = folder / "talker", folder / "keys"
    policy = BASES.get("tiny")
    policy.model.save_pretrained(talker)
    policy.tokenizer.save_pretrained(talker)
    said = json.loads((talker / "tokenizer_config.json").read_text())
    (talker / "tokenizer_config.json").write_text(json.dumps({**said, "chat_template": TEMPLATE}))
    keys.write_text(f"ada {KEY}\nbob {OTHER_KEY}\n")
    found = Served(folder / "state", "--model", "tiny", "--model", str(talker), "--keys", str(keys)).start()
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def expected(prompt: str, seed: int = 5, n: int = 1, **sampling: Any) -> list[Any]:
    """Draw in this process what the service is to draw."""
    [group] = BASES.get("tiny").generate([prompt], Sampling(**sampling), n=n, keys=[fold(STREAM_ROLLOUT, seed)])
    return group


def text_of(tokens: list[int]) -> str:
    return BASES.get("tiny").decode(tokens)


# ---- completions -----------------------------------------------------------------------------------------------------


def test_completions_are_the_models_own(client: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 5, "n": 3, "temperature": 0.7, "logprobs": 2}
    found = client.completions.create(model="tiny", prompt="abc", **asked)
    wanted = expected("abc", n=3, max_new_tokens=12, temperature=0.7)
    assert [one.text for one in found.choices] == [one.text for one in wanted]
    assert [one.token_ids for one in found.choices] == [one.tokens for one in wanted]
    assert [one.finish_reason for one in found.choices] == [one.finish_reason for one in wanted]
    for choice, one in zip(found.choices, wanted, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert len(choice.logprobs.tokens) == len(one.tokens)
        assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * len(one.tokens)
        # The drawn token's own log-probability is that of the list, where it is in it.
        for token, value, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert value <= max(top.values()) + 1e-5
            assert top.get(token, value) == pytest.approx(value, abs=1e-5)
    assert found.usage.prompt_tokens == 3
    assert found.usage.completion_tokens == sum(len(one.tokens) for one in wanted)


def test_prompts_are_texts_or_tokens_one_or_many(client: Any) -> None:
    def draw(prompt: Any) -> list[str]:
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        return [one.text for one in found.choices]

    ids = BASES.get("tiny").encode("ab")
    [alone], [other] = draw("ab"), draw("xyz")
    assert draw(ids) == [alone]
    assert draw(["ab", "xyz"]) == draw([ids, BASES.get("tiny").encode("xyz")]) == [alone, other]


def test_a_seed_repeats_and_its_absence_does_not(client: Any) -> None:
    def draw(**options: Any) -> str:
        return str(client.completions.create(model="tiny", prompt="q", max_tokens=24, **options).choices[0].text)

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw() != draw()


def test_a_stop_ends_and_is_cut_also_from_a_stream(client: Any) -> None:
    seed, whole = next(
        (seed, one.text) for seed in range(99) for one in expected("go", seed, max_new_tokens=40) if len(one.text) > 20
    )
    stop = whole[5:8]
    asked: dict[str, Any] = {"model": "tiny", "prompt": "go", "max_tokens": 40, "seed": seed, "stop": [stop]}
    cut = client.completions.create(**asked).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert text_of(cut.token_ids).endswith(stop)
    pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == cut.text
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_the_end_token_can_be_ignored(client: Any) -> None:
    seed = next(seed for seed in range(999) if expected("e", seed, max_new_tokens=8)[0].tokens[-1] == 0)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "e", "max_tokens": 8, "seed": seed}
    assert client.completions.create(**asked).choices[0].token_ids[-1] == 0
    found = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (8, "length")


def test_a_stream_says_the_same_in_pieces(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 10, "seed": 4, "n": 2}
    asked["logprobs"] = 1
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage == whole.usage
    for choice in whole.choices:
        own = [one for piece in pieces for one in piece.choices if one.index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        logprobs = [value for one in own for value in one.logprobs.token_logprobs]
        assert logprobs == pytest.approx(choice.logprobs.token_logprobs)
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]


def test_requests_side_by_side_draw_what_they_draw_alone(client: Any) -> None:
    def draw(seed: int) -> tuple[str, int]:
        # Limits differ, and still they are drawn together.
        found = client.completions.create(model="tiny", prompt="a" * (1 + seed), max_tokens=8 + seed, seed=seed)
        return found.choices[0].text, found.usage.completion_tokens

    alone = [draw(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(draw, range(8))) == alone


# ---- chat ------------------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(client: Any) -> None:
    parts = [{"type": "text", "text": "hi"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    asked: dict[str, Any] = {"model": "talker", "messages": messages, "max_tokens": 9, "seed": 5}
    found = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    [wanted] = expected("system: be brief\nuser: hi\nassistant: ", max_new_tokens=9)
    [choice] = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == wanted.text
    assert [one.id for one in choice.logprobs.content] == choice.token_ids == wanted.tokens
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(wanted.logprobs, abs=1e-4)
    assert {len(one.top_logprobs) for one in choice.logprobs.content} == {3}
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].delta.content for piece in pieces) == wanted.text
    # What was answered can be sent back.
    messages += [choice.message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(**asked).choices[0].finish_reason in ("stop", "length")


# ---- which policy ----------------------------------------------------------------------------------------------------


def test_saved_weights_are_served_by_name_and_the_newest_of_a_run_is_found(served: Served, client: Any) -> None:
    tinker = pytest.importorskip("tinker")
    ids = [*BASES.get("tiny").encode("the fox"), 0]
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})

    def recited(model: str) -> str:
        return str(client.completions.create(model=model, prompt="t", max_tokens=10, temperature=0).choices[0].text)

    with connected(served) as trainer:
        trained = trainer.create_lora_training_client("tiny", rank=32, seed=3)
        run = trained.get_info().model_id
        with pytest.raises(openai.NotFoundError, match="has saved weights to draw from yet"):
            recited(run)
        first = trained.save_weights_for_sampler("first").result().path
        for _ in range(30):
            trained.forward_backward([datum], "cross_entropy")
            adam = tinker.AdamParams(learning_rate=5e-3, beta1=0.8, beta2=0.99, eps=1e-4, grad_clip_norm=1.0)
            trained.optim_step(adam).result()
        last = trained.save_weights_for_sampler("last").result().path
    assert recited(first) == recited("tiny")
    assert recited(last) == recited(run) == recited("newest") == "he fox"
    listed = [one.id for one in client.models.list()]
    assert listed == ["tiny", "talker", run, first, last, "newest"]
    assert client.models.retrieve(last).id == last
    # Another key sees none of it.
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=OTHER_KEY, max_retries=0) as other:
        assert [one.id for one in other.models.list()] == ["tiny", "talker"]
        for name in (run, last, "newest"):
            with pytest.raises(openai.NotFoundError):
                other.completions.create(model=name, prompt="t")


# ---- rollouts --------------------------------------------------------------------------------------------------------


def test_a_recipe_trains_on_completions_of_the_service(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_KEY", KEY)
    talker = served.folder.parent / "talker"
    (tmp_path / "c.yaml").write_text(f"""
policy: {{type: language, params: {{path: {talker}}}}}
data:
  type: rollouts
  params:
    tasks: digits
    prompts_per_step: 2
    group_size: 4
    max_new_tokens: 6
    temperature: 0.8
    generator:
      type: endpoint
      params: {{url: "{served.url}/v1", model: talker, api_key: "${{env:SERVICE_KEY}}"}}
algorithm: {{type: grpo, params: {{temperature: 0.8}}}}
training: {{training_steps: 1, batch_size: 8, lr: 3.0e-3, log_every: 1}}
""")
    trainer = build(load(tmp_path / "c.yaml"), run=tmp_path / "run")
    before = {name: one.clone() for name, one in trainer.policy.state_dict().items()}
    own = BASES.get("tiny")
    trainer.fit()
    assert isinstance(trainer.data, TextRollouts)
    rollouts = trainer.data.rollouts
    assert len(rollouts) == 8
    for one in rollouts:
        # The server's tokens and log-probabilities are those of the policy that began to learn from them.
        drawn = [token for token, sampled in zip(one.tokens, one.loss_mask, strict=True) if sampled]
        assert own.decode(drawn) == one.text
        told = [value for value, sampled in zip(one.logprobs, one.loss_mask, strict=True) if sampled]
        with torch.inference_mode():
            logits = own.logits({"input_ids": torch.tensor([one.tokens])})[0] / 0.8
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        assert told == pytest.approx(wanted[len(one.tokens) - len(drawn) :].tolist(), abs=1e-4)
    assert any(not torch.equal(one, before[name]) for name, one in trainer.policy.state_dict().items())


def test_a_generator_is_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generator.*url"):
        TextRollouts("digits", generator={"type": "endpoint"})
    with pytest.raises(ConfigError, match="type and params"):
        TextRollouts("digits", generator={"url": "http://127.0.0.1"})
    (tmp_path / "c.yaml").write_text(
        "policy: {type: language, params: {tiny: true}}\nalgorithm: grpo\n"
        "data: {type: rollouts, params: {tasks: digits, generator: {type: endpoint, params: {urll: a}}}}\n"
    )
    with pytest.raises(ConfigError, match="urll"):
        load(tmp_path / "c.yaml")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, said",
    [
        ({"prompt": "a", "echo": True}, "does not offer echo"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "does not offer frequency_penalty"),
        ({"prompt": "a", "best_of": 4}, "does not offer best_of"),
        ({"prompt": "a", "extra_body": {"wishes": 3}}, "wishes: Extra inputs are not permitted"),
        ({"prompt": "a", "max_tokens": 512}, "1 tokens, which with max_tokens=512 exceeds the context of 512"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": []}, "a prompt is a text or a list of tokens"),
        ({"prompt": [98]}, "the model knows 0 to 97"),
        ({"prompt": [-1]}, "none negative"),
        ({"prompt": "a", "stop": [""]}, "stop.0: String should have at least 1 character"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "n": 0}, "n: "),
        ({"prompt": ["a"] * 100, "n": 3}, "256 completions at most"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(client: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model="tiny", **given)
    assert said in found.value.body["message"]
    assert found.value.body["type"] == "invalid_request_error"


def test_other_refusals_have_the_shape_too(served: Served, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="'tiny' has no chat template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match=r"refuses this conversation.*no tools here"):
        client.chat.completions.create(model="talker", messages=[{"role": "tool", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model="talker", messages=[{"role": "user", "content": "a"}], top_logprobs=2)
    for name in ("nobody", "tinker://nobody/weights/a", "tinker://../../x"):
        with pytest.raises(openai.NotFoundError, match=r"there is no|is no checkpoint"):
            client.completions.create(model=name, prompt="a")
    with pytest.raises(openai.NotFoundError, match="does not offer POST /v1/embeddings"):
        client.embeddings.create(model="tiny", input="a")
    status, body = served.call("/v1/models", key="tml-somebody-else-s-key")
    assert (status, body["error"]["type"]) == (401, "authentication_error")
    status, body = served.call("/v1/completions", b"{", method="POST")
    assert status == 400
    assert body["error"]["message"]
    status, body = served.call("/v1/completions", b"{}", method="POST", Content_Length=str(1 << 30))
    assert status == 413
    assert "too large" in body["error"]["message"]


def test_a_client_that_leaves_is_not_drawn_for(client: Any) -> None:
    with client.completions.create(model="tiny", prompt="a", max_tokens=500, seed=1, stream=True) as stream:
        next(iter(stream))
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1
