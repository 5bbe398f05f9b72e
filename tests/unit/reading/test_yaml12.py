"""YAML as people mean it: numbers are numbers, words are words, and every mistake has a place."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.reading import yaml12
from etude.reading.yaml12 import ReadError


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("5.", 5.0), ("-1.5e+3", -1500.0), ("1_000", 1000), ("+3", 3),
        ("1_000.5", 1000.5), ("010", 10), ("0o10", 8), ("0x1F", 31), (".inf", math.inf), ("-.INF", -math.inf),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
    ],
)  # fmt: skip
def test_plain_scalars_are_read_as_their_type(text: str, value: object) -> None:
    read = yaml12.read(f"key: {text}").value["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["on", "off", "yes", "no", "y", "NO", "2024-01-31", "12:30:00", "1:30", "1__0", "_1", "1_", "0b11", "0o9", "1e",
     "e5", ".", "-", "+", "1.2.3", "TruE", "inf", "nan", "0x", "1e5x"],
)  # fmt: skip
def test_everything_else_is_text(text: str) -> None:
    assert yaml12.read(f"key: '{text}'").value == {"key": text}
    if text != "-":
        assert yaml12.read(f"key: {text}").value == {"key": text}


def test_quoted_numbers_stay_text() -> None:
    assert yaml12.read("a: '1'\nb: \"2\"\nc: !!str 3").value == {"a": "1", "b": "2", "c": "3"}


def test_every_key_and_item_has_its_place() -> None:
    marks = yaml12.read("a:\n  b: [1, {c: 2}]\n").marks
    assert marks == {("a",): (1, 1), ("a", "b"): (2, 3), ("a", "b", 0): (2, 7), ("a", "b", 1): (2, 10),
                     ("a", "b", 1, "c"): (2, 11)}  # fmt: skip


def test_anchors_aliases_and_merge_keys_work() -> None:
    text = "base: &b {x: 1, y: {z: 2}}\none: {<<: *b, x: 3}\ntwo: *b\nthree: {<<: [{q: 1}, *b]}\n"
    value = yaml12.read(text).value
    assert value["one"] == {"x": 3, "y": {"z": 2}}
    assert value["two"] == {"x": 1, "y": {"z": 2}}
    assert value["three"] == {"q": 1, "x": 1, "y": {"z": 2}}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text, message, mark",
    [
        ("a: 1\nb: 2\na: 3\n", "'a' appears twice; it is first set in line 1", (3, 1)),
        ("a:\n  1: x\n", "the key '1' is not text", (2, 3)),
        ("null: x\n", "the key 'null' is not text", (1, 1)),
        ("? [a]\n: x\n", "cannot be a key", (1, 3)),
        ("a: .nan\n", "NaN", (1, 4)),
        ("a: !!python/object/apply:os.system [x]\n", "tag", (1, 4)),
        ("a: !secret x\n", "tag", (1, 4)),
        ("a: *b\n", "*b is not defined", (1, 4)),
        ("a: &a [*a]\n", "contains itself", (1, 8)),
        ("a: b: c\n", "not valid YAML", (1, 5)),
        ("a: [1\n", "not valid YAML", (2, 1)),
        ("a: 1\n---\nb: 2\n", "more than one document", (2, 1)),
        ("a: \x00\n", "not valid YAML", None),
        ("\tb: 1\n", "not valid YAML", (1, 1)),
        ("a: " + "[" * 100_000, "nested more than 64 levels", (1, 67)),
        ("- " * 100_000, "nested more than 64 levels", (1, 129)),
        (BOMB, "more than 100000 values", None),
        ("a: " + "9" * 5000, "more than 1000 digits", (1, 4)),
        ("a: {<<: 3}\n", "'<<' takes a mapping", (1, 5)),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, message: str, mark: tuple[int, int] | None) -> None:
    with pytest.raises(ReadError) as caught:
        yaml12.read(text)
    assert message in caught.value.message
    assert mark is None or caught.value.mark == mark
    assert "\n" not in caught.value.message


def test_bytes_that_are_not_text_are_refused_with_their_line() -> None:
    with pytest.raises(ReadError, match="not UTF-8") as caught:
        yaml12.read_bytes(b"a: 1\nb: \xff\xfe\n")
    assert caught.value.mark == (2, 4)
    with pytest.raises(ReadError, match="larger than 4 MiB"):
        yaml12.read_bytes(b"x" * (5 << 20))
    assert yaml12.read_bytes(b"\xef\xbb\xbfa: 1") == "a: 1"


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=20)
TRAPS = st.sampled_from(
    ["1e-4", "0o10", "on", "2024-01-01", "1_000", ".5", "~", "<<", "=", "*", "- a", "a: b", "#", " x", ".nan"]
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT, TRAPS)
KEYS = TEXT.filter(lambda key: key != "<<")
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, TREES, max_size=4))
def test_what_is_written_reads_back_the_same(tree: dict[str, object]) -> None:
    assert yaml12.read(yaml12.write(tree)).value == tree
