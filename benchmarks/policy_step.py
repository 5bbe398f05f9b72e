"""CPU time of a training step of ACT and Diffusion over lerobot's, at equal sizes, on equal data, one thread each.

Ours is a step of the torch engine, from a batch as our loader gives it (uint8 images) to the updated weights: loss,
backward, finite guard, clipping, AdamW, schedule, metrics. lerobot's is what its training script does with a batch of
its loader (float images): its preprocessor, then its own `update_policy` with its preset optimizer and schedule. No
loader is timed. lerobot runs in a child process of $ETUDE_LEROBOT_PYTHON; the two take turns, round by round, and the
ratio of each round is one measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from etude import Trainer, TrainingConfiguration
from etude.data.stream import StreamData
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import SingleProcess
from etude.policies import ACT, Diffusion
from etude.policies.base import PolicyModule
from etude.types import DataSpec, Feature

GOAL = 0.9
ROUNDS, STEPS, BATCHES = 7, 2, 4
STATE, ENVIRONMENT, ACTION, PIXELS = 14, 7, 14, 96
STATS = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0}

# Depths, chunk, horizon and kernels as published; widths half (ACT) and a quarter (Diffusion) of the published ones,
# with which a step takes seconds on one core.
ACT_SIZES = {
    "chunk_size": 100, "n_action_steps": 100, "dim_model": 256, "n_heads": 8, "dim_feedforward": 1600,
    "n_encoder_layers": 4, "n_decoder_layers": 1, "n_vae_encoder_layers": 4, "latent_dim": 32, "dropout": 0.1,
}  # fmt: skip
DIFFUSION_SIZES = {"horizon": 16, "n_obs_steps": 2, "n_action_steps": 8, "down_dims": [128, 256, 512]}
PUBLISHED = {
    "act": {**ACT_SIZES, "dim_model": 512, "dim_feedforward": 3200},
    "diffusion": {**DIFFUSION_SIZES, "down_dims": [512, 1024, 2048]},
}
CASES: dict[str, dict[str, Any]] = {
    "ACT, state": {"policy": "act", "sizes": ACT_SIZES, "batch": 8, "cameras": 0},
    "ACT, 1 camera": {"policy": "act", "sizes": ACT_SIZES, "batch": 8, "cameras": 1},
    "ACT, 2 cameras": {"policy": "act", "sizes": ACT_SIZES, "batch": 8, "cameras": 2},
    "Diffusion, state": {"policy": "diffusion", "sizes": DIFFUSION_SIZES, "batch": 64, "cameras": 0},
    "Diffusion, 1 camera": {"policy": "diffusion", "sizes": DIFFUSION_SIZES, "batch": 8, "cameras": 1, "crop": 84},
}

LEROBOT = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
answers, sys.stdout = sys.stdout, sys.stderr
import torch
from accelerate import Accelerator
from lerobot import __version__
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from safetensors.torch import load_file
torch.set_num_threads(1)

KINDS = {
    "action": FeatureType.ACTION, "observation.state": FeatureType.STATE,
    "observation.environment_state": FeatureType.ENV,
}

def read_batches(path):
    batches = []
    for name, value in load_file(path).items():
        number, name = name.split("/")
        while len(batches) <= int(number):
            batches.append({})
        batches[int(number)][name] = value.float() / 255 if value.dtype == torch.uint8 else value
    return batches

def prepare(case, path, stats):
    batches = read_batches(path)
    features, all_stats = {}, {}
    for name, value in batches[0].items():
        if name.endswith("_is_pad"):
            continue
        kind = KINDS.get(name, FeatureType.VISUAL)
        features[name] = PolicyFeature(kind, tuple(value.shape[-3 if kind is FeatureType.VISUAL else -1:]))
        shape = (3, 1, 1) if kind is FeatureType.VISUAL else features[name].shape
        all_stats[name] = {key: torch.full(shape, at) for key, at in stats.items()}
    inputs = {name: feature for name, feature in features.items() if name != "action"}
    sizes = dict(case["sizes"])
    if "crop" in case:
        sizes["crop_shape"] = (case["crop"], case["crop"])
    config = make_policy_config(
        case["policy"], input_features=inputs, output_features={"action": features["action"]}, device="cpu",
        push_to_hub=False, pretrained_backbone_weights=None, **sizes,
    )
    policy = get_policy_class(case["policy"])(config)
    preprocessor, _ = make_pre_post_processors(config, dataset_stats=all_stats)
    preset, schedule = config.get_optimizer_preset(), config.get_scheduler_preset()
    optimizer = preset.build(policy.get_optim_params())
    schedule = schedule and schedule.build(optimizer, 100_000)
    runtime = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    policy, optimizer, schedule = runtime.prepare(policy, optimizer, schedule)
    meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = MetricsTracker(case["batch"], 1000, 10, meters, accelerator=runtime)
    done = 0

    def run(steps):
        nonlocal tracker, done
        started = time.process_time()
        for _ in range(steps):
            batch = preprocessor(batches[done % len(batches)])
            tracker, _ = update_policy(
                tracker, policy, batch, optimizer, preset.grad_clip_norm, accelerator=runtime, lr_scheduler=schedule
            )
            tracker.step()
            done += 1
        return time.process_time() - started

    return run, sum(p.numel() for p in policy.parameters() if p.requires_grad)

for line in sys.stdin:
    request = json.loads(line)
    if "case" in request:
        run, count = prepare(request["case"], request["path"], request["stats"])
        answer = {"parameters": count, "torch": torch.__version__, "lerobot": __version__}
    else:
        answer = {"seconds": run(request["steps"])}
    print(json.dumps(answer), file=answers, flush=True)
"""


class LeRobot:
    """lerobot in a process of its own, which answers a line of JSON with a line of JSON."""

    def __init__(self, python: str) -> None:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [python, "-c", LEROBOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"lerobot's process ended with status {self.process.wait()}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.communicate(timeout=60)


def make_spec(case: dict[str, Any]) -> DataSpec:
    """Describe the observations and actions of a case."""

    def vector(width: int, role: Any) -> Feature:
        return Feature((width,), "float32", role, stats={key: [at] * width for key, at in STATS.items()})

    features = {"observation.state": vector(STATE, "state"), "action": vector(ACTION, "action")}
    if not case["cameras"]:  # lerobot wants a camera or the state of the environment
        features["observation.environment_state"] = vector(ENVIRONMENT, "environment")
    for number in range(case["cameras"]):
        features[f"observation.images.camera{number}"] = Feature((3, PIXELS, PIXELS), "uint8", "image")
    return DataSpec(features)


def make_batches(case: dict[str, Any], spec: DataSpec) -> list[dict[str, Tensor]]:
    """Return a few batches of noise; some actions are padding."""
    generator = torch.Generator().manual_seed(0)
    sizes, size = case["sizes"], case["batch"]
    history = (sizes["n_obs_steps"],) if "n_obs_steps" in sizes else ()
    chunk = sizes.get("chunk_size") or sizes["horizon"]
    batches = []
    for _ in range(BATCHES):
        batch = {}
        for name, feature in spec.features.items():
            lead = (size, chunk) if feature.role == "action" else (size, *history)
            if feature.role == "image":
                batch[name] = torch.randint(256, (*lead, *feature.shape), generator=generator, dtype=torch.uint8)
            else:
                batch[name] = torch.rand(*lead, *feature.shape, generator=generator) * 2 - 1
        batch["action_is_pad"] = torch.zeros(size, chunk, dtype=torch.bool)
        batch["action_is_pad"][0, chunk // 2 :] = True
        batches.append(batch)
    return batches


def make_policy(case: dict[str, Any]) -> PolicyModule:
    """Return our policy of a case, to be built by the session."""
    if case["policy"] == "act":
        return ACT(**case["sizes"], image_norm="frozen")
    crop = case.get("crop")
    return Diffusion(**case["sizes"], image_crop=crop and [crop, crop])


@contextmanager
def ours(case: dict[str, Any], spec: DataSpec, batches: list[dict[str, Tensor]]) -> Iterator[tuple[Any, int]]:
    """Yield a function that trains some steps and tells its CPU time, and the number of parameters."""
    config = TrainingConfiguration(
        training_steps=100_000, batch_size=case["batch"], lr=1e-5, schedule="cosine", num_threads=1
    )
    policy = make_policy(case)
    data = StreamData(batches, batched=True, spec=spec)
    group = Group()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(policy, data, config=config, run=folder, show_progress=False)
        with Session(trainer, group, SingleProcess(group)).running("never") as session:

            def run(steps: int) -> float:
                started = time.process_time()
                for _ in range(steps):
                    session.take_step()
                return time.process_time() - started

            yield run, sum(p.numel() for p in policy.parameters() if p.requires_grad)


def compare(case: dict[str, Any], lerobot: LeRobot, rounds: int) -> dict[str, Any]:
    """Return parameters, seconds per step of both, and the ratio of each round."""
    spec = make_spec(case)
    batches = make_batches(case, spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.safetensors"
        save_file({f"{i}/{name}": value for i, batch in enumerate(batches) for name, value in batch.items()}, path)
        theirs = lerobot.ask(case=case, path=str(path), stats=STATS)
    with ours(case, spec, batches) as (run, parameters):
        measure: dict[str, Callable[[int], float]] = {
            "ours": run, "theirs": lambda steps: float(lerobot.ask(steps=steps)["seconds"])
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in measure}
        for number in range(-1, rounds):
            for name in list(measure)[:: 1 if number % 2 else -1]:  # who goes first alternates
                spent = measure[name](STEPS) / STEPS
                if number >= 0:  # the first round warms up
                    seconds[name].append(spent)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {**theirs, "parameters": (parameters, theirs["parameters"]), "seconds": seconds, "ratios": ratios}


def report(name: str, case: dict[str, Any], found: dict[str, Any]) -> bool:
    """Print the line of a case and tell whether the goal is met."""
    mine, its = found["parameters"]
    if mine != its:
        raise SystemExit(f"{name}: {mine:,} parameters here, {its:,} there; the sizes are not equal")
    ours_ms, theirs_ms = (1000 * statistics.median(found["seconds"][key]) for key in ("ours", "theirs"))
    ratios = found["ratios"]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"  {name:20s} batch {case['batch']:2d}  {mine:>11,} parameters in both  etude {ours_ms:6.0f} ms  "
        f"lerobot {theirs_ms:6.0f} ms  {ratio:.2f}x ({spread}; goal <= {GOAL})",
        flush=True,
    )
    return ratio <= GOAL


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--published", action="store_true", help="published widths: minutes per case, 6 GB of memory")
    options = parser.parse_args()
    python = os.environ.get("ETUDE_LEROBOT_PYTHON")
    if not python:
        print("policy step: not measured, lerobot is not installed; set ETUDE_LEROBOT_PYTHON to a Python that has it")
        return
    torch.set_num_threads(1)
    lerobot = LeRobot(python)
    chosen = {name: dict(case) for name, case in CASES.items() if options.only in name}
    missed = []
    try:
        for name, case in chosen.items():
            if options.published:
                case["sizes"] = PUBLISHED[case["policy"]]
            found = compare(case, lerobot, options.rounds)
            if name == next(iter(chosen)):
                print(
                    f"CPU time of a training step over lerobot {found['lerobot']}'s, one thread, {PIXELS} px cameras, "
                    f"median of {options.rounds} rounds (torch {torch.__version__} here, {found['torch']} there):"
                )
            missed += [] if report(name, case, found) else [name]
    finally:
        lerobot.close()
    if missed:
        print(f"above the goal: {'; '.join(missed)}", file=sys.stderr)


if __name__ == "__main__":
    main()
