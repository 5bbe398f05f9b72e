"""`etude model show`."""

from __future__ import annotations

import json
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
