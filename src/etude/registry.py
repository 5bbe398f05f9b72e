"""One `Registry` class, the named registries, and the plugins that fill them. Imports no torch.

A registry maps keys to classes (or functions) that fit what it is a registry of. Built-in components are named as
`module:attribute` and imported when they are used; a plugin registers its own:

    from etude.registry import POLICY_REGISTRY

    @POLICY_REGISTRY.register("my_policy")
    class MyPolicy(nn.Module): ...
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from etude.builtins import BUILTINS, TORCH_OPTIMIZERS
from etude.errors import MissingExtraError, RegistryError
from etude.extras import EXTRAS
from etude.plugins import PLUGIN_FILES, import_plugin, is_plugin_file
from etude.reading.suggest import did_you_mean
from etude.signatures.fit import missing_of
from etude.types import protocols

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from etude.signatures import Parameter, Signature

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Lazy:
    """A component that is imported when it is first used."""

    target: str
    """`module:attribute`."""
    args: tuple[Any, ...] = ()
    """Leading arguments, for a class that serves several keys."""
    signature: str = ""
    """Where to read the parameters (`module:attribute`), if not from the target itself."""


@dataclass(frozen=True, slots=True)
class Description:
    """What `etude list` says about one component."""

    key: str
    summary: str
    parameters: tuple[Parameter, ...]
    module: str
    """Where the component lives."""


class Registry(Generic[T]):
    """Components of one kind by key; refuses what does not fit and what is already taken."""

    def __init__(
        self,
        name: str,
        protocols: tuple[type | str, ...] = (),
        builtins: Mapping[str, str | Lazy] | None = None,
        entry_point_group: str | None = None,
        *,
        noun: str | None = None,
        supplied: Iterable[str] = (),
        supplied_to_builtins: Iterable[str] = (),
        functions: bool = True,
        files: tuple[str, ...] = (),
    ) -> None:
        """Make a registry.

        Args:
            name: The plural that `etude list` knows it by.
            protocols: What a class must offer, any one of: a Protocol, or member names separated by spaces.
            builtins: Components to import on first use; those of `etude.builtins` unless given.
            entry_point_group: The group of Python entry points to read; `etude.<name>` unless given.
            noun: One component, for error messages.
            supplied: Parameters that the framework passes itself and a configuration may not.
            supplied_to_builtins: Further such parameters of the built-in components; for others they are their own.
            functions: Whether a function that returns such a component will do.
            files: How the names of files end that stand for a component just as a key does.
        """
        self.name = name
        self.noun = noun or name.removesuffix("s")
        self.entry_point_group = entry_point_group or f"etude.{name}"
        self.supplied = frozenset(supplied)
        self._supplied_to_builtins = frozenset(supplied_to_builtins)
        named = builtins or {key: f"etude.{home}" for key, home in BUILTINS.get(name, {}).items()}
        self.builtins = {key: Lazy(one) if isinstance(one, str) else one for key, one in named.items()}
        self._protocols = protocols
        self._functions = functions
        self._files = files
        self._signatures: dict[str, tuple[Any, Signature]] = {}
        self._entries: dict[str, Any] = dict(self.builtins)

    # ---- filling -----------------------------------------------------------------------------------------------------

    def register(self, key: str | None = None) -> Callable[[C], C]:
        """Return a decorator that adds a class or function under `key`, or under its own name."""
        if callable(key):
            raise RegistryError(f"the {self.noun} registry is used as @registry.register('key'), with parentheses")

        def decorate(component: C) -> C:
            self.add(key or component.__name__, component)
            return component

        return decorate

    def add(self, key: str, component: Callable[..., T] | Lazy | EntryPoint) -> None:
        """Add a component; refuse a key that is taken and a class that does not fit."""
        if not key:
            raise RegistryError(f"a {self.noun} needs a name, got {key!r}")
        present = self._entries.get(key)
        if present is not None:
            if present is component or _same_definition(present, component):
                return
            raise RegistryError(
                f"{self.noun} {key!r} of {_home(component)} is already registered by {_home(present)}; "
                "choose another key"
            )
        if not _is_deferred(component):
            self._require_fit(key, component)
        self._entries[key] = component

    def _require_fit(self, key: str, component: Any) -> None:
        if not callable(component):
            raise RegistryError(f"{self.noun} {key!r} must be a class or a function, got {type(component).__name__}")
        if isinstance(component, partial):
            component = component.func
        if not inspect.isclass(component):
            if self._functions:
                return
            raise RegistryError(f"{self.noun} {key!r} must be a class; {_home(component)} is a function")
        lacks = [missing_of(component, protocol) for protocol in self._protocols]
        if lacks and all(lacks):
            wanted = " or ".join(dict.fromkeys(" and ".join(missing) for missing in lacks))
            raise RegistryError(f"{self.noun} {key!r}: {_home(component)} does not fit; it lacks {wanted}")

    # ---- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Callable[..., T]:
        """Return the class or function under `key`, importing it if need be."""
        entry = self._entry(key)
        if not _is_deferred(entry):
            return entry  # type: ignore[no-any-return]
        component: Callable[..., T] = _resolve(entry, f"{self.noun} {key!r}")
        self._require_fit(key, component)
        self._entries[key] = component
        return component

    def loaded(self, key: str) -> Callable[..., T] | None:
        """Return the component if it is at hand without importing anything."""
        entry = self._entry(key)
        return None if _is_deferred(entry) else entry

    def _entry(self, key: str) -> Any:
        if key not in self._entries:
            load_entry_points()
        if key not in self._entries:
            near = did_you_mean(key, self._entries)
            known = ", ".join(self.keys()) or "none"
            raise RegistryError(f"unknown {self.noun} {key!r}{near + ' Known' if near else '; known'}: {known}")
        return self._entries[key]

    def key_of(self, component: Callable[..., T]) -> str | None:
        """Return the key a component is registered under, if it is."""
        home = _home(component)
        return next((key for key, entry in self._entries.items() if entry is component or _home(entry) == home), None)

    def keys(self) -> list[str]:
        """Return every key, in order, entry points included."""
        load_entry_points()
        return sorted(self._entries)

    def __contains__(self, key: object) -> bool:
        if key not in self._entries:
            load_entry_points()
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __repr__(self) -> str:
        return f"Registry({self.name}: {', '.join(sorted(self._entries))})"

    def is_file(self, key: str) -> bool:
        """Tell whether a text names a file that stands for a component, or `file.py:Name`, and not a key."""
        return key not in self._entries and (key.endswith(self._files) or names_object(key))

    def is_builtin(self, key: str) -> bool:
        """Tell whether a key is one of Etude's own."""
        return key in self.builtins

    def supplied_to(self, key: str) -> frozenset[str]:
        """Return the parameters of a component that the framework passes itself."""
        return self.supplied | self._supplied_to_builtins if self.is_builtin(key) else self.supplied

    def signature(self, key: str) -> Signature:
        """Return the parameters a configuration may give; reads the source of what is not imported yet."""
        from etude.signatures import read_runtime, read_static

        entry = self._entry(key)
        known = self._signatures.get(key)
        if known is not None and known[0] is entry:
            return known[1]
        found = read_static(entry.signature or entry.target) if isinstance(entry, Lazy) else None
        if found is not None and entry.signature and not entry.args:  # another's parameters, but a purpose of its own
            own = read_static(entry.target)
            found = replace(found, summary=own.summary if own else "")
        if found is None:
            found, entry = read_runtime(self.get(key)), self._entries[key]
        if self.name == "losses" and not isinstance(entry, Lazy):  # ours take everything at once, and wait to be used
            found = _with_build(found, self.get(key))
        signature = found.without(self.supplied_to(key))
        self._signatures[key] = entry, signature
        return signature

    def describe(self, key: str) -> Description:
        """Return what there is to know about a component: its summary and its parameters."""
        signature = self.signature(key)
        return Description(key, signature.summary, signature.parameters, _home(self._entry(key)))


def _is_deferred(entry: Any) -> bool:
    # An entry point is known by its shape, so that importlib.metadata is imported only where it is read.
    return isinstance(entry, Lazy) or (hasattr(entry, "load") and hasattr(entry, "group") and hasattr(entry, "dist"))


def _resolve(entry: Any, what: str) -> Any:
    target = entry.target if isinstance(entry, Lazy) else entry.value
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except MissingExtraError:
        raise  # it says already what to install
    except (ImportError, AttributeError) as error:
        missing = (getattr(error, "name", None) or "").split(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing in EXTRAS:
            raise MissingExtraError(f"{what} needs {missing}: pip install 'etude[{EXTRAS[missing]}]'") from error
        raise RegistryError(f"{what} cannot be imported from {target}: {error}") from error
    return partial(found, *entry.args) if isinstance(entry, Lazy) and entry.args else found


def _home(component: Any) -> str:
    if isinstance(component, Lazy):
        return component.target
    if _is_deferred(component):
        return f"{component.value} (entry point of {component.dist.name if component.dist else 'an unknown package'})"
    if isinstance(component, partial):
        component = component.func
    return f"{component.__module__}:{component.__qualname__}"


def _same_definition(one: Any, other: Any) -> bool:
    """Tell whether two components are one definition, imported under two module names."""
    if isinstance(one, Lazy) and not one.args:
        return bool(_home(other) == one.target)
    homes = []
    for component in (one, other):
        module = sys.modules.get(getattr(component, "__module__", ""))
        file = getattr(module, "__file__", None)
        homes.append(file and (os.path.realpath(file), component.__qualname__, component.__module__))
    first, second = homes
    return bool(first and second and first[:2] == second[:2] and first[2] != second[2])


# ---- the named registries --------------------------------------------------------------------------------------------

_TRAINER_ARGUMENTS = (
    "policy", "data", "algorithm", "engine", "config", "run", "callbacks", "loggers", "eval_data", "run_config", "name",
    "run_root", "show_progress", "sampler", "environment", "inner",
)  # fmt: skip
_HOOKS = ("on_fit_start", "on_step_end", "on_log", "on_evaluate_end", "on_save", "on_fit_end", "on_exception")
POLICY_REGISTRY: Registry[protocols.Policy] = Registry("policies", (protocols.Policy,), noun="policy")
DATASET_BUILDER_REGISTRY: Registry[Any] = Registry(
    "data",
    (protocols.DatasetFactory, "take", "__getitem__ __len__", "__iter__", "train_data", "train_dataloader"),
    supplied_to_builtins=("batch_size", "num_workers", "val_env", "test_env"),  # of the torch loaders, and Lightning's
)
ALGORITHM_REGISTRY: Registry[protocols.Algorithm] = Registry("algorithms", (protocols.Algorithm,))
_HF_ENGINE = "etude.engines.huggingface.engine:HuggingFaceEngine"
ENGINE_REGISTRY: Registry[protocols.Engine] = Registry(
    "engines",
    (protocols.Engine,),
    {
        "huggingface": Lazy(_HF_ENGINE, (), "transformers.training_args:TrainingArguments"),
        "lightning": "etude.engines.lightning.engine:LightningEngine",
        "ray": "etude.engines.ray.engine:RayEngine",
        "remote": "etude.engines.remote.engine:RemoteEngine",
        "torch": "etude.engines.torch:TorchEngine",
    },
    functions=False,
)
TRAINER_REGISTRY: Registry[Any] = Registry(
    "trainers",
    ("fit compute_loss", protocols.TrainStep),
    supplied=(*_TRAINER_ARGUMENTS, "models", "optimizers", "loss", "device"),
    functions=False,
)
LOGGER_REGISTRY: Registry[protocols.Logger] = Registry("loggers", (protocols.Logger,))
CALLBACK_REGISTRY: Registry[Any] = Registry("callbacks", _HOOKS)
OPTIMIZER_BUILDER_REGISTRY: Registry[protocols.OptimizerFactory] = Registry(
    "optimizers",
    (protocols.OptimizerFactory,),
    {
        key: Lazy("etude.loop.optimizers:TorchOptimizer", (key,), f"torch.optim.{where}")
        for key, where in TORCH_OPTIMIZERS.items()
    },
    supplied=("params",),
    supplied_to_builtins=("lr", "weight_decay"),
    functions=False,
)
for _key, _where in BUILTINS["optimizers"].items():  # added as a plugin's are: rate and decay are their own affair
    OPTIMIZER_BUILDER_REGISTRY.add(_key, Lazy(f"etude.{_where}"))
LOSS_BUILDER_REGISTRY: Registry[Any] = Registry("losses", (protocols.LossFactory,), noun="loss", functions=False)
ENVIRONMENT_REGISTRY: Registry[Any] = Registry("environments", ("reset step render close",))
TASK_REGISTRY: Registry[Any] = Registry(
    "tasks", ("__len__ __getitem__",), noun="source of tasks", files=(".jsonl", ".csv", ".parquet")
)
REWARD_REGISTRY: Registry[Any] = Registry("rewards", ("__call__", "evaluate"), supplied=("task", "text"))
AGENT_REGISTRY: Registry[Any] = Registry("agents", ("run",), supplied=("task", "llm"))
GENERATOR_REGISTRY: Registry[Any] = Registry("generators", ("generate",))
ROBOT_REGISTRY: Registry[Any] = Registry("robots", ("observe act stop",))

REGISTRIES: dict[str, Registry[Any]] = {
    registry.name: registry
    for registry in (
        POLICY_REGISTRY, DATASET_BUILDER_REGISTRY, ALGORITHM_REGISTRY, ENGINE_REGISTRY, TRAINER_REGISTRY,
        OPTIMIZER_BUILDER_REGISTRY, LOSS_BUILDER_REGISTRY, LOGGER_REGISTRY, CALLBACK_REGISTRY, ENVIRONMENT_REGISTRY,
        TASK_REGISTRY, REWARD_REGISTRY, AGENT_REGISTRY, GENERATOR_REGISTRY, ROBOT_REGISTRY,
    )
}  # fmt: skip


def build_parameters(factory: Any) -> list[str]:
    """Name the parameters of a loss factory that its `build` takes, and not its constructor."""
    from etude.signatures import read_runtime

    at_once = read_runtime(factory)
    late = read_runtime(partial(factory.build, None))
    return [p.name for p in late.parameters if at_once.get(p.name) is None]


def _with_build(own: Signature, factory: Any) -> Signature:
    from etude.signatures import read_runtime

    late = read_runtime(partial(factory.build, None))
    names = build_parameters(factory)
    return replace(own, parameters=own.parameters + tuple(p for p in late.parameters if p.name in names))


# ---- plugins and entry points ----------------------------------------------------------------------------------------

_entry_points_read = False


def load_plugins(modules: Iterable[str]) -> None:
    """Import each plugin once, by module name or by the path of a Python file; its components register themselves."""
    for plugin in modules:
        before = {name: dict(registry._entries) for name, registry in REGISTRIES.items()}
        try:
            import_plugin(plugin)
        # A plugin is the user's code and may raise anything: the error must name the plugin, and what it had
        # registered before must not stand in the way of the next attempt.
        except (Exception, SystemExit) as error:
            for name, registry in REGISTRIES.items():
                registry._entries = before[name]
            if isinstance(error, RegistryError):
                raise RegistryError(f"plugin {plugin!r}: {error}") from error
            raise RegistryError(f"plugin {plugin!r} cannot be loaded: {type(error).__name__}: {error}") from error


def names_object(text: str) -> bool:
    """Tell whether a text names something that a Python file defines: `file.py:Name`."""
    path, _, name = text.rpartition(":")
    return path.endswith(".py") and is_plugin_file(path) and name.isidentifier()


def load_object(reference: str, what: str) -> Any:
    """Return what a Python file defines, named as `file.py:Name`; files of one folder can import each other.

    Args:
        reference: The file, from the working directory on unless it is absolute, and the name.
        what: What it is to be, for the error message.
    """
    path, _, name = reference.rpartition(":")
    if not names_object(reference):
        raise RegistryError(f"{what} is named as file.py:Name, got {reference!r}")
    try:
        load_plugins([path])
    except RegistryError as error:
        raise RegistryError(f"{what} {reference!r}: {error}") from error
    module = sys.modules[PLUGIN_FILES[os.path.realpath(os.path.expanduser(path))]]
    if not hasattr(module, name):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise RegistryError(f"{what} {reference!r}: the file defines {', '.join(own) or 'nothing'}, but no {name!r}")
    return getattr(module, name)


def load_entry_points() -> None:
    """Read the entry points of installed packages, once: `etude.<registry>` components and `etude.plugins` modules."""
    global _entry_points_read
    if _entry_points_read:
        return
    _entry_points_read = True
    from importlib.metadata import entry_points

    every = entry_points()
    for registry in REGISTRIES.values():
        for point in every.select(group=registry.entry_point_group):
            registry.add(point.name, point)
    load_plugins(point.value for point in every.select(group="etude.plugins"))
