"""`etude model show`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from etude.cli.main import app
from etude.errors import ConfigError

MODEL = """
schema_version: 1
model:
  graph:
    inputs: {x: {shape: [B, 4]}}
    modules: {enc: {_type_: nn.Linear, in_features: 4, out_features: 3}}
    nodes:
      - {name: a, call: module:enc, args: [$x]}
      - {name: b, call: op:add, args: [$a, $a]}
    outputs: {"sum<&>": $b}
"""


def test_a_model_is_printed_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.yaml").write_text(MODEL)
    done = CliRunner().invoke(app, ["model", "show", "net.yaml"])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["a", "module:enc", "x", "[2,", "3]", "15"] in lines
    assert "15 parameters; drawing: net.svg" in done.output
    drawing = ElementTree.fromstring(Path("net.svg").read_text(encoding="utf-8"))
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"x", "a", "b", "sum<&>", "[2, 3]"} <= set(texts)


def test_programs_get_json(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(MODEL)
    done = CliRunner().invoke(app, ["model", "show", str(path), "--json", "-o", str(tmp_path / "sub" / "net.svg")])
    told = json.loads(done.output)
    assert told["parameters"] == 15
    assert [node["name"] for node in told["nodes"]] == ["x", "a", "b", "sum<&>"]
    assert (tmp_path / "sub" / "net.svg").exists()


@pytest.mark.parametrize("wrong", ["in_features: 5", "in_features: -1", "in_feature: 4"])
def test_a_model_that_cannot_be_built_is_one_sentence(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(MODEL.replace("in_features: 4", wrong))
    done = CliRunner().invoke(app, ["model", "show", str(path)])
    assert isinstance(done.exception, ConfigError)
    assert "net.yaml:" in str(done.exception)
    assert "\n" not in str(done.exception)


@pytest.mark.parametrize("place", ["file/net.svg", "/proc/nowhere/net.svg", "/dev/full", "."])
def test_a_place_that_takes_no_drawing_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "net.yaml").write_text(MODEL)
    (tmp_path / "file").write_text("in the way of a folder")
    done = CliRunner().invoke(app, ["model", "show", str(tmp_path / "net.yaml"), "-o", str(tmp_path / place)])
    assert isinstance(done.exception, ConfigError)
    assert re.fullmatch(r"cannot use /\S*: [^\n]+; make it writable, or name another place", str(done.exception))
    assert done.output == ""


def test_what_is_no_model_file_is_said_as_of_every_other_file(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    for path in (tmp_path / "absent.yaml", tmp_path / "list.yaml", tmp_path / "broken.yaml", tmp_path):
        said = []
        for command in (["model", "show"], ["check"]):
            done = CliRunner().invoke(app, [*command, str(path)])
            assert isinstance(done.exception, ConfigError)
            said.append(str(done.exception).partition(";")[0])
        assert said[0] == said[1]
