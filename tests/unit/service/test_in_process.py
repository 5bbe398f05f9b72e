"""The service in this process: its losses are our own summed, every parameter of Adam acts, states come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra: llm)")

from etude.errors import ConfigError, NonFiniteError
from etude.service import InProcessService, RemoteApiGrpoTrainer, RemoteApiOpdTrainer, SelfHostedOpdTrainer
from etude.service.datums import AdamParams, Datum, ModelInput, SamplingParams, as_datums
from etude.types import Batch, Trajectory
from tests.unit.service.held import QUICK, digits, same, tiny, weights

TOKENS = [[5, 6, 7, 8], [9, 4, 3]]


def datums(**inputs: Any) -> list[Datum]:
    """Return two datums with numbers that differ by token."""
    made = []
    for tokens in TOKENS:
        count = len(tokens) - 1
        numbers = {name: scale * torch.arange(1.0, count + 1) for name, scale in inputs.items()}
        made.append(Datum(ModelInput(tokens[:-1]), {"target_tokens": torch.tensor(tokens[1:]), **numbers}))
    return made


def test_cross_entropy_is_the_weighed_sum_and_signed_weights_count() -> None:
    policy = tiny()
    client = InProcessService(policy, rows=1).create_training_client()
    done = client.forward_backward(datums(weights=-0.5), "cross_entropy").result()
    expected = 0.0
    for one, tokens in zip(done.loss_fn_outputs, TOKENS, strict=True):
        assert torch.equal(one["elementwise_loss"], 0.5 * torch.arange(1.0, len(tokens)) * one["logprobs"])
        expected += float(one["elementwise_loss"].sum())
    assert done.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    first = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    client.forward_backward(datums(weights=-0.5), "cross_entropy").result()
    second = [p.grad for p in policy.parameters() if p.grad is not None]
    assert all(torch.allclose(2 * a, b, atol=1e-7) for a, b in zip(first, second, strict=True))  # they add up


def test_weights_left_out_are_ones_and_forward_leaves_gradients_alone() -> None:
    policy = tiny()
    client = InProcessService(policy).create_training_client()
    done = client.forward(datums(), "cross_entropy").result()
    assert all(torch.equal(one["elementwise_loss"], -one["logprobs"]) for one in done.loss_fn_outputs)
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize(
    "loss_fn, config, expected",
    [
        ("importance_sampling", {}, lambda r, p, a: -r * a),
        ("ppo", {}, lambda r, p, a: -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.5}, None),
        ("cispo", {"clip_high_threshold": 1.1}, lambda r, p, a: -r.clamp(0.0, 1.1) * p * a),
        ("dro", {"beta": 0.3}, lambda r, p, a: -(p * a - 0.15 * r.log() ** 2)),
    ],
)
def test_losses_by_name_are_the_published_ones(loss_fn: str, config: dict[str, float], expected: Any) -> None:
    client = InProcessService(tiny()).create_training_client()
    data = datums(logprobs=-1.0, advantages=0.5)
    done = client.forward(data, loss_fn, config).result()
    if expected is None:

        def expected(r: Any, p: Any, a: Any) -> Any:
            return -torch.minimum(r * a, r.clamp(0.9, 1.5) * a)

    for one, datum in zip(done.loss_fn_outputs, data, strict=True):
        p, a = one["logprobs"], datum.loss_fn_inputs["advantages"]
        r = (p - datum.loss_fn_inputs["logprobs"]).exp()
        assert torch.allclose(one["elementwise_loss"], expected(r, p, a), rtol=1e-5, atol=1e-6)


def test_entropy_is_a_bonus_where_it_is_asked_for() -> None:
    client = InProcessService(tiny()).create_training_client()
    without = client.forward(datums(), "cross_entropy").result().metrics["loss:sum"]
    assert client.forward(datums(), "cross_entropy", {"entropy_coeff": 0.1}).result().metrics["loss:sum"] < without


def test_what_a_service_cannot_do_is_refused() -> None:
    service = InProcessService(tiny())
    client = service.create_training_client()
    for call, message in (
        (lambda: client.forward_backward(datums(), "ppoo"), "unknown loss_fn 'ppoo'; choose from cross_entropy"),
        (lambda: client.forward(datums(), "ppo", {"clip": 1.0}), "ppo has no option 'clip' in loss_fn_config"),
        (lambda: client.forward(datums(), "dro"), "dro needs 'logprobs' in loss_fn_inputs"),
        (lambda: client.load_state("memory://nothing"), "nothing was saved as"),
        (lambda: service.create_sampling_client("memory://nothing"), "nothing was saved as"),
        (lambda: service.create_lora_training_client("x", rank=8), "adapters of rank 8, and the policy has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    other = Datum(ModelInput([1, 2]), {"target_tokens": [5, 6]})
    with pytest.raises(ConfigError, match="must be the tokens of model_input, one further"):
        client.forward([other])


@pytest.mark.parametrize(
    "name, value",
    [("learning_rate", 1e-2), ("beta1", 0.5), ("beta2", 0.5), ("eps", 1e-1), ("weight_decay", 0.5),
     ("grad_clip_norm", 1e-3)],
)  # fmt: skip
def test_every_parameter_of_adam_acts(name: str, value: float) -> None:
    def trained(params: AdamParams) -> Any:
        policy = tiny()
        client = InProcessService(policy).create_training_client()
        for scale in (1.0, -0.3):
            client.forward_backward(datums(weights=scale), "cross_entropy").result()
            client.optim_step(params).result()
        assert all(p.grad is None for p in policy.parameters())
        return policy

    # With an eps that is not small the size of the gradient, and so its clip, shows in one step of Adam.
    base = AdamParams(eps=1e-4)
    assert not same(trained(base), trained(replace(base, **{name: value})))
    assert same(trained(base), trained(base))


def test_states_come_back_with_and_without_the_optimizer() -> None:
    policy = tiny()
    service = InProcessService(policy)
    client = service.create_training_client()

    def step() -> None:
        client.forward_backward(datums(weights=1.0), "cross_entropy").result()
        client.optim_step(AdamParams(1e-2)).result()

    step()
    path = client.save_state("one").result().path
    step()
    expected = weights(policy)
    client.load_state_with_optimizer(path).result()
    step()
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(policy), strict=True))
    client.load_state(path).result()
    assert not service.optimizer.state
    step()
    assert not all(torch.equal(a, b) for a, b in zip(expected, weights(policy), strict=True))


def test_a_sampling_client_draws_from_what_was_saved() -> None:
    policy = tiny()
    service = InProcessService(policy)
    client = service.create_training_client()
    sampler = client.save_weights_and_get_sampling_client("before")
    ask = {"prompt": ModelInput([5, 6]), "num_samples": 2, "sampling_params": SamplingParams(4, seed=3)}
    before = sampler.sample(**ask, include_prompt_logprobs=True).result()
    for _ in range(3):
        client.forward_backward(datums(weights=1.0), "cross_entropy").result()
        client.optim_step(AdamParams(0.1)).result()
    assert sampler.sample(**ask).result().sequences == before.sequences
    assert service.create_sampling_client().sample(**ask).result().sequences != before.sequences
    one = before.sequences[0]
    assert len(one.tokens) == len(one.logprobs) <= 4 and one.stop_reason in ("stop", "length")
    assert before.prompt_logprobs[0] is None and before.prompt_logprobs[1] < 0
    again = sampler.compute_logprobs(ModelInput([5, 6, *one.tokens])).result()
    assert again[2:] == pytest.approx(one.logprobs, abs=1e-5)


def test_trajectories_become_datums_with_numbers_at_their_tokens() -> None:
    rows = [
        Trajectory([1, 2, 3, 4], [0, 0, 1, 1], 1.0, advantage=2.0, logprobs=[0.0, 0.0, -1.0, -2.0]),
        Trajectory([1, 2, 3, 4], [0, 0, 1, 1], 1.0, token_advantages=[5.0, 6.0], logprobs=[-1.0, -2.0]),
    ]
    for datum, advantages in zip(as_datums(rows, by_advantage=True), ([0, 2, 2], [0, 5, 6]), strict=True):
        assert datum.model_input.to_ints() == [1, 2, 3]
        inputs = datum.loss_fn_inputs
        assert inputs["target_tokens"].tolist() == [2, 3, 4] and inputs["mask"].tolist() == [0, 1, 1]
        assert inputs["advantages"].tolist() == advantages and inputs["logprobs"].tolist() == [0, -1, -2]
    (plain,) = as_datums(rows[:1], by_advantage=False)
    assert plain.loss_fn_inputs["weights"].tolist() == [0, 1, 1]


# ---- the ready trainers that go through it ---------------------------------------------------------------------------


def fit(kind: Any, settings: Any, policy: Any, **training: Any) -> Any:
    return kind(settings).fit(
        policy, digits(), run=False, loggers=[], show_progress=False, training={**QUICK, **training}
    )


def test_the_parameters_of_a_recipe_reach_adam_and_unknown_ones_are_refused() -> None:
    config = {
        "learning_rate": 1e-3,
        "beta1": 0.8,
        "beta2": 0.7,
        "eps": 1e-5,
        "weight_decay": 0.1,
        "grad_clip_norm": 0.3,
    }
    policy = tiny()
    inner = RemoteApiGrpoTrainer({"train_service": {"config": config}})
    inner.fit(policy, digits(), run=False, loggers=[], show_progress=False, training={**QUICK, "training_steps": 1})
    assert inner._adam_params() == AdamParams(*config.values())
    with pytest.raises(ConfigError, match=r"train_service\.config\.lerning_rate is not known"):
        fit(RemoteApiGrpoTrainer, {"train_service": {"config": {"lerning_rate": 1}}}, tiny())
    with pytest.raises(ConfigError, match="which makes steps of Adam"):
        fit(RemoteApiGrpoTrainer, {}, tiny(), optimizer="sgd")


def test_rollouts_without_log_probabilities_are_trained_on_as_if_just_sampled() -> None:
    class Forgetful(RemoteApiGrpoTrainer):
        def _prepare_trajectories(self, trajectories: Any, metrics: Any) -> Any:
            for one in trajectories:
                one.logprobs = None
            return super()._prepare_trajectories(trajectories, metrics)

    settings = {"train_service": {"config": {"learning_rate": 1e-3, "eps": 1.0}}}  # steps that do not only follow signs
    one, other = tiny(), tiny()
    fit(Forgetful, settings, one, training_steps=1)
    fit(RemoteApiGrpoTrainer, settings, other, training_steps=1)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(one), weights(other), strict=True))


def test_a_gradient_that_is_not_finite_stops_before_the_update() -> None:
    class Poisoned(RemoteApiGrpoTrainer):
        def _client(self) -> Any:
            client = super()._client()
            plain = client.forward_backward

            def poisoned(*arguments: Any) -> Any:
                done = plain(*arguments)
                next(p for p in self.policy.parameters() if p.grad is not None).grad.fill_(float("nan"))
                return done

            client.forward_backward = poisoned
            return client

    policy = tiny()
    with pytest.raises(NonFiniteError, match="gradient not finite"):
        fit(Poisoned, {}, policy)
    assert same(policy, tiny())


@pytest.mark.parametrize("kind", [SelfHostedOpdTrainer, RemoteApiOpdTrainer])
def test_distillation_grades_each_token_by_the_teacher(kind: Any) -> None:
    students, kept = [], []

    class Watched(kind):  # type: ignore[misc]
        def _prepare_batch(self, batch: Any) -> Any:
            batch, metrics = super()._prepare_batch(batch)
            kept.extend(batch.to_trajectories())
            return batch, metrics

        def _prepare_trajectories(self, trajectories: Any, metrics: Any) -> Any:
            kept.extend(super()._prepare_trajectories(trajectories, metrics))
            return trajectories

    for seed in (1, 2):
        student, teacher = tiny(), tiny()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        kept.clear()
        service = {"train_service": {"config": {"learning_rate": 3e-3}}} if kind is RemoteApiOpdTrainer else {}
        names = {"algorithm": {"distillation_coeff" if not service else "kl_penalty_coef": 0.5}}
        fit(Watched, {"teachers": [{"base_model": teacher}], **names, **service}, student, training_steps=1)
        for one in kept[:3]:
            text = Batch.from_trajectories([Trajectory(one.tokens, one.loss_mask, 0.0)])
            grades = 0.5 * (teacher.log_probs(text)[0].detach() - torch.tensor(one.logprobs))
            expected = torch.where(text["loss_mask"][0] != 0, grades, 0.0)
            assert torch.allclose(torch.tensor(one.token_advantages), expected, atol=1e-5)
        students.append(student)
    assert not same(*students) and not same(students[0], tiny())


def test_one_teacher_is_needed_and_a_remote_one_refused() -> None:
    for settings, message in (
        ({}, "distillation needs a teacher"),
        ({"teachers": ["a", "b"]}, "2 are named; one teaches"),
        (
            {"teachers": [{"base_model": "a", "base_url": "http://x"}]},
            "teachers.0.base_url: the teacher is",
        ),
        ({"teachers": [{}]}, "teachers.0.base_model is missing"),
    ):
        for kind in (SelfHostedOpdTrainer, RemoteApiOpdTrainer):
            with pytest.raises(ConfigError, match=message):
                fit(kind, settings, tiny())
