"""Signatures, read from source or from life, say the same."""

from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import pytest
from pydantic import SecretStr

from etude.signatures import Signature, read_runtime, read_static
from etude.types.duration import Duration

MODULE = '''
from __future__ import annotations

import dataclasses
import typing as t
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional, Union

from pydantic import Field, SecretStr

from etude.types.duration import Duration

Mode = Literal["fast", "slow"]
SIZES = [1, 2]


class Plain:
    """Say one thing.

    More text: not an argument.

    Args:
        width: How wide
            it is.
        mode (str): How it goes.
    """

    def __init__(self, width: int, mode: Mode = "fast", sizes: list[int] = SIZES, *args: int, free=3,
                 gain: float | None = None, where: "Path | None" = None, pair: tuple[int, float] = (1, 2.0),
                 many: tuple[int, ...] = (), key: Optional[SecretStr] = None, either: Union[int, str] = 1,
                 table: Mapping[str, int] | None = None, items: Iterable[float] = (), rows: Sequence[str] = (),
                 limit: Annotated[int, Field(ge=1, le=9)] = 3, alias: t.Optional[int] = None, sign: int = -1,
                 long: Duration = Duration(3), opaque: Unknown = None) -> None:
        ...


class Child(Plain):
    """Add to the parent."""

    def __init__(self, *args: Any, extra: bool = False, **kwargs: Any) -> None: ...


class Silent(Plain):
    """Take what the parent takes."""


class Nothing:
    """Take nothing."""


class Open:
    def __init__(self, a: int = 1, **kwargs: Any) -> None: ...


@dataclass
class Base:
    """Hold values."""

    kind: ClassVar[str] = "x"
    first: int
    """The first
    of all."""
    second: list[str] = field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Derived(Base):
    """Hold more."""

    third: float = 0.5
    hidden: int = field(init=False, default=3)
    """Not a parameter."""
    fourth: str = dataclasses.field(default="z")


def function(a: int, /, b: str, *, c: bool = True) -> None:
    """Do something."""
'''
NAMES = ["Plain", "Child", "Silent", "Nothing", "Open", "Base", "Derived", "function"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"signed_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _both(module: str, name: str) -> tuple[Signature, Signature]:
    static = read_static(f"{module}:{name}")
    assert static is not None
    return static, read_runtime(getattr(__import__(module), name))


@pytest.mark.parametrize("name", NAMES)
def test_source_and_life_agree(module: str, name: str) -> None:
    static, live = _both(module, name)
    assert (static.open, static.summary) == (live.open, live.summary)
    for written, seen in zip(static.parameters, live.parameters, strict=True):
        assert (written.name, written.type, written.required) == (seen.name, seen.type, seen.required)
        if written.name != "limit":  # equal in meaning; the metadata differs in form
            assert written.annotation == seen.annotation, written.name
        if name not in ("Base", "Derived"):
            assert written.help == seen.help
        if written.name not in ("long", "second"):
            assert written.default == seen.default


def test_annotations_become_types(module: str) -> None:
    static, _ = _both(module, "Plain")
    kinds = {parameter.name: parameter.annotation for parameter in static.parameters}
    assert kinds["width"] is int
    assert kinds["mode"] == Literal["fast", "slow"]
    assert kinds["sizes"] == list[int]
    assert kinds["gain"] == Optional[float]  # noqa: UP045
    assert kinds["free"] is Any
    assert kinds["where"] == Optional[Path]  # noqa: UP045
    assert kinds["pair"] == tuple[int, float]
    assert kinds["many"] == tuple[int, ...]
    assert kinds["key"] == Optional[SecretStr]  # noqa: UP045
    assert kinds["either"] == Union[int, str]  # noqa: UP007
    assert kinds["table"] == Optional[dict[str, int]]  # noqa: UP045
    assert kinds["items"] == list[float]
    assert kinds["alias"] == Optional[int]  # noqa: UP045
    assert get_origin(kinds["limit"]) is Annotated
    assert get_args(kinds["long"])[0] is Duration
    assert kinds["opaque"] is Any
    assert static.get("sign") is not None
    assert [p.name for p in static.parameters if p.required] == ["width"]


def test_docstrings_are_the_help(module: str) -> None:
    static, _ = _both(module, "Plain")
    assert static.summary == "Say one thing."
    assert {p.name: p.help for p in static.parameters if p.help} == {"width": "How wide it is.", "mode": "How it goes."}
    base, _ = _both(module, "Derived")
    assert {p.name: p.help for p in base.parameters if p.help} == {"first": "The first of all."}


def test_what_the_parent_takes_is_taken_through_kwargs(module: str) -> None:
    static, _ = _both(module, "Child")
    assert static.parameters[0].name == "extra"
    assert static.get("width") is not None
    assert not static.open
    assert _both(module, "Open")[0].open


def test_names_that_cannot_be_read_are_none(module: str) -> None:
    assert read_static(f"{module}:Absent") is None
    assert read_static("no.such.module:X") is None
    assert read_static("sys:path") is None


def test_the_framework_hides_what_it_supplies(module: str) -> None:
    static, _ = _both(module, "function")
    assert [p.name for p in static.parameters] == ["b", "c"]
    assert [p.name for p in static.without(["b"]).parameters] == ["c"]
