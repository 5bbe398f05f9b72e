"""Build what a configuration describes: the trainer with its policy, data, algorithm, engine, loggers and callbacks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.config.load import Loaded
from etude.config.schema import Component, OnlineConfig
from etude.errors import ConfigError, EtudeError
from etude.reading.origins import lookup
from etude.registry import REGISTRIES, build_parameters
from etude.secrets import holds_secret, redact
from etude.signatures.fit import is_dataset_factory, is_train_step

if TYPE_CHECKING:
    from etude.runs.directory import Run
    from etude.trainer import Trainer


def build(loaded: Loaded, *, run: str | Path | Run | None = None) -> Trainer:
    """Build the trainer that a configuration describes; `fit()` starts it.

    Args:
        loaded: What `load` returned.
        run: Directory or name of the run; None takes `run.root/run.name`, or makes a new one if it has no name.
    """
    from etude.rng import STREAM_INIT, fold, generators_kept

    config = loaded.config
    if run is None and config.run.name is not None:
        run = Path(config.run.root) / config.run.name
    maker = _Maker(loaded, run)
    trainer_type, extra = maker.trainer_type()
    # A policy that makes its weights when it is constructed must get the same ones on every rank and in every run.
    with generators_kept(fold(config.training.seed, STREAM_INIT, 1)):
        policy = maker.policy(config.policy)
        data: Any = None if config.data is None else maker.data(config.data, "data")
        eval_data = None if config.eval_data is None else maker.data(config.eval_data, "eval_data")
        if config.online is not None:
            data, eval_data = maker.online(config.online, data, eval_data)
        algorithm = None if config.algorithm is None else maker.make("algorithms", config.algorithm, "algorithm")
        if config.loss is not None:
            algorithm = maker.loss(config.loss)
        callbacks = maker.make_all("callbacks", config.callbacks)
    if config.online is not None:
        _ = data.env_spec  # refuses an environment that does not fit before there is a run directory
    arguments: dict[str, Any] = {
        "engine": maker.make("engines", config.engine, "engine"),
        "config": config.training,
        "run": run,
        "run_root": config.run.root,
        "callbacks": callbacks,
        "loggers": maker.make_all("loggers", config.loggers),
        "eval_data": eval_data,
        "name": config.run.name or name_after(loaded.path),
        "run_config": _stored(loaded, policy),
    }
    trainer: Trainer = maker.call(lambda: trainer_type(policy, data, algorithm, **arguments, **extra), "trainer")
    return trainer


def name_after(path: str) -> str:
    """Return what a run of a file is called: as the file, or as the run whose stored configuration it is."""
    file = Path(path)
    return file.resolve().parent.name if file.name == "config.yaml" else file.stem


def _stored(loaded: Loaded, policy: Any) -> dict[str, Any]:
    """Return what the run keeps of its configuration: of model files, which may change or go, their content."""
    stored = loaded.stored()
    params = lookup(stored, ("policy", "params"))
    described = getattr(policy, "component_configs", None)
    if isinstance(params, dict) and described is not None:
        text = json.dumps(described)
        # A reference would be resolved again, and what comes from the environment stays out of runs.
        params["configs"] = params["configs"] if "${" in text or holds_secret(text) else described
    return stored


class _Maker:
    """Makes components, and says which part of which file is to blame when one refuses its parameters."""

    def __init__(self, loaded: Loaded, run: Any) -> None:
        self.loaded = loaded
        self.run = run

    def make(self, kind: str, component: Component, path: str) -> Any:
        """Construct one component with its parameters."""
        constructor = REGISTRIES[kind].get(component.type)
        return self.call(lambda: constructor(**component.params), path)

    def policy(self, component: Component) -> Any:
        """Construct the policy; components whose weights were in a folder that is gone want a checkpoint instead."""
        folder = component.params.get("load_dir")
        if component.type != "components" or not isinstance(folder, str) or Path(folder).expanduser().is_dir():
            return self.make("policies", component, "policy")
        policy = self.make(
            "policies", Component(type=component.type, params={**component.params, "load_dir": None}), "policy"
        )
        policy.unloaded = f"{self.loaded.origin('policy.params.load_dir')}: there is no directory {folder}"
        return policy

    def make_all(self, kind: str, components: list[Component]) -> list[Any]:
        """Construct the components of a list."""
        return [self.make(kind, component, f"{kind}.{index}") for index, component in enumerate(components)]

    def call(self, make: Callable[[], Any], path: str) -> Any:
        """Call a constructor; a value that it refuses is a mistake of the configuration."""
        try:
            return make()
        except EtudeError:
            raise
        except ValueError as error:
            raise ConfigError(redact(f"{self.loaded.origin(path)}: {path}: {error}")) from error

    def data(self, component: Component, path: str) -> Any:
        """Construct data, or ask a dataset factory for it."""
        constructor = REGISTRIES["data"].get(component.type)
        if not is_dataset_factory(constructor):
            return self.make("data", component, path)
        params = ReadOnce(component.params)
        built = self.call(lambda: constructor().build(self._options(), params), path)
        if not isinstance(built, Mapping) or "dataset" not in built:
            raise ConfigError(
                f"{self.loaded.origin(path)}: {path}: build() of {component.type!r} must return {{'dataset': ...}}"
            )
        self._refuse_unread(params, path, component.type)
        if built.get("norm_stats") is None:
            return built["dataset"]
        from etude.data.coerce import as_data

        data: Any = as_data(built["dataset"])
        data.norm_stats = built["norm_stats"]  # what the loop normalises batches by
        return data

    def online(self, section: OnlineConfig, demonstrations: Any, eval_data: Any) -> tuple[Any, Any]:
        """Join demonstrations with what is played; what they hold out is still evaluated on."""
        from etude.data.coerce import held_out
        from etude.data.replay import ReplayBuffer
        from etude.rollouts.online import OnlineData, OnlineSettings

        params = section.model_dump(exclude={"share", "buffer"})
        share = 0.5 if section.share is None and demonstrations is not None else section.share
        buffer = ReplayBuffer(**section.buffer.model_dump())
        data = OnlineData(demonstrations, OnlineSettings(**params), share=share, buffer=buffer)
        data.require_room(self.loaded.config.training.batch_size)
        return data, held_out(demonstrations) if eval_data is None else eval_data

    def loss(self, component: Component) -> Any:
        """Ask a loss factory for its module; its parameters go to the constructor, or to `build` if that takes them."""
        factory: Any = REGISTRIES["losses"].get(component.type)
        late = build_parameters(factory)
        first = {name: value for name, value in component.params.items() if name not in late}
        rest = {name: value for name, value in component.params.items() if name in late}
        return self.call(lambda: factory(**first).build(**rest), "loss")

    def _refuse_unread(self, params: ReadOnce, path: str, key: str) -> None:
        # What the task is called also names the project of W&B.
        unread = [f"{path}.params.{name}" for name in params if name not in params.seen and name != "task_name"]
        if unread:
            lines = [f"{self.loaded.origin(name)}: {name}: unknown key; {key!r} does not read it" for name in unread]
            raise ConfigError("\n".join(lines))

    def _options(self) -> dict[str, Any]:
        directory = getattr(self.run, "dir", self.run)
        return {
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "dist_enabled": int(os.environ.get("WORLD_SIZE", "1")) > 1,
            "save_dir": str(directory if directory is not None else self.loaded.config.run.root),
        }

    def trainer_type(self) -> tuple[Callable[..., Trainer], dict[str, Any]]:
        """Return the trainer class and the parameters that are its own."""
        component = self.loaded.config.trainer or Component(type="trainer")
        constructor = REGISTRIES["trainers"].get(component.type)
        if not is_train_step(constructor):
            return constructor, component.params
        from etude.trainer import wrap_train_step

        return wrap_train_step(constructor, component.params), {}


class ReadOnce(dict[str, Any]):
    """Parameters that remember which of them were read, so that none is dropped in silence."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a parameter, or the default."""
        self.seen.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return a parameter."""
        self.seen.add(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:  # makes `**params` ask for each value
        return super().__iter__()

    def values(self) -> Any:
        """Return the values; all of them count as read."""
        self.seen.update(self)
        return super().values()

    def items(self) -> Any:
        """Return the pairs; all of them count as read."""
        self.seen.update(self)
        return super().items()

    def copy(self) -> dict[str, Any]:
        """Return a plain copy; all parameters count as read."""
        self.seen.update(self)
        return dict(super().items())
