"""`TrainingConfiguration`: every knob of a run that is not the policy, the data, the algorithm or the engine."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from etude.errors import ConfigError
from etude.reading.suggest import unknown
from etude.types.duration import Duration

DurationField = Annotated[
    Duration,
    BeforeValidator(Duration.parse),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": ["integer", "string"], "examples": [500, "2 epochs", "30 min"]}),
]
if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # which pydantic does not name in public


def _is_none(value: Any) -> bool:
    return value is None


Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]


class _SaysWhatIsWrong(ModelMetaclass):
    """Makes a mistake in Python read as one in a file does; files are validated another way, and keep their lines."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            words = [_explain(cls, problem) for problem in error.errors(include_url=False)]
            raise ConfigError(f"{cls.__name__}: {'; '.join(words)}") from None


def _explain(kind: Any, problem: Any) -> str:
    *above, name = problem["loc"] or ("",)
    place = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should")
        return f"{place}: {message}" + ("" if problem["type"] == "value_error" else f", got {problem['input']!r}")
    for part in above:
        inner = kind.model_fields.get(part)
        kind = kind if inner is None else next(_sections(inner.annotation), kind)
    return f"{place}: {unknown(str(name), list(kind.model_fields))}"


def _sections(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


class Section(BaseModel, metaclass=_SaysWhatIsWrong):
    """Base of every configuration section: frozen, unknown keys refused, help text under each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def help_texts(cls) -> dict[str, str]:
        """Return the text under each field; read from the source on demand, for it takes longer than validating."""
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Section) and base is not Section:
                (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
                assert isinstance(tree, ast.ClassDef)
                for field, text in pairwise(tree.body):
                    match field, text:
                        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                            texts[name] = inspect.cleandoc(meaning)
        return texts

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Give the schema of each field its help text."""
        schema = handler(core)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.help_texts().items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


class EarlyStopping(Section):
    """Stop when a metric has not improved for a while."""

    metric: str = "eval/loss"
    """The metric to watch, by its name in metrics.jsonl."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without improvement before stopping."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    min_delta: float = Field(default=0.0, ge=0)
    """The least change that counts as an improvement."""


class OptimizerConfiguration(Section):
    """One named optimizer over the parameters whose names match."""

    match: list[str] = Field(default=["*"], min_length=1)
    """Parameter-name patterns (`encoder.*`); a parameter belongs to the first optimizer that matches."""
    type: str = "adamw"
    """Key in the optimizer registry: adam, adamw, sgd, rmsprop, adagrad, or any torch optimizer in lower case."""
    lr: float = Field(default=1e-3, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of this optimizer."""
    params: dict[str, Any] = {}
    """Further arguments of the optimizer, such as betas or momentum."""
    schedule: Schedule = "constant"
    """Shape of the learning rate over the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from zero."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine schedules end, relative to `lr`."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm of these parameters; null does not clip."""


class TrainingConfiguration(Section):
    """Length, optimisation, cadence and safety of one training run."""

    lr: float = Field(default=1e-3, ge=0)
    """Peak learning rate."""
    batch_size: int = Field(default=32, ge=1)
    """Samples in one micro-batch of one rank; the global batch is this x accumulation x ranks."""
    optimizer: str = "adamw"
    """Key in the optimizer registry: adam, adamw, sgd, rmsprop, adagrad, or any torch optimizer in lower case."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step."""
    training_steps: int = Field(default=1000, ge=1)
    """Optimizer steps to take, unless `duration` says otherwise."""
    # Nothing that is trained on given data has to do with it: left out of what is printed and stored where it is 1.
    num_episodes_per_experience: int = Field(default=1, ge=1, exclude_if=lambda episodes: episodes == 1)
    """Rollouts sampled per call of `experience()`, for trainers with a sampler."""

    duration: DurationField | None = None
    """Length of the run in steps, epochs, tokens, env steps or time; replaces `training_steps`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The one root seed; every random stream is derived from it."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank; null takes one for a small policy on a CPU, else what torch or OMP_NUM_THREADS says."""
    num_workers: int = Field(default=0, ge=0)
    """Data-loading processes per rank; 0 loads in the training process."""
    prefetch_factor: int | None = Field(default=None, ge=1, exclude_if=_is_none)
    """Batches that each data-loading process makes ahead; null makes at least those of the next step."""
    pin_memory: bool | None = Field(default=None, exclude_if=_is_none)
    """Keep batches where a GPU copies them from fastest; null does so for data-loading processes where there is one."""
    shuffle: bool = True
    """Draw training samples in a random order, anew each epoch."""

    schedule: Schedule = "constant"
    """Shape of the learning rate over the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from zero."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine schedules end, relative to `lr`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    optimizer_params: dict[str, Any] = {}
    """Further arguments of the optimizer, such as betas or momentum."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; null does not clip."""
    optimizers: dict[str, OptimizerConfiguration] = {}
    """Several named optimizers, each over the parameters it matches; replaces the single one above."""
    freeze: list[str] = []
    """Parameter-name patterns to keep fixed (`backbone.*`); their modules stay in eval mode."""
    precision: Literal["float32", "float64", "bf16", "fp16", "auto"] = "float32"
    """Arithmetic of the forward pass; weights stay float32 under bf16 and fp16. auto is bf16 on CUDA, else float32."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the weights with this decay; evaluation then uses it."""
    compile: bool = False
    """Compile the policy with torch.compile."""

    log_every: DurationField = Duration(50)
    """How often metrics are written."""
    evaluate_every: DurationField | None = None
    """How often to evaluate; null evaluates only at the end, if there is evaluation data."""
    evaluate_batches: int | None = Field(default=None, ge=1)
    """At most this many evaluation batches; null takes all."""
    save_every: DurationField | None = None
    """How often to save; null saves only at the end and when interrupted."""
    keep_last: int | None = Field(default=2, ge=1)
    """Newest checkpoints to keep; null keeps all."""
    keep_best: int = Field(default=1, ge=0)
    """Best checkpoints to keep beside them."""
    best_metric: str = "eval/loss"
    """The metric that ranks checkpoints."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger `best_metric` is better."""
    early_stopping: EarlyStopping | None = None
    """Stop before the end when a metric stalls."""

    hang_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds without progress before a rank counts as hung; null takes 20 times the longest step, 10 to 600 s."""

    @field_validator("prefetch_factor")
    @classmethod
    def _require_workers(cls, ahead: int | None, given: ValidationInfo) -> int | None:
        if ahead is not None and given.data.get("num_workers") == 0:
            raise ValueError("needs num_workers of at least 1: batches are made ahead in processes of their own")
        return ahead

    def __setattr__(self, name: str, value: Any) -> None:
        # Subclasses may carry fields of their own, set after super().__init__(); declared fields stay frozen.
        if type(self) is not TrainingConfiguration and name not in type(self).model_fields and name[0] != "_":
            self.__dict__[name] = value
            return
        if name in type(self).model_fields:
            changed = f"config.model_copy(update={{{name!r}: {value!r}}})"
            raise ConfigError(f"{name} cannot be changed once it is set; make another configuration: {changed}")
        super().__setattr__(name, value)

    @property
    def length(self) -> Duration:
        """The requested length of the run."""
        return self.duration or Duration(self.training_steps)

    def named_optimizers(self) -> dict[str, OptimizerConfiguration]:
        """Return the optimizers by name: the ones listed, or the single one of the top-level fields as `policy`."""
        if self.optimizers:
            return self.optimizers
        single = {
            "match": ["*"],
            "type": self.optimizer,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "params": self.optimizer_params,
            "schedule": self.schedule,
            "warmup_steps": self.warmup_steps,
            "min_lr_ratio": self.min_lr_ratio,
            "clip_norm": self.clip_norm,
        }
        # Checked already, and what was left unsaid stays so: an optimizer factory then keeps a rate of its own.
        return {"policy": OptimizerConfiguration.model_construct(set(single) - self._unsaid(), **single)}

    def _unsaid(self) -> set[str]:
        fields, base = type(self).model_fields, TrainingConfiguration.model_fields
        names = {"lr", "weight_decay"} - self.model_fields_set
        return {name for name in names if fields[name].default == base[name].default}
