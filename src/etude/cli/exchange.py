"""Signatures and help of the commands that take policies elsewhere and back; the work is in what each imports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import TrainedPolicy, WhichCheckpoint, output_option
from etude.cli.panels import DEPLOY

Repository = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="A repository on the Hugging Face hub.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(rich_help_panel=DEPLOY)(export)
    app.command("import", rich_help_panel=DEPLOY)(import_policy)
    app.command(rich_help_panel=DEPLOY)(push)
    app.command(rich_help_panel=DEPLOY)(pull)


def export(
    source: TrainedPolicy,
    output: Annotated[Path, output_option("Where to write it.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="torch|onnx|pretrained|components|lerobot",
            help="torch.export, ONNX, a directory for from_pretrained, one file of weights per component, or LeRobot.",
        ),
    ] = "torch",
    which: WhichCheckpoint = "auto",
) -> None:
    """Write POLICY as one graph, normalisation inside, that runs without training code.

    Such as: etude export runs/act --format onnx --output exported/act
    """
    from etude.cli.export import export_source

    export_source(source, output, kind=kind, which=which)


def import_policy(
    source: Annotated[
        Path, typer.Argument(metavar="DIR", help="What LeRobot saved: a policy, a checkpoint, or a cached repository.")
    ],
    output: Annotated[Path, output_option("Where to write it.")],
) -> None:
    """Read an ACT or Diffusion policy of LeRobot's; `evaluate`, `serve-policy` and `export` take what it writes.

    Such as: etude import outputs/train/act/checkpoints/last --output policies/act
    """
    from etude.cli.export import import_source

    import_source(source, output)


def push(
    source: TrainedPolicy,
    repository: Repository,
    which: WhichCheckpoint = "auto",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository a private one.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", metavar="BRANCH", help="Branch to write to.")] = None,
) -> None:
    """Upload POLICY with its card to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN.

    Such as: etude push runs/act me/pick-place-act --private
    """
    import gc

    gc.enable()  # switched off for the start by `main`
    from etude.cli.output import say
    from etude.cli.runs import find_run
    from etude.config.restore import load_policy
    from etude.policies.hub import push_to_hub

    say(push_to_hub(load_policy(find_run(source), which), repository, private=private, revision=revision))


def pull(
    repository: Repository,
    output: Annotated[Path | None, output_option("Where to put it [the hub's cache].")] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit; the newest unless given.")
    ] = None,
) -> None:
    """Download a policy from the Hugging Face hub and print its folder, for evaluate, act, export and serve-policy.

    Such as: etude evaluate $(etude pull me/pick-place-act) --env metaworld/pick-place
    """
    from etude.cli.output import say
    from etude.policies.hub import pull_from_hub

    say(str(pull_from_hub(repository, revision=revision, directory=output)))
