"""What a service does for the official client, unmodified, whatever its version: a real server process, each time.

The last test runs the others with an older client (`clients.lock`), in a process that finds it first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.algorithms import losses
from etude.service.server.bases import Adapter
from tests.faulty import FaultyLine
from tests.served import RUNNING, Served, connected
from tests.unit.service.server.calls import BASES, adam, datum, heard, lora, step, tinker, tokens

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the client's, as is the next
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.timeout(300),  # the first one waits for what the service imports when it makes its first model
]
ROOT = Path(__file__).resolve().parents[4]
VERSION = "ETUDE_TEST_CLIENT"
"""Which client is meant, for the process of the last test."""


def version_in(lock: str) -> str:
    """Return the version of the client that a file pins."""
    (line,) = (line for line in (ROOT / lock).read_text().splitlines() if line.startswith("tinker=="))
    return line.removeprefix("tinker==")


def test_the_client_is_the_one_that_is_meant() -> None:
    assert tinker.__version__ == os.environ.get(VERSION, version_in("requirements.lock"))


def test_the_client_learns_what_is_offered(client: Any) -> None:
    (model,) = client.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == ("tiny", 512)
    assert (getattr(model, "trainable", True), getattr(model, "sampleable", True)) == (
        True,
        True,
    )
    trained = lora(client)
    assert trained.get_tokenizer().encode("a fox") == BASES.get("tiny").encode("a fox")
    info = trained.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 8, "tiny")


@pytest.mark.parametrize("rank, rate", [(0, 3e-3), (8, 5e-3), (32, 5e-3)])
def test_a_sentence_is_learned_in_thirty_steps_and_recited(client: Any, rank: int, rate: float) -> None:
    """With the client's own parameters of Adam, nothing but the rate given."""
    trained, ids = lora(client, rank=rank), tokens()
    for _ in range(30):
        found = step(trained, [datum()], rate=rate)
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

    told = []

    def loss(_: Any, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        ours = _ours(loss_fn, log_probs[0][None], old[None], advantages[None], torch.ones(1, len(old))).sum()
        told.append(float(ours.detach()))
        return ours, {}

    found = named.forward_backward(rows, loss_fn, config).result()
    custom.forward_backward_custom([datum()], loss).result()
    assert found.metrics["loss:sum"] == pytest.approx(told[0], rel=1e-4, abs=1e-5)
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


def test_weights_that_are_no_numbers_change_nothing(client: Any) -> None:
    trained = lora(client)
    before = heard(trained)
    with pytest.raises(tinker.BadRequestError, match="not finite"):
        trained.forward_backward([datum(weights=[float("nan")] * (len(tokens()) - 1))], "cross_entropy").result()
    assert torch.equal(heard(trained), before)
    step(trained, [datum()])
    assert not torch.equal(heard(trained), before)


def test_two_saves_three_steps_apart_differ(client: Any) -> None:
    trained = lora(client)
    paths = []
    for number in range(4):
        if number in (0, 3):
            paths.append(trained.save_state(f"step-{number}").result().path)
        step(trained, [datum()])
    first, second = (heard(client.create_training_client_from_state(path)) for path in paths)
    assert float((second - first).abs().max()) > 0.1


def test_a_retried_call_is_applied_once(client: Any, served: Served) -> None:
    faults = {"forward_backward": ["answer lost", "doubled"], "optim_step": ["doubled", "answer lost"]}
    line = FaultyLine(served.url, share=0.0, seed=0, plan=faults)
    try:
        with connected(line) as other:
            calm, rough = lora(client), lora(other)
            for _ in range(2):
                step(calm, [datum()])
                step(rough, [datum()])
            assert torch.equal(heard(calm), heard(rough))
    finally:
        line.close()
    assert line.seen["answer lost"] == line.seen["doubled"] == 2


def test_nothing_waits_for_a_call_that_was_refused(client: Any) -> None:
    trained = lora(client)
    before = heard(trained)
    refused = trained.optim_step(adam(rate=-1.0))
    wrong = trained.forward_backward([datum(weights=[1.0])], "cross_entropy")
    done = trained.forward_backward([datum()], "cross_entropy")  # sent at once, without a look at the others
    updated = trained.optim_step(adam())
    with pytest.raises(tinker.UnprocessableEntityError, match="learning_rate"):
        refused.result()
    with pytest.raises(tinker.BadRequestError, match="weights has the shape"):
        wrong.result()
    assert done.result(timeout=30).metrics["loss:sum"] > 0
    assert updated.result(timeout=30).metrics["grad_norm:mean"] > 0
    assert not torch.equal(heard(trained), before)


def test_a_part_of_the_data_that_is_refused_does_not_leave_the_client_waiting(client: Any) -> None:
    """More than 1024 rows are sent in several calls; a client that sends them all at once then waits for itself."""
    trained = lora(client)
    rows = [datum([5, 9])] * 1024 + [datum([5, 9], weights=[1.0, 2.0])]
    sent, updated = trained.forward_backward(rows, "cross_entropy"), trained.optim_step(adam())
    with pytest.raises(tinker.BadRequestError, match="weights has the shape"):
        sent.result(timeout=60)
    assert updated.result(timeout=60).metrics["grad_norm:mean"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_of_this_holds_with_the_older_client(served: Served, child_env: dict[str, str]) -> None:
    version = version_in("clients.lock")
    folder = Path(sys.prefix) / "clients" / f"tinker-{version}"
    if not folder.is_dir():
        pytest.skip("the older client could not be installed")
    env = {**child_env, "PYTHONPATH": str(folder), RUNNING: served.url, VERSION: version}
    own = "test_all_of_this_holds_with_the_older_client"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", f"not {own}", __file__]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert sum(map(len, re.findall(r"^(\.+) ", done.stdout, re.MULTILINE))) >= 20, done.stdout[-3000:]
