"""`RedTeamConfig`: a red-team experiment as one file, for `etude redteam`. Imports no torch before it builds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from etude.config.training import DurationField, Section, TrainingConfiguration
from etude.reading.dialect import Dialect
from etude.reading.origins import Layer
from etude.reading.plain import clean
from etude.redteam.prompts import NEUTRAL_DEV_PROMPTS, NEUTRAL_PROMPTS, read_prompts
from etude.types.duration import Duration

if TYPE_CHECKING:
    from etude.redteam.hf_system import HFASTSystem
    from etude.redteam.hf_trainer import HFASTTrainer
    from etude.redteam.sampler import ASTSampler

RUN_SECTION = "redteam"
"""Under what name a run keeps this configuration, by which it is told from those of `etude train`."""

SCORE = "eval/score"
"""What an evaluation calls the mean score of the target's responses."""


class HFASTConfiguration(TrainingConfiguration):
    """The training configuration with defaults for language models: `HFASTConfiguration()` is complete."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    batch_size: int = Field(default=4, ge=1)
    """Pairs or turns in one micro-batch."""
    num_episodes_per_experience: int = Field(default=2, ge=1)
    """Trees grown in each step."""
    keep_last: int = Field(default=1, ge=1)
    """Newest checkpoints to keep; one of SmolLM2 with its optimizer takes 1.6 GB."""
    best_metric: str = SCORE
    """The metric that ranks checkpoints: the mean score of what the target answers to the dev prompts."""
    best_mode: Any = "max"
    """Whether a smaller or a larger `best_metric` is better."""


class FirstLook(HFASTConfiguration):
    """The same with the length of a first look, as the command line begins with."""

    training_steps: int = Field(default=10, ge=1)
    """Experiences to learn from, unless `duration` says otherwise."""
    log_every: DurationField = Duration(1)
    """How often metrics are written."""


class Weights(Section):
    """What a turn is rewarded for."""

    likelihood_weight: float = 0.025
    """Weight of minus the logarithm of the probe's perplexity under the target."""
    combined_weight: float = 0.1
    """Weight of the score of probe and response together."""
    response_weight: float = 0.1
    """Weight of the score of the response alone."""
    max_perplexity: float = Field(default=1e4, ge=1)
    """Where the perplexity is cut off."""


class RedTeamConfig(Section):
    """Who audits whom, from where, and how the auditor learns; as it is, a first look that takes a CPU minute."""

    auditor: str = "smollm2"
    """Directory or hub id of the model that is trained; smollm2 is the embedded one."""
    target: str = "smollm2"
    """The model that is probed."""
    baseline: str | None = None
    """What the auditor is held near; null takes the auditor before training."""
    devices: dict[str, str] = {}
    """Devices of auditor, target and baseline; the CPU unless given."""
    lora: int | dict[str, Any] | None = 16
    """Train adapters of this rank; null trains all weights."""
    auditor_sampling: dict[str, Any] = {"max_new_tokens": 8}
    """How probes are drawn: max_new_tokens, temperature, ..."""
    target_sampling: dict[str, Any] = {"max_new_tokens": 8}
    """How responses are drawn."""
    chat: bool = False
    """Whether the target gets what was said as a message of its chat template."""
    scorer: str = "profanity"
    """profanity, vader, vader-signed, novelty, classifier:PATH#LABEL or guard:PATH; sums: 0.8*vader+0.2*novelty."""
    reward: Weights = Weights()
    """Weights of the reward."""
    prompts: str | list[str] | None = None
    """What conversations begin with: a text file, one a line, or a list; null takes forty neutral ones."""
    dev_prompts: str | list[str] | None = None
    """The same for evaluation; null takes twelve others."""
    tree_width: int = Field(default=2, ge=1)
    """Probes tried on each context."""
    tree_depth: int = Field(default=1, ge=1)
    """Turns of a conversation."""
    algorithm: Literal["dpo", "ipo", "ppo"] = "dpo"
    """How the auditor learns."""
    params: dict[str, Any] = {}
    """Parameters of the algorithm, such as beta or clip_range."""
    eval_every: int | str = 100
    """Steps between evaluations on the dev prompts."""
    threshold: float = 0.5
    """The score from which a response counts as a success."""
    ckpt_dir: str = "checkpoints"
    """Where the auditor is kept as Hugging Face directories: best and last."""
    run: str | None = None
    """Directory of the run, or its name under runs/; one that is there resumes. Null makes a new one."""
    training: FirstLook = FirstLook()
    """Length, optimisation, cadence and safety."""

    def check_models(self) -> None:
        """Refuse models that are not there, before anything large is imported."""
        from etude.policies.language.locate import locate_model

        for name in (self.auditor, self.target, self.baseline):
            if name not in (None, "smollm2"):
                locate_model(name)

    def system(self, auditor: str | None = None) -> HFASTSystem:
        """Load the models; another auditor takes the place of the configured one, without adapters."""
        from etude.redteam.hf_system import HFASTSystem
        from etude.redteam.scorers import make_scorer

        return HFASTSystem(
            self.auditor if auditor is None else auditor,
            self.target,
            self.baseline,
            make_scorer(self.scorer),
            devices=self.devices,
            lora=self.lora if auditor is None else None,
            value_head=self.algorithm == "ppo" and auditor is None,
            auditor_sampling=self.auditor_sampling,
            target_sampling=self.target_sampling,
            chat=self.chat,
            seed=self.training.seed,
            **self.reward.model_dump(),
        )

    def sampler(self, system: HFASTSystem) -> ASTSampler:
        """Return the sampler of a system."""
        from etude.redteam.sampler import ASTSampler

        return ASTSampler(system, _prompts(self.prompts, NEUTRAL_PROMPTS), self.tree_width, self.tree_depth)

    def starts(self) -> list[str]:
        """Return the prompts of evaluation."""
        return _prompts(self.dev_prompts, NEUTRAL_DEV_PROMPTS)

    def build(self, run: Path | None = None, stored: dict[str, Any] | None = None) -> HFASTTrainer:
        """Return the trainer that the configuration describes.

        Args:
            run: A run that takes the place of the configured one.
            stored: What the run keeps of the configuration, if it was read from a file.
        """
        from etude.errors import ConfigError
        from etude.redteam import algorithms
        from etude.redteam.hf_trainer import HFASTTrainer

        system = self.system()
        kind = {"dpo": algorithms.DPO, "ipo": algorithms.IPO, "ppo": algorithms.PPO}[self.algorithm]
        try:
            solver = kind(system, **self.params)
        except TypeError as error:
            raise ConfigError(f"params: {error}") from None
        return HFASTTrainer(
            self.training,
            self.sampler(system),
            solver,
            dev_prompts=self.starts(),
            eval_every=self.eval_every,
            ckpt_dir=self.ckpt_dir,
            threshold=self.threshold,
            run=self.run if run is None else run,
            name="redteam",
            run_config={RUN_SECTION: clean(self.model_dump(mode="json")) if stored is None else stored},
        )


class RedTeamFile(Dialect[RedTeamConfig]):
    """What `etude redteam` reads: the file itself, or as a run keeps it, under `redteam`."""

    def normalize(self, layer: Layer, folder: str) -> Layer:
        """Take the section of a run's configuration for the whole."""
        inner = layer.values.get(RUN_SECTION)
        if not isinstance(inner, dict) or len(layer.values) > 1:
            return layer
        origins = {path[1:]: origin for path, origin in layer.origins.items() if path[:1] == (RUN_SECTION,)}
        return Layer(inner, origins)


REDTEAM = RedTeamFile(RedTeamConfig)


def _prompts(given: str | list[str] | None, otherwise: tuple[str, ...]) -> list[str]:
    return list(otherwise) if given is None else read_prompts(given) if isinstance(given, str) else given
