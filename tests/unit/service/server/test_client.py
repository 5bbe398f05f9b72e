"""The official client, unmodified, against a real server process."""

from __future__ import annotations

import io
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from etude.algorithms import losses
from etude.service.datums import AdamParams
from etude.service.server.bases import Adapter, Bases
from etude.service.server.codec import Row, Work
from etude.service.server.trained import TrainedModel
from tests.served import KEY, Served, connected

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of the client's
SENTENCE = "the quick brown fox"
BASES = Bases(["tiny"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("service") / "state").start()
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with connected(served) as found:
        yield found


def tokens(text: str = SENTENCE) -> list[int]:
    """Return the tokens of a text and of its end."""
    return [*BASES.get("tiny").encode(text), 0]


def datum(ids: list[int] | None = None, **inputs: Any) -> Any:
    """Return a datum on a text, targets shifted by one."""
    ids = ids or tokens()
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **inputs}
    )


def adam(rate: float = 1e-2, **others: float) -> Any:
    return tinker.AdamParams(learning_rate=rate, **others)


def step(trained: Any, data: list[Any], loss_fn: str = "cross_entropy", config: Any = None, rate: float = 1e-2) -> Any:
    """Make one update, both calls sent at once, and return what the first came to."""
    done, updated = trained.forward_backward(data, loss_fn, config), trained.optim_step(adam(rate))
    updated.result()
    return done.result()


def heard(trained: Any, data: list[Any] | None = None) -> torch.Tensor:
    """Return the log-probabilities that a model in training gives."""
    found = trained.forward(data or [datum()], "cross_entropy").result().loss_fn_outputs
    return torch.cat([one["logprobs"].to_torch().flatten() for one in found])


def lora(client: Any, **options: Any) -> Any:
    return client.create_lora_training_client("tiny", **{"rank": 8, "seed": 3} | options)


def test_the_client_learns_what_is_offered(client: Any) -> None:
    (model,) = client.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.trainable, model.sampleable) == ("tiny", 512, True, True)
    info = lora(client).get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 8, "tiny")


@pytest.mark.parametrize("rank", [0, 32])
def test_a_sentence_is_learned_in_thirty_steps_and_recited(client: Any, rank: int) -> None:
    trained, ids = lora(client, rank=rank), tokens()
    for _ in range(30):
        done = trained.forward_backward([datum()], "cross_entropy")
        params = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-4, "grad_clip_norm": 1.0} if rank else {}
        trained.optim_step(adam(0.005 if rank else 0.003, **params)).result()
        found = done.result()
    assert found.metrics["loss:sum"] / len(ids[1:]) < 0.05
    sampler = trained.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints(ids[:1])
    (said,) = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=40, temperature=0)).result().sequences
    assert (list(said.tokens), said.stop_reason) == (ids[1:], "stop")


def test_weights_count_as_they_are_given(client: Any) -> None:
    trained, count = lora(client), len(tokens()) - 1
    ones, none = [datum(weights=[1.0] * count)], [datum(weights=[0.0] * count)]
    plain, whole, nothing = (trained.forward(data, "cross_entropy").result() for data in ([datum()], ones, none))
    assert plain.metrics["loss:sum"] == whole.metrics["loss:sum"] > 0
    assert nothing.metrics["loss:sum"] == 0
    assert nothing.loss_fn_outputs[0]["logprobs"].tolist() == plain.loss_fn_outputs[0]["logprobs"].tolist()
    signed = [1.0, -2.0] + [0.0] * (count - 2)
    log_probs = plain.loss_fn_outputs[0]["logprobs"].to_torch()
    found = trained.forward([datum(weights=signed)], "cross_entropy").result()
    assert found.metrics["loss:sum"] == pytest.approx(-float(log_probs[0] - 2 * log_probs[1]), rel=1e-6)


def test_a_custom_cross_entropy_is_cross_entropy(client: Any) -> None:
    named, custom = lora(client), lora(client)

    def loss(_: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -log_probs[0].sum(), {}

    told = named.forward_backward([datum()], "cross_entropy").result()
    done = custom.forward_backward_custom([datum()], loss).result()
    assert done.metrics["loss:sum"] == pytest.approx(told.metrics["loss:sum"], rel=1e-6)
    for trained in (named, custom):
        trained.optim_step(adam()).result()
    torch.testing.assert_close(heard(named), heard(custom), rtol=0, atol=1e-6)


def _ours(loss_fn: str, *given: torch.Tensor) -> torch.Tensor:
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "importance_sampling": lambda: losses.importance_sampling(*given),
        "ppo": lambda: losses.ppo_clip(*given, clip_low=0.1, clip_high=0.3),
        "cispo": lambda: losses.cispo(*given, ratio_low=0.5, ratio_high=1.2),
        "dro": lambda: losses.dro(*given, beta=0.2),
        "gspo": lambda: losses.gspo(*given, clip_low=0.1, clip_high=0.3),
    }
    return kinds[loss_fn]()


@pytest.mark.parametrize(
    "loss_fn, config",
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
        ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}),
        ("dro", {"beta": 0.2}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
    ],
)
def test_policy_losses_are_our_own(client: Any, loss_fn: str, config: Any) -> None:
    named, custom = lora(client), lora(client)
    step(named, [datum()])  # away from a fresh adapter, half of whose gradients are zero
    step(custom, [datum()])
    generator = torch.Generator().manual_seed(1)
    old = heard(named) + 0.4 * torch.randn(len(tokens()) - 1, generator=generator)
    advantages = torch.randn(len(old), generator=generator)
    rows = [datum(logprobs=old, advantages=advantages)]

    def loss(_: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        ours = _ours(loss_fn, log_probs[0][None], old[None], advantages[None], torch.ones(1, len(old)))
        return ours.sum(), {}

    found = named.forward_backward(rows, loss_fn, config).result()
    told = custom.forward_backward_custom([datum()], loss).result()
    assert found.metrics["loss:sum"] == pytest.approx(told.metrics["loss:sum"], rel=1e-4, abs=1e-5)
    named.optim_step(adam()).result()
    custom.optim_step(adam()).result()
    torch.testing.assert_close(heard(named), heard(custom), rtol=0, atol=1e-4)


def test_any_tokens_can_be_targets(client: Any) -> None:
    trained, ids = lora(client), tokens()
    first = heard(trained)
    several = torch.tensor([[right, 5, 7, 9] for right in ids[1:]])
    weights = torch.zeros(several.shape)
    weights[:, 0] = 1.0
    wide = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": tinker.TensorData.from_torch(several), "weights": weights},
    )
    assert wide.loss_fn_inputs["weights"].sparse_crow_indices is not None
    found = trained.forward_backward([wide, datum()], "cross_entropy").result()
    log_probs = found.loss_fn_outputs[0]["logprobs"].to_torch()
    assert log_probs.shape == several.shape
    torch.testing.assert_close(log_probs[:, 0], first, rtol=0, atol=1e-5)
    assert found.loss_fn_outputs[1]["logprobs"].shape == [len(ids) - 1]
    assert found.metrics["loss:sum"] == pytest.approx(-2 * float(first.sum()), rel=1e-5)
    fives = [datum([*ids[:-1], 5])]
    assert heard(trained, fives)[-1].item() == pytest.approx(log_probs[-1, 1].item(), abs=1e-5)


def test_every_parameter_of_adam_is_honoured(client: Any) -> None:
    given = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    trained, policy = lora(client), BASES.make("tiny", Adapter(8, 3))
    weights = [one for one in policy.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    ids = torch.tensor([tokens()])
    for _ in range(3):
        trained.forward_backward([datum()], "cross_entropy").result()
        norm = trained.optim_step(adam(0.02, **given)).result().metrics["grad_norm:mean"]
        (-policy.log_probs({"input_ids": ids}).sum()).backward()
        assert float(torch.nn.utils.clip_grad_norm_(weights, 0.5)) == pytest.approx(norm, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    expected = policy.log_probs({"input_ids": ids})[0, 1:].detach()
    torch.testing.assert_close(heard(trained), expected, rtol=0, atol=1e-4)


def test_what_is_trained_can_be_chosen(client: Any) -> None:
    heads = [lora(client, train_mlp=False, train_attn=False), lora(client, train_unembed=False)]
    before = heard(heads[0])
    for trained in heads:
        step(trained, [datum()])
    assert not torch.equal(heard(heads[0]), before)
    assert not torch.allclose(heard(heads[0]), heard(heads[1]))


def test_a_saved_state_goes_on_exactly(client: Any) -> None:
    trained = lora(client)
    for _ in range(2):
        step(trained, [datum()])
    path = trained.save_state("two").result().path
    second = heard(trained)
    for _ in range(3):
        step(trained, [datum()])
    later = trained.save_state("five").result().path
    expected = heard(trained)
    resumed = client.create_training_client_from_state_with_optimizer(path)
    assert torch.equal(heard(resumed), second)
    for _ in range(3):
        step(resumed, [datum()])
    assert torch.equal(heard(resumed), expected)
    anew = client.create_training_client_from_state(path)
    step(anew, [datum()])
    assert not torch.equal(heard(anew), heard(client.create_training_client_from_state(later)))
    with pytest.raises(tinker.RequestFailedError, match="there already"):
        trained.save_state("two").result()
    trained.save_state("two", overwrite=True).result()
    assert torch.equal(heard(client.create_training_client_from_state(path)), expected)


def test_all_weights_can_be_trained_and_saved(client: Any) -> None:
    trained = lora(client, rank=0)
    assert trained.get_info().is_lora is False
    step(trained, [datum()], rate=1e-3)
    resumed = client.create_training_client_from_state_with_optimizer(trained.save_state("all").result().path)
    step(trained, [datum()], rate=1e-3)
    step(resumed, [datum()], rate=1e-3)
    assert torch.equal(heard(trained), heard(resumed))


def test_a_sampler_keeps_its_weights_and_agrees_with_the_trainer(client: Any) -> None:
    trained, prompt = lora(client), tinker.ModelInput.from_ints(tokens())
    step(trained, [datum()])
    before = heard(trained)
    ephemeral = trained.save_weights_and_get_sampling_client()
    named = client.create_sampling_client(trained.save_weights_for_sampler("kept").result().path)
    for _ in range(3):
        step(trained, [datum()])
    assert not torch.allclose(heard(trained), before, atol=1e-2)
    for sampler in (ephemeral, named):
        first, *rest = sampler.compute_logprobs(prompt).result()
        assert first is None
        torch.testing.assert_close(torch.tensor(rest), before, rtol=0, atol=1e-4)
    base = client.create_sampling_client(base_model="tiny")
    assert base.get_base_model() == "tiny"
    with torch.no_grad():
        expected = BASES.get("tiny").log_probs({"input_ids": torch.tensor([tokens()])})[0, 1:]
    torch.testing.assert_close(torch.tensor(base.compute_logprobs(prompt).result()[1:]), expected, rtol=0, atol=1e-4)


def test_samples_are_drawn_as_asked(client: Any) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    prompt = tinker.ModelInput.from_ints(tokens()[:4])

    def draw(count: int = 1, **params: Any) -> list[list[int]]:
        answer = sampler.sample(prompt, count, tinker.SamplingParams(**{"max_tokens": 12} | params)).result()
        return [list(one.tokens) for one in answer.sequences]

    assert draw(3, seed=7) == draw(3, seed=7) != draw(3, seed=8)
    assert len({tuple(one) for one in draw(3, seed=7)}) == 3
    assert draw(top_k=1, seed=1) == draw(temperature=0) == draw(top_p=1e-6, seed=2)
    likely = draw(temperature=0, max_tokens=3)[0]
    assert draw(temperature=0, stop=[likely[1]])[0] == likely[: likely.index(likely[1]) + 1]
    assert {len(one) for one in draw(64, seed=1, max_tokens=40, stop=[])} == {40}
    assert min(len(one) for one in draw(64, seed=1, max_tokens=40)) < 40


def test_prompts_are_scored_with_the_likeliest_tokens(client: Any) -> None:
    sampler, ids = client.create_sampling_client(base_model="tiny"), tokens()
    answer = sampler.sample(
        tinker.ModelInput.from_ints(ids), 1, tinker.SamplingParams(max_tokens=2, temperature=0),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    with torch.no_grad():
        logits = BASES.get("tiny").logits({"input_ids": torch.tensor([ids])})[0, 1:].log_softmax(-1)
    values, found = logits.topk(3, -1)
    assert answer.topk_prompt_logprobs[0] is None
    assert [[token for token, _ in place] for place in answer.topk_prompt_logprobs[1:]] == found.tolist()
    assert answer.topk_prompt_logprobs[1][0][1] == pytest.approx(values[0, 0].item(), abs=1e-4)
    assert answer.prompt_logprobs[2] == pytest.approx(logits[1, ids[2]].item(), abs=1e-4)
    (drawn,) = answer.sequences
    assert [int(row[0]) for row in drawn.topk_logprobs_np.token_ids] == list(drawn.tokens)
    last = sampler.compute_logprobs(tinker.ModelInput.from_ints(ids), prompt_logprobs_last_n=2).result()
    assert [one is None for one in last] == [True] * (len(ids) - 2) + [False] * 2


def test_checkpoints_are_listed_published_fetched_and_deleted(client: Any, served: Served) -> None:
    trained = lora(client)
    step(trained, [datum()])
    path = trained.save_state("one", ttl_seconds=3600, user_metadata={"why": "test"}).result().path
    drawn = trained.save_weights_for_sampler("two").result().path
    with pytest.warns(FutureWarning, match="RestClient"):  # one of its own leaves its connections open
        rest = client.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank, run.last_checkpoint.tinker_path) == ("tiny", 8, path)
    listed = {one.tinker_path: one for one in rest.list_checkpoints(run.training_run_id).result().checkpoints}
    assert set(listed) == {path, drawn}
    assert listed[path].expires_at is not None
    assert listed[path].user_metadata == {"why": "test"}
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (kept,) = (one for one in rest.list_user_checkpoints().result().checkpoints if one.tinker_path == path)
    assert (kept.public, kept.expires_at) == (True, None)
    place = f"{served.url}/api/v1/training_runs/{run.training_run_id}/checkpoints/weights/one/archive"
    with urllib.request.urlopen(urllib.request.Request(place, headers={"X-API-Key": KEY})) as answer:
        content = io.BytesIO(answer.read())
    with tarfile.open(fileobj=content) as file:
        names = file.getnames()
    assert names == ["adapter_model.safetensors", "adapter_config.json", "about.json"]
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        client.create_training_client_from_state(path)
    assert run.training_run_id in [one.training_run_id for one in rest.list_training_runs().result().training_runs]


def test_adapters_on_every_layer_agree_with_peft(client: Any) -> None:
    trained = lora(client)
    for _ in range(3):
        step(trained, [datum()])
    ours = TrainedModel(BASES.make("tiny", Adapter(8, 3)))
    work = Work("", 1, [Row(tokens()[:-1], {"target_tokens": torch.tensor(tokens()[1:])})], "cross_entropy", {}, False)
    for _ in range(3):
        ours.run(work)
        ours.step(AdamParams(learning_rate=1e-2))
    assert any("lm_head" in name for name in ours.names)
    with torch.no_grad():
        logits = ours.policy.model(input_ids=torch.tensor([tokens()[:-1]])).logits[0].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens()[1:])[:, None])[:, 0]
    torch.testing.assert_close(heard(trained), expected, rtol=0, atol=1e-4)
    sampler = trained.save_weights_and_get_sampling_client()
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens())).result()[1:]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)


def test_models_share_the_memory_of_their_base() -> None:
    first, second = (BASES.make("tiny", Adapter(8, seed)) for seed in (1, 2))
    shared = {one.data_ptr() for one in first.parameters()} & {one.data_ptr() for one in second.parameters()}
    assert shared == {one.data_ptr() for one in BASES.get("tiny").parameters()}


def test_a_gradient_that_is_no_number_changes_nothing(client: Any) -> None:
    trained = lora(client)
    before = heard(trained)
    trained.forward_backward([datum(weights=[float("nan")] * (len(tokens()) - 1))], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="not finite"):
        trained.optim_step(adam()).result()
    assert torch.equal(heard(trained), before)
    step(trained, [datum()])
    assert not torch.equal(heard(trained), before)
