"""What a configuration file may say: `ExperimentConfig`. Its JSON schema is `ExperimentConfig.model_json_schema()`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from etude.config.training import Section, TrainingConfiguration
from etude.secrets import redact

SCHEMA_VERSION = 1


def _empty_mapping(value: Any) -> Any:
    # `params:` with nothing below it is null in YAML.
    return {} if value is None else value


def _empty_list(value: Any) -> Any:
    return [] if value is None else value


class Guarded(Section):
    """A section that may hold secrets: how it prints does not give them away."""

    def __repr__(self) -> str:
        return redact(super().__repr__())

    def __str__(self) -> str:
        return redact(super().__str__())


class Component(Guarded):
    """A part by its registry key, with parameters; a bare key is enough where there are none."""

    type: str = Field(min_length=1)
    """Key in the registry of its kind; `etude list` shows them."""
    params: Annotated[dict[str, Any], BeforeValidator(_empty_mapping)] = {}
    """Parameters of the component; `etude list KIND KEY` shows them."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(super().__get_pydantic_json_schema__(core, handler))
        return {"anyOf": [{"type": "string", "description": "The key alone, without parameters."}, mapping]}


def _from_key(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


AnyComponent = Annotated[Component, BeforeValidator(_from_key)]


def _name_below(value: str) -> str:
    # `group/a` is a folder in a folder; these parts lead out of the one that holds the runs.
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise ValueError(f"{value!r} names no folder below run.root; choose another, or another run.root")
    return value


class RunConfig(Guarded):
    """Where a run is kept."""

    name: Annotated[str, Field(min_length=1), AfterValidator(_name_below)] | None = None
    """Directory of the run under `root`; a run of that name goes on where it stopped. Null makes a
    new one, named after the file."""
    root: str = Field(default="runs", min_length=1)
    """The directory that holds the runs."""
    resume: str = Field(default="auto", min_length=1, exclude_if=lambda how: how == "auto")
    """Go on from the run's newest checkpoint (auto), start afresh (never), or begin with this checkpoint's state."""


class BufferConfig(Section):
    """How much of what is played is kept, and how it is drawn."""

    max_frames: int = Field(default=1_000_000, ge=1)
    """Frames that are kept at most; the oldest episodes leave first."""
    max_bytes: int = Field(default=2 * 2**30, ge=1)
    """Bytes that these take at most."""
    sampling: Literal["uniform", "prioritised"] = "uniform"
    """Draw all frames alike, or those more often from which there is more to learn."""


class OnlineConfig(Section):
    """What the policy plays while it learns, and how that joins the demonstrations in `data`."""

    env: str = Field(min_length=1)
    """The environment, such as metaworld/pick-place or gym:Pendulum-v1."""
    options: Annotated[dict[str, Any], BeforeValidator(_empty_mapping)] = {}
    """Parameters of the environment; those that show what the demonstrations have unless given."""
    label: Literal["own", "expert"] = "own"
    """Learn from what the policy did (own), or from what the environment's expert would have done there (expert)."""
    keep: Literal["success", "all"] = "success"
    """With own, the episodes to keep: those that succeed, or all."""
    reward: Literal["env", "success"] = "env"
    """What is kept as reward: that of the environment, or 1 where it succeeds and 0 elsewhere."""
    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of each batch that was played, between 0 and 1; null is half beside demonstrations, and all without."""
    episodes_per_round: int = Field(default=4, ge=1)
    """Episodes of one round, over all ranks."""
    updates_per_round: int = Field(default=200, ge=1)
    """Optimizer steps from one round to the next."""
    start_after: int = Field(default=0, ge=0)
    """Optimizer steps on demonstrations alone before the first round."""
    warmup_episodes: int = Field(default=20, ge=0)
    """With expert, episodes in which the expert also acts, at a share of the steps that falls from 1 to 0."""
    noise: float = Field(default=0.0, ge=0)
    """Deviation of noise on what is executed, in units of the normalised action."""
    noise_steps: int = Field(default=1, ge=1)
    """Steps for which a draw of the noise holds."""
    step_timeout_s: float | None = Field(default=10.0, gt=0)
    """Seconds that one step of the simulator may take; null is no limit."""
    buffer: Annotated[BufferConfig, BeforeValidator(_empty_mapping)] = BufferConfig()
    """What keeps the episodes."""
    workers: int = Field(default=2, ge=1)
    """Processes that play beside training with `engine: ray`; other engines play between updates themselves."""


class ExperimentConfig(Guarded):
    """One experiment: what is trained, on what, how, and what is left behind."""

    schema_version: Literal[1] = 1
    """Version of this schema."""
    plugins: Annotated[list[str], BeforeValidator(_empty_list)] = []
    """Modules, or Python files relative to this file, that register further components."""
    policy: AnyComponent
    """What is trained."""
    data: AnyComponent | None = None
    """Where batches come from; beside `online` the demonstrations, which may then be left out."""
    online: OnlineConfig | None = Field(default=None, exclude_if=lambda online: online is None)
    """What the policy plays while it learns, for batches that mix it in."""
    eval_data: AnyComponent | None = None
    """What evaluation measures the loss on."""
    algorithm: AnyComponent | None = None
    """How a batch becomes a loss; null asks the policy."""
    loss: AnyComponent | None = None
    """The loss module of a trainer that is made from (models, optimizers, loss, device), from the loss registry."""
    trainer: AnyComponent | None = None
    """The trainer class; null takes `etude.Trainer`."""
    engine: AnyComponent = Component(type="torch")
    """How a loss becomes an update."""
    training: Annotated[TrainingConfiguration, BeforeValidator(_empty_mapping)] = TrainingConfiguration()
    """Length, optimisation, cadence and safety."""
    run: Annotated[RunConfig, BeforeValidator(_empty_mapping)] = RunConfig()
    """Where the run is kept."""
    loggers: Annotated[list[AnyComponent], BeforeValidator(_empty_list)] = [Component(type="tensorboard")]
    """Where metrics go beside metrics.jsonl."""
    callbacks: Annotated[list[AnyComponent], BeforeValidator(_empty_list)] = []
    """What else happens around the loop."""
