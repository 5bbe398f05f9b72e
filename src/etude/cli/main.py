"""The `etude` command: signatures and help here, work in the module each command imports when it runs."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.cli import complete, exchange, robots
from etude.cli.data import data_app
from etude.cli.look import add_commands
from etude.cli.model import model_app
from etude.cli.options import (
    AsJson,
    Config,
    EnvOptions,
    Envs,
    Episodes,
    Images,
    Overrides,
    Plugins,
    RunName,
    Seed,
    TrainedPolicy,
    WhichCheckpoint,
    count,
    optional_argument,
    output_option,
)
from etude.cli.overrides import TakesOverrides
from etude.cli.panels import DEPLOY, LANGUAGE, ROBOTS, START, TRAIN, GroupedCommands
from etude.cli.redteam import redteam_app
from etude.cli.sweep import add_sweep
from etude.errors import EtudeError, Interrupted, no_place

# Rich costs 0.1 s to import: help and usage errors use it only where they are seen in a terminal.
app = typer.Typer(
    name="etude",
    cls=GroupedCommands,
    help="Write a trainer once, run it on any engine, and get the same numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() and sys.stderr.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
new_app = typer.Typer(help="Write a working skeleton to start from.", no_args_is_help=True)
app.add_typer(new_app, name="new", rich_help_panel=START)
app.add_typer(data_app, name="data", rich_help_panel=ROBOTS)
app.add_typer(model_app, name="model", rich_help_panel=LANGUAGE)
app.add_typer(redteam_app, name="redteam", rich_help_panel=LANGUAGE)

_NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
"""How systems refuse a folder or a file that was named to be written."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
"""How they say that nothing more fits; not always with the name of a file."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from etude import __version__

        typer.echo(f"etude {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Write a trainer once, run it on any engine, and get the same numbers."""


@app.command(cls=TakesOverrides, rich_help_panel=TRAIN)
def train(
    config: Annotated[
        str | None,
        optional_argument("CONFIG", "Experiment file (YAML), or a preset such as digits.", complete.configs),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Continue from the last checkpoint, none, or this one.")
    ] = "auto",
    train_config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", "--train_config", "--train-config", metavar="CONFIG", help="Another way to give CONFIG."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("-m", "--mode", metavar="self-hosted|training-service", help="How a recipe must be trained."),
    ] = None,
    tag: Annotated[
        str | None, typer.Option("-t", "--tag", metavar="NAME", help="Name the run; as run.name=NAME.")
    ] = None,
    run_nexrl: Annotated[
        bool, typer.Option("-r", "--run-nexrl", help="Start training, as it always does; for commands of recipes.")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N|A,B", help="A run for each of N seeds, or for these; compared.")
    ] = None,
    jobs: Annotated[int, count("--jobs", "Seeds at a time, with --seeds.")] = 1,
) -> None:
    """Train what CONFIG describes: an experiment, or a recipe.

    Several processes: torchrun --nproc_per_node 2 -m etude train CONFIG
    """
    settings = list(overrides or [])
    if train_config is not None and config is not None:
        settings.insert(0, config)  # the file came by option, so the first plain argument is an override
    path = train_config or (Path(config) if config is not None else None)
    if path is None:
        raise typer.BadParameter("give what to train, as in: etude train configs/digits.yaml, or: etude train digits")

    if mode not in (None, "self-hosted", "training-service"):
        raise typer.BadParameter(f"-m is self-hosted or training-service, got {mode!r}")
    settings += [f"run.name={tag}"] if tag is not None else []
    if seeds is not None:
        if resume != "auto":
            raise typer.BadParameter(
                "with --seeds each run goes on by itself; begin from a checkpoint with run.resume=PATH"
            )
        from etude.cli.sweeping import train_seeds

        train_seeds(path, settings, seeds, jobs, mode)
        return
    if jobs != 1:
        raise typer.BadParameter("--jobs is for --seeds: one run is one job")

    from etude.cli.train import train_config as run_training

    run_training(path, settings, resume, mode)


@app.command(cls=TakesOverrides, rich_help_panel=TRAIN)
def resume(run: RunName, overrides: Overrides = None) -> None:
    """Go on with RUN in its own directory.

    Overrides may lengthen it (training.training_steps=2000) or change its cadence.
    """
    from etude.cli.train import resume_run

    resume_run(run, list(overrides or []))


@app.command(cls=TakesOverrides, rich_help_panel=TRAIN)
def check(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Validate CONFIG and print every value with where it comes from."""
    from etude.cli.check import check_config

    check_config(config, list(overrides or []), as_json=as_json)


add_sweep(app)
add_commands(app)


@app.command("list", rich_help_panel=START)
def list_components(
    kind: Annotated[
        str | None, optional_argument("KIND", "presets, policies, data, algorithms, engines, ...", complete.kinds)
    ] = None,
    key: Annotated[str | None, optional_argument("NAME", "One of them, to see its parameters.", complete.keys)] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
) -> None:
    """List what a config can name, and the parameters each takes."""
    from etude.cli.listing import print_components

    print_components(kind, key, plugins=list(plugin or []), as_json=as_json)


@app.command(cls=TakesOverrides, rich_help_panel=TRAIN)
def verify(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, count("--steps", "Optimizer steps of each run.")] = 20,
) -> None:
    """Train twice and compare the parameters, bit for bit."""
    from etude.cli.verify import verify_config

    verify_config(config, list(overrides or []), steps=steps)


@app.command(rich_help_panel=ROBOTS)
def record(
    env: Envs,
    episodes: Episodes = 50,
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="The dataset; data/ENV unless given.")
    ] = None,
    cameras: Annotated[
        str | None, typer.Option("--cameras", metavar="A,B", help="Cameras to record; none unless given.")
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", metavar="PIXELS", min=8, help="Height and width of the pictures.")
    ] = None,
    noise: Annotated[
        float, typer.Option("--noise", metavar="STD", min=0, help="Noise on what is executed, not on what is recorded.")
    ] = 0.0,
    noise_share: Annotated[
        float, typer.Option("--noise-share", metavar="P", min=0, max=1, help="Share of the episodes that have noise.")
    ] = 1.0,
    noise_rate: Annotated[
        float, typer.Option("--noise-rate", metavar="P", min=0, max=1, help="Probability that noise begins at a step.")
    ] = 1.0,
    noise_steps: Annotated[int, count("--noise-steps", "For how many steps the same noise holds.")] = 1,
    policy: Annotated[
        str, typer.Option("--policy", metavar="WHO", help="expert, file.py:function, or a run or checkpoint.")
    ] = "expert",
    seed: Seed = 0,
    images: Images = "video",
    keep_failures: Annotated[bool, typer.Option("--keep-failures", help="Keep episodes that fail, too.")] = False,
    rewards: Annotated[bool, typer.Option("--rewards", help="Keep what each step earned, as next.reward.")] = False,
    workers: Annotated[
        int | None, count("--workers", "Processes that play; one for each core if there are cameras.", least=0)
    ] = None,
    option: EnvOptions = None,
) -> None:
    """Record demonstrations as a LeRobot dataset; an interrupted recording goes on.

    Such as: etude record --env metaworld/drawer-open --episodes 50 --cameras corner2
    """
    from etude.cli.record import record_demonstrations

    record_demonstrations(
        env, root, episodes=episodes, policy=policy, seed=seed,
        noise=noise, noise_share=noise_share, noise_rate=noise_rate, noise_steps=noise_steps,
        keep_failures=keep_failures, rewards=rewards, cameras=cameras, size=size, images=images,
        settings=list(option or []), workers=workers,
    )  # fmt: skip


@app.command(rich_help_panel=ROBOTS)
def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="A run, a checkpoint, a saved policy, expert, or file.py:function.",
            autocompletion=complete.runs,
        ),
    ],
    env: Envs,
    episodes: Episodes = 50,
    split: Annotated[
        str, typer.Option("--split", metavar="train|validation|test", help="Whose seeds; recording uses train.")
    ] = "test",
    seed: Seed = 0,
    slots: Annotated[int | None, count("--slots", "Episodes side by side; changes no result.")] = None,
    workers: Annotated[int, count("--workers", "Processes that share them; changes no result.", least=0)] = 0,
    video: Annotated[int, count("--video", "Films to make, failures first.", least=0)] = 0,
    which: WhichCheckpoint = "auto",
    output: Annotated[Path | None, output_option("Where results go [RUN/evaluation].")] = None,
    option: EnvOptions = None,
    plugin: Plugins = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Keep why episodes failed; changes no result.")
    ] = True,
    samples: Annotated[int, count("--samples", "Plans drawn each time, for uncertainty.", least=0)] = 0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure the success of POLICY in simulation.

    Such as: etude evaluate runs/act --env metaworld/pick-place --episodes 200 --video 4
    """
    from etude.cli.evaluate import evaluate_source

    evaluate_source(
        source, env, episodes=episodes, split=split, seed=seed, slots=slots, workers=workers, videos=video,
        which=which, output=output, settings=list(option or []), as_json=as_json, plugins=list(plugin or []),
        diagnose=diagnose, samples=samples,
    )  # fmt: skip


@app.command(rich_help_panel=START)
def quickstart(
    task: Annotated[
        str, typer.Option("--task", metavar="NAME", help="One of Meta-World's 50 tasks.", autocompletion=complete.tasks)
    ] = "pick-place",
    policy: Annotated[str, typer.Option("--policy", metavar="KEY", help="act, diffusion, flow or mlp.")] = "act",
    episodes: Annotated[int, count("--episodes", "Demonstrations to record.")] = 50,
    eval_episodes: Annotated[int, count("--eval-episodes", "Held-out episodes to evaluate.")] = 50,
    steps: Annotated[int | None, count("--steps", "Training steps; the preset's unless given.")] = None,
    noise: Annotated[
        float, typer.Option("--noise", metavar="STD", min=0, help="Noise on what the expert executes.")
    ] = 0.0,
    seed: Seed = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where everything goes [runs/quickstart-TASK-POLICY].")
    ] = None,
) -> None:
    """Record demonstrations, train a policy, evaluate it and write a report; goes on where it was stopped."""
    from etude.cli.quickstart import run_quickstart

    run_quickstart(
        task, policy, directory, episodes=episodes, eval_episodes=eval_episodes, steps=steps, noise=noise, seed=seed
    )


@app.command("serve", rich_help_panel=DEPLOY)
def serve_training(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where everything is kept; started again, it goes on.")
    ] = Path("service"),
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="tiny, smollm2 or a directory, or NAME=one of them; repeatable."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; other than loopback needs --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="A line for each client: its name and its key.")
    ] = None,
    snapshot_steps: Annotated[
        int | None,
        typer.Option("--snapshot-steps", metavar="N", help="Steps that a restart repeats at most; 20 unless given."),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option("--sessions", metavar="N", help="Sessions of one key that may be open; 1000 unless given."),
    ] = None,
) -> None:
    """Serve training and sampling of language models to the Tinker client, with base_url=http://127.0.0.1:8000."""
    from etude.cli.serve import serve_training as serve

    serve(folder, model or [], host=host, port=port, keys=keys, snapshot_steps=snapshot_steps, sessions=sessions)


@app.command("serve-policy", rich_help_panel=DEPLOY)
def serve_policy(
    source: TrainedPolicy,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; other than loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8765,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="TEXT", envvar="ETUDE_POLICY_KEY", help="What clients must know."),
    ] = None,
    which: WhichCheckpoint = "auto",
) -> None:
    """Serve POLICY to robots over a WebSocket, and print what its actions take.

    On the robot: from etude.deploy import PolicyClient
    """
    from etude.cli.serve import serve_policy as serve

    serve(source, host=host, port=port, key=key, which=which)


robots.add_commands(app)


exchange.add_commands(app)


@new_app.callback()
def new() -> None:
    """Write a working skeleton to start from."""


@new_app.command("trainer")
def new_trainer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the trainer, such as label_smoothing.")],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder to write into.")] = Path("."),
) -> None:
    """Write NAME.py with a loss of your own, NAME.yaml that trains it, and a test that proves it."""
    from etude.cli.skeleton import write_trainer

    write_trainer(name, directory)


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and its exit code, ours in a traceback."""
    # A command that lives for 0.3 s spends a tenth of it collecting imports that never die; training turns it on.
    gc.disable()
    try:
        app(prog_name="etude")
    except EtudeError as error:
        _complain(f"error: {error}")
        raise SystemExit(error.exit_code) from None
    except Interrupted as interruption:
        _complain(interruption.message)
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:  # noqa: BLE001 - the last stop before the interpreter: secrets leave the traceback here
        if isinstance(error, OSError) and error.filename is not None and _is_about_a_place(error):
            refused = no_place(error)
            _complain(f"error: {refused}")
            raise SystemExit(refused.exit_code) from None
        if isinstance(error, OSError) and error.errno in _FULL:
            where = "" if error.filename is None else f" {error.filename}"
            _complain(f"error: cannot write{where}: {error.strerror}; make room, and run it again")
            raise SystemExit(2) from None
        import traceback

        from etude.cli.output import visible
        from etude.secrets import redact

        sys.stderr.write(visible(redact(traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        gc.freeze()  # nor is the interpreter to search them all for garbage on its way out


def _is_about_a_place(error: OSError) -> bool:
    """Tell whether the system refused a place that was named to be written, and not a file that we miss."""
    if error.errno in _NO_PLACE:
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # Folders under /proc and its like "do not exist" even while they are made.
    return error.errno == errno.ENOENT and last is not None and last.tb_frame.f_code.co_name in ("mkdir", "makedirs")


def _complain(message: str) -> None:
    from etude.cli.output import visible
    from etude.secrets import redact

    rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ else ""
    try:
        sys.stderr.write(redact(f"etude: {rank}{visible(message)}\n"))
        sys.stderr.flush()
    except OSError:  # the terminal is gone: flushing at the end would fail again, and replace the exit code by 120
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
