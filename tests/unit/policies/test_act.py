"""ACT: the published architecture, its loss, and training it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from etude import Trainer, TrainingConfiguration
from etude.errors import ConfigError, DataError
from etude.policies import ACT, PolicyModule
from etude.policies.transformer import DecoderLayer, EncoderLayer, drop, sinusoids, sinusoids_2d
from etude.types import DataSpec
from tests.unit.policies.samples import make_batch, make_spec, now, parameters, reaching

STATE = "observation.state"
SMALL: dict[str, Any] = {
    "chunk_size": 6, "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 2,
    "n_vae_encoder_layers": 2, "latent_dim": 4, "image_backbone": "resnet10_small",
}  # fmt: skip


def built(spec: DataSpec | None = None, **options: Any) -> ACT:
    torch.manual_seed(0)
    policy = ACT(**{**SMALL, **options})
    policy.build(spec or make_spec())
    return policy


# ---- the architecture ------------------------------------------------------------------------------------------------


def published_parameters(state: int, action: int, environment: int = 0) -> int:
    """Count by the paper: width 512, feed-forward 3200, 4 + 4 encoder layers and 1 decoder layer, 100 actions."""
    width, hidden, latent, chunk = 512, 3200, 32, 100
    attention = 4 * (width * width + width)
    feed_forward = width * hidden + hidden + hidden * width + width
    norm = 2 * width
    encoder = 4 * (attention + feed_forward + 2 * norm)
    decoder = 2 * attention + feed_forward + 3 * norm + norm
    vae = encoder + width + (state + 1) * width + (action + 1) * width + (width + 1) * 2 * latent
    tokens = (latent + 1) * width + (state + 1) * width + 2 * width
    tokens += (environment + 2) * width if environment else 0
    return vae + encoder + decoder + tokens + chunk * width + (width + 1) * action


@pytest.mark.slow
def test_parameters_are_those_of_the_published_sizes() -> None:
    policy = ACT()
    policy.build(make_spec(14, 14))
    # 17,381,440 VAE + 17,332,736 encoder + 5,385,856 decoder + 25,600 tokens + 51,200 queries + 7,182 head
    assert parameters(policy) == published_parameters(14, 14) == 40_184_014


@pytest.mark.slow
def test_parameters_with_an_environment_state() -> None:
    policy = ACT()
    policy.build(make_spec(39, 4, environment=6))
    assert parameters(policy) == published_parameters(39, 4, 6)


@pytest.mark.slow
def test_parameters_with_a_camera_are_those_of_the_reference() -> None:
    policy = ACT(image_norm="frozen")
    policy.build(make_spec(14, 14, cameras=("top",), size=480))
    # ResNet-18 without its classifier has 11,176,512 parameters, 9,600 of them in BatchNorm, which is frozen; a 1 x 1
    # convolution joins it to the transformer. LeRobot prints 51,613,582 for ALOHA with one camera.
    image = 11_176_512 - 9_600 + 512 * 512 + 512
    assert parameters(policy) == published_parameters(14, 14) + image == 51_613_582


def attend(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_pad: Tensor | None = None) -> Tensor:
    reference = nn.MultiheadAttention(query.shape[-1], layer.heads, batch_first=True)
    reference.load_state_dict(layer.state_dict())
    out: Tensor = reference(query, key, value, key_padding_mask=is_pad)[0]
    return out


def encode(layer: EncoderLayer, x: Tensor, position: Tensor, is_pad: Tensor | None = None) -> Tensor:
    x = layer.norm1(x + attend(layer.self_attention, x + position, x + position, x, is_pad))
    feed = layer.feed_forward
    out: Tensor = layer.norm2(x + feed.linear2(functional.relu(feed.linear1(x))))
    return out


def decode(layer: DecoderLayer, x: Tensor, position: Tensor, memory: Tensor, memory_position: Tensor) -> Tensor:
    x = layer.norm1(x + attend(layer.self_attention, x + position, x + position, x))
    x = layer.norm2(x + attend(layer.cross_attention, x + position, memory + memory_position, memory))
    feed = layer.feed_forward
    out: Tensor = layer.norm3(x + feed.linear2(functional.relu(feed.linear1(x))))
    return out


def test_the_forward_pass_is_that_of_the_paper_written_plainly() -> None:
    spec = make_spec(environment=2, tasks=3)
    policy = built(spec, n_decoder_layers=2).eval()
    batch = policy.normalizer.normalize(make_batch(spec))
    latent = torch.randn(4, 4)
    tokens = policy.tokens
    memory = torch.stack(
        [
            tokens.latent(latent),
            tokens.vectors[0](batch[STATE]),
            tokens.vectors[1](batch["observation.environment_state"]),
            tokens.task(batch["task_index"]),
        ],
        dim=1,
    )
    position = tokens.positions.transpose(0, 1)
    for layer in policy.encoder:
        memory = encode(layer, memory, position)
    queries = policy.query_positions.transpose(0, 1)
    chunk = torch.zeros(4, 6, 32)
    for layer in policy.decoder:
        chunk = decode(layer, chunk, queries, memory, position)
    expected = policy.action_head(policy.decoder_norm(chunk))
    torch.testing.assert_close(policy.decode(batch, latent), expected, atol=1e-5, rtol=1e-5)


def test_the_latent_is_that_of_the_paper_written_plainly() -> None:
    policy = built().eval()
    vae = policy.vae
    batch = policy.normalizer.normalize(make_batch(make_spec()))
    actions, is_pad = batch["action"], batch["action_is_pad"]
    x = torch.cat([vae.cls.expand(4, 1, -1), vae.state(batch[STATE]).unsqueeze(1), vae.action(actions)], dim=1)
    is_pad = functional.pad(is_pad, (2, 0), value=False)
    for layer in vae.layers:
        x = encode(layer, x, sinusoids(8, 32), is_pad)
    mean, log_variance = vae.out(x[:, 0]).chunk(2, dim=1)
    got = vae(batch, actions, (~batch["action_is_pad"]).float())
    torch.testing.assert_close(got[0], mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], log_variance, atol=1e-5, rtol=1e-5)


def test_positions_are_the_sines_and_cosines_of_the_paper() -> None:
    table = sinusoids(7, 6)
    for place in range(7):
        for pair in range(3):
            angle = place / 10000 ** (2 * pair / 6)
            assert table[place, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[place, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_positions_in_an_image_tell_row_and_column() -> None:
    table = sinusoids_2d(3, 5, 16).view(3, 5, 16)
    assert torch.equal(table[0, :, :8], table[0, :1, :8].expand(5, -1)), "the first half tells the row"
    assert torch.equal(table[:, 2, 8:], table[:1, 2, 8:].expand(3, -1)), "the second half tells the column"
    full = 2 * math.pi / (1 + 1e-6 / 5)
    assert table[0, 0, 8] == pytest.approx(math.sin(full / 5), abs=1e-5)
    assert table[0, 4, 9] == pytest.approx(math.cos(full), abs=1e-5)
    assert len({tuple(row) for row in table.flatten(0, 1).tolist()}) == 15


def test_dropping_keeps_the_mean_and_follows_the_generator() -> None:
    values = torch.ones(1001, 333, requires_grad=True)
    torch.manual_seed(1)
    dropped = drop(values, 0.1, training=True)
    torch.manual_seed(1)
    assert torch.equal(dropped, drop(values, 0.1, training=True))
    assert not torch.equal(dropped, drop(values, 0.1, training=True))
    share = float((dropped == 0).float().mean())
    assert share == pytest.approx(0.1, abs=0.002)
    kept = dropped.detach()[dropped != 0]
    assert torch.equal(kept, torch.full_like(kept, 1 / 0.9))
    dropped.sum().backward()
    assert torch.equal(values.grad, dropped.detach())
    assert drop(values, 0.1, training=False) is values and drop(values, 0.0, training=True) is values


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"environment": 2},
        {"state": 0, "environment": 2},
        {"tasks": 3},
        {"text": 7},
        {"environment": 2, "tasks": 3, "text": 7},
    ],
    ids=str,
)
def test_any_mix_of_vectors_becomes_a_chunk(inputs: dict[str, int], history: int) -> None:
    spec = make_spec(**inputs)  # type: ignore[arg-type]
    policy = built(spec, n_obs_steps=history)
    batch = make_batch(spec, history=history)
    loss = policy(batch)
    loss.total.backward()
    unused = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
    assert unused == [], "every parameter has its part in training, as DDP wants it"
    assert policy.predict_action_chunk(now(batch)).shape == (4, 6, 3)


@pytest.mark.slow
@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("cameras, state", [(("top",), 5), (("left", "right"), 5), (("top",), 0)])
def test_cameras_become_tokens(cameras: tuple[str, ...], state: int, history: int) -> None:
    spec = make_spec(state, cameras=cameras)
    policy = built(spec, n_obs_steps=history)
    batch = make_batch(spec, size=2, history=history)
    policy(batch).total.backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []
    memory, positions = policy.tokens(policy.normalizer.normalize(batch), None)
    # 64 pixels make a map of 2 x 2.
    assert len(memory) == len(positions) == 1 + history * bool(state) + 4 * len(cameras) * history
    chunk = policy.predict_action_chunk(now(batch))
    camera = f"observation.images.{cameras[-1]}"
    other = {**now(batch), camera: torch.zeros_like(batch[camera])}
    assert not torch.equal(policy.predict_action_chunk(other), chunk), "the policy looks at every camera"


def test_tasks_are_told_apart() -> None:
    spec = make_spec(tasks=3)
    policy = built(spec)
    observation = {STATE: torch.zeros(3, 5), "task_index": torch.arange(3)}
    chunk = policy.predict_action_chunk(observation)
    assert not torch.allclose(chunk[0], chunk[1]) and not torch.allclose(chunk[1], chunk[2])


def test_history_in_the_wrong_shape_is_named() -> None:
    policy = built(n_obs_steps=3)
    with pytest.raises(
        DataError, match=r"observation.state comes as \(4, 5\), the policy was made for \(batch, 3, 5\)"
    ):
        policy(make_batch(make_spec()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_heads": 5}, "must be a multiple of its heads"),
        ({"n_encoder_layers": 0}, "at least one layer"),
        ({"activation": "swish"}, "activation 'swish' is unknown"),
        ({"n_action_steps": 7}, "between 1 and the 6 actions"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**options)


# ---- loss and training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_padded_actions_do_not_matter(training: bool) -> None:
    policy = built().train(training)
    batch = make_batch(make_spec())
    assert batch["action_is_pad"].any() and not batch["action_is_pad"].all(1).any()
    other = {**batch, "action": torch.where(batch["action_is_pad"][..., None], 99.0, batch["action"])}
    losses = []
    for given in (batch, other):
        torch.manual_seed(3)
        losses.append(policy(given))
    assert torch.equal(losses[0].total, losses[1].total)
    assert float(losses[0].weight) == int((~batch["action_is_pad"]).sum())
    changed = {**batch, "action": torch.where(batch["action_is_pad"][..., None], batch["action"], 99.0)}
    assert float(policy(changed).total.detach()) > float(losses[0].total.detach())


def test_the_loss_is_l1_and_the_divergence_of_the_latent() -> None:
    policy = built(dropout=0.0)
    batch = make_batch(make_spec())
    torch.manual_seed(5)
    loss = policy(batch)
    normalized = policy.normalizer.normalize(batch)
    actions, valid = policy.targets(normalized)
    mean, log_variance = policy.vae(normalized, actions, valid)
    posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
    kl = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(1)
    torch.manual_seed(5)
    error = (policy.decode(normalized, mean + posterior.stddev * torch.randn_like(mean)) - actions).abs().mean(-1)
    expected = ((error + policy.kl_weight * kl[:, None]) * valid).sum()
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.metrics["l1"], (error * valid).sum().detach() / valid.sum())
    torch.testing.assert_close(loss.metrics["kl"], kl.mean().detach())


def test_evaluation_measures_what_the_robot_would_do() -> None:
    policy = built().eval()
    batch = make_batch(make_spec())
    loss = policy(batch)
    chunk = policy.normalizer.normalize({"action": policy.predict_action_chunk(now(batch))})["action"]
    actions, valid = policy.targets(policy.normalizer.normalize(batch))
    torch.testing.assert_close(loss.total, ((chunk - actions).abs().mean(-1) * valid).sum())
    assert torch.equal(policy(batch).total, loss.total), "nothing is drawn at random"


@pytest.mark.parametrize("pre_norm", [False, True])
def test_training_is_a_function_of_the_global_generator(pre_norm: bool) -> None:
    policy, batch = built(pre_norm=pre_norm), make_batch(make_spec())
    totals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        totals.append(float(policy(batch).total.detach()))
    assert totals[0] == totals[1] != totals[2]


@pytest.mark.slow
@pytest.mark.parametrize("use_vae", [True, False])
def test_a_small_batch_is_learned_by_heart(use_vae: bool) -> None:
    policy, batch = (
        built(dropout=0.0, use_vae=use_vae, n_encoder_layers=1, n_vae_encoder_layers=1),
        make_batch(make_spec()),
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    errors = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = policy(batch)
        (loss.total / loss.weight).backward()
        optimizer.step()
        errors.append(float(policy.eval()(batch).total.detach() / loss.weight))
        policy.train()
    assert min(errors) < 0.3 * errors[0]


def train(run: Any, steps: int, policy: ACT | None = None, episodes: int = 6) -> tuple[ACT, Any]:
    policy = policy or ACT(**SMALL)
    config = TrainingConfiguration(training_steps=steps, batch_size=16, lr=2e-3, save_every=5, log_every=5, seed=3)
    data = reaching(policy.horizon, episodes)
    trainer = Trainer(policy, data, config=config, run=run, loggers=[], eval_data=data, show_progress=False)
    return policy, trainer.fit()


def test_training_through_the_trainer_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, result = train(tmp_path / "whole", 10)
    assert {"train/loss", "train/l1", "train/kl"} <= result.metrics.keys()
    train(tmp_path / "parts", 5)
    resumed, _ = train(tmp_path / "parts", 10)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    whole.save_pretrained(tmp_path / "policy")
    loaded = PolicyModule.from_pretrained(tmp_path / "policy")
    observation = {STATE: torch.randn(3, 4)}
    assert torch.equal(loaded.predict_action_chunk(observation), whole.predict_action_chunk(observation))


@pytest.mark.slow
def test_a_trained_policy_reaches_goals_it_has_not_seen() -> None:
    policy, _ = train(False, 300, ACT(**{**SMALL, "n_action_steps": 3, "dropout": 0.0}), episodes=60)
    generator = torch.Generator().manual_seed(7)
    place, goal = (torch.rand(16, 2, generator=generator) * 1.2 - 0.6 for _ in range(2))
    start = (goal - place).norm(dim=1)
    for _ in range(20):
        place = place + policy.select_action({STATE: torch.cat([place, goal], dim=1)})
    assert float(((goal - place).norm(dim=1) / start).median()) < 0.3


@pytest.mark.slow
def test_the_loss_compiles_as_one_graph() -> None:
    spec = make_spec(environment=2, tasks=3)
    policy, batch = built(spec), make_batch(spec)
    compiled = torch.compile(policy, backend="eager", fullgraph=True)
    totals = []
    for loss in (policy, compiled):
        torch.manual_seed(0)
        totals.append(loss(batch).total)
    torch.testing.assert_close(totals[0], totals[1])


def test_the_registry_knows_act() -> None:
    from etude.registry import POLICY_REGISTRY

    assert POLICY_REGISTRY.get("act") is ACT
    described = POLICY_REGISTRY.describe("act")
    assert all(parameter.help for parameter in described.parameters)
