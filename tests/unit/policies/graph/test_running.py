"""Built models as plain modules: errors, memory, compilation, export, copies, and what they cost."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.policies.graph import MODULE_REGISTRY, build_model

YAML = """
schema_version: 1
model:
  graph:
    inputs: {x: {shape: [B, 4]}, scale: {optional: true, default: 1.0}}
    modules:
      first: {_type_: mlp, in_features: 4, out_features: 8, hidden: [8]}
      second: {_type_: mlp, in_features: 16, out_features: 2, hidden: [8]}
    nodes:
      - {name: a, call: module:first, args: [$x]}
      - {name: b, call: op:mul, args: [$a, $scale]}
      - {name: c, call: op:cat, args: [[$a, $b]], kwargs: {dim: 1}}
      - {name: d, call: module:second, args: [$c]}
    outputs: [$d]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(YAML)
    return path


def identity(modules: dict[str, Any], nodes: list[Any], outputs: Any, inputs: Any) -> dict[str, Any]:
    body = {"inputs": inputs, "modules": modules, "nodes": nodes, "outputs": outputs}
    return {"schema_version": 1, "model": {"graph": body}}


class Raises(nn.Module):
    error: Exception = RuntimeError("boom")

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            raise self.error
        return x


class Watch(nn.Module):
    """Notes which tensors it saw, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        self.alive.append(sum(one() is not None for one in self.seen))
        out = x + 1
        self.seen.append(weakref.ref(out))
        return out


MODULE_REGISTRY.add("raises_for_test", Raises)
MODULE_REGISTRY.add("watch_for_test", Watch)


class Odd(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("k"), Odd(3, "odd"), ValueError()])
def test_errors_keep_their_type_and_name_node_file_and_line(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "schema_version: 1\nmodel:\n  graph:\n    inputs: [x]\n    modules: {m: {_type_: raises_for_test}}\n"
        "    nodes:\n      - {name: broken, call: module:m, args: [$x]}\n    outputs: [$broken]\n"
    )
    model = build_model(path)
    model.graph_modules["m"].error = error
    with pytest.raises(type(error)) as caught:
        model(torch.ones(1))
    assert caught.value is error
    said = " ".join([str(error), *getattr(error, "__notes__", [])])
    assert "bad.yaml:7" in said
    assert "node 'broken' (module:m)" in said


def test_shapes_are_tried_when_the_model_is_built(path: Path) -> None:
    state = torch.get_rng_state()
    model = build_model(path)
    assert model.shapes == {
        "x": "[2, 4]",
        "scale": "float",
        "a": "[2, 8]",
        "b": "[2, 8]",
        "c": "[2, 16]",
        "d": "[2, 2]",
    }
    torch.set_rng_state(state)
    assert torch.equal(nn.Linear(4, 8).weight, model.graph_modules["first"][0].weight)
    path.write_text(YAML.replace("in_features: 16", "in_features: 15"))
    with pytest.raises(RuntimeError, match=r"model.yaml:13:9: .*node 'd' \(module:second\): .*16.*15"):
        build_model(path)


def test_a_trial_changes_nothing_and_lazy_modules_get_their_weights() -> None:
    modules = {
        "norm": {"_type_": "BatchNorm1d", "num_features": 4},
        "lazy": {"_type_": "LazyLinear", "out_features": 3},
    }
    nodes = [
        {"name": "a", "call": "module:norm", "args": ["$x"]},
        {"name": "b", "call": "module:lazy", "args": ["$a"]},
    ]
    model = build_model(identity(modules, nodes, ["$b"], {"x": ["B", 4]}))
    assert model.graph_modules["norm"].num_batches_tracked == 0
    assert model.graph_modules["lazy"].weight.shape == (3, 4)
    assert model.training


def test_what_needs_numbers_is_left_to_the_first_call() -> None:
    model = build_model(identity({}, [{"name": "y", "call": "op:getitem", "args": ["$x", "$m"]}], ["$y"],
                                 {"x": ["B"], "m": {"shape": ["B"], "dtype": "bool"}}))  # fmt: skip
    assert model.shapes["y"] == ""
    assert model(torch.arange(2), torch.tensor([True, False])).tolist() == [0]


def test_values_are_let_go_of_after_their_last_use() -> None:
    nodes = [{"name": f"v{i}", "call": "module:m", "args": [f"$v{i - 1}" if i else "$x"]} for i in range(5)]
    model = build_model(identity({"m": {"_type_": "watch_for_test"}}, nodes, ["$v4"], ["x"]))
    with torch.no_grad():
        model(torch.ones(3))
    assert model.graph_modules["m"].alive == [0, 1, 1, 1, 1]


@pytest.mark.slow
def test_compiles_and_exports_as_one_graph(path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(path).eval()
    x = torch.randn(3, 4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model, (x,), strict=True)
    torch.testing.assert_close(exported.module()(x), model(x))


def test_models_are_copied_saved_and_restored_like_any_module(path: Path) -> None:
    model = build_model(path)
    x = torch.randn(2, 4)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(x), model(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    other = build_model(path)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.equal(other(x), model(x))


def test_a_replaced_module_is_the_one_that_is_called(path: Path) -> None:
    model = build_model(path)
    model.graph_modules["second"] = nn.Identity()
    assert model(torch.ones(2, 4)).shape == (2, 16)


def test_unknown_types_in_a_dictionary_are_refused() -> None:
    with pytest.raises(ConfigError, match="no plain value"):
        build_model({"schema_version": 1, "model": object()})
    with pytest.raises(ConfigError, match="must be a path"):
        build_model(3)  # type: ignore[arg-type]
