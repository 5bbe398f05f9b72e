"""What `etude redteam train` and `etude redteam evaluate` do."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.cli.output import is_main_rank, print_json, print_table, say, show_log
from etude.cli.train import how_to_go_on
from etude.errors import ConfigError
from etude.reading import yaml12
from etude.reading.compose import read_file
from etude.reading.load import Loaded, load
from etude.redteam.config import REDTEAM, RUN_SECTION, RedTeamConfig
from etude.runs.durable import require_place, write_atomically
from etude.runs.progress import shown_metrics

KEPT_CONFIG = "redteam.yaml"
log = logging.getLogger("etude")


def read_config(path: Path | None, given: Mapping[str, Any], settings: Sequence[str]) -> Loaded[RedTeamConfig]:
    """Return the configuration of a file, with options and settings over it."""
    # As JSON, which is YAML too: what an option gives is one value, whatever it looks like.
    options = {key: value for key, value in given.items() if value is not None}
    overrides = [f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in options.items()]
    return load(path, [*overrides, *settings], REDTEAM)


def is_auditing(path: Path) -> bool:
    """Return whether the stored configuration of a run is one of `etude redteam train`."""
    try:
        values = read_file(str(path)).values
    except ConfigError:
        return False  # whoever reads it as something else says what is wrong
    return list(values) == [RUN_SECTION]


def train_auditor(path: Path | None, given: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Train, keep the configuration beside the auditor, and say where it is."""
    _train(read_config(path, given, settings))


def resume_auditor(run: Path, settings: Sequence[str]) -> None:
    """Go on with a run of `etude redteam train` from its stored configuration, in its own directory."""
    _train(read_config(run / "config.yaml", {}, settings), run)


def _train(loaded: Loaded[RedTeamConfig], run: Path | None = None) -> None:
    config = loaded.config
    gc.enable()  # switched off for the start by `main`
    show_log()
    config.check_models()
    if is_main_rank():
        log.info("loading the auditor %s and the target %s", config.auditor, config.target)
    trainer = config.build(run, loaded.stored())
    directory = Path(config.ckpt_dir)
    if is_main_rank():
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / KEPT_CONFIG, yaml12.write(loaded.stored()).encode())
    with how_to_go_on(trainer):
        result = trainer.fit()
    if not is_main_rank():
        return
    say(f"reached step {result.steps}" + ("" if result.stopped == "finished" else f" ({result.stopped})"))
    shown = [f"{name} {value:.4g}" for name, value in shown_metrics(result.metrics).items() if name.startswith("eval/")]
    if shown:
        say("  ".join(shown))
    say(f"auditor: {directory / 'best'}, {directory / 'last'}")
    say(f"evaluate: etude redteam evaluate {directory / 'best'}")


def evaluate_auditor(
    auditor: str,
    path: Path | None,
    against: str | None,
    given: Mapping[str, Any],
    settings: Sequence[str],
    *,
    rollouts: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Evaluate an auditor and the one to compare it with, write both, and print the comparison."""
    beside = Path(auditor).parent / KEPT_CONFIG
    config = read_config(beside if path is None and beside.is_file() else path, given, settings).config
    gc.enable()
    config.check_models()
    from etude.redteam.evaluator import ASTEvaluator, compare

    folder = output or Path(f"{auditor.rstrip('/')}-evaluation")
    require_place(folder / "redteam.json")
    results = {}
    embedder: Any = "auto"
    for who, model in (("auditor", auditor), ("baseline", against or config.auditor)):
        evaluator = ASTEvaluator(
            config.sampler(config.system(model)),
            prompts=config.starts(),
            threshold=config.threshold,
            embedder=embedder,
        )
        results[who] = evaluator.evaluate(rollouts)
        embedder = evaluator.embedder
    result, baseline = results["auditor"], results["baseline"]
    found = {**results, "comparison": compare(result, baseline)}
    ASTEvaluator.write_json(found, folder / "redteam.json")
    ASTEvaluator.write_html(result, folder / "redteam.html", baseline=baseline, title=f"Red-team report: {auditor}")
    if as_json:
        print_json(found["comparison"])
        return
    rows = [_row(name, result["means"][name], baseline["means"].get(name)) for name in result["means"]]
    print_table(("measure", "auditor", "baseline", "baseline's 95 % interval"), rows, right=(1, 2))
    rate, other = result["attack_success"], baseline["attack_success"]
    say(f"attack success: {rate['successes']}/{rate['of']}, baseline {other['successes']}/{other['of']}")
    say(f"diversity of probes: {result['diversity']['probe']:.3f}, baseline {baseline['diversity']['probe']:.3f}")
    say(f"results: {folder / 'redteam.json'}, {folder / 'redteam.html'}")


def _row(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> tuple[str, ...]:
    if theirs is None:
        return name, f"{ours['mean']:.4g}", "", ""
    low, high = theirs["interval"]
    return name, f"{ours['mean']:.4g}", f"{theirs['mean']:.4g}", f"{low:.4g} to {high:.4g}"
