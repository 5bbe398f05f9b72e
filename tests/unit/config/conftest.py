"""A config file, a plugin with components that need no torch, and registries that forget what a test registers."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from etude.config.load import Loaded, load

PLUGIN = '''
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from etude import registry


@registry.POLICY_REGISTRY.register("net")
class Net:
    """Stand in for a policy.

    Args:
        width: How wide it is.
    """

    def __init__(self, width: int = 8, depths: list[int] = [1, 2], rate: float | None = None,
                 kind: Literal["plain", "gated"] = "plain", gain: Annotated[float, Field(gt=0)] = 1.0) -> None:
        self.width, self.depths, self.rate, self.kind, self.gain = width, depths, rate, kind, gain

    def forward(self, batch): ...
    def state_dict(self): ...


@registry.DATASET_BUILDER_REGISTRY.register("rows")
class Rows:
    def __init__(self, count: int, folder: Path = Path("."), shift: tuple[float, float] = (0.0, 0.0)) -> None:
        self.count, self.folder, self.shift = count, folder, shift

    def __len__(self): return self.count
    def __getitem__(self, index): return {"x": index}


@registry.ENGINE_REGISTRY.register("stub")
@dataclass
class Stub:
    """Stand in for an engine."""

    strategy: str = "auto"
    """How ranks share a policy."""

    def run(self, trainer, resume): ...


@registry.LOGGER_REGISTRY.register("sink")
class Sink:
    def __init__(self, project: str = "p", api_key: SecretStr | None = None, tags: dict[str, str] | None = None):
        self.project, self.api_key, self.tags = project, api_key, tags

    def start(self, run_dir, config, first_step): ...
    def log(self, step, metrics): ...
    def close(self): ...


@registry.OPTIMIZER_BUILDER_REGISTRY.register("plain_sgd")
class PlainSGD:
    def __init__(self, lr: float, momentum: float = 0.0) -> None: ...
    def build(self, params): ...


@registry.CALLBACK_REGISTRY.register("beep")
class Beep:
    def __init__(self, times: int = 1, loud: bool = False, note: str = "") -> None: ...
    def on_step_end(self, trainer, metrics): ...
'''

BASE = """\
plugins: [components.py]
policy: {type: net}
data: {type: rows, params: {count: 10}}
engine: stub
loggers: []
"""


@pytest.fixture(autouse=True)
def each_test_has_its_own_plugins(registries_restored: None) -> None:
    """Every folder here has a plugin of the same names."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the plugin in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "components.py").write_text(PLUGIN)
    return tmp_path


@pytest.fixture
def config(folder: Path) -> Callable[..., Loaded]:
    """Load the base configuration with more text below it, and overrides."""

    def load_text(more: str = "", *overrides: str, base: str = BASE) -> Loaded:
        (folder / "x.yaml").write_text(base + dedent(more))
        return load("x.yaml", overrides)

    return load_text
