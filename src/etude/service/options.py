"""From the names that recipes use to the options of our algorithms: the loss, its clip, its divergence, its mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from etude.errors import ConfigError
from etude.service.settings import Settings, train_service

_MEANS: Final = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "token_sum",
    "seq-mean-token-mean": "sequence_mean",
}
_DIVERGENCES: Final = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
_LOSSES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "cross_entropy": ("sft", {}),
    "importance_sampling": ("grpo", {"objective": "importance_sampling"}),
    "ppo_clip": ("grpo", {}),
}
"""Losses by the names of training services, as algorithms of ours."""
_RENAMED: Final = {
    "clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high", "entropy_coeff": "entropy_coef",
    "ppo_epochs": "epochs", "distillation_epochs": "epochs", "distillation_coeff": "coef",
    "kl_discount_factor": "discount",
}  # fmt: skip


def make_loss(settings: Settings, default: str = "grpo", **given: Any) -> Any:
    """Make the algorithm whose loss is trained on: the one that `algorithm.loss` names, with options of two sections.

    The sections are `algorithm` and the training service's `actor`; what `algorithm` says comes first. Keys that the
    algorithm does not have stay unread, for the custom trainer.

    Args:
        settings: The whole configuration.
        default: The algorithm where none is named.
        **given: Options that come before all others.
    """
    from etude.registry import ALGORITHM_REGISTRY

    section, actor = settings.section("algorithm"), _actor(settings)
    named = section.get("loss", default)
    stated: dict[str, Any] = {}
    if isinstance(named, Settings):
        stated = named.section("params").plain()
        named = named.get("type", default)
    if not isinstance(named, str):
        raise ConfigError(f"algorithm.loss must name a loss, got {named!r}")
    key, implied = _LOSSES.get(named, (named, {}))
    kind: Any = ALGORITHM_REGISTRY.get(key)
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    options = {**implied, **_translated(actor, known), **_translated(section, known), **_direct(section, known)}
    options |= _penalty(section) if "kl_in" in known else {}
    return kind(**{**options, **stated, **{name: value for name, value in given.items() if name in known}})


def _actor(settings: Settings) -> Settings:
    return train_service(settings).section("actor") if "actor" not in settings else settings.section("actor")


def _direct(section: Settings, known: set[str]) -> dict[str, Any]:
    return {name: _plain(section[name]) for name in section if name in known}


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Settings) else value


def _translated(section: Settings, known: set[str]) -> dict[str, Any]:
    """Return the options that a section gives under its own names."""
    found: dict[str, Any] = {}
    if "clip_ratio" in section and "clip_low" in known:
        found |= {"clip_low": section.clip_ratio, "clip_high": section.clip_ratio}
    found |= {ours: section[name] for name, ours in _RENAMED.items() if name in section and ours in known}
    if "loss_agg_mode" in section and "aggregation" in known:
        found["aggregation"] = _choice(section, "loss_agg_mode", _MEANS)
    objective = section.get("loss_func_type") if "objective" in known else None
    if objective == "importance_sampling":
        found["objective"] = "importance_sampling"
    if "clip_ratio_c" in section and "dual_clip" in known and (objective is None or str(objective).endswith("_v2")):
        found["dual_clip"] = section.clip_ratio_c
    if section.get("use_kl_loss") and "kl_in" in known:
        kind = _choice(section, "kl_loss_type", _DIVERGENCES) if "kl_loss_type" in section else "k3"
        found |= {"kl_in": "loss", "kl_coef": section.get("kl_loss_coef", 0.001), "kl_kind": kind}
    return found


def _choice(section: Settings, name: str, words: Mapping[str, str]) -> str:
    value = section[name]
    if value in words.values():
        return str(value)
    if value not in words:
        raise ConfigError(f"{name} {value!r} is not known; choose from {', '.join(words)}")
    return words[value]


def _penalty(section: Settings) -> dict[str, Any]:
    """Return the options of a divergence that is subtracted from rewards, if `use_kl_in_reward` asks for one."""
    if not section.get("use_kl_in_reward"):
        return {}
    control = section.section("kl_ctrl") or section.section("critic").section("kl_ctrl")
    kind = control.get("type", "adaptive")
    if kind not in ("fixed", "adaptive"):
        raise ConfigError(f"algorithm.kl_ctrl.type {kind!r} is not known; choose from fixed, adaptive")
    estimator = _choice(section, "kl_penalty", _DIVERGENCES) if "kl_penalty" in section else "k1"
    found = {"kl_in": "reward", "kl_kind": estimator, "kl_coef": float(control.get("kl_reward_coef", 0.1))}
    target, horizon = control.get("target_kl", 6.0), control.get("horizon", 10_000.0)
    return found | ({"kl_target": float(target), "kl_horizon": float(horizon)} if kind == "adaptive" else {})
