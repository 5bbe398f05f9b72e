"""Red-teaming that learns: an auditor is trained to find what makes a target model fail."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.redteam.algorithms import DPO, IPO, PPO
    from etude.redteam.ast_system import ASTSystem
    from etude.redteam.classifiers import ClassifierScorer, GuardScorer
    from etude.redteam.config import RedTeamConfig
    from etude.redteam.embeddings import NoveltyScorer, SentenceEmbedder
    from etude.redteam.evaluator import ASTEvaluator
    from etude.redteam.hf_system import HFASTSystem
    from etude.redteam.hf_trainer import HFASTConfiguration, HFASTTrainer
    from etude.redteam.prompts import NEUTRAL_PROMPTS
    from etude.redteam.sampler import ASTSampler
    from etude.redteam.scorers import CombinedScorer, ProfanityScorer, VaderScorer

_HOMES = {
    "algorithms": ("DPO", "IPO", "PPO"),
    "ast_system": ("ASTSystem",),
    "classifiers": ("ClassifierScorer", "GuardScorer"),
    "config": ("RedTeamConfig",),
    "embeddings": ("NoveltyScorer", "SentenceEmbedder"),
    "evaluator": ("ASTEvaluator",),
    "hf_system": ("HFASTSystem",),
    "hf_trainer": ("HFASTConfiguration", "HFASTTrainer"),
    "prompts": ("NEUTRAL_PROMPTS",),
    "sampler": ("ASTSampler",),
    "scorers": ("CombinedScorer", "ProfanityScorer", "VaderScorer"),
}

__all__ = [
    "DPO", "IPO", "NEUTRAL_PROMPTS", "PPO", "ASTEvaluator", "ASTSampler", "ASTSystem", "ClassifierScorer",
    "CombinedScorer", "GuardScorer", "HFASTConfiguration", "HFASTSystem", "HFASTTrainer", "NoveltyScorer",
    "ProfanityScorer", "RedTeamConfig", "SentenceEmbedder", "VaderScorer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"etude.redteam.{home}"), name)
    raise AttributeError(f"module 'etude.redteam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
