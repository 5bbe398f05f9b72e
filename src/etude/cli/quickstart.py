"""`etude quickstart`: demonstrations, training, evaluation and a report in one command that can be stopped anywhere."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etude.cli.counting import Counting
from etude.cli.evaluate import print_failures, tell_so_far
from etude.cli.output import say
from etude.cli.train import how_to_go_on
from etude.errors import ConfigError

FILE = "quickstart.json"
POLICIES = ("act", "mlp", "diffusion", "flow")
STAGES = ("record", "train", "evaluate", "report")
MAX_STEPS = 300
"""Steps of an evaluated episode; the experts need 30 to 175."""


def run_quickstart(
    task: str,
    policy: str,
    directory: Path | None,
    *,
    episodes: int,
    eval_episodes: int,
    steps: int | None,
    noise: float,
    seed: int,
) -> None:
    """Do what is not done yet, stage by stage."""
    gc.enable()  # switched off for the start by `main`
    if policy not in POLICIES:
        raise ConfigError(f"there is no preset for the policy {policy!r}; there are {', '.join(POLICIES)}")
    from etude.simulation.environments.metaworld import require_task

    task = require_task(task.removeprefix("metaworld/"))
    directory = directory or Path("runs") / f"quickstart-{task}-{policy}"
    settings = {
        "task": task, "policy": policy, "episodes": episodes, "eval_episodes": eval_episodes, "steps": steps,
        "noise": noise, "seed": seed,
    }  # fmt: skip
    log = StageLog(directory, settings)
    env = f"metaworld/{task}"
    dataset = directory / "demonstrations"
    log.run("record", lambda: _record(env, dataset, episodes, noise, seed))
    config = read_recipe(f"metaworld-{policy}", str(dataset), seed=seed, steps=steps)
    log.run("train", lambda: _train(directory, config))
    log.run("evaluate", lambda: _evaluate(directory, env, eval_episodes, seed))
    facts = log.run("report", lambda: _report(directory), always=True)
    say(f"in all {log.seconds:.1f} s")
    say(f"report: {facts['path']}")


def read_recipe(
    preset: str, dataset: str, *, seed: int = 0, steps: int | None = None, augment: bool = False
) -> dict[str, Any]:
    """Return how a preset trains its policy, on a dataset of one's own and without evaluation on the way.

    Args:
        preset: Its name, as in `etude list presets`.
        dataset: Directory of the dataset.
        seed: Seed of the training.
        steps: Training steps, if not the preset's.
        augment: Whether samples are changed in training as the preset says, where it says so.
    """
    from etude.config.load import EXPERIMENT
    from etude.config.presets import presets
    from etude.reading.compose import compose

    values = compose(presets()[preset], [], EXPERIMENT).values
    left_out = ("evaluate_every", "best_metric", "best_mode")
    training = {name: value for name, value in values["training"].items() if name not in left_out}
    training |= {"seed": seed} if steps is None else {"seed": seed, "training_steps": steps}
    data: dict[str, Any] = {"type": "lerobot", "params": {"root": dataset}}
    if augment and (changes := values["data"]["params"].get("augment")):
        data["params"]["augment"] = changes
    return {"policy": values["policy"], "data": data, "training": training}


class StageLog:
    """Which stages are done, what came of them, and how long they took over all sessions: quickstart.json."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._path = directory / FILE
        self._content: dict[str, Any] = {"settings": dict(settings), "stages": {}}
        if self._path.exists():
            try:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                before, stages = dict(found["settings"]), dict(found["stages"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self._path}: cannot be read ({error}); delete {directory} to begin anew") from None
            changed = [key for key, value in settings.items() if before.get(key) != value]
            if changed:
                key = changed[0]
                raise ConfigError(
                    f"{directory}: was begun with {key}={before.get(key)}, not {settings[key]}; choose another --dir"
                )
            self._content["stages"] = stages

    @property
    def seconds(self) -> float:
        """How long all stages took, over all sessions."""
        return float(sum(stage["seconds"] for stage in self._content["stages"].values()))

    def run(self, name: str, work: Callable[[], dict[str, Any]], *, always: bool = False) -> dict[str, Any]:
        """Do the work of a stage unless it is done; note how long it took, even if it was interrupted."""
        stage = self._content["stages"].setdefault(name, {"done": False, "seconds": 0.0, "facts": {}})
        head = f"[{STAGES.index(name) + 1}/{len(STAGES)}] {name}"
        if stage["done"] and not always:
            say(f"{head}: {stage['facts']['text']} (done before, {stage['seconds']:.1f} s)")
            facts: dict[str, Any] = stage["facts"]
            return facts
        say(f"{head} ...")
        began = time.perf_counter()
        try:
            stage["facts"] = work()
            stage["done"] = True
        finally:
            stage["seconds"] += time.perf_counter() - began
            self._save()
        say(f"{head}: {stage['facts']['text']} ({stage['seconds']:.1f} s)")
        done: dict[str, Any] = stage["facts"]
        return done

    def _save(self) -> None:
        from etude.runs.durable import write_atomically

        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, (json.dumps(self._content, indent=2) + "\n").encode())


def _record(env: str, dataset: Path, episodes: int, noise: float, seed: int) -> dict[str, Any]:
    from etude.simulation.record import Noise, record

    counting = Counting("episode", episodes)
    try:
        done = record(
            env, dataset, episodes=episodes, noise=Noise(noise), seed=seed,
            on_episode=lambda saved, attempts: counting.show(saved, f"{attempts} attempts"),
        )  # fmt: skip
    finally:
        counting.close()
    return {
        "text": f"{done.episodes} demonstrations, {done.frames} frames",
        "episodes": done.episodes, "frames": done.frames, "attempts": done.attempts,
    }  # fmt: skip


def _train(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    from etude.config.load import load
    from etude.reading import yaml12
    from etude.runs.durable import write_atomically

    path = directory / "experiment.yaml"
    run = {"root": str(directory.parent), "name": directory.name}
    write_atomically(path, yaml12.write({**config, "run": run}).encode())
    loaded = load(path)
    from etude.config.build import build

    trainer = build(loaded, run=directory)
    with how_to_go_on(trainer, "the same command"):
        result = trainer.fit(resume="auto")
    return {
        "text": f"{result.steps} steps, loss {result.metrics['train/loss']:.4g}",
        "steps": result.steps, "loss": result.metrics["train/loss"],
    }  # fmt: skip


def _evaluate(directory: Path, env: str, episodes: int, seed: int) -> dict[str, Any]:
    from etude.config.restore import load_policy
    from etude.simulation.diagnosis import DiagnosisOptions
    from etude.simulation.environments.rendering import EGL_PACKAGES, OSMESA_PACKAGES, prepare_mujoco
    from etude.simulation.evaluate import evaluate_policy
    from etude.simulation.results import EpisodeRow, EvaluationResult

    counting, seen = Counting("episode", episodes), list[EpisodeRow]()

    def show(row: EpisodeRow) -> None:
        seen.append(row)
        counting.show(len(seen), tell_so_far(seen))

    def show_film(result: EvaluationResult) -> None:
        counting.close()
        if not result.videos:
            say(f"{result.total}; filming some of them ...")

    output = directory / "evaluation"
    films = output / "videos" if prepare_mujoco() != "disable" else None
    try:
        result = evaluate_policy(
            load_policy(directory), env, episodes=episodes, split="test", seed=seed, video_dir=films,
            workers=min(4, os.cpu_count() or 1), options={"max_steps": MAX_STEPS}, on_episode=show,
            on_film=show_film, diagnosis=DiagnosisOptions(),
        )  # fmt: skip
    finally:
        counting.close()
    result.keep(output / f"{env.replace('/', '-')}-test")
    print_failures(result)
    if films is None:
        packages = f"apt-get install {EGL_PACKAGES}, or: apt-get install {OSMESA_PACKAGES}"
        say(f"no videos: neither EGL nor OSMesa works here; on Debian run: {packages}")
    return {"text": f"{result.total}", **result.metrics(), "interval": list(result.interval)}


def _report(directory: Path) -> dict[str, Any]:
    from etude.simulation.report import write_run_report

    path = write_run_report(directory)
    return {"text": f"{path.stat().st_size / 1e3:.0f} kB", "path": str(path)}
