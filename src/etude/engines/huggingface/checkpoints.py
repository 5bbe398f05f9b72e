"""`SafeCheckpoints`: transformers' checkpoints, made whole or absent, verified on resume, and free of pickle.

A `checkpoint-N` keeps the layout of transformers, so that its tools can read it: model files as `save_pretrained`
writes them and `trainer_state.json`. What transformers would pickle (optimizer, scheduler, scaler) is state as in every
other checkpoint of ours, and the manifest says what every file must hash to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import SAFE_WEIGHTS_NAME

from etude.errors import CheckpointError, one_line
from etude.loop import guard
from etude.loop.distributed import Group
from etude.loop.optimizers import lay_out_state, plain_state
from etude.runs import durable, folder
from etude.runs.checkpoint import Checkpoint, read_checkpoint
from etude.runs.fallback import first_good, put_aside
from etude.runs.manifest import MANIFEST_NAME
from etude.runs.tensor_file import file_parts, read_tensor_file
from etude.types.protocols import ORDER_VERSION

log = logging.getLogger("etude")

OWN_WEIGHTS = "weights.safetensors"
"""The full weights, for a model whose own `save_pretrained` leaves something out or uses other names."""
TRAINER_STATE = "trainer_state.json"
ARGUMENTS = "training_args.json"


class SafeCheckpoints(transformers.Trainer):
    """A `transformers.Trainer` whose `checkpoint-N` folders survive crashes and tell when they are damaged."""

    _resumed: Checkpoint | None = None
    """What training goes on from, verified; read once."""
    _saved_at = -1
    _odd: frozenset[str] = frozenset()

    @property
    def _order_version(self) -> int:
        """How the data of this run is ordered: as it was when the run began."""
        if self._resumed is None:
            return ORDER_VERSION
        version: int = self._resumed.tree.get("order", {"version": 1})["version"]
        return version

    @property
    def group(self) -> Group:
        """The ranks that train together."""
        return Group(self.args.process_index, self.args.world_size, self.args.device)

    @property
    def module(self) -> nn.Module:
        """The model as it was given, without wrappers."""
        return cast(nn.Module, self.model)

    @property
    def output_dir(self) -> Path:
        """Where checkpoints go."""
        return Path(self.args.output_dir or ".")

    # -- saving -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if trial is None:
            self.store_flos()
        directory, step = Path(self._get_output_dir(trial=trial)), self.state.global_step
        final = directory / f"checkpoint-{step}"
        tree = {} if self.args.save_only_model else self._collect()
        self.require_finite(tree)
        temp = Path(self.group.gather(str(directory / durable.temp_name(final.name)))[0])
        fault = None
        try:
            self._write(temp, final, tree)
        except (OSError, SafetensorError, CheckpointError) as error:
            fault = f"the checkpoint of step {step} could not be written to {directory}: {error}"
        faults = [text for text in self.group.gather(fault) if text]  # also waits until the checkpoint is there
        if faults:
            raise CheckpointError(faults[0])
        self._saved_at = step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            found = [path for _, path in saved_in(directory)]
            kept = choose_kept(found, self.state.best_model_checkpoint, self.args.save_total_limit)
            for path in found:
                if path not in kept:
                    durable.discard(path)

    def _write(self, temp: Path, final: Path, tree: Mapping[str, Any]) -> None:
        with ExitStack() as stack:
            if self.args.should_save:
                stack.enter_context(durable.in_use(temp))
                temp.mkdir(parents=True)
            self.save_model(str(temp), _internal_call=True)
            if not self.args.should_save:
                return
            self._note_best(final)
            self._note_callbacks()
            self.state.save_to_json(str(temp / TRAINER_STATE))
            metric = self.state.best_metric if self.state.best_global_step == self.state.global_step else None
            staged = folder.stage(tree, {})
            folder.fill(temp, staged, self.state.global_step, None if metric is None else float(metric), {})
            folder.publish(temp, final)

    def _note_best(self, final: Path) -> None:
        if self.args.save_strategy == SaveStrategy.NO or not self.state.best_global_step:
            return
        best = final.with_name(f"checkpoint-{self.state.best_global_step}")
        if best == final or best.is_dir():
            self.state.best_model_checkpoint = str(best)

    def _note_callbacks(self) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                states = cast(dict[str, Any], self.state.stateful_callbacks)  # a list only until it is filled
                if isinstance(states.get(name), list):
                    states[name].append(state)
                else:
                    states[name] = state

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model as its own `save_pretrained` does, else its weights; arguments as JSON, never as a pickle."""
        directory = Path(output_dir or self.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if is_transformers_model(model):
            model.save_pretrained(str(directory), state_dict=state_dict)
        elif callable(getattr(model, "save_pretrained", None)):
            model.save_pretrained(str(directory))
            # A model may save an average of its weights, or under other names: resuming needs them as they are.
            if not _holds(directory / SAFE_WEIGHTS_NAME, model.state_dict()):
                durable.write_atomically(directory / OWN_WEIGHTS, *file_parts(model.state_dict()))
        else:
            durable.write_atomically(directory / SAFE_WEIGHTS_NAME, *file_parts(model.state_dict()))
        tokenizer = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(directory))
        arguments: Any = self.args
        (directory / ARGUMENTS).write_text(arguments.to_json_string() + "\n", encoding="utf-8")

    def _collect(self) -> dict[str, Any]:
        """Return what the next step depends on beside the weights; every rank must call."""
        optimizer, scheduler = cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        state = optimizer.state_dict()
        tree: dict[str, Any] = {
            "optimizer": {**state, "param_groups": plain_state(state["param_groups"])},
            "scheduler": plain_state(scheduler.state_dict()),
            "order": {"version": self._order_version},
        }
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            tree["scaler"] = scaler.state_dict()
        return tree

    def require_finite(self, tree: Mapping[str, Any]) -> None:
        """Refuse weights, statistics and optimizer state that an update has broken; every rank must call."""
        state = {"policy": self.module.state_dict(), "optimizer": tree.get("optimizer", {})}
        last = next((path for _, path in saved_in(self.output_dir)), None) if self.group.is_main else None
        guard.require_finite(self.group, self.state.global_step, state, self._odd, last)

    # -- resuming -----------------------------------------------------------------------------------------------

    def choose_checkpoint(self, resume: str | bool | None) -> str | None:
        """Return the checkpoint to go on from: the newest good one for True, the one named, or None.

        Rank 0 looks and verifies; the others take its word for which, and verify what they read.
        """
        self._resumed = None
        self._odd = guard.odd_from_the_start(self.module)

        def look() -> str | None:
            durable.remove_leftovers(self.output_dir)
            self._resumed = _find(resume, self.output_dir) if resume else None
            _put_newer_aside(self.output_dir, self._resumed.step if self._resumed else 0)
            return str(self._resumed.path) if self._resumed else None

        path: str | None = self.group.ask_main(look)
        if path is not None and self._resumed is None:
            self._resumed = read_checkpoint(Path(path))
        return path

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.module if model is None else model
        if is_transformers_model(self.accelerator.unwrap_model(model, keep_torch_compile=False)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _load_weights(model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        read_checkpoint(best)
        if is_transformers_model(self.model):
            super()._load_best_model()
        else:
            _load_weights(self.module, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            return
        tree = self._resumed.tree
        if "optimizer" not in tree:
            raise CheckpointError(
                f"{checkpoint} holds the model only (save_only_model), so training cannot go on from it; "
                "load it with from_pretrained and start anew"
            )
        optimizer, scheduler = cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        saved = tree["optimizer"]
        current = optimizer.state_dict()["param_groups"]
        if [len(g["params"]) for g in current] != [len(g["params"]) for g in saved["param_groups"]]:
            raise CheckpointError(f"the optimizer in {checkpoint} is over other parameters than this one")
        groups = [{**now, **was} for now, was in zip(current, saved["param_groups"], strict=True)]
        optimizer.load_state_dict({**saved, "param_groups": groups})
        lay_out_state(getattr(optimizer, "optimizer", optimizer))
        scheduler.load_state_dict(dict(tree["scheduler"]))

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if self._resumed is not None and scaler is not None and "scaler" in self._resumed.tree:
            scaler.load_state_dict(self._resumed.tree["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: randomness is a function of the step, so there is no state to load."""


def is_transformers_model(model: Any) -> bool:
    """Tell whether a model is of transformers or PEFT, which know best how to save and load it."""
    if isinstance(model, transformers.PreTrainedModel):
        return True
    if find_spec("peft") is None:
        return False
    from importlib import import_module

    return isinstance(model, import_module("peft").PeftModel)


def saved_in(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the checkpoints in a directory, newest first."""
    return folder.entries(directory, "checkpoint-")


def newest_good(directory: Path) -> Checkpoint:
    """Return the newest checkpoint that is whole, saying loudly what was wrong with newer ones."""
    return first_good((path for _, path in saved_in(directory)), read_checkpoint, directory)


def choose_kept(newest_first: list[Path], best: str | None, limit: int | None) -> list[Path]:
    """Return what `save_total_limit` keeps: so many of the newest, the best always among them, the newest always."""
    if limit is None or limit <= 0:
        return newest_first
    kept = newest_first[:limit]
    if best is not None and Path(best) in newest_first[limit:]:
        kept = [*newest_first[: max(1, limit - 1)], Path(best)]
    return kept


def _put_newer_aside(directory: Path, step: int) -> None:
    """Rename the checkpoints after `step`, so that a run which goes on from there cannot be taken for theirs."""
    for other, path in saved_in(directory):
        if other > step:
            name = put_aside(path).name
            log.warning("training goes on from step %d, before %s: renamed that to %s", step, path, name)


def _find(resume: str | bool, output_dir: Path) -> Checkpoint:
    if resume is True:
        return newest_good(output_dir)
    path = Path(str(resume))
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if (path / TRAINER_STATE).is_file() and not (path / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{path} was not written by Etude or is damaged: it has no {MANIFEST_NAME}, so nothing can be "
            "verified; load its weights with from_pretrained and start anew"
        )
    if saved_in(path):
        return newest_good(path)
    return read_checkpoint(path)


def _holds(path: Path, state: Mapping[str, Tensor]) -> bool:
    """Tell whether a file holds exactly these weights."""
    try:
        found = read_tensor_file(path)
    except (OSError, ValueError):
        return False
    return found.keys() == state.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value.detach().cpu())
        for name, value in state.items()
    )


def _load_weights(model: nn.Module, directory: Path) -> None:
    own = directory / OWN_WEIGHTS
    state = read_tensor_file(own if own.exists() else directory / SAFE_WEIGHTS_NAME)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint {directory} does not fit the model: {one_line(error, 300)}") from None
