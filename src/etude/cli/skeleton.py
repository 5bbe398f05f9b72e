"""`etude new trainer`: three files that run as they are and show where to change what."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from etude.cli.output import say
from etude.errors import ConfigError

TRAINER = '''"""{title}: a trainer with a loss of its own."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from etude import Loss, Trainer
from etude.registry import TRAINER_REGISTRY


@TRAINER_REGISTRY.register("{name}")
class {class_name}(Trainer):
    """Train a classifier on smoothed labels.

    Args:
        smoothing: Share of each label that is spread over all classes.
    """

    def __init__(self, *args: Any, smoothing: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.smoothing = smoothing

    def compute_loss(self, policy: Any, batch: Any) -> Loss:
        """Return the summed loss of one batch, how many samples it sums over, and means worth logging."""
        logits = policy.predict(batch)
        labels = batch[policy.action_name].reshape(-1).long()
        total = functional.cross_entropy(logits, labels, label_smoothing=self.smoothing, reduction="sum")
        accuracy = (logits.detach().argmax(dim=1) == labels).float().mean()
        return Loss(total, len(labels), {{"accuracy": accuracy}})
'''

CONFIG = """# Train with: etude train {name}.yaml
plugins: [{name}.py]

policy:
  type: mlp
  params:
    hidden: [64]

data:
  type: digits

eval_data:
  type: digits
  params:
    split: validation

trainer:
  type: {name}
  params:
    smoothing: 0.1

training:
  lr: 1e-3
  batch_size: 64
  training_steps: 500
  evaluate_every: 100
  save_every: 100
"""

TEST = '''"""{title} really trains: run with `pytest test_{name}.py`."""

from __future__ import annotations

from pathlib import Path

from etude.config.build import build
from etude.config.load import load

CONFIG = Path(__file__).with_name("{name}.yaml")


def test_{name}_learns_better_than_chance(tmp_path: Path) -> None:
    loaded = load(CONFIG, [f"run.root={{tmp_path}}", "training.training_steps=40", "loggers=[]"])
    result = build(loaded).fit()
    assert result.steps == 40
    assert result.metrics["eval/accuracy"] > 0.3  # chance is 0.1
'''


def write_trainer(name: str, directory: Path) -> None:
    """Write NAME.py, NAME.yaml and test_NAME.py; refuse to replace anything."""
    name = name.replace("-", "_")
    _require_good_name(name)
    class_name = "".join(part.capitalize() for part in name.split("_")).removesuffix("Trainer") + "Trainer"
    files = {f"{name}.py": TRAINER, f"{name}.yaml": CONFIG, f"test_{name}.py": TEST}
    taken = [str(directory / file) for file in files if (directory / file).exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)}: already there, and not replaced; choose another name or --dir")
    directory.mkdir(parents=True, exist_ok=True)
    title = class_name.removesuffix("Trainer")
    for file, template in files.items():
        with (directory / file).open("x", encoding="utf-8") as stream:
            stream.write(template.format(name=name, class_name=class_name, title=title))
        say(f"wrote {directory / file}")
    say(f"train it:  etude train {directory / name}.yaml")
    say(f"test it:   pytest {directory / f'test_{name}.py'}")


def _require_good_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot name a trainer; use lower-case words such as label_smoothing")
    from etude.registry import TRAINER_REGISTRY

    if name in TRAINER_REGISTRY or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is the name of a trainer or module that exists already; choose another")
