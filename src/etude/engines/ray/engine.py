"""The Ray engine: Ray Train places and restarts the workers, each of which runs the torch engine's session."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import ConfigError, Interrupted, MissingExtraError

try:
    import ray
except ModuleNotFoundError as error:
    raise MissingExtraError("the Ray engine needs ray; run: pip install 'etude[ray]'") from error

from etude.engines.ray import cluster, worker
from etude.engines.ray.actors import beside_driver
from etude.engines.ray.crew import Crew, count_rollout_workers, rollouts_beside
from etude.engines.ray.log_forwarding import Listener, log_levels
from etude.engines.ray.mailbox import Mailbox
from etude.engines.ray.outcome import explain_failure, revive
from etude.engines.ray.shipping import pack, restore_weights
from etude.loop.signals import StopSignals
from etude.runs.directory import Run, resolve_run
from etude.types import Result

with cluster.quiet():
    import ray.train
    import ray.train.torch
    import ray.train.v2.api.config

if TYPE_CHECKING:
    from etude.trainer import Trainer

log = logging.getLogger("etude")
train: Any = ray.train  # its types are those of an older version of itself
TorchTrainer: Any = ray.train.torch.TorchTrainer

PATIENCE_S = 60.0
"""Time after which workers that are not there yet are mentioned."""
START_LIMIT = 10
"""Times that Ray tries to start the workers, each for a minute at most, before it gives up."""


class RayEngine:
    """Train in workers of Ray Train, on this machine or on a cluster; every number is the torch engine's.

    Args:
        num_workers: How many ranks train together.
        resources_per_worker: What each worker needs, such as {CPU: 2}; a CPU, and with `use_gpu` a GPU, unless given.
        use_gpu: Give each worker a GPU.
        max_failures: How often the group is started again, from the newest checkpoint, after a worker has died.
        strategy: How several ranks share a policy: replicated (ddp, the default) or sharded (fsdp).
        find_unused_parameters: Let parameters go without a gradient in some steps, for conditional paths under ddp.
        sync_batch_norm: Normalise over the batches of all ranks where the policy has batch normalisation.
        address: The cluster: HOST:PORT, auto, or local for one of its own. None takes the one that this process is
            connected to or RAY_ADDRESS names, or else starts one on this machine for as long as training lasts.
    """

    def __init__(
        self,
        num_workers: int = 1,
        resources_per_worker: dict[str, float] | None = None,
        use_gpu: bool = False,
        max_failures: int = 0,
        strategy: Literal["auto", "ddp", "fsdp"] = "auto",
        find_unused_parameters: bool = False,
        sync_batch_norm: bool = True,
        address: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"engine.params.num_workers: {num_workers} is too few; one or more")
        if max_failures < 0:
            raise ConfigError(f"engine.params.max_failures: {max_failures} is too few; 0 or more")
        negative = [name for name, amount in (resources_per_worker or {}).items() if amount < 0]
        if negative:
            raise ConfigError(f"engine.params.resources_per_worker.{negative[0]}: less than nothing")
        self.num_workers, self.use_gpu, self.max_failures, self.address = num_workers, use_gpu, max_failures, address
        self.strategy: Literal["auto", "ddp", "fsdp"] = strategy
        self.find_unused_parameters, self.sync_batch_norm = find_unused_parameters, sync_batch_norm
        self.needs: Mapping[str, float] = {
            "CPU": 1.0,
            **({"GPU": 1.0} if use_gpu else {}),
            **(resources_per_worker or {}),
        }
        """What each worker is given."""

    def run(self, trainer: Trainer, resume: str | Path = "auto") -> Result:
        """Train to the requested length and return what came of it."""
        device = self._choose_device(trainer.config.device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("the Ray engine starts its ranks itself; leave torchrun out, and set num_workers")
        beside = count_rollout_workers(trainer, self.num_workers, is_sharded=self.strategy == "fsdp")
        directory = self._choose_directory(trainer, resume)
        # Twice: connecting, Ray puts a handler of its own in place of the first.
        with StopSignals() as early, cluster.quiet(), self._connected(beside) as folder, StopSignals() as signals:
            if early.received:
                raise Interrupted(early.received)
            cluster.require_room(self.num_workers, self.needs, beside)
            parcel = pack(trainer, None if directory is None else directory.absolute(), ray.put)
            mailbox: Any = ray.remote(num_cpus=0, scheduling_strategy=beside_driver())(Mailbox).remote()
            try:
                with rollouts_beside(trainer, directory or folder, parcel, mailbox) as crew:
                    task = worker.Assignment(
                        mailbox, ray.put(parcel), worker.as_text(resume), device, self.strategy,
                        self.find_unused_parameters, self.sync_batch_norm, log_levels(),
                        None if crew is None else crew.actors,
                    )  # fmt: skip
                    failure = self._wait(self._make_fit(task, folder), mailbox, signals, crew)
                outcomes: dict[int, dict[str, Any]] = ray.get(mailbox.outcomes.remote())
            finally:
                ray.kill(mailbox)
            if crew is not None and crew.failure is not None:
                raise crew.failure
            return self._conclude(trainer, directory, outcomes, failure)

    def _connected(self, beside: int) -> AbstractContextManager[Path]:
        return cluster.connected(self.address, self.needs["CPU"] * self.num_workers + beside, self.use_gpu)

    def _choose_device(self, device: str) -> str:
        if device.startswith("cuda") and not self.use_gpu:
            raise ConfigError(f"training.device: {device!r} needs engine.params.use_gpu: true")
        if device == "cpu" and self.use_gpu:
            raise ConfigError("engine.params.use_gpu: training.device is 'cpu'; use auto or cuda")
        return device if self.use_gpu or device != "auto" else "cpu"

    def _choose_directory(self, trainer: Trainer, resume: str | Path) -> Path | None:
        """Choose the run directory here, once: every worker, of every attempt, gets the same."""
        if trainer.run_request is False:
            return None
        directory = resolve_run(trainer.run_request, root=trainer.run_root, name=trainer.name, resume=str(resume)).dir
        trainer.run = Run(directory)
        return directory

    def _make_fit(self, task: worker.Assignment, folder: Path) -> Fit:
        return Fit(
            LeanTrainer(
                worker.work,
                train_loop_config={"task": task},
                scaling_config=train.ScalingConfig(
                    num_workers=self.num_workers, use_gpu=self.use_gpu, resources_per_worker=dict(self.needs)
                ),
                run_config=train.RunConfig(
                    name="train",
                    storage_path=str(folder / "train"),
                    failure_config=train.FailureConfig(
                        max_failures=self.max_failures, controller_failure_limit=START_LIMIT
                    ),
                    logging_config=train.v2.api.config.LoggingConfig(log_level="CRITICAL"),
                ),
            )
        )

    def _wait(self, fit: Fit, mailbox: Any, signals: StopSignals, crew: Crew | None) -> BaseException | None:
        """Show what the workers say, hand signals to them, and return what Ray found wrong with them, if anything."""
        listener, relayed, patience = Listener(), False, time.monotonic() + PATIENCE_S
        fit.start()
        letters = mailbox.collect.remote()
        try:
            while fit.is_alive():
                if ray.wait([letters], timeout=0.1)[0]:
                    for letter in ray.get(letters):
                        listener.show(*letter)
                    letters = mailbox.collect.remote()
                failed = crew is not None and crew.watch() is not None
                if (signals.received or failed) and not relayed:
                    relayed = True
                    mailbox.interrupt.remote(signals.received or signal.SIGTERM)
                    if crew is not None and failed and self.num_workers > 1:
                        crew.actors.end()  # ranks that wait for episodes together would not see the signal
                if not listener.entered and time.monotonic() > patience:
                    patience = float("inf")
                    log.info("waiting for Ray to start %d workers: the cluster may be busy", self.num_workers)
            for letter in [*ray.get(letters), *ray.get(mailbox.collect.remote(0.0))]:
                listener.show(*letter)
        finally:
            listener.close()
        return fit.failure

    def _conclude(
        self, trainer: Trainer, directory: Path | None, outcomes: Mapping[int, Mapping[str, Any]],
        failure: BaseException | None,
    ) -> Result:  # fmt: skip
        """Return the result of rank 0, or raise what a worker raised, or say that workers were lost."""
        for outcome in outcomes.values():
            if "error" in outcome:
                raise revive(outcome["error"])
        delivered = outcomes.get(0, {})
        if "result" not in delivered:
            raise explain_failure(failure or RuntimeError("rank 0 gave no result"), self.max_failures)
        restore_weights(trainer, delivered)
        result: Result = delivered["result"]
        if directory is None:
            return result
        best, last = (
            path and directory / path.relative_to(directory.absolute()) for path in (result.best, result.last)
        )
        return replace(result, run_dir=directory, best=best, last=last)


class LeanTrainer(TorchTrainer):  # type: ignore[misc]
    """Ray Train without two actors that have nothing to do here and take seconds to start.

    No datasets of Ray's are dealt out, and placement groups that are not detached end with their job.
    """

    def _create_default_callbacks(self) -> list[Any]:
        idle = ("DatasetsCallback", "PlacementGroupCleanerCallback")
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in idle]


class Fit(threading.Thread):
    """Ray Train at work, in a thread of its own: in the main thread it would take SIGINT for itself."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(name="etude-ray-train", daemon=True)
        self._trainer = trainer
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Run the workers to their end; keep what Ray says when they do not get there."""
        try:
            self._trainer.fit()
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            self.failure = error
