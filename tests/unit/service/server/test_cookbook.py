"""tinker-cookbook's own loops, unmodified, against a service: where ETUDE_COOKBOOK_PYTHON names a Python that has them.

The recipes ask for models, tokenizers and datasets by their names on a hub. A folder of such a name, below the one they
are started in, is found first; so they run without a network.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.policies.language.source import ModelSource
from tests.served import KEY, Served

pytest.importorskip("peft")
pytest.importorskip("fastapi")

PYTHON = os.environ.get("ETUDE_COOKBOOK_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="ETUDE_COOKBOOK_PYTHON names no Python that has tinker-cookbook"),
]
MODEL = "meta-llama/Llama-3.2-1B"
"""A model that the recipes have a way to write prompts for which suits any tokenizer; behind it is SmolLM2."""
FRUIT = ("strawberry", "raspberry", "a strawberry", "strawberry, the fruit")
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and two datasets under the names that the recipes ask for."""
    folder = tmp_path_factory.mktemp("cookbook")
    ModelSource("smollm2").load_tokenizer().save_pretrained(folder / MODEL)
    talks = [
        [{"role": "user", "content": f"What comes after {n}?"}, {"role": "assistant", "content": f"{n + 1}."}]
        for n in range(16)
    ]
    _write(folder / "HuggingFaceH4/no_robots", [{"messages": talk} for talk in talks])
    sums = [{"question": f"How many r's are in {word}?", "answer": "#### 3"} for word in FRUIT * 4]
    _write(folder / "openai/gsm8k", sums)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("service") / "state"
    found = Served(state, "--model", f"{MODEL}=smollm2").start()
    yield found
    found.stop()
    assert "Traceback" not in found.log.read_text()


def _run(recipe: str, place: Path, served: Served, *options: str) -> list[dict[str, Any]]:
    """Run a recipe from its command line, and return the metrics that it wrote."""
    assert PYTHON is not None
    log = place / "logs" / recipe
    command = [
        PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={served.url}", f"model_name={MODEL}",
        f"log_path={log}", *options,
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env |= {"HF_HOME": str(place / "hub")}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_loop_learns(place: Path, served: Served) -> None:
    rows = _run("sl_loop", place, served, "batch_size=4", "learning_rate=1e-3", "lora_rank=8", "save_every=2")
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]


def test_the_reinforcement_loop_draws_and_trains(place: Path, served: Served) -> None:
    options = ("batch_size=2", "group_size=4", "max_tokens=24", "max_steps=2", "lora_rank=8", "save_every=1")
    rows = [row for row in _run("rl_loop", place, served, *options) if "reward/total" in row]
    assert len(rows) == 2
    # Which answers are right is a matter of luck: a step is made wherever those to one question differ.
    assert all(0 <= row["reward/total"] <= 1 for row in rows)
    assert all("grad_norm:mean" in row for row in rows if row["reward/total"] not in (0, 0.5, 1))


def test_the_supervised_trainer_learns_and_evaluates(place: Path, served: Served) -> None:
    options = ("dataset=no_robots", "batch_size=4", "learning_rate=1e-3", "lora_rank=8", "eval_every=2", "save_every=2")
    rows = _run("chat_sl.train", place, served, *options)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]


def test_the_reinforcement_trainer_draws_and_trains(place: Path, served: Served) -> None:
    options = ("env=arithmetic", "groups_per_batch=2", "group_size=4", "max_steps=2", "lora_rank=8", "eval_every=0")
    rows = _run("math_rl.train", place, served, *options)
    assert len([row for row in rows if "env/all/reward/total" in row]) == 2
