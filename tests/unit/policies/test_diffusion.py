from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude import Trainer, TrainingConfiguration
from etude.errors import ConfigError, DataError
from etude.policies.base import PolicyModule
from etude.policies.diffusion import Diffusion
from etude.policies.flow import FlowMatching
from etude.policies.generative import GenerativePolicy, even_draws, repeat_edges
from etude.registry import POLICY_REGISTRY
from etude.types import DataSpec, Feature
from tests.unit.policies.demonstrations import ACTION, STATE, make_batch, make_spec, make_windows, stats

SMALL: dict[str, Any] = {"down_dims": [8, 16], "step_embed_dim": 16, "n_layers": 2, "hidden_dim": 16}
SHORT = {"num_train_timesteps": 10}
KINDS: dict[str, tuple[type[GenerativePolicy], dict[str, Any]]] = {
    "diffusion-unet": (Diffusion, {**SHORT, "head": "unet"}),
    "diffusion-transformer": (Diffusion, {**SHORT, "head": "transformer"}),
    "diffusion-dit": (Diffusion, {**SHORT, "head": "dit", "sampler": "ddim", "num_inference_steps": 5}),
    "diffusion-v": (Diffusion, {**SHORT, "prediction_type": "v_prediction"}),
    "flow-unet": (FlowMatching, {"head": "unet"}),
    "flow-dit": (FlowMatching, {"head": "dit", "solver": "midpoint"}),
    "flow-transformer": (FlowMatching, {"head": "transformer"}),
    "diffusion-mlp": (Diffusion, {**SHORT, "head": "mlp"}),
    "flow-mlp": (FlowMatching, {"head": "mlp"}),
}


def make(kind: str = "diffusion-unet", spec: Any = None, **options: Any) -> GenerativePolicy:
    torch.manual_seed(0)
    family, choices = KINDS[kind]
    policy = family(**{**SMALL, **choices, **options})
    policy.build(spec or make_spec())
    return policy


def mean_loss(policy: GenerativePolicy, batch: dict[str, Tensor], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    loss = policy(batch)
    return loss.total / loss.weight


every_kind = pytest.mark.parametrize("kind", KINDS)


# ---- windows and shapes ----------------------------------------------------------------------------------------------


def test_the_published_windows() -> None:
    policy = Diffusion()
    assert policy.observation_delta_indices == [-1, 0]
    assert policy.action_delta_indices == list(range(-1, 15))
    assert policy.executor.n_action_steps == 8


@every_kind
def test_a_chunk_starts_with_the_action_for_now(kind: str) -> None:
    policy = make(kind).eval()
    batch = make_batch(policy)
    chunk = policy.predict_action_chunk(batch)
    assert chunk.shape == (6, 15, 2)
    assert chunk.isfinite().all()
    torch.manual_seed(3)
    chunk = policy.predict_action_chunk(batch)
    torch.manual_seed(3)
    noise = torch.randn(6, 16, 2)
    with torch.no_grad():
        whole = policy.denoise(noise, policy.condition(policy.normalizer.normalize(batch)))
    torch.testing.assert_close(chunk, policy.normalizer.unnormalize_action(whole[:, 1:]))


@pytest.mark.parametrize("n_obs_steps, horizon", [(1, 8), (2, 8), (3, 16)])
def test_any_history_works(n_obs_steps: int, horizon: int) -> None:
    policy = make(n_obs_steps=n_obs_steps, horizon=horizon, n_action_steps=2)
    batch = make_batch(policy)
    assert batch[STATE].dim() == (2 if n_obs_steps == 1 else 3)
    assert policy.predict_action_chunk(batch).shape == (6, horizon - n_obs_steps + 1, 2)
    assert policy.select_action({STATE: torch.zeros(4, 3)}).shape == (4, 2)


def test_the_executor_runs_the_first_actions_of_a_chunk() -> None:
    policy = make(sampler="ddim", num_inference_steps=5, n_action_steps=3).eval()
    torch.manual_seed(7)
    chunk = policy.predict_action_chunk({STATE: torch.zeros(1, 2, 3)})
    torch.manual_seed(7)
    taken = [policy.select_action({STATE: torch.zeros(1, 3)}) for _ in range(3)]
    assert torch.equal(torch.cat(taken), chunk[0, :3])


@every_kind
def test_every_kind_of_observation_is_seen(kind: str) -> None:
    more = {
        "observation.environment_state": Feature((2,), role="environment", stats=stats([0.0] * 2, [1.0] * 2)),
        "task_index": Feature((), "int64", role="task", classes=3),
    }
    policy = make(kind, make_spec(**more)).eval()
    batch: dict[str, Tensor] = {
        STATE: torch.zeros(2, 2, 3),
        "observation.environment_state": torch.zeros(2, 2, 2),
        "task_index": torch.zeros(2, dtype=torch.long),
    }

    def chunk(**changes: Tensor) -> Tensor:
        torch.manual_seed(0)
        for parameter in policy.parameters():  # a DiT starts blind
            parameter.data.normal_(std=0.1)
        torch.manual_seed(1)
        return policy.predict_action_chunk({**batch, **changes})

    before = chunk()
    assert not torch.equal(before, chunk(**{STATE: torch.tensor([[[0.0] * 3, [0.5] * 3]]).expand(2, -1, -1)}))
    assert not torch.equal(before, chunk(**{STATE: torch.tensor([[[0.5] * 3, [0.0] * 3]]).expand(2, -1, -1)}))
    assert not torch.equal(before, chunk(**{"observation.environment_state": torch.ones(2, 2, 2)}))
    assert not torch.equal(before, chunk(task_index=torch.full((2,), 2)))


@pytest.mark.slow
def test_cameras_are_seen() -> None:
    image = Feature((3, 64, 64), "uint8", role="image", stats=None)
    spec = make_spec(**{"observation.images.top": image, "observation.images.side": image})
    policy = make(spec=spec, image_backbone="resnet10_small", image_crop=[56, 56], keypoints=8)
    batch = make_batch(policy, batch=2)
    for camera in ("top", "side"):
        batch[f"observation.images.{camera}"] = torch.randint(0, 256, (2, 2, 3, 64, 64), dtype=torch.uint8)
    loss = policy(batch)
    loss.total.backward()
    assert all(p.grad is not None for p in policy.parameters())
    assert policy.predict_action_chunk(batch).shape == (2, 15, 2)


@pytest.mark.slow
def test_the_published_policy_has_as_many_parameters_as_lerobots() -> None:
    """On PushT (one camera, a state of 2, an action of 2): UNet 251,511,938, ResNet-18 11,176,512, keypoints 16,416 and
    a layer on them 4,160.
    """
    camera, state = Feature((3, 96, 96), "uint8", role="image"), Feature((2,), role="state")
    policy = Diffusion()
    policy.action_dim = 2
    with torch.device("meta"):
        GenerativePolicy.make_layers(policy, DataSpec({"observation.image": camera, STATE: state}))
    assert sum(p.numel() for p in policy.parameters()) == 262_709_026


# ---- the loss --------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_does_not_depend_on_what_padding_holds(kind: str, training: bool) -> None:
    policy = make(kind, dropout=0.0).train(training)
    batch = make_batch(policy)
    changed = {**batch, ACTION: torch.where(batch["action_is_pad"].unsqueeze(2), torch.nan, batch[ACTION])}
    a, b = mean_loss(policy, batch), mean_loss(policy, changed)
    assert a.isfinite()
    assert torch.equal(a, b)


def test_the_loss_weighs_every_real_action_alike() -> None:
    policy = make().train()
    batch = make_batch(policy)
    loss = policy(batch)
    assert float(loss.weight) == (~batch["action_is_pad"]).sum() == 6 * 16 - (0 + 1 + 2 + 3 + 0 + 1)
    unmasked = make(do_mask_loss=False)(batch)
    assert float(unmasked.weight) == 6 * 16


def test_the_loss_is_the_mean_squared_error_over_real_actions() -> None:
    policy = make().train()
    batch = make_batch(policy)
    torch.manual_seed(5)
    loss = policy(batch)
    torch.manual_seed(5)
    valid = ~batch["action_is_pad"]
    normalised = policy.normalizer.normalize(batch)
    actions = repeat_edges(normalised[ACTION], valid.float())
    uniform = even_draws(1, 6, torch.device("cpu"))
    noise = torch.randn_like(actions)
    noisy, step, target = policy.corrupt(actions, noise, uniform)
    errors = (policy.head(noisy, step, policy.condition(normalised)) - target)[valid]
    torch.testing.assert_close(loss.total / loss.weight, errors.square().mean())


def test_without_padding_information_all_actions_are_real() -> None:
    policy = make().train()
    batch = make_batch(policy)
    free = {STATE: batch[STATE], ACTION: batch[ACTION]}
    none = {**free, "action_is_pad": torch.zeros(6, 16, dtype=torch.bool)}
    assert torch.equal(mean_loss(policy, free), mean_loss(policy, none))


def test_padding_takes_the_nearest_real_action() -> None:
    actions = torch.arange(6.0).view(1, 6, 1).repeat(3, 1, 1)
    valid = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]).float()
    expected = torch.tensor([[2, 2, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]]).float()
    assert torch.equal(repeat_edges(actions, valid).squeeze(2), expected)


@every_kind
def test_losses_are_functions_of_the_generator(kind: str) -> None:
    policy = make(kind).train()
    batch = make_batch(policy)
    assert torch.equal(mean_loss(policy, batch, 1), mean_loss(policy, batch, 1))
    assert not torch.equal(mean_loss(policy, batch, 1), mean_loss(policy, batch, 2))


@every_kind
def test_samples_are_functions_of_the_generator(kind: str) -> None:
    policy = make(kind).eval()
    batch = make_batch(policy)
    chunks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        chunks.append(policy.predict_action_chunk(batch))
    assert torch.equal(chunks[0], chunks[1])
    assert not torch.equal(chunks[0], chunks[2])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["diffusion-dit", "flow-unet", "flow-mlp"])
def test_less_noise_makes_actions_that_differ_less(kind: str) -> None:
    spreads = []
    for noise_scale in (1.0, 0.5, 0.0):
        policy = make(kind, noise_scale=noise_scale).eval()
        batch = make_batch(policy)
        noise = torch.randn(2, batch["action"].shape[0], *policy.noise_shape or (), generator=torch.manual_seed(3))
        normal = policy.normalize_observation(batch)
        one, other = (policy.sample_from_noise(normal, drawn) for drawn in noise)
        spreads.append(float((one - other).abs().mean()))
        torch.manual_seed(3)
        drawn_here = policy.sample_actions(normal)
        assert torch.equal(drawn_here, policy.sample_from_noise(normal, noise[0])), "exports scale the noise alike"
    assert spreads[0] > spreads[1] > spreads[2] == 0.0


@pytest.mark.parametrize("draws, batch", [(1, 1), (1, 64), (4, 1), (4, 7), (4, 64)])
def test_noise_levels_are_spread_evenly(draws: int, batch: int) -> None:
    """One in each of draws * batch equal parts; those of one sample in `draws` different quarters."""
    uniform = even_draws(draws, batch, torch.device("cpu"))
    parts = (uniform * draws * batch).floor().long()
    assert sorted(parts.tolist()) == list(range(draws * batch))
    levels_of_samples = (uniform.view(draws, batch) * draws).floor().long()
    assert torch.equal(levels_of_samples, torch.arange(draws).unsqueeze(1).expand(-1, batch))
    assert uniform.max() < 1


@pytest.mark.parametrize("kind", ["diffusion-unet", "flow-dit"])
def test_evaluation_losses_vary_less_than_training_losses(kind: str) -> None:
    policy = make(kind, dropout=0.0)
    batch = make_batch(policy, batch=16)
    with torch.no_grad():
        spread = {}
        for training in (True, False):
            policy.train(training)
            losses = torch.stack([mean_loss(policy, batch, seed) for seed in range(30)])
            spread[training] = losses.std().item()
            if training:
                typical = losses.mean().item()
    assert spread[False] < 0.7 * spread[True]  # half of it, were there no end of seeds
    assert losses.mean().item() == pytest.approx(typical, rel=0.1)


# ---- settings that cannot work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mean_std", "identity"])
def test_clipping_needs_bounded_actions(mode: str) -> None:
    with pytest.raises(ConfigError, match=f"clips its samples to \\[-1, 1\\].*normalization '{mode}'"):
        make(normalization={"action": mode})
    make(normalization={"action": mode}, clip_sample=False)
    make(normalization={"action": "quantiles"})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip_sample_range": 0.5}, "cuts off actions of the data"),
        ({"sampler": "euler"}, "sampler 'euler' is unknown; one of ddpm, ddim"),
        ({"prediction_type": "noise"}, "one of epsilon, sample, v_prediction"),
        ({"beta_schedule": "cosine"}, "one of squaredcos_cap_v2, linear"),
        ({"num_inference_steps": 0}, "num_inference_steps must be between 1 and"),
        ({"num_inference_steps": 101}, "between 1 and num_train_timesteps"),
        ({"horizon": 15}, "horizon 15 must be a multiple of 2"),
        ({"head": "rnn"}, "one of unet, transformer, dit, mlp"),
        ({"n_action_steps": 16}, "between 1 and the 15 actions"),
        ({"n_obs_steps": 17}, "leaves none for the future"),
        ({"noise_scale": -1.0, "sampler": "ddim"}, "noise_scale must be 0 or more, got -1.0"),
        ({"noise_scale": 0.5}, "noise_scale is for the sampler ddim"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_actions_outside_of_the_data_are_never_sampled() -> None:
    policy = make().eval()
    chunk = policy.predict_action_chunk(make_batch(policy, batch=50))
    assert chunk.min() >= -4 - 1e-5
    assert chunk.max() <= 2 + 1e-5


def test_wrong_windows_are_named() -> None:
    policy = make()
    batch = make_batch(policy)
    with pytest.raises(DataError, match="action comes as \\(6, 10, 2\\)"):
        policy({**batch, ACTION: batch[ACTION][:, :10]})


# ---- learning --------------------------------------------------------------------------------------------------------

TWO_CHUNKS = torch.stack([torch.linspace(-4, 2, 16), torch.linspace(2, -4, 16)])


def fit_two_chunks(policy: GenerativePolicy, steps: int, lr: float) -> Tensor:
    """Learn one chunk for each of two states by heart; return the samples for each, (samples, H, A)."""
    states = torch.tensor([[0.8, -0.2, 0.1], [-0.8, 0.3, 0.4]])
    row = torch.arange(16) % 2
    actions = torch.stack([TWO_CHUNKS, TWO_CHUNKS.flip(1)], dim=2)
    batch = {STATE: states[row].unsqueeze(1).expand(-1, 2, -1), ACTION: actions[row]}
    optimizer = torch.optim.Adam(policy.parameters(), lr)
    policy.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 4 * (1 - step / steps))
        optimizer.zero_grad()
        loss = policy(batch)
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    chunk = policy.eval().predict_action_chunk({STATE: batch[STATE]})
    return (chunk - actions[row][:, 1:]).abs()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["diffusion-v", "diffusion-transformer", "flow-dit"])
def test_what_was_learned_by_heart_is_sampled(kind: str) -> None:
    policy = make(kind, down_dims=[16, 32], hidden_dim=32, n_heads=2, dropout=0.0)
    misses = fit_two_chunks(policy, 250, 5e-3)
    # The actions span 6, and the two chunks are 3.2 apart on average.
    assert misses.mean() < 0.25
    assert misses.quantile(0.9) < 0.5


# ---- with the Trainer, and saved -------------------------------------------------------------------------------------


def trainer(kind: str, run: Path | bool, steps: int, **options: Any) -> Trainer:
    torch.manual_seed(0)
    family, choices = KINDS[kind]
    policy = family(**{**SMALL, **choices, "dropout": 0.1})
    config = TrainingConfiguration(training_steps=steps, batch_size=8, lr=1e-3, ema_decay=0.9, **options)
    data = make_windows(policy)
    return Trainer(policy, data, config=config, run=run, eval_data=data, loggers=[], show_progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["diffusion-unet", "diffusion-transformer", "flow-dit"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(kind: str, tmp_path: Path) -> None:
    whole = trainer(kind, tmp_path / "whole", 6)
    result = whole.fit()
    trainer(kind, tmp_path / "parts", 3).fit()
    parts = trainer(kind, tmp_path / "parts", 6)
    again = parts.fit()
    assert again.metrics["eval/loss"] == result.metrics["eval/loss"]
    ours, theirs = whole.policy.state_dict(), parts.policy.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@every_kind
def test_a_saved_policy_makes_bitwise_the_same_samples(kind: str, tmp_path: Path) -> None:
    policy = make(kind).eval()
    batch = make_batch(policy)
    policy.save_pretrained(tmp_path)
    loaded = PolicyModule.from_pretrained(tmp_path)
    assert type(loaded) is type(policy)
    chunks = []
    for one in (policy, loaded):
        torch.manual_seed(11)
        chunks.append(one.predict_action_chunk(batch))
    assert torch.equal(*chunks)


def test_the_policies_are_registered() -> None:
    assert POLICY_REGISTRY.get("diffusion") is Diffusion
    assert POLICY_REGISTRY.get("flow") is FlowMatching


@pytest.mark.parametrize("kind", ["diffusion-unet", "flow-dit"])
def test_double_precision_works(kind: str) -> None:
    policy = make(kind).double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in make_batch(policy).items()}
    assert policy(batch).total.dtype == torch.float64
    assert policy.predict_action_chunk(batch).dtype == torch.float64
