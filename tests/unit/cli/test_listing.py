"""`etude list`: what there is, and what each takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli import complete
from etude.cli.main import app
from etude.errors import RegistryError
from etude.registry import REGISTRIES

runner = CliRunner()


def test_the_kinds_are_listed_with_their_names() -> None:
    rows = [line.split(maxsplit=1) for line in runner.invoke(app, ["list"]).stdout.splitlines()[1:-1]]
    assert [kind for kind, _ in rows] == ["presets", *REGISTRIES]
    assert ["policies", ", ".join(REGISTRIES["policies"].keys())] in rows


@pytest.mark.parametrize("kind", list(REGISTRIES))
def test_every_kind_can_be_listed_in_text_and_json(kind: str) -> None:
    text = runner.invoke(app, ["list", kind])
    assert text.exit_code == 0, text.exception
    found = json.loads(runner.invoke(app, ["list", kind, "--json"]).stdout)
    assert [one["name"] for one in found] == REGISTRIES[kind].keys()
    assert all(one["name"] in text.stdout for one in found)


@pytest.mark.parametrize("kind,key", [(kind, key) for kind, registry in REGISTRIES.items() for key in registry])
def test_every_component_shows_its_parameters(kind: str, key: str) -> None:
    text = runner.invoke(app, ["list", kind, key])
    assert text.exit_code == 0, text.exception
    found = json.loads(runner.invoke(app, ["list", kind, key, "--json"]).stdout)
    assert (found["kind"], found["name"]) == (kind, key)
    assert [one["name"] for one in found["parameters"]] == [
        one.name for one in REGISTRIES[kind].describe(key).parameters
    ]


def test_parameters_come_with_type_default_and_help() -> None:
    lines = runner.invoke(app, ["list", "policies", "mlp"]).stdout.splitlines()
    assert lines[0].startswith("mlp: ")
    assert lines[2].split() == ["parameter", "type", "default", "help"]
    (dropout,) = [line for line in lines if line.startswith("dropout")]
    assert dropout.split(maxsplit=3)[1:3] == ["float", "0.0"]
    assert "Probability" in dropout


def test_a_plugin_can_be_looked_at(tmp_path: Path) -> None:
    plugin = tmp_path / "listing_plugin.py"
    plugin.write_text(
        "from etude.registry import LOSS_BUILDER_REGISTRY\n"
        "@LOSS_BUILDER_REGISTRY.register('listing_test_loss')\n"
        "class Huber:\n"
        '    """Be kind to outliers."""\n'
        "    def __init__(self, delta: float = 1.0) -> None: ...\n"
        "    def build(self): ...\n"
    )
    try:
        result = runner.invoke(app, ["list", "losses", "listing_test_loss", "--plugin", str(plugin)])
        assert "Be kind to outliers." in result.stdout
        assert "delta" in result.stdout
    finally:
        REGISTRIES["losses"]._entries.pop("listing_test_loss", None)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["polices"], "unknown kind 'polices'; did you mean 'policies'?"),
        (["zzz"], "unknown kind 'zzz'; known: presets, policies"),
        (["policies", "mpl"], "unknown policy 'mpl'; did you mean 'mlp'?"),
        (["losses", "--plugin", "absent_plugin"], "plugin 'absent_plugin'"),
    ],
)
def test_misspelt_names_are_corrected(arguments: list[str], message: str) -> None:
    error = runner.invoke(app, ["list", *arguments]).exception
    assert isinstance(error, RegistryError)
    assert message in str(error)


def test_completion_knows_every_kind() -> None:
    assert sorted(complete.KINDS) == sorted(["presets", *REGISTRIES])


def test_presets_are_listed_and_printed_to_be_kept_as_files() -> None:
    found = {one["name"]: one for one in json.loads(runner.invoke(app, ["list", "presets", "--json"]).stdout)}
    assert {"digits", "metaworld-act", "digits-grpo"} <= set(found)
    text = runner.invoke(app, ["list", "presets"]).stdout
    for name, one in found.items():
        assert one["summary"] in text
        assert runner.invoke(app, ["list", "presets", name]).stdout == Path(one["path"]).read_text()
    assert json.loads(runner.invoke(app, ["list", "presets", "digits", "--json"]).stdout)["name"] == "digits"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(RegistryError, match="unknown preset 'digit'; did you mean 'digits'"):
        runner.invoke(app, ["list", "presets", "digit"], catch_exceptions=False)
