"""What the newest client offers beside what is tried with every version: top-k, checkpoints, adapters, memory."""

from __future__ import annotations

import io
import tarfile
import urllib.request
from typing import Any

import pytest
import torch

from etude.policies.language.source import ModelSource
from etude.policies.language.tiny import Tiny
from etude.rng import generators_kept
from etude.service.datums import AdamParams
from etude.service.server.bases import Adapter
from etude.service.server.codec import DatumRow, Work, message_of_json
from etude.service.server.trained import TrainedModel
from tests.served import KEY, Served
from tests.unit.service.server.calls import BASES, datum, heard, lora, step, tinker, tokens

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the client's
    pytest.mark.timeout(300),  # the first one waits for what the service imports when it makes its first model
]

SERVE_OPTIONS = ("--model", "tiny", "--model", "an-org/small=tiny")
_ROW: dict[str, Any] = {
    "model_input": {"chunks": [{"tokens": [5, 9]}]},
    "loss_fn_inputs": {"target_tokens": {"data": [9, 12], "dtype": "int64"}},
}
_WORK: dict[str, Any] = {"forward_backward_input": {"loss_fn": "cross_entropy", "data": [_ROW]}}


def test_what_is_trained_can_be_chosen(client: Any) -> None:
    heads = [lora(client, train_mlp=False, train_attn=False), lora(client, train_unembed=False)]
    before = heard(heads[0])
    for trained in heads:
        step(trained, [datum()])
    assert not torch.equal(heard(heads[0]), before)
    assert not torch.allclose(heard(heads[0]), heard(heads[1]))


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
    work = Work(
        "", 1, [DatumRow(tokens()[:-1], {"target_tokens": torch.tensor(tokens()[1:])})], "cross_entropy", {}, False
    )
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


def test_bodies_that_nobody_can_read_hold_nothing_up(client: Any, served: Served) -> None:
    trained = lora(client)
    model = trained.model_id
    named = f'"model_id": "{model}", "seq_id": '
    message = message_of_json({"model_id": model, "seq_id": 3, **_WORK}, forward_only=False).SerializeToString()
    proto = {"Content_Type": "application/x-protobuf"}
    both = {"model_id": model, "path": "a", "sampling_session_seq_id": 1}
    sent: list[tuple[str, Any, dict[str, str]]] = [
        ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": "fast"}}, {}),
        ("optim_step", f'{{{named}2, "adam_params": {{'.encode(), {}),
        ("forward_backward", message[:-3], proto),
        ("forward", {"model_id": model, "seq_id": 4, "forward_input": {"loss_fn": "cross_entropy", "data": 3}}, {}),
        ("save_weights_for_sampler", both | {"seq_id": 5}, {}),
        ("load_weights", {"model_id": model, "seq_id": 6, "path": "x", "optimizer": True, "session_id": "s"}, {}),
    ]
    for call, body, headers in sent:
        status, found = served.call(f"/api/v1/{call}", body, **headers)
        assert status in (400, 422), found
        assert found["detail"]
    _, last = served.call("/api/v1/optim_step", {"model_id": model, "seq_id": 7, "adam_params": {}})
    status, found = served.call("/api/v1/retrieve_future", {"request_id": last["request_id"]})
    assert (status, found.get("type")) == (200, "optim_step")


def test_a_model_can_be_offered_by_the_name_that_a_program_asks_for(client: Any) -> None:
    assert [one.model_name for one in client.get_server_capabilities().supported_models] == ["tiny", "an-org/small"]
    trained, other = lora(client), client.create_lora_training_client("an-org/small", rank=8, seed=3)
    assert torch.equal(heard(trained), heard(other))
    assert other.get_info().model_data.model_name == "an-org/small"
    assert other.get_tokenizer().encode("a fox") == trained.get_tokenizer().encode("a fox")


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_thirty_steps_are_those_of_a_loop_written_with_peft_and_adam(client: Any) -> None:
    """Adapters, their scale, the sum over tokens, Adam with the client's parameters: nothing of ours is in the loop."""
    import peft

    trained, ids = lora(client), torch.tensor([tokens()])
    told = [step(trained, [datum()], rate=5e-3).metrics["loss:sum"] for _ in range(30)]
    model = ModelSource(tiny=Tiny()).load()
    layers = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    with generators_kept(3):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=layers)
        model = peft.get_peft_model(model, config)
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer, expected = torch.optim.Adam(weights, lr=5e-3, betas=(0.9, 0.95), eps=1e-12), []
    for _ in range(30):
        logits = model(input_ids=ids[:, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert told == pytest.approx(expected, rel=0.02)
    assert expected[-1] / len(ids[0, 1:]) < 0.05
