"""Models from files: what each key of the schema does, as a user would write it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

from etude.errors import ConfigError, RegistryError
from etude.policies.graph import build_model


def write(folder: Path, text: str, name: str = "model.yaml") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


def graph(nodes: list[Any], outputs: Any, inputs: Any = ("x",), modules: Any = None, **more: Any) -> dict[str, Any]:
    body = {"inputs": list(inputs) if isinstance(inputs, tuple) else inputs, "modules": modules or {}, "nodes": nodes}
    return {"schema_version": 1, **more, "model": {"graph": {**body, "outputs": outputs}}}


LINEAR = {"_type_": "nn.Linear", "in_features": 4, "out_features": 3}


def test_a_sequential_model_is_its_layers_in_a_row(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        schema_version: 1
        model:
          sequential:
            inputs: [x]
            layers:
              - {_type_: nn.Linear, in_features: 4, out_features: 8}
              - {_type_: ReLU}
              - {_type_: torch.nn.Linear, _args_: [8, 2], _kwargs_: {bias: false}}
        """,
    )
    torch.manual_seed(0)
    model = build_model(path)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    x = torch.randn(5, 4)
    assert isinstance(model, nn.Module)
    assert torch.equal(model(x), twin(x))
    assert next(iter(model.state_dict())) == "graph_modules.layer0.weight"


def test_a_graph_joins_modules_and_operations() -> None:
    nodes = [
        {"name": "a", "call": "module:enc", "args": ["$x"]},
        {"name": "b", "call": "module:enc", "kwargs": {"input": "$x"}},
        {"name": "c", "call": "op:cat", "args": [["$a", "$b"]], "kwargs": {"dim": 1}},
        {"name": "d", "call": "op:chunk", "args": ["$c", 2, 1], "out": ["left", "right"]},
    ]
    model = build_model(graph(nodes, ["$left", "$c"], modules={"enc": LINEAR}))
    x = torch.randn(2, 4)
    left, both = model(x)
    assert torch.equal(left, model.graph_modules["enc"](x))
    assert both.shape == (2, 6)


@pytest.mark.parametrize(
    "call, args, expected",
    [
        ("add", ["$x", "$x"], lambda x: x + x), ("sub", ["$x", 1], lambda x: x - 1),
        ("mul", ["$x", 2, "$x"], lambda x: x * 2 * x), ("matmul", ["$x", "$x"], lambda x: x @ x),
        ("cat", [["$x", "$x"]], lambda x: torch.cat([x, x])), ("stack", [["$x", "$x"]], lambda x: torch.stack([x, x])),
        ("chunk", ["$x", 3], lambda x: x.chunk(3)), ("split", ["$x", [1, 2]], lambda x: x.split([1, 2])),
        ("getitem", ["$x", 0], lambda x: x[0]), ("getitem", ["$x", [0, 1]], lambda x: x[0, 1]),
        ("reshape", ["$x", [9]], lambda x: x.reshape(9)), ("reshape", ["$x", 1, -1], lambda x: x.reshape(1, -1)),
        ("flatten", ["$x", 0], lambda x: x.flatten()), ("transpose", ["$x", 0, 1], lambda x: x.t()),
        ("permute", ["$x", [1, 0]], lambda x: x.t()), ("unsqueeze", ["$x", 1], lambda x: x.unsqueeze(1)),
        ("squeeze", ["$x", 0], lambda x: x), ("expand", ["$x", [2, -1, -1]], lambda x: x.expand(2, -1, -1)),
        ("mean", ["$x"], lambda x: x.mean()), ("sum", ["$x", 1, True], lambda x: x.sum(1, True)),
        ("softmax", ["$x", 0], lambda x: x.softmax(0)), ("detach", ["$x"], lambda x: x),
        ("identity", ["$x"], lambda x: x),
    ],
)  # fmt: skip
def test_operations(call: str, args: list[Any], expected: Any) -> None:
    model = build_model(graph([{"name": "y", "call": f"op:{call}", "args": args}], "$y"))
    x = torch.randn(3, 3)
    torch.testing.assert_close(model(x), expected(x))


def test_inputs_may_be_left_out_where_they_are_optional() -> None:
    nodes = [{"name": "y", "call": "op:mul", "args": ["$x", "$gain"]}]
    model = build_model(graph(nodes, ["$y"], {"x": None, "gain": {"default": 2.0}}))
    assert model(torch.ones(1)).item() == 2
    assert model(torch.ones(1), 3.0).item() == model(gain=3.0, x=torch.ones(1)).item() == 3
    with pytest.raises(TypeError, match="'x' is given twice"):
        model(torch.ones(1), x=torch.ones(1))
    with pytest.raises(TypeError, match="no input 'gian'; did you mean 'gain'"):
        model(torch.ones(1), gian=1.0)
    with pytest.raises(TypeError, match="'x' is missing"):
        model(gain=1.0)
    with pytest.raises(TypeError, match="takes 2 inputs"):
        model(1, 2, 3)


def test_a_doubled_dollar_is_a_dollar() -> None:
    nodes = [{"name": "y", "call": "op:identity", "args": [["$$x", "$x", "$${x}", {"k": "$$$"}]]}]
    assert build_model(graph(nodes, "$y"))(1) == ["$x", 1, "${x}", {"k": "$$"}]


def test_results_come_single_as_a_tuple_or_by_key() -> None:
    nodes = [
        {"name": "n", "call": "op:identity", "args": [{"p": "$x", "q": 5}], "out": {"p": "first", "q": "second"}},
    ]  # fmt: skip
    assert build_model(graph(nodes, {"a": "$first", "b": "$second"}))(1) == {"a": 1, "b": 5}
    assert build_model(graph(nodes, ["first", "$second"]))(1) == (1, 5)
    assert build_model(graph(nodes, ["$second"]))(1) == 5
    config = graph(nodes, ["$first", "$second"])
    config["model"]["graph"]["return"] = "dict"
    assert build_model(config)(1) == {"first": 1, "second": 5}


def test_a_wrong_number_of_results_is_said() -> None:
    nodes = [{"name": "n", "call": "op:chunk", "args": ["$x", 3], "out": ["a", "b"]}]
    with pytest.raises(ValueError, match=r"node 'n' \(op:chunk\): gives 3 values, and out names 2"):
        build_model(graph(nodes, "$a"))(torch.ones(3))


def test_steps_and_ordered_mappings_are_nodes_too() -> None:
    steps = [{"call": "op:add", "args": ["$x", 1], "out": "y"}]
    model = {"schema_version": 1, "model": {"graph": {"inputs": ["x"], "steps": steps, "outputs": ["$y"]}}}
    assert build_model(model)(1) == 2
    nodes = {"b": {"call": "op:add", "args": ["$a", 1]}, "a": {"call": "op:add", "args": ["$x", 1]}}
    body = {"inputs": ["x"], "nodes": nodes, "order": ["a", "b"], "outputs": ["$b"]}
    assert build_model({"schema_version": 1, "model": {"graph": body}})(1) == 3
    del body["order"]
    with pytest.raises(ConfigError, match="order is missing"):
        build_model({"schema_version": 1, "model": {"graph": body}})


def test_nested_objects_are_made_and_shared_modules_share() -> None:
    layer = {"_type_": "nn.TransformerEncoderLayer", "d_model": 8, "nhead": 2, "batch_first": True}
    spec = {"_type_": "nn.TransformerEncoder", "encoder_layer": layer, "num_layers": 2, "enable_nested_tensor": False}
    nodes = [
        {"name": "a", "call": "module:m", "args": ["$x"]},
        {"name": "b", "call": "module:m", "args": ["$a"]},
    ]
    model = build_model(graph(nodes, ["$b"], {"x": ["B", 3, 8]}, {"m": spec}))
    assert model.shapes["b"] == "[2, 3, 8]"
    assert len(model.graph_modules["m"].layers) == 2


# ---- composition -----------------------------------------------------------------------------------------------------


def test_files_build_on_files_and_merge_lists(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        schema_version: 1
        size: {width: 4}
        model:
          graph:
            inputs: [x]
            modules:
              zeta: {_type_: Linear, in_features: "${size.width}", out_features: "${size.width}"}
              alpha: {_type_: Linear, in_features: "${size.width}", out_features: "${size.width}"}
            nodes:
              - {name: a, call: module:zeta, args: [$x]}
              - {name: b, call: module:alpha, args: [$a]}
            outputs: [$b]
        """,
        "base.yaml",
    )
    path = write(
        tmp_path,
        """
        defaults: [base.yaml]
        size: {width: 6}
        model:
          graph:
            modules: {omega: {_type_: ReLU}}
            nodes:
              _merge_: keyed
              key: name
              _value_:
                - {name: b, call: module:zeta}
                - {name: c, call: module:omega, args: [$b]}
            outputs: [$c]
        """,
    )
    model = build_model(path)
    assert list(model.graph_modules) == ["zeta", "alpha", "omega"]
    x = torch.randn(2, 6)
    zeta = model.graph_modules["zeta"]
    assert torch.equal(model(x), zeta(zeta(x)).relu())


@pytest.mark.parametrize("how, expected", [("append", [1, 2, 3]), ("prepend", [3, 1, 2]), ("replace", [3])])
def test_lists_are_merged_as_asked(tmp_path: Path, how: str, expected: list[int]) -> None:
    nodes = 'nodes: [{name: y, call: op:identity, args: ["${items}"]}]'
    base = f"schema_version: 1\nitems: [1, 2]\nmodel: {{graph: {{inputs: [x], {nodes}, outputs: [$y]}}}}\n"
    write(tmp_path, base, "base.yaml")
    path = write(tmp_path, f"defaults: [{{base: base.yaml}}]\nitems: {{_merge_: {how}, _value_: [3]}}\n")
    assert build_model(path)(0) == expected


def test_a_merge_with_nothing_below_is_its_value() -> None:
    nodes = {"_merge_": "append", "_value_": [{"name": "y", "call": "op:identity", "args": ["$x"]}]}
    assert build_model(graph(nodes, "$y"))(7) == 7  # type: ignore[arg-type]


def test_templates_are_filled_in_and_overridden() -> None:
    templates = {
        "layer": {"_type_": "Linear", "in_features": 4, "out_features": 4},
        "wide": {"_template_": "layer", "out_features": 9},
    }
    modules = {"a": {"_template_": "layer"}, "b": {"_template_": "wide", "bias": False}}
    nodes = [{"name": "y", "call": "module:a", "args": ["$x"]}]
    model = build_model(graph(nodes, "$y", modules=modules, templates=templates))
    assert model.graph_modules["b"].weight.shape == (9, 4)
    assert model.graph_modules["b"].bias is None


def test_references_keep_types_and_become_text_inside_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST_WIDTH", " 08 ")
    monkeypatch.setenv("ETUDE_TEST_RAW", " raw ")
    values = [
        "${p.list[1].k}", "${p.list}", "${env:int:ETUDE_TEST_WIDTH}", "${env:ETUDE_TEST_RAW}", "n=${p.n}, ${p.list[0]}",
        "${env:float:ETUDE_TEST_NONE,1e-3}", "${env:bool:ETUDE_TEST_NONE,true}", "${env:json:ETUDE_TEST_NONE,[1, 2]}",
        "${env:ETUDE_TEST_NONE,}", "${p.chain}", "l=${p.list}",
    ]  # fmt: skip
    parameters = {"n": 3, "list": [1.5, {"k": True}], "chain": "${p.again}", "again": "${p.n}"}
    model = build_model(graph([{"name": "y", "call": "op:identity", "args": [values]}], "$y", p=parameters))
    lists = [1.5, {"k": True}]
    expected = [True, lists, 8, " raw ", "n=3, 1.5", 1e-3, True, [1, 2], "", 3, 'l=[1.5, {"k": true}]']
    assert model(0) == expected


def test_weights_are_the_same_for_any_hash_seed(tmp_path: Path) -> None:
    linear = "{_type_: Linear, in_features: 4, out_features: 4}"
    base = f"schema_version: 1\nmodel: {{graph: {{modules: {{z: {linear}, a: {linear}}}}}}}\n"
    write(tmp_path, base, "base.yaml")
    path = write(tmp_path, """
        defaults: [base.yaml]
        model:
          graph:
            inputs: [x]
            modules: {k: {_type_: Linear, in_features: 4, out_features: 4}, a: {bias: false}}
            nodes: [{name: y, call: module:a, args: [$x]}]
            outputs: [$y]
        """)  # fmt: skip
    code = (
        "import sys, torch; from etude.policies.graph import build_model; torch.manual_seed(0); "
        "print({n: p.sum().item() for n, p in build_model(sys.argv[1]).named_parameters()})"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, timeout=100,
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    ]  # fmt: skip
    assert said[0] == said[1] != ""


# ---- extensions ------------------------------------------------------------------------------------------------------

EXTENSION = """
from torch import nn

def register(registry):
    @registry.register("{key}")
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x
"""


def test_two_models_share_an_extension_and_build_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graph_extension_one.py").write_text(EXTENSION.replace("{key}", "twice_for_test"))
    monkeypatch.syspath_prepend(str(tmp_path))
    nodes = [{"name": "y", "call": "module:m", "args": ["$x"]}]
    config = graph(nodes, "$y", modules={"m": {"_type_": "twice_for_test"}}, imports=["graph_extension_one"])
    assert build_model(config)(2) == build_model(config)(2) == 4
    other = {**config, "settings": {"allowed_import_prefixes": ["graph_"]}}
    assert build_model(other)(3) == 6


def test_imports_can_be_forbidden_and_errors_name_them() -> None:
    config = graph([{"name": "y", "call": "op:identity", "args": ["$x"]}], "$y", imports=["no_such_module_here"])
    with pytest.raises(ConfigError, match="not allowed by the caller"):
        build_model(config, allow_imports=False)
    with pytest.raises(ConfigError, match=r"settings.allow_imports"):
        build_model({**config, "settings": {"allow_imports": False}})
    with pytest.raises(ConfigError, match=r"allowed_import_prefixes"):
        build_model({**config, "settings": {"allowed_import_prefixes": ["mine."]}})
    with pytest.raises(RegistryError, match=r"imports\[0\].*no_such_module_here"):
        build_model(config)


def test_targets_need_the_callers_leave() -> None:
    modules = {"m": {"_target_": "torch.nn.Linear", "_args_": [4, 3]}}
    config = graph([{"name": "y", "call": "module:m", "args": ["$x"]}], "$y", modules=modules)
    with pytest.raises(ConfigError, match="allow_target=True"):
        build_model({**config, "settings": {"allow_target": True}})
    with pytest.raises(ConfigError, match=r"settings.allow_target"):
        build_model({**config, "settings": {"allow_target": False}}, allow_target=True)
    assert isinstance(build_model(config, allow_target=True).graph_modules["m"], nn.Linear)
