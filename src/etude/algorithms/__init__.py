"""How a batch becomes a loss: pure functions (advantages, losses, kl, aggregate), and small classes on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.algorithms.bc import BehaviorCloning
    from etude.algorithms.distillation import Distillation
    from etude.algorithms.gkd import GKD
    from etude.algorithms.grpo import CISPO, DRO, GMPO, GRPO, GSPO, SAPO, DrGRPO
    from etude.algorithms.kto import KTO
    from etude.algorithms.policy_gradient import PolicyGradient
    from etude.algorithms.ppo import PPO
    from etude.algorithms.preference import DPO, IPO, ORPO, SimPO
    from etude.algorithms.reinforce import OPO, RLOO, ReinforcePlusPlus, ReMax
    from etude.algorithms.reward_model import RewardModel
    from etude.algorithms.rlpd import RLPD
    from etude.algorithms.sft import SFT

__all__ = [
    "CISPO", "DPO", "DRO", "GKD", "GMPO", "GRPO", "GSPO", "IPO", "KTO", "OPO", "ORPO", "PPO", "RLOO", "RLPD", "SAPO",
    "SFT", "BehaviorCloning", "Distillation", "DrGRPO", "PolicyGradient", "ReMax", "ReinforcePlusPlus", "RewardModel",
    "SimPO",
]  # fmt: skip

_HOMES = {
    "bc": ("BehaviorCloning",),
    "distillation": ("Distillation",),
    "gkd": ("GKD",),
    "grpo": ("CISPO", "DRO", "GMPO", "GRPO", "GSPO", "SAPO", "DrGRPO"),
    "kto": ("KTO",),
    "policy_gradient": ("PolicyGradient",),
    "ppo": ("PPO",),
    "preference": ("DPO", "IPO", "ORPO", "SimPO"),
    "reinforce": ("OPO", "RLOO", "ReMax", "ReinforcePlusPlus"),
    "reward_model": ("RewardModel",),
    "rlpd": ("RLPD",),
    "sft": ("SFT",),
}
__getattr__, __dir__ = lazily(__name__, _HOMES)
