"""Registries refuse what does not fit or is taken; plugins load once; built-in components are told without torch."""

import inspect
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from etude import plugins, registry
from etude.errors import RegistryError
from etude.registry import (
    CALLBACK_REGISTRY,
    DATASET_BUILDER_REGISTRY,
    LOSS_BUILDER_REGISTRY,
    OPTIMIZER_BUILDER_REGISTRY,
    POLICY_REGISTRY,
    REGISTRIES,
    TRAINER_REGISTRY,
    Lazy,
    Registry,
    load_plugins,
)
from etude.signatures import fit
from etude.types import protocols

pytestmark = pytest.mark.usefixtures("registries_restored")


class Fitting:
    def forward(self, batch: Any) -> Any: ...
    def state_dict(self) -> Any: ...


def test_a_registered_class_is_found_by_its_key_or_name() -> None:
    decorated = POLICY_REGISTRY.register("mine")(Fitting)
    assert decorated is Fitting
    assert POLICY_REGISTRY.get("mine") is Fitting
    assert "mine" in POLICY_REGISTRY
    assert "mine" in POLICY_REGISTRY.keys()  # noqa: SIM118
    POLICY_REGISTRY.register()(Fitting)
    assert POLICY_REGISTRY.get("Fitting") is Fitting


def test_a_decorator_without_parentheses_is_told() -> None:
    with pytest.raises(RegistryError, match="with parentheses"):
        POLICY_REGISTRY.register(Fitting)  # type: ignore[arg-type]


def test_unknown_keys_come_with_a_suggestion_and_the_list() -> None:
    with pytest.raises(RegistryError, match=r"unknown policy 'mpl'; did you mean 'mlp'\? Known: .*mlp"):
        POLICY_REGISTRY.get("mpl")
    with pytest.raises(RegistryError, match=r"unknown policy 'qqq'; known: "):
        POLICY_REGISTRY.get("qqq")


def test_a_taken_key_is_refused_naming_both() -> None:
    class Other(Fitting): ...

    POLICY_REGISTRY.add("mine", Fitting)
    POLICY_REGISTRY.add("mine", Fitting)  # the same again is no conflict
    with pytest.raises(RegistryError) as caught:
        POLICY_REGISTRY.add("mine", Other)
    assert f"{__name__}:Fitting" in str(caught.value)
    assert "Other" in str(caught.value)
    with pytest.raises(RegistryError, match=r"already registered by etude\.policies\.mlp:MLP"):
        POLICY_REGISTRY.add("mlp", Fitting)
    assert POLICY_REGISTRY.get("mine") is Fitting


@pytest.mark.parametrize(
    "one, members, lacking",
    [
        (POLICY_REGISTRY, {"forward": lambda self, batch: 0}, "lacks state_dict()"),
        (TRAINER_REGISTRY, {"fit": lambda self: 0}, "lacks compute_loss() or train_step()"),
        (
            DATASET_BUILDER_REGISTRY,
            {"__len__": lambda self: 0},
            "lacks build() or take() or __getitem__() or __iter__()",
        ),
        (DATASET_BUILDER_REGISTRY, {"build": lambda self: 0}, "lacks build(opt_params, params) or take()"),
        (OPTIMIZER_BUILDER_REGISTRY, {"build": lambda self: 0}, "lacks build(params)"),
        (LOSS_BUILDER_REGISTRY, {"build": lambda self, opt_params, params: 0}, "lacks build()"),
        (CALLBACK_REGISTRY, {"on_stepend": lambda self: 0}, "lacks on_fit_start() or on_step_end()"),
        (REGISTRIES["loggers"], {"log": lambda self, step, metrics: 0}, "lacks start() and close()"),
        (REGISTRIES["engines"], {}, "lacks run()"),
        (REGISTRIES["algorithms"], {}, "lacks loss()"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_naming_what_it_lacks(
    one: Registry[Any], members: dict[str, Any], lacking: str
) -> None:
    with pytest.raises(RegistryError) as caught:
        one.add("odd", type("Odd", (), members))
    assert lacking in str(caught.value)
    assert f"{one.noun} 'odd'" in str(caught.value)
    assert "odd" not in one


@pytest.mark.parametrize(
    "one, members",
    [
        (TRAINER_REGISTRY, {"train_step": lambda self, data, **kwargs: {}}),
        (DATASET_BUILDER_REGISTRY, {"build": lambda self, opt_params, params: {}}),
        (DATASET_BUILDER_REGISTRY, {"build": lambda self, *args, **kwargs: {}}),
        (DATASET_BUILDER_REGISTRY, {"__iter__": lambda self: iter(())}),
        (OPTIMIZER_BUILDER_REGISTRY, {"build": lambda self, params, **kwargs: 0}),
        (LOSS_BUILDER_REGISTRY, {"build": lambda self: 0}),
        (CALLBACK_REGISTRY, {"on_save": lambda self, trainer, step: 0}),
    ],
)
def test_a_class_that_fits_one_of_the_protocols_is_accepted(one: Registry[Any], members: dict[str, Any]) -> None:
    one.add("good", type("Good", (), members))


def test_functions_serve_where_a_component_is_made_by_calling() -> None:
    def make_rows() -> list[int]:
        return [1]

    DATASET_BUILDER_REGISTRY.add("rows", make_rows)
    with pytest.raises(RegistryError, match="must be a class"):
        TRAINER_REGISTRY.add("rows", make_rows)
    with pytest.raises(RegistryError, match="must be a class or a function, got int"):
        POLICY_REGISTRY.add("three", 3)  # type: ignore[arg-type]


def test_a_module_without_forward_does_not_fit() -> None:
    from torch import nn

    with pytest.raises(RegistryError, match=r"lacks forward\(\)"):
        POLICY_REGISTRY.add("hollow", type("Hollow", (nn.Module,), {}))


def test_a_lazy_component_is_imported_on_first_use_and_then_checked() -> None:
    one: Registry[Any] = Registry(
        "things", ("absent_member",), {"thing": "etude.errors:ConfigError", "gone": "etude.no:X"}
    )
    assert one.loaded("thing") is None
    with pytest.raises(RegistryError, match=r"lacks absent_member\(\)"):
        one.get("thing")
    with pytest.raises(RegistryError, match=r"thing 'gone' cannot be imported from etude.no:X"):
        one.get("gone")


# ---- plugins ---------------------------------------------------------------------------------------------------------

PLUGIN = """
from etude.registry import CALLBACK_REGISTRY
print("loading")
@CALLBACK_REGISTRY.register("{key}")
class Plugged:
    def on_log(self, trainer, step, metrics): ...
"""


def test_a_plugin_is_loaded_once_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugpack").mkdir()
    (tmp_path / "plugpack" / "plugmod.py").write_text(PLUGIN.format(key="one"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "plugpack")
    file = str(tmp_path / "plugpack" / "plugmod.py")
    load_plugins(["plugpack.plugmod", "plugpack.plugmod", "plugmod", file, file])
    assert capsys.readouterr().out == "loading\n"
    load_plugins([file])
    assert CALLBACK_REGISTRY.get("one").__module__ == "plugpack.plugmod"


def test_one_definition_under_two_module_names_is_one_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugpack2").mkdir()
    (tmp_path / "plugpack2" / "plugmod2.py").write_text(PLUGIN.format(key="two"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "plugpack2")
    import importlib

    importlib.import_module("plugpack2.plugmod2")
    importlib.import_module("plugmod2")
    assert CALLBACK_REGISTRY.get("two").__module__ == "plugpack2.plugmod2"


def test_a_plugin_that_fails_leaves_nothing_behind_and_may_try_again(tmp_path: Path) -> None:
    file = tmp_path / "plugbad.py"
    file.write_text(PLUGIN.format(key="three") + "raise RuntimeError('not today')\n")
    with pytest.raises(RegistryError, match=r"plugbad.py' cannot be loaded: RuntimeError: not today"):
        load_plugins([str(file)])
    assert "three" not in CALLBACK_REGISTRY
    file.write_text(PLUGIN.format(key="three"))
    load_plugins([str(file)])
    assert "three" in CALLBACK_REGISTRY


@pytest.mark.parametrize(
    "text, message",
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_package_at_all\n", "No module named 'no_such_package_at_all'"),
        ("raise SystemExit(3)\n", "SystemExit"),
        (PLUGIN.format(key="taken") + PLUGIN.format(key="taken").replace("Plugged", "Other"), "already registered by"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plugwrong.py").write_text(text)
    with pytest.raises(RegistryError, match=r"plugwrong\.py'") as caught:
        load_plugins([str(tmp_path / "plugwrong.py")])
    assert message in str(caught.value)


def test_plugin_files_may_import_their_siblings_which_they_share(tmp_path: Path) -> None:
    sizes = "print('loading sizes')\nfrom etude.registry import CALLBACK_REGISTRY\nclass Sizes:\n    width = 7\n"
    (tmp_path / "sizes.py").write_text(sizes)
    (tmp_path / "plugone.py").write_text("from .sizes import Sizes\n" + PLUGIN.format(key="plugone"))
    text = "from .sizes import Sizes\nfrom .plugone import Plugged as First\n" + PLUGIN.format(key="plugtwo")
    (tmp_path / "plugtwo.py").write_text(text)
    load_plugins([str(tmp_path / "plugtwo.py"), str(tmp_path / "plugone.py"), str(tmp_path / "sizes.py")])
    one, two = (sys.modules[CALLBACK_REGISTRY.get(key).__module__] for key in ("plugone", "plugtwo"))
    assert one.Sizes is two.Sizes
    assert two.First is one.Plugged
    assert [Path(plugin).name for plugin in plugins.loaded_plugins()[-3:]] == ["plugtwo.py", "plugone.py", "sizes.py"]


def test_folders_of_one_name_do_not_share_their_siblings(tmp_path: Path) -> None:
    for width, folder in enumerate(("a/parts", "b/parts")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "sizes.py").write_text(f"WIDTH = {width}\n")
        text = "from .sizes import WIDTH\n" + PLUGIN.format(key=f"width{width}")
        (tmp_path / folder / "plug.py").write_text(text)
        load_plugins([str(tmp_path / folder / "plug.py")])
    found = [sys.modules[CALLBACK_REGISTRY.get(f"width{width}").__module__].WIDTH for width in (0, 1)]
    assert found == [0, 1]


def test_another_process_that_loads_the_same_plugins_finds_them_under_the_same_names(tmp_path: Path) -> None:
    """A trainer that is sent to workers names its classes by module."""
    for folder in ("a/parts", "b/parts"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "sizes.py").write_text("WIDTH = 1\n")
        text = "from .sizes import WIDTH\n" + PLUGIN.format(key=folder)
        (tmp_path / folder / "plug.py").write_text(text.replace('print("loading")', ""))
        load_plugins([str(tmp_path / folder / "plug.py")])
    here = [CALLBACK_REGISTRY.get(folder).__module__ for folder in ("a/parts", "b/parts")]
    code = (
        "import sys; from etude.registry import CALLBACK_REGISTRY, load_plugins; load_plugins(sys.argv[1:]);"
        "print(*[CALLBACK_REGISTRY.get(folder).__module__ for folder in ('a/parts', 'b/parts')])"
    )
    command = [sys.executable, "-c", code, *plugins.loaded_plugins()[-2:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert done.stdout.split() == here


def test_a_sibling_that_fails_is_read_again_after_it_is_mended(tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("WIDTH = 7\n")
    (tmp_path / "plugfail.py").write_text("from .sizes import HEIGHT\n" + PLUGIN.format(key="seven"))
    with pytest.raises(RegistryError, match="cannot import name 'HEIGHT'"):
        load_plugins([str(tmp_path / "plugfail.py")])
    (tmp_path / "sizes.py").write_text("HEIGHT = 10 + 7\n")
    load_plugins([str(tmp_path / "plugfail.py")])
    assert "seven" in CALLBACK_REGISTRY


def test_a_plugin_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugcwd.py").write_text(PLUGIN.format(key="four"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    load_plugins(["plugcwd"])
    assert "four" in CALLBACK_REGISTRY


def test_entry_points_of_installed_packages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugpoint.py").write_text(PLUGIN.format(key="five"))
    monkeypatch.syspath_prepend(tmp_path)
    points = EntryPoints(
        [
            EntryPoint("six", f"{__name__}:Fitting", "etude.policies"),
            EntryPoint("any", "plugpoint", "etude.plugins"),
            EntryPoint("other", "plugpoint", "somebody.else"),
        ]
    )
    asked = []
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[Fitting.__module__])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: asked.append(1) or points)
    monkeypatch.setattr(registry, "_entry_points_read", False)
    assert "five" in CALLBACK_REGISTRY
    assert POLICY_REGISTRY.get("six") is Fitting
    assert len(asked) == 1


# ---- built-in components ---------------------------------------------------------------------------------------------

BUILTINS = [
    (name, key) for name, one in REGISTRIES.items() for key, entry in one._entries.items() if isinstance(entry, Lazy)
]


@pytest.mark.parametrize("name, key", BUILTINS)
def test_built_in_components_fit_their_registry(name: str, key: str) -> None:
    assert callable(REGISTRIES[name].get(key))


@pytest.mark.parametrize("name, key", BUILTINS)
def test_the_source_tells_the_same_signature_as_the_class(name: str, key: str) -> None:
    from etude.signatures import read_runtime, read_static

    entry = REGISTRIES[name]._entries[key]
    if not isinstance(entry, Lazy):  # another test has used it
        entry = Lazy(f"{entry.__module__}:{entry.__qualname__}")
    target = entry.signature or entry.target
    static = read_static(target)
    module, _, attribute = target.partition(":")
    live = read_runtime(getattr(__import__(module, fromlist=["_"]), attribute))
    assert static is not None
    assert static.open == live.open
    assert static.summary == live.summary or target.startswith("torch.")
    # torch and Lightning evaluate annotations; torch assigns __doc__ later
    torch_kinds = target.startswith(("torch.", "etude.engines.lightning."))
    if target.startswith("transformers."):  # it computes defaults as it is imported
        assert [written.name for written in static.parameters] == [seen.name for seen in live.parameters]
        return
    for written, seen in zip(static.parameters, live.parameters, strict=True):
        assert (written.name, written.required, written.default) == (seen.name, seen.required, seen.default)
        if not torch_kinds:
            assert (written.type, written.annotation, written.help) == (seen.type, seen.annotation, seen.help)


def test_every_optimizer_of_torch_is_known() -> None:
    import torch

    classes = [found for found in vars(torch.optim).values() if inspect.isclass(found)]
    names = {found.__name__.lower() for found in classes if issubclass(found, torch.optim.Optimizer)}
    # L-BFGS calls the loss back several times a step, which no training loop here offers.
    assert names - {"optimizer", "lbfgs"} == OPTIMIZER_BUILDER_REGISTRY.builtins.keys()


def test_an_optimizer_is_built_from_its_registry() -> None:
    import torch

    factory = OPTIMIZER_BUILDER_REGISTRY.get("sgd")
    built = factory(lr=0.5, momentum=0.9).build([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(built, torch.optim.SGD)
    assert built.defaults["lr"] == 0.5


def test_components_are_described_without_importing_torch() -> None:
    program = (
        "import sys\n"
        "from etude.registry import REGISTRIES\n"
        "for registry in REGISTRIES.values():\n"
        "    for key in registry.keys():\n"
        "        registry.describe(key)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy'\n"
        "print(REGISTRIES['policies'].describe('mlp').parameters[0].name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("hidden\n", 0), done.stderr


def test_protocols_are_told_by_what_they_ask_for() -> None:
    assert fit._members(protocols.Logger) == ["start", "log", "close"]
    assert fit._members(protocols.Policy) == ["forward", "state_dict"]
