"""lerobot's ACT in a process of its own: trained on a dataset on disk, then asked for actions one at a time.

`LeRobotACT` is the side of etude; the file is run by the Python that has lerobot ($ETUDE_LEROBOT_PYTHON). They talk in
lines of JSON. Windows of actions are gathered from arrays in memory: lerobot's loader would take most of the time, and
serves the same samples. Policy, loss, normalisation and execution of chunks are lerobot's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

STATE, ENVIRONMENT_STATE, ACTION = "observation.state", "observation.environment_state", "action"
GRAD_CLIP_NORM = 10.0  # lerobot's


def find_python() -> str | None:
    """Return the Python that has lerobot, if one is named."""
    return os.environ.get("ETUDE_LEROBOT_PYTHON") or None


class LeRobotACT:
    """Trains when it is made; then a function from an observation to an action.

    Args:
        python: The Python that has lerobot.
        dataset: Directory of a dataset with states and actions.
        params: Sizes of ACT, by lerobot's names.
        training: training_steps, batch_size, lr, weight_decay, warmup_steps and seed.
    """

    def __init__(self, python: str, dataset: Path, params: dict[str, Any], training: dict[str, Any]) -> None:
        request = json.dumps({"dataset": str(dataset), "params": params, "training": training})
        self._process = subprocess.Popen(
            [python, __file__, request],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        self.trained = self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"lerobot's process ended with code {self._process.wait()}")
        return json.loads(line)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def reset(self) -> None:
        """Begin an episode."""
        self._send("reset")

    def __call__(self, observation: dict[str, Any]) -> Any:
        """Return the next action."""
        self._send([float(value) for value in observation[STATE]])
        return np.array(self._receive(), np.float32)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def read_arrays(dataset: Path) -> tuple[Any, Any, Any]:
    """Return states, actions, and for each frame the last frame of its episode."""
    import pyarrow.parquet as pq

    columns: dict[str, list[Any]] = {STATE: [], ACTION: [], "episode_index": []}
    for path in sorted((dataset / "data").rglob("*.parquet")):
        table = pq.read_table(path, columns=list(columns))
        for name, parts in columns.items():
            parts.append(np.array(table[name].to_pylist(), np.int64 if name == "episode_index" else np.float32))
    state, action, episode = (np.concatenate(parts) for parts in columns.values())
    return state, action, np.searchsorted(episode, episode, side="right") - 1


def _statistics(values: Any) -> dict[str, Any]:
    import torch

    return {"mean": torch.from_numpy(values.mean(0)), "std": torch.from_numpy(values.std(0))}


def _make_policy(params: dict[str, Any], state: Any, action: Any) -> tuple[Any, Any, Any]:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.act.processor_act import make_act_pre_post_processors

    # Without a camera its ACT wants an environment state beside the robot's: the same numbers, normalised alike.
    config = ACTConfig(
        **params, pretrained_backbone_weights=None, device="cpu", push_to_hub=False,
        input_features={
            STATE: PolicyFeature(FeatureType.STATE, state.shape[1:]),
            ENVIRONMENT_STATE: PolicyFeature(FeatureType.ENV, state.shape[1:]),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, action.shape[1:])},
        normalization_mapping=dict.fromkeys(("VISUAL", "STATE", "ENV", "ACTION"), NormalizationMode.MEAN_STD),
    )  # fmt: skip
    seen = _statistics(state)
    before, after = make_act_pre_post_processors(
        config, {STATE: seen, ENVIRONMENT_STATE: seen, ACTION: _statistics(action)}
    )
    return ACTPolicy(config), before, after


def _train(policy: Any, before: Any, arrays: tuple[Any, Any, Any], training: dict[str, Any]) -> dict[str, float]:
    import torch
    from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig

    state, action, last = arrays
    steps, window = training["training_steps"], np.arange(policy.config.chunk_size)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=training["lr"], weight_decay=training["weight_decay"])
    schedule = CosineDecayWithWarmupSchedulerConfig(
        num_warmup_steps=training["warmup_steps"], num_decay_steps=steps, peak_lr=training["lr"], decay_lr=0.0
    ).build(optimizer, steps)
    generator, order = np.random.default_rng(training["seed"]), np.zeros(0, np.int64)
    policy.train()
    began, before_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        if len(order) < training["batch_size"]:
            order = np.concatenate([order, generator.permutation(len(state))])
        chosen, order = order[: training["batch_size"]], order[training["batch_size"] :]
        frames = chosen[:, None] + window
        batch = before({
            STATE: torch.from_numpy(state[chosen]), ENVIRONMENT_STATE: torch.from_numpy(state[chosen]),
            ACTION: torch.from_numpy(action[np.minimum(frames, last[chosen, None])]),
            "action_is_pad": torch.from_numpy(frames > last[chosen, None]),
        })  # fmt: skip
        loss, _ = policy.forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    policy.eval()
    return {"train_s": time.perf_counter() - began, "train_cpu_s": time.process_time() - before_cpu, "steps": steps}


def serve() -> None:
    """Train as asked for on the command line, then answer observations with actions until the input ends."""
    import logging
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    answers, sys.stdout = sys.stdout, sys.stderr  # lerobot prints
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(request["training"]["seed"])
    arrays = read_arrays(Path(request["dataset"]))
    policy, before, after = _make_policy(request["params"], arrays[0], arrays[1])
    trained = _train(policy, before, arrays, request["training"])
    print(json.dumps(trained), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if message == "reset":
            policy.reset()
            continue
        state = torch.tensor(message)
        action = after(policy.select_action(before({STATE: state, ENVIRONMENT_STATE: state})))
        print(json.dumps(action[0].tolist()), file=answers, flush=True)


if __name__ == "__main__":
    serve()
