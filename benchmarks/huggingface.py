"""CPU time per step of the Hugging Face door and engine over transformers alone: same model, data, optimizer, logging.

Batches lie ready, so that the trainers are measured and not the data. With `samples` as an argument, batches are put
together from single samples instead, each of which Etude gives a random stream of its own: seeding the three global
generators takes about 10 us a sample, and is what makes augmentation the same on any resume, worker or rank.

Each round runs all of them, in turn from either end; the median over the rounds of the ratio within a round counts.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.overhead import Batch, loss_of, make_batches, make_model
from benchmarks.spread import Spread

LOG_EVERY = 25
GOAL = 1.03


class Samples(Dataset[Batch]):
    """Samples in memory, one at a time."""

    def __init__(self, width: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, width, generator=generator)
        self.y = torch.randn(samples, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.y[index]}


class Stopwatch:
    """CPU time per step of every window from one log to the next."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def see(self, step: int) -> None:
        """Take note of the end of a step."""
        if step % LOG_EVERY == 1:
            self.marks.append(time.process_time())

    @property
    def windows(self) -> list[float]:
        """Seconds per step in each."""
        return [(after - before) / LOG_EVERY for before, after in pairwise(self.marks)]


def watching(watch: Stopwatch) -> Any:
    """Return a transformers callback that tells the stopwatch."""
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.see(state.global_step)

    return Watch()


def arguments(folder: str, steps: int) -> Any:
    """Return the arguments that both trainers share."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, learning_rate=1e-3, lr_scheduler_type="cosine", max_grad_norm=1.0,
        logging_steps=LOG_EVERY, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip


def plain(model: nn.Module, loader: DataLoader[Batch], steps: int) -> list[float]:
    """Train with transformers alone, given the loader."""
    import transformers

    class Plain(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False, **kwargs: Any) -> Any:
            return loss_of(model, inputs)

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    with tempfile.TemporaryDirectory() as folder:
        watch, data = Stopwatch(), loader.dataset
        Plain(model=model, args=arguments(folder, steps), train_dataset=data, callbacks=[watching(watch)]).train()
        return watch.windows


def door(model: nn.Module, loader: DataLoader[Batch], steps: int) -> list[float]:
    """Train with `BaseTrainer`."""
    from etude.engines.huggingface import BaseTrainer

    class Ours(BaseTrainer):
        def compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False) -> Any:
            return loss_of(model, inputs)

    with tempfile.TemporaryDirectory() as folder:
        watch = Stopwatch()
        Ours(model=model, args=arguments(folder, steps), train_loader=loader, callbacks=[watching(watch)]).train()
        return watch.windows


def engine(model: nn.Module, loader: DataLoader[Batch], steps: int) -> list[float]:
    """Train an `etude.Trainer` on the engine."""
    from etude import Callback, Trainer, TrainingConfiguration
    from etude.engines.huggingface import HuggingFaceEngine

    class Ours(Trainer):
        def compute_loss(self, policy: Any, batch: Batch) -> Any:
            return loss_of(policy, batch)

    watch = Stopwatch()

    class Watch(Callback):
        def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
            watch.see(trainer.progress.step)

    config = TrainingConfiguration(training_steps=steps, schedule="cosine", log_every=LOG_EVERY, num_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        Ours(
            model, loader, engine=HuggingFaceEngine(), config=config, run=folder, loggers=[], callbacks=[Watch()],
            show_progress=False,
        ).fit()  # fmt: skip
        return watch.windows


CONTENDERS: dict[str, Callable[[nn.Module, DataLoader[Batch], int], list[float]]] = {
    "transformers": plain,
    "BaseTrainer": door,
    "engine": engine,
}


def measure(
    width: int, depth: int, batch: int, steps: int, rounds: int, by_sample: bool
) -> tuple[float, dict[str, Spread]]:
    """Return the CPU seconds per step of transformers alone, and the others' ratios to it within each round."""
    ready, samples = make_batches(width, batch), Samples(width, 16 * batch)
    base: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        spent: dict[str, float] = {}
        for name in sorted(CONTENDERS, reverse=bool(number % 2)):
            loader: DataLoader[Any] = DataLoader(ready, batch_size=None)  # type: ignore[arg-type]  # any sequence
            if by_sample:
                loader = DataLoader(samples, batch_size=batch, shuffle=True)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                spent[name] = min(CONTENDERS[name](make_model(width, depth), loader, steps))
        base.append(spent["transformers"])
        for name, seconds in spent.items():
            ratios[name].append(seconds / spent["transformers"])
    return median(base), {name: Spread.of(found) for name, found in ratios.items() if name != "transformers"}


def main(by_sample: bool = False) -> dict[str, float]:
    """Print both tables and return the larger of our ratios in each."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for label, shape in (("~1 ms step", (128, 3, 256, 77, 25)), ("~13 ms step", (512, 6, 256, 27, 9))):
        base, ratios = measure(*shape, by_sample)
        print(f"Hugging Face, {label} ({base * 1000:.2f} ms), CPU time per step over transformers alone:")
        for name, ratio in ratios.items():
            goal = "" if by_sample else f"  (goal <= {GOAL})"
            print(f"  {name:14s} {ratio}  {(ratio.median - 1) * base * 1e6:+8.0f} us{goal}", flush=True)
        found[label] = max(ratio.median for ratio in ratios.values())
    return found


if __name__ == "__main__":
    main(by_sample="samples" in sys.argv[1:])
