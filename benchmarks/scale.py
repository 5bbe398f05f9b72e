"""What each part of training costs against the number of ranks: messages, bytes and memory, counted and never timed.

`python -m benchmarks.scale` trains a tiny sharded policy on 1, 2, 8 and 32 processes of this machine with counters
around the group's collectives, the watch's store and the staging of checkpoints, and prints one table; `--ranks 1,2`
chooses others, `--width 64` makes the policy larger. Where Ray is installed, a second table has what as many rollout
workers send. docs/explanation/scale.md continues it on paper.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # once here, not in every child
import torch.distributed as dist
from torch import Tensor, nn

from etude import Callback, Trainer, TrainingConfiguration
from etude.data.order import Order
from etude.engines.torch import TorchEngine
from etude.loop import deferred, watchdog
from etude.loop.session import Session
from etude.loop.sharding import local_tensor

RANKS = (1, 2, 8, 32)
STEPS, LOG_EVERY, SAVE_EVERY = 6, 2, 3
BEAT_S, BEATS = 0.2, 4
_ROWS: dict[str, str] = {
    "order: bytes held for 10^3 rows": "order_small",
    "order: bytes held for 10^9 rows": "order_large",
    "gathers: messages of ours a step": "step_messages",
    "gathers: bytes of ours a step": "step_bytes",
    "logs: messages a row": "log_messages",
    "logs: bytes a row": "log_bytes",
    "weights: bytes of parameters held": "parameters",
    "weights: bytes that sharding moves a step": "sharding_bytes",
    "building: largest tensor made at a time": "building",
    "watch: messages a beat": "beat_messages",
    "watch: bytes a beat, leader of the host": "beat_bytes",
    "watch: bytes a beat, any other": "beat_bytes_other",
    "checkpoints: bytes of state held": "state",
    "checkpoints: bytes staged": "staged",
    "checkpoints: files written": "files",
    "checkpoints: messages a save": "save_messages",
    "checkpoints: bytes of messages a save": "save_bytes",
}


class Stack(nn.Module):
    """A tiny policy of blocks, built when training starts."""

    needs_spec = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.is_built = width, False

    def build(self, spec: Any) -> None:
        """Make the layers."""
        self.inp = nn.Linear(4, self.width)
        self.blocks = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(4))
        self.out = nn.Linear(self.width, 1)
        self.is_built = True

    def forward(self, x: Tensor) -> Tensor:
        """Return one number a row."""
        x = self.inp(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        found: Tensor = self.out(x)
        return found


class Regression(Trainer):
    """Learn a sum."""

    def compute_loss(self, policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean square."""
        return {"loss": (policy(batch["x"]) - batch["y"]).square().mean()}


class Counts:
    """Messages and bytes by the part of training that causes them."""

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.part = "start"

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Put what happens down to a part."""
        before, self.part = self.part, part
        self.times[part] += 1
        try:
            yield
        finally:
            self.part = before

    def add(self, part: str, *tensors: Tensor) -> None:
        """Count one message."""
        self.messages[part] += 1
        self.nbytes[part] += sum(tensor.nbytes for tensor in tensors)


def count_collectives(counts: Counts) -> None:
    """Have every collective that passes through Python counted: ours by the part under way, FSDP's as sharding."""

    def wrap(name: str, sharding: bool) -> None:
        real: Callable[..., Any] = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            aside = options.get("group") is not None and not sharding
            part = "sharding" if sharding else "save" if aside else counts.part
            given = [*args, *options.values()]
            flat = [t for value in given for t in (value if isinstance(value, list) else [value])]
            counts.add(part, *(t for t in flat if isinstance(t, Tensor)))
            return real(*args, **options)

        setattr(dist, name, counted)

    for name in ("all_reduce", "all_gather", "broadcast"):
        wrap(name, sharding=False)
    for name in ("all_gather_single", "reduce_scatter_single"):
        wrap(name, sharding=True)
    for method, part in (("take_step", "step"), ("log_training", "log"), ("save", "save")):
        _attribute(counts, method, part)


def _attribute(counts: Counts, method: str, part: str) -> None:
    real: Callable[..., Any] = getattr(Session, method)

    def attributed(self: Session, *args: Any, **options: Any) -> Any:
        with counts.during(part):
            return real(self, *args, **options)

    setattr(Session, method, attributed)


class CountedStore:
    """The watch's store, with its messages counted."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            found = call(*args)
            parts = [*args, *(found if isinstance(found, list) else [found])]
            self.calls.append((name, sum(len(part) for part in parts if isinstance(part, str | bytes))))
            return found

        return counted

    def per_beat(self) -> tuple[float, float]:
        """Return messages and bytes from one report of this rank to the next."""
        at = [place for place, (name, _) in enumerate(self.calls) if name == "set"]
        if len(at) < 2:
            return 0.0, 0.0
        between = self.calls[at[0] : at[-1]]
        return len(between) / (len(at) - 1), sum(size for _, size in between) / (len(at) - 1)


class Look(Callback):
    """Notes what a rank holds and stages, and lets the watch beat a few times."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.found: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count the parameters of this rank, and have the watch counted from here on."""
        self.found["parameters"] = sum(local_tensor(p).nbytes for p in trainer.policy.parameters())
        board = getattr(trainer.session.watchdog, "_board", None)
        self.store = None if board is None else CountedStore(board._store)
        if board is not None:
            board._store = self.store

    def on_step_end(self, trainer: Trainer, metrics: Any) -> None:
        """Leave out the first step, which gets memory ready for the first save."""
        if trainer.progress.step == 1:
            for kept in (self.counts.messages, self.counts.nbytes):
                kept["step"] = kept["sharding"] = 0

    def on_save(self, trainer: Trainer, step: int) -> None:
        """Compare what is held with what was staged."""
        session, store = trainer.session, trainer.session.record.store
        assert store is not None
        self.found["state"] = sum(tensor.nbytes for tensor in session.written_tensors())
        self.found["staged"] = sum(file.nbytes for file in store._staged.values())
        self.found["files"] = len(store._staged)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Wait until the watch has spoken often enough."""
        deadline = time.monotonic() + 120
        while self.store is not None and time.monotonic() < deadline:
            if sum(name == "set" for name, _ in self.store.calls) > BEATS:
                break
            time.sleep(0.05)
        trainer.session.group.barrier()
        if self.store is not None:
            messages, nbytes = self.store.per_beat()
            leads = trainer.session.watchdog._board.leads
            self.found |= {"beat_messages": messages, "beat_bytes" if leads else "beat_bytes_other": nbytes}


def count_order(found: dict[str, float]) -> None:
    """Note what the order of an epoch holds in memory, for few rows and for a billion."""
    for name, length in (("order_small", 1000), ("order_large", 10**9)):
        order = Order(length, seed=0)
        order.at(length - 4, 8)  # over the end of an epoch, where most is held
        found[name] = float(_held(order))


def _held(value: Any, depth: int = 4) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if depth and isinstance(value, dict):
        return sum(_held(item, depth - 1) for item in value.values())
    if depth and isinstance(value, list | tuple):
        return sum(_held(item, depth - 1) for item in value)
    return _held(vars(value), depth - 1) if depth and hasattr(value, "__dict__") else 0


def work(out: Path, width: int) -> None:
    """Train as one rank, and write down what was counted."""
    counts = Counts()
    look = Look(counts)
    count_collectives(counts)
    watchdog.INTERVAL_S = BEAT_S
    deferred.SMALL_BYTES = 64
    largest = [0]
    make = deferred.Deferral.make

    def measured(self: Any, ref: Any) -> Tensor:
        found = make(self, ref)
        largest[0] = max(largest[0], found.nbytes)
        return found

    deferred.Deferral.make = measured  # type: ignore[method-assign]
    rows = {"x": torch.randn(256, 4, generator=torch.Generator().manual_seed(0))}
    config = TrainingConfiguration(
        training_steps=STEPS, batch_size=1, log_every=LOG_EVERY, save_every=SAVE_EVERY, ema_decay=0.9
    )
    trainer = Regression(
        Stack(width), {**rows, "y": rows["x"].sum(1, keepdim=True)}, config=config, run=out / "run",
        engine=TorchEngine(strategy="fsdp"), loggers=[], callbacks=[look], show_progress=False,
    )  # fmt: skip
    trainer.fit()
    found = look.found
    if trainer.rank == 0:
        count_order(found)
    found["building"] = float(largest[0])
    saves = counts.times["save"] or 1
    found["step_messages"], found["step_bytes"] = (c["step"] / (STEPS - 1) for c in (counts.messages, counts.nbytes))
    found["log_messages"], found["log_bytes"] = (
        c["log"] / counts.times["log"] for c in (counts.messages, counts.nbytes)
    )
    found["save_messages"], found["save_bytes"] = (c["save"] / saves for c in (counts.messages, counts.nbytes))
    found["sharding_bytes"] = counts.nbytes["sharding"] / (STEPS - 1)
    (out / f"rank{trainer.rank}.json").write_text(json.dumps(found))


def run(world: int, width: int) -> dict[str, float]:
    """Return the largest count of any rank, by what is counted."""
    with tempfile.TemporaryDirectory(prefix="etude-scale-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = [_fork(Path(folder), width, rank, world, port) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"a rank of {world} failed: exit codes {codes}")
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {key: max(found[key] for found in ranks if key in found) for key in set().union(*ranks)}


def _fork(out: Path, width: int, rank: int, world: int, port: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )  # fmt: skip
        work(out, width)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked child must never return into the parent's stack
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Print what was counted, a column for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--only", choices=["ranks", "rollouts"], help="one of the tables; both unless given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [int(number) for number in options.ranks.split(",")]
    if options.only != "rollouts":
        columns = [run(number, options.width) for number in numbers]
        _print("of one rank, the largest of all", [f"{n} ranks" for n in numbers], _ROWS, columns)
    if options.only != "ranks" and find_spec("ray") is not None:
        from benchmarks import scale_ray  # after the last fork: Ray has threads

        columns = scale_ray.count_all(numbers)
        _print("of one of them", [f"{n} rollout workers" for n in numbers], scale_ray.ROWS, columns)


def _print(first: str, heads: list[str], rows: dict[str, str], columns: list[dict[str, float]]) -> None:
    print(f"| {first} | " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * len(heads))
    for label, key in rows.items():
        print(f"| {label} | " + " | ".join(_number(column.get(key)) for column in columns) + " |")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value == int(value) or value > 100 else f"{value:.1f}"


if __name__ == "__main__":
    main()
