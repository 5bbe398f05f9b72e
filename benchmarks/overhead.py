"""CPU time per step of each trainer over a bare PyTorch loop: same model, data, optimizer, clipping, schedule, logging.

The optimizer is the fused AdamW everywhere: Etude's and the Hugging Face Trainer's default, and the fastest.

Every contender trains on the same pre-made batches in the same process. Rounds are interleaved, each contender is
compared with the bare loop of the same round, and the median of these ratios counts; their range is printed beside it.
The bare loop leaves the gradients alone where no clipping is needed, as Etude does; one workload always clips.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.spread import Spread
from etude import Trainer, TrainingConfiguration
from etude.data.stream import StreamData

LOG_EVERY = 50
Batch = dict[str, Tensor]
Contender = Callable[[nn.Module, list[Batch], int], float]
clip_norm = 1.0  # of the workload that is being measured


def make_model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def make_batches(width: int, samples: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(samples, width, generator=generator), "y": torch.randn(samples, 1, generator=generator)}
        for _ in range(16)
    ]


def loss_of(model: Any, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def cosine(steps: int) -> Callable[[int], float]:
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def bare(model: nn.Module, batches: list[Batch], steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "metrics.jsonl", "w") as log:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(steps))
        parameters = list(model.parameters())
        window = 0.0
        started = time.process_time()
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batches[step % len(batches)])
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if norm > clip_norm:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
            optimizer.step()
            schedule.step()
            window += loss.item()
            if (step + 1) % LOG_EVERY == 0:
                row = {"step": step + 1, "loss": window / LOG_EVERY, "norm": float(norm)}
                log.write(json.dumps({**row, "lr": schedule.get_last_lr()[0]}) + "\n")
                log.flush()
                window = 0.0
        return time.process_time() - started


class _Etude(Trainer):
    def compute_loss(self, policy: Any, batch: Batch) -> dict[str, Tensor]:
        return {"loss": loss_of(policy, batch)}


def etude(model: nn.Module, batches: list[Batch], steps: int) -> float:
    from etude.loop.distributed import Group
    from etude.loop.session import Session
    from etude.loop.strategy import SingleProcess

    config = TrainingConfiguration(
        training_steps=steps, batch_size=len(batches[0]["x"]), schedule="cosine", log_every=LOG_EVERY, num_threads=1,
        clip_norm=clip_norm,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Etude(model, StreamData(batches, batched=True), config=config, run=folder, show_progress=False)
        group = Group()
        with Session(trainer, group, SingleProcess(group)).running("never") as session:
            started = time.process_time()
            while session.progress.step < steps - 1:  # the last step also saves
                session.take_step()
            spent = time.process_time() - started
            session.take_step()
            session.finish()
        return spent


def lightning_trainer(model: nn.Module, batches: list[Batch], steps: int) -> float:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.spent = 0.0

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = loss_of(self.model, batch)
            self.log("loss", loss)
            return loss

        def on_train_start(self) -> None:
            self.spent = -time.process_time()

        def on_train_end(self) -> None:
            self.spent += time.process_time()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with tempfile.TemporaryDirectory() as folder:
        module = Module()
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", gradient_clip_val=clip_norm, log_every_n_steps=LOG_EVERY,
            default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            logger=lightning.pytorch.loggers.CSVLogger(folder),
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(_Repeat(batches, steps), batch_size=None))
        return module.spent


def fabric(model: nn.Module, batches: list[Batch], steps: int) -> float:
    import lightning

    runtime = lightning.Fabric(accelerator="cpu")
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, cosine(steps))
    wrapped, optimizer = runtime.setup(model, plain)
    loader = runtime.setup_dataloaders(torch.utils.data.DataLoader(_Repeat(batches, steps), batch_size=None))
    window = 0.0
    started = time.process_time()
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch)
        runtime.backward(loss)
        runtime.clip_gradients(wrapped, optimizer, max_norm=clip_norm)
        optimizer.step()
        schedule.step()
        window += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            runtime.log_dict({"loss": window / LOG_EVERY})
            window = 0.0
    return time.process_time() - started


def accelerate_loop(model: nn.Module, batches: list[Batch], steps: int) -> float:
    from accelerate import Accelerator

    runtime = Accelerator(cpu=True)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, cosine(steps))
    loader = torch.utils.data.DataLoader(_Repeat(batches, steps), batch_size=None)
    wrapped, optimizer, loader, schedule = runtime.prepare(model, plain, loader, scheduler)
    window = 0.0
    started = time.process_time()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch)
        runtime.backward(loss)
        runtime.clip_grad_norm_(wrapped.parameters(), clip_norm)
        optimizer.step()
        schedule.step()
        window += loss.item()
    return time.process_time() - started


def hf_trainer(model: nn.Module, batches: list[Batch], steps: int) -> float:
    import transformers

    class Clock(transformers.TrainerCallback):
        spent = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.spent = -time.process_time()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.spent += time.process_time()

    class HF(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False, **kwargs: Any) -> Any:
            return loss_of(model, inputs)

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(torch.utils.data.DataLoader(_Repeat(batches, steps), batch_size=None))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, learning_rate=1e-3, lr_scheduler_type="cosine", max_grad_norm=clip_norm,
            logging_steps=LOG_EVERY, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        clock = Clock()
        HF(model=model, args=arguments, train_dataset=batches, callbacks=[clock]).train()
        return clock.spent


class _Repeat(torch.utils.data.Dataset[Batch]):
    def __init__(self, batches: list[Batch], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        if index >= self.steps:
            raise IndexError(index)
        return self.batches[index % len(self.batches)]


CONTENDERS: dict[str, tuple[str | None, Contender]] = {
    "bare PyTorch": (None, bare),
    "Etude": (None, etude),
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate_loop),
    "HF Trainer": ("transformers", hf_trainer),
    "Lightning": ("lightning", lightning_trainer),
}


def measure(
    width: int, depth: int, samples: int, steps: int, rounds: int, only: set[str] | None = None
) -> dict[str, list[float]]:
    """Return the CPU seconds per step of each contender that is installed, one figure for each round."""
    batches = make_batches(width, samples)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (package, contend) in CONTENDERS.items():
            if (package and importlib.util.find_spec(package) is None) or (only and name not in only):
                continue
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                spent = contend(make_model(width, depth), batches, steps) / steps
            found.setdefault(name, []).append(spent)
    return found


WORKLOADS = {
    "~1 ms step": (1.05, 1.0, (128, 3, 256, 150, 15), None),
    "~1 ms step, always clipping": (1.05, 1e-3, (128, 3, 256, 150, 15), {"bare PyTorch", "Etude"}),
    "~13 ms step": (1.02, 1.0, (512, 6, 256, 20, 9), None),
}
"""By name: the goal, the norm to clip to, (width, depth, samples, steps, rounds), and who takes part."""


def main() -> dict[str, tuple[float, float]]:
    """Print a table for each workload and return our median ratios with their goals."""
    global clip_norm
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for label, (goal, norm, shape, only) in WORKLOADS.items():
        clip_norm = norm
        seconds = measure(*shape, only=only)
        base = seconds["bare PyTorch"]
        middle = statistics.median(base)
        print(f"overhead, {label} ({middle * 1000:.2f} ms bare), CPU time per step over a bare loop, median (range):")
        for name, spent in seconds.items():
            ratio = Spread.of([one / bare for one, bare in zip(spent, base)])
            goal_text = f"  (goal <= {goal})" if name == "Etude" else ""
            print(f"  {name:14s} {ratio}  {(statistics.median(spent) - middle) * 1e6:+8.0f} us{goal_text}")
            if name == "Etude":
                found[label] = (ratio.median, goal)
    return found


if __name__ == "__main__":
    main()
