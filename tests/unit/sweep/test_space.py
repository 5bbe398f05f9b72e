"""What a sweep searches, as it is written on a command line."""

from __future__ import annotations

import pytest

from etude.errors import ConfigError
from etude.sweep.space import SearchChoice, SearchRange, parse_space, split_at_commas


@pytest.mark.parametrize(
    "text, found",
    [
        ("lr=log(1e-5,1e-2)", SearchRange("lr", 1e-5, 1e-2, is_log=True)),
        ("lr=log(1,10)", SearchRange("lr", 1.0, 10.0, is_log=True)),
        ("p=uniform(0, 0.5)", SearchRange("p", 0.0, 0.5)),
        ("n=int(1,8)", SearchRange("n", 1, 8, step=1)),
        ("n=int(16,64,16)", SearchRange("n", 16, 64, step=16)),
        ("n=logint(16,1024)", SearchRange("n", 16, 1024, is_log=True)),
        ("p=range(0.1,0.5,0.1)", SearchRange("p", 0.1, 0.5, step=0.1)),
        ("n=range(2,8,2)", SearchRange("n", 2, 8, step=2)),
        ("c=4,8,16", SearchChoice("c", ("4", "8", "16"))),
        ("c=true, false", SearchChoice("c", ("true", "false"))),
        ("c=[64,64],[128],null", SearchChoice("c", ("[64,64]", "[128]", "null"))),
        ("c={type: mlp, size: [4,4]},act", SearchChoice("c", ("{type: mlp, size: [4,4]}", "act"))),
        ("c='a,b',c", SearchChoice("c", ("'a,b'", "c"))),
    ],
)  # fmt: skip
def test_ranges_and_choices_are_read(text: str, found: object) -> None:
    space = parse_space([text])
    assert space.parameters == (found,)
    assert type(space.parameters[0].__dict__.get("low")) is type(found.__dict__.get("low"))
    assert space.fixed == ()


@pytest.mark.parametrize("text", ["lr=1e-3", "hidden=[64,64]", "name='a,b'", "x=", "m={a: 1, b: 2}", "t=it's"])
def test_a_single_value_is_an_override(text: str) -> None:
    space = parse_space([text])
    assert (space.parameters, space.fixed) == ((), (text,))


@pytest.mark.parametrize(
    "text, says",
    [
        ("lr", "write key=what"),
        ("=3", "write key=what"),
        ("lr=log(0,1)", "begins above 0"),
        ("lr=log(1e-2,1e-5)", "lower end comes first"),
        ("lr=log(1e-5)", r"write log\(1e-5,1e-2\)"),
        ("lr=lgo(1,2)", "did you mean 'log'"),
        ("lr=normal(0,1)", r"normal\(\) is not known"),
        ("lr=uniform(a,b)", "'a' is not a number"),
        ("lr=uniform(0,inf)", "'inf' is not a number"),
        ("n=int(1.5,3)", "whole numbers"),
        ("n=int(1,8,0)", "step is above 0"),
        ("n=int(1,8,99)", "no more than the range"),
        ("n=int(1,99999999999999999999)", "searched up to 9,007,199,254,740,992"),
        (f"n=int(1,1{'0' * 400})", "searched up to"),
        ("p=range(0,1,1e-320)", "too far apart"),
        ("p=uniform(-1e308,1e308)", "too far apart"),
        ("n=4,,8", "a choice is empty"),
        ("n=4,4", "there twice"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_space([text])
    assert "\n" not in str(caught.value)


def test_a_key_is_given_once() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        parse_space(["lr=1", "lr=log(1,2)"])


def test_a_trial_is_overrides_that_read_back_to_its_values() -> None:
    space = parse_space(["training.seed=3", "lr=log(1e-5,1e-2)", "n=int(1,8)", "c=[4,4],null"])
    values = {"lr": 0.1 + 0.2, "n": 4, "c": "[4,4]"}
    assert parse_space(["policy=mlp,act", "policy.params.dim=8"]).overrides({"policy": "act"}) == [
        "policy=act", "policy.params.dim=8",
    ], "a part is set after the whole"  # fmt: skip
    assert space.overrides(values) == ["training.seed=3", "lr=0.30000000000000004", "n=4", "c=[4,4]"]


def test_samples_hold_every_end_and_every_choice() -> None:
    samples = list(parse_space(["a=1", "n=int(1,8)", "c=x,y,z"]).samples())
    assert samples == [["a=1", f"n={n}", f"c={c}"] for n, c in ((1, "x"), (8, "x"), (1, "y"), (1, "z"))]


def test_a_grid_has_every_combination_and_no_continuous_range() -> None:
    grid = parse_space(["n=int(1,2)", "c=x,y", "p=range(0.1,0.3,0.1)"]).grid()
    assert len(grid) == 2 * 2 * 3
    assert grid[0] == {"n": 1, "c": "x", "p": 0.1}
    assert grid[-1]["p"] == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="a grid has no end"):
        parse_space(["lr=log(1e-5,1e-2)"]).grid()
    with pytest.raises(ConfigError, match="too large"):
        parse_space(["a=int(1,1000)", "b=int(1,1000)"]).grid()
    with pytest.raises(ConfigError, match="too many for a grid"):
        parse_space(["a=int(1,9000000000000000)"]).grid()  # which no machine could list


def test_commas_in_brackets_and_quotes_split_nothing() -> None:
    assert split_at_commas("a, [b, c], 'd, e', f(g, h)") == ["a", "[b, c]", "'d, e'", "f(g, h)"]
