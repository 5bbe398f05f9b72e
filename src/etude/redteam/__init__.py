"""Red-teaming that learns: an auditor is trained to find what makes a target model fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazily

if TYPE_CHECKING:
    from etude.redteam.algorithms import DPO, IPO, PPO
    from etude.redteam.ast_system import ASTSystem
    from etude.redteam.classifiers import ClassifierScorer, GuardScorer
    from etude.redteam.config import HFASTConfiguration, RedTeamConfig
    from etude.redteam.embeddings import NoveltyScorer, SentenceEmbedder
    from etude.redteam.evaluator import ASTEvaluator
    from etude.redteam.hf_system import HFASTSystem
    from etude.redteam.hf_trainer import HFASTTrainer
    from etude.redteam.prompts import NEUTRAL_PROMPTS
    from etude.redteam.sampler import ASTSampler
    from etude.redteam.scorers import CombinedScorer, ProfanityScorer, VaderScorer
    from etude.redteam.words import write_word_model

_HOMES = {
    "algorithms": ("DPO", "IPO", "PPO"),
    "ast_system": ("ASTSystem",),
    "classifiers": ("ClassifierScorer", "GuardScorer"),
    "config": ("HFASTConfiguration", "RedTeamConfig"),
    "embeddings": ("NoveltyScorer", "SentenceEmbedder"),
    "evaluator": ("ASTEvaluator",),
    "hf_system": ("HFASTSystem",),
    "hf_trainer": ("HFASTTrainer",),
    "prompts": ("NEUTRAL_PROMPTS",),
    "sampler": ("ASTSampler",),
    "scorers": ("CombinedScorer", "ProfanityScorer", "VaderScorer"),
    "words": ("write_word_model",),
}

__all__ = [
    "DPO", "IPO", "NEUTRAL_PROMPTS", "PPO", "ASTEvaluator", "ASTSampler", "ASTSystem", "ClassifierScorer",
    "CombinedScorer", "GuardScorer", "HFASTConfiguration", "HFASTSystem", "HFASTTrainer", "NoveltyScorer",
    "ProfanityScorer", "RedTeamConfig", "SentenceEmbedder", "VaderScorer", "write_word_model",
]  # fmt: skip
__getattr__, __dir__ = lazily(__name__, _HOMES)
