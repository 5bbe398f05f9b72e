"""What runs in a worker of Ray Train: the torch engine's session, in the process group that Ray has made."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
import ray.train

from etude.callbacks import ShowProgress
from etude.engines.ray.actors import Actors
from etude.engines.ray.log_forwarding import ForwardedDisplay, forwarding
from etude.engines.ray.online import beside_actors
from etude.engines.ray.outcome import describe
from etude.engines.ray.shipping import collect_weights, unpack
from etude.errors import ConfigError, Interrupted, RankError
from etude.loop.distributed import Group
from etude.loop.session import Session
from etude.loop.strategy import make_strategy
from etude.runs.directory import Run
from etude.runs.durable import is_this_host

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")

PEERS_WITHIN_S = 5.0
"""Time for the other ranks to fail too, before one that failed alone ends the group."""
STRATEGY: dict[str, Any] = {"strategy": "auto", "find_unused_parameters": False, "sync_batch_norm": True}
"""What engines say about how ranks share a policy, and what holds where one does not."""
PREDECESSOR_WITHIN_S = 60.0
"""Time for the workers of a driver that was killed to be ended by Ray."""


@dataclass(frozen=True)
class Assignment:
    """What the driver tells every worker."""

    mailbox: Any
    parcel: Any
    """Reference to what is unpacked into the trainer."""
    resume: str
    device: str
    strategy: Literal["auto", "ddp", "fsdp"]
    find_unused_parameters: bool
    sync_batch_norm: bool
    levels: dict[str, int] = field(default_factory=dict)
    actors: Actors | None = None
    """Where online rows come from and weights go to, if something is played."""


def work(config: dict[str, Assignment]) -> None:
    """Train as one rank of the group, and deliver how it ended.

    Ray Train is told of lost processes alone, which starting again may mend. Errors of the code go to the driver.
    """
    task = config["task"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    with forwarding(task.mailbox.post.remote, task.levels):
        try:
            outcome = _train(task, rank)
        except RankError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver raises it
            outcome = describe(error, rank)
    ray.get(task.mailbox.deliver.remote(rank, outcome))
    if "error" in outcome and not ray.get(task.mailbox.all_delivered.remote(world, PEERS_WITHIN_S)):
        os._exit(1)  # the others wait for this rank in a collective: they are to see it go, as under torchrun


def _train(task: Assignment, rank: int) -> dict[str, Any]:
    group = Group.join(task.device)
    # Rank 0 speaks for all: a signal may come while the ranks begin one by one.
    found = _exchange(group, ray.get(task.mailbox.enter.remote(rank)))
    if found["failed"]:
        return {}  # an error of the code, which a new group would only repeat
    if found["signal"]:
        raise Interrupted(found["signal"])
    if found["attempt"] and group.is_main:
        log.warning("a worker was lost; Ray has started the group again, which goes on from the newest checkpoint")
    trainer = unpack(ray.get(task.parcel), ray.get)
    SignalRelay(task.mailbox, trainer).start()
    if trainer.show_progress and group.is_main:
        trainer.callbacks.append(ShowProgress(ForwardedDisplay(task.mailbox.post.remote)))
    trainer.show_progress = False
    if task.actors is not None:
        trainer.data = beside_actors(trainer.data, task.actors)
    if group.is_main:
        _wait_for_predecessor(trainer.run_request)
    # A group that Ray has started again goes on from where the last one had come.
    again = found["attempt"] and (task.resume == "never" or _has_checkpoints(trainer.run_request))
    resume = _exchange(group, "auto" if again else task.resume)
    strategy = make_strategy(task.strategy, group, task.find_unused_parameters, task.sync_batch_norm)
    with Session(trainer, group, strategy).running(resume) as session:
        while not session.finished:
            session.take_step()
        result = session.finish()
        delivered = {"result": result, **collect_weights(session)}
    return delivered if group.is_main else {}


def train_beside(trainer: Trainer, actors: Actors, resume: str, **options: Any) -> None:
    """Train as one worker of a Ray Train job that is not ours, on what others play; report the last metrics."""
    group, engine = Group.join(trainer.config.device), trainer.engine
    trainer.data = beside_actors(trainer.data, actors, **options)
    kind, *flags = (getattr(engine, name, default) for name, default in STRATEGY.items())
    strategy = make_strategy(kind, group, *flags)
    if resume != "never" and _has_checkpoints(Run(Path(str(trainer.run_request)))):
        resume = "auto"
    with Session(trainer, group, strategy).running(resume) as session:
        while not session.finished:
            session.take_step()
        result = session.finish()
    ray.train.report(dict(result.metrics))


def experiment_name() -> str:
    """Return the name that the Ray Train job has given itself."""
    return str(ray.train.get_context().get_experiment_name())


def _exchange(group: Group, value: Any) -> Any:
    """Return the value of rank 0."""
    try:
        return group.gather(value)[0]
    except RuntimeError as error:
        raise RankError(f"a rank was lost before training began; ending rank {group.rank}") from error


def _has_checkpoints(run: Any) -> bool:
    return isinstance(run, Run) and any(run.checkpoints_dir.glob("step-*"))


def _wait_for_predecessor(run: Any) -> None:
    """Wait for a worker that still writes to the run directory: Ray ends it soon after its driver or its group."""
    deadline = time.monotonic() + PREDECESSOR_WITHIN_S
    while isinstance(run, Run) and _is_written_by_another(run.status()):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"a Ray worker (process {run.status().get('pid')}) still trains in {run.dir}; end it, or name another"
            )
        time.sleep(0.05)


def _is_written_by_another(status: dict[str, Any]) -> bool:
    pid = status.get("pid")
    if status.get("state") != "running" or not is_this_host(status.get("host", "")) or pid == os.getpid():
        return False
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class SignalRelay(threading.Thread):
    """Waits for a signal that the driver got, and notes it where the session looks for one."""

    def __init__(self, mailbox: Any, trainer: Trainer) -> None:
        super().__init__(name="etude-signal-relay", daemon=True)
        self._mailbox, self._trainer = mailbox, trainer

    def run(self) -> None:
        """Hand the signal on, as soon as there is a session to take it."""
        number = ray.get(self._mailbox.wait_for_interrupt.remote())
        while not hasattr(self._trainer, "session"):
            time.sleep(0.02)
        self._trainer.session.signals.received = number


def as_text(resume: str | Path) -> str:
    """Return a request to resume in a form that means the same on every host."""
    return str(resume) if str(resume) in ("auto", "never") else str(Path(resume).absolute())
