"""`etude redteam`: signatures and help here, work in `cli.auditing` and `cli.stressing`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import (
    AsJson,
    EnvOptions,
    Plugins,
    Seed,
    TrainedPolicy,
    WhichCheckpoint,
    count,
    option,
    optional_argument,
    output_option,
)

redteam_app = typer.Typer(help="Find what makes a language model or a robot fail.", no_args_is_help=True)

Setting = Annotated[
    list[str] | None, option("--set", "KEY=VALUE", "Any other key of the file, such as training.lr=1e-4.")
]
Target = Annotated[str | None, option("--target", "MODEL", "The model that is probed [smollm2].")]
Scorer = Annotated[
    str | None, option("--scorer", "NAME", "profanity, vader, novelty, classifier:PATH#LABEL, ... [profanity].")
]
Searches = Annotated[
    list[str] | None, option("--search", "NAME", "cross_entropy, adversary, random; repeatable [cross_entropy].")
]
Disturb = Annotated[
    list[str] | None,
    option("--disturb", "KIND[=X]", "start, push, noise, latency, camera; repeatable [all there are]."),
]


@redteam_app.callback()
def redteam() -> None:
    """Find what makes a language model or a robot fail."""


@redteam_app.command()
def train(
    config: Annotated[Path | None, optional_argument("CONFIG", "Experiment file (YAML).")] = None,
    auditor: Annotated[str | None, option("--auditor", "MODEL", "The model that is trained [smollm2].")] = None,
    target: Target = None,
    prompts: Annotated[str | None, option("--prompts", "FILE", "Prompts, one a line [forty neutral ones].")] = None,
    scorer: Scorer = None,
    algorithm: Annotated[str | None, option("--algorithm", "dpo|ipo|ppo", "How it learns [dpo].")] = None,
    steps: Annotated[int | None, count("--steps", "Experiences [10, for a first look].")] = None,
    output: Annotated[Path | None, output_option("Where the auditor goes [checkpoints].")] = None,
    run: Annotated[
        str | None, option("--run", "RUN", "Run directory, or its name under runs/; one that is there resumes.")
    ] = None,
    setting: Setting = None,
) -> None:
    """Train an auditor against a target, from CONFIG, options, or both.

    Such as: etude redteam train --target my-model --scorer vader --steps 50
    """
    from etude.cli.auditing import train_auditor

    given = {
        "auditor": auditor, "target": target, "prompts": prompts, "scorer": scorer, "algorithm": algorithm,
        "training.training_steps": steps, "ckpt_dir": output, "run": run,
    }  # fmt: skip
    train_auditor(config, given, list(setting or []))


@redteam_app.command()
def evaluate(
    auditor: Annotated[str, typer.Argument(metavar="AUDITOR", help="A trained auditor, such as checkpoints/best.")],
    config: Annotated[
        Path | None, option("--config", "FILE", "Experiment file [the one kept beside AUDITOR, if any].")
    ] = None,
    against: Annotated[
        str | None, option("--against", "MODEL", "Auditor to compare with [as before training].")
    ] = None,
    target: Target = None,
    prompts: Annotated[str | None, option("--prompts", "FILE", "Prompts, one a line [the dev prompts].")] = None,
    scorer: Scorer = None,
    rollouts: Annotated[int, count("--rollouts", "Conversations of each.")] = 48,
    output: Annotated[Path | None, output_option("Where results go [AUDITOR-evaluation].")] = None,
    setting: Setting = None,
    as_json: AsJson = False,
) -> None:
    """Measure what AUDITOR elicits, against the auditor before training; writes JSON and a page."""
    from etude.cli.auditing import evaluate_auditor

    given = {"target": target, "dev_prompts": prompts, "scorer": scorer}
    evaluate_auditor(
        auditor, config, against, given, list(setting or []), rollouts=rollouts, output=output, as_json=as_json
    )


@redteam_app.command()
def robot(
    source: TrainedPolicy,
    env: Annotated[str, option("--env", "ENV", "metaworld/TASK, pusht, aloha/TASK or gym:ID.")],
    search: Searches = None,
    episodes: Annotated[int, count("--episodes", "Episodes of each search.")] = 200,
    baseline: Annotated[bool, typer.Option(help="Compare with as many episodes drawn by chance.")] = True,
    disturb: Disturb = None,
    strength: Annotated[float, option("--strength", "X", "What all strengths are multiplied by.")] = 1.0,
    seed: Seed = 0,
    workers: Annotated[int, count("--workers", "Processes that share the episodes.", least=0)] = 0,
    video: Annotated[int, count("--video", "Films of the likeliest failures.", least=0)] = 6,
    which: WhichCheckpoint = "auto",
    output: Annotated[Path | None, output_option("Where results go [stress/ENV in the run].")] = None,
    to_dataset: Annotated[
        Path | None,
        option("--to-dataset", "DIR", "Let the expert demonstrate what failed, as a LeRobot dataset there."),
    ] = None,
    env_option: EnvOptions = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """Search beginnings and disturbances for the likeliest failures of POLICY; writes JSON, films and a page.

    Such as: etude redteam robot runs/act --env metaworld/pick-place --episodes 200 --to-dataset data/hard
    """
    from etude.cli.stressing import StressOptions, stress

    asked = StressOptions(
        env=env, search=search or ["cross_entropy"], episodes=episodes, baseline=baseline, disturb=disturb or [],
        strength=strength, seed=seed, workers=workers, videos=video, which=which, output=output,
        to_dataset=to_dataset, settings=env_option or [], plugins=plugin or [], as_json=as_json,
    )  # fmt: skip
    stress(source, asked)
