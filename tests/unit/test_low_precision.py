"""A CPU that dies of what it announces: found out in a child process, remembered, avoided, and said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from etude import Trainer, TrainingConfiguration, low_precision
from etude.errors import ConfigError
from etude.low_precision import ISA, VERDICT, require_low_precision, require_low_precision_of
from tests.unit.policies.demonstrations import make_spec
from tests.unit.policies.language.samples import SMALL

TRIES = "tries.txt"


def _fake(directory: Path, survives: str) -> list[str]:
    """Return a probe that dies as a CPU does, unless oneDNN is capped so; it notes each of its tries."""
    program = (
        "import os, signal, sys\n"
        "cap = os.environ.get('ONEDNN_MAX_CPU_ISA', 'none')\n"
        "print(cap, file=open(sys.argv[1], 'a'))\n"
        "cap in sys.argv[2].split() or os.kill(os.getpid(), getattr(signal, sys.argv[3]))\n"
    )
    return [sys.executable, "-I", "-S", "-c", program, str(directory / TRIES), survives, "SIGILL"]


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what makes this machine one whose CPU survives only under the named caps."""
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    for name in (ISA, VERDICT):
        monkeypatch.setenv(name, "")  # so that it is put back whatever happens to it
        monkeypatch.delenv(name)
    # Of this process it cannot be told: others have calculated in it.
    monkeypatch.setattr(low_precision, "_is_ignored", lambda cap: False)

    def make(survives: str) -> None:
        monkeypatch.setattr(low_precision, "PROBE", _fake(tmp_path, survives))

    return make


def _tries(directory: Path) -> list[str]:
    path = directory / TRIES
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    "survives, tried, cap",
    [
        ("none", ["none"], None),
        ("AVX512_CORE_BF16 AVX2", ["none", "AVX512_CORE_BF16"], "AVX512_CORE_BF16"),
        ("AVX2", ["none", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"], "AVX2"),
    ],
)
def test_the_first_cap_that_the_cpu_survives_is_set_and_said_in_one_line(
    cpu: Callable[[str], None], tmp_path: Path, survives: str, tried: list[str], cap: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    cpu(survives)
    for dtype in (torch.bfloat16, "fp16", "16-mixed"):
        require_low_precision(dtype)
    assert os.environ.get(ISA) == cap
    assert _tries(tmp_path) == tried, "once is enough"
    assert [record.getMessage().partition("; ")[2] for record in caplog.records] == (
        [f"going on with {ISA}={cap}"] if cap else []
    )


def test_what_was_found_is_remembered_for_later_processes_and_handed_to_children(
    cpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu("AVX512_CORE_BF16")
    require_low_precision("bf16")
    (kept,) = (tmp_path / "cache" / "low-precision").glob("*.json")
    assert json.loads(kept.read_text())["cap"] == "AVX512_CORE_BF16"
    child = {name: os.environ[name] for name in (ISA, VERDICT)}

    for name in child:  # another process, later
        monkeypatch.delenv(name)
    require_low_precision("bf16")
    assert os.environ[ISA] == "AVX512_CORE_BF16" and len(_tries(tmp_path)) == 2

    kept.unlink()  # a child needs no file
    monkeypatch.delenv(ISA)  # nor, as Ray's workers, the variable itself
    monkeypatch.setenv(VERDICT, child[VERDICT])
    require_low_precision("bf16")
    assert os.environ[ISA] == "AVX512_CORE_BF16" and len(_tries(tmp_path)) == 2


def test_a_damaged_memory_is_made_again(cpu: Callable[[str], None], tmp_path: Path) -> None:
    cpu("AVX2")
    require_low_precision("bf16")
    (kept,) = (tmp_path / "cache" / "low-precision").glob("*.json")
    for damage in (b"", b"[]", b'{"cap": "rm -rf"}'):
        kept.write_bytes(damage)
        del os.environ[ISA], os.environ[VERDICT]
        require_low_precision("bf16")
        assert json.loads(kept.read_text())["cap"] == "AVX2"


def test_other_kernels_and_builds_of_torch_are_tried_anew(
    cpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu("none")
    for name, value in (("_torch_build", lambda: "3.0"), ("platform.release", lambda: "7.0")):
        monkeypatch.setattr(f"etude.low_precision.{name}", value)
        low_precision._machine_key.cache_clear()
        require_low_precision("bf16")
    monkeypatch.undo()
    low_precision._machine_key.cache_clear()
    assert len(_tries(tmp_path)) == 2


def test_a_cap_that_the_user_set_is_kept_if_it_helps_and_lowered_if_not(
    cpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu("AVX512_CORE AVX2")
    monkeypatch.setenv(ISA, "AVX512_CORE")
    require_low_precision("bf16")
    assert (os.environ[ISA], _tries(tmp_path)) == ("AVX512_CORE", ["AVX512_CORE"])
    cpu("AVX2")
    monkeypatch.setenv(ISA, "AVX512_CORE_AMX")
    require_low_precision("bf16")
    assert os.environ[ISA] == "AVX2"


def test_a_cache_that_cannot_be_written_costs_a_try_and_nothing_else(
    cpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    cpu("AVX2")
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "file" / "cache"))
    require_low_precision("bf16")
    require_low_precision("bf16")
    assert os.environ[ISA] == "AVX2" and len(_tries(tmp_path)) == 4


def test_a_try_that_was_killed_from_outside_says_nothing_about_the_cpu(
    cpu: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu("")
    low_precision.PROBE[-1] = signal.SIGKILL.name
    require_low_precision("bf16")
    assert ISA not in os.environ and _tries(tmp_path) == ["none"]
    assert not list((tmp_path / "cache" / "low-precision").glob("*.json"))

    monkeypatch.setattr(low_precision, "PROBE", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(low_precision, "PROBE_LIMIT_S", 0.2)
    monkeypatch.delenv(VERDICT)
    require_low_precision("bf16")
    assert ISA not in os.environ


def test_processes_that_start_together_try_once(cpu: Callable[[str], None], tmp_path: Path) -> None:
    cpu("AVX512_CORE_BF16")
    program = (
        "import sys\n"
        "from etude import low_precision\n"
        "low_precision.PROBE = sys.argv[1:]\n"
        "low_precision._is_ignored = lambda cap: False\n"
        "low_precision.require_low_precision('bf16')\n"
        "import os; print(os.environ['ONEDNN_MAX_CPU_ISA'])\n"
    )
    command = [sys.executable, "-c", program, *low_precision.PROBE]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["AVX512_CORE_BF16"] * 3
    assert len(_tries(tmp_path)) == 2


def test_types_of_32_bits_and_other_devices_are_not_tried(cpu: Callable[[str], None], tmp_path: Path) -> None:
    cpu("")
    for dtype in (torch.float32, "float64", "32-true", None, "64-true"):
        require_low_precision(dtype)
    require_low_precision("bf16", torch.device("cuda", 0))
    require_low_precision_of(nn.Linear(2, 2))
    assert _tries(tmp_path) == []


# ---- every door ------------------------------------------------------------------------------------------------------


def _train(precision: str = "float32", policy: nn.Module | None = None, engine: str = "torch") -> None:
    rows = {"x": torch.randn(8, 2), "y": torch.randn(8, 1)}
    config = TrainingConfiguration(training_steps=1, precision=precision, batch_size=4)  # type: ignore[arg-type]
    Regression(policy or nn.Linear(2, 1), rows, config=config, engine=engine, run=False, show_progress=False).fit()


class Regression(Trainer):
    def compute_loss(self, policy: Any, batch: Any) -> Any:
        return (policy(batch["x"]) - batch["y"]).square().mean()


def _hugging_face(**options: Any) -> None:
    from tests.unit.engines.huggingface.parts import make

    make(Path(os.environ["ETUDE_CACHE"]), **options)


def _lightning(precision: str) -> None:
    from etude.engines.lightning import Trainer as LightningTrainer
    from tests.unit.engines.lightning.parts import Net, loader

    LightningTrainer(
        accelerator="cpu", precision=precision, max_epochs=1, logger=False, enable_progress_bar=False,  # type: ignore[arg-type]
        enable_checkpointing=False, default_root_dir=os.environ["ETUDE_CACHE"],
    ).fit(Net(), loader())  # fmt: skip


def _language(dtype: str) -> None:
    from etude.policies.language.model import LanguageModel

    LanguageModel.tiny(**SMALL, dtype=dtype)


def _robot_policy_in_half() -> None:
    from etude.policies.mlp import MLP

    policy = MLP()
    policy.build(make_spec())
    policy.half()


DOORS: dict[str, Callable[[], None]] = {
    "torch bf16": lambda: _train("bf16"),
    "torch fp16": lambda: _train("fp16"),
    "torch, weights in bf16": lambda: _train(policy=nn.Linear(2, 1).bfloat16()),
    "lightning engine": lambda: _train("bf16", engine="lightning"),
    "huggingface engine": lambda: _train("bf16", engine="huggingface"),
    "BaseTrainer bf16": lambda: _hugging_face(bf16=True),
    "BaseTrainer fp16": lambda: _hugging_face(fp16=True),
    "BaseTrainer bf16_full_eval": lambda: _hugging_face(bf16_full_eval=True),
    "lightning bf16-mixed": lambda: _lightning("bf16-mixed"),
    "lightning bf16-true": lambda: _lightning("bf16-true"),
    "language model bfloat16": lambda: _language("bfloat16"),
    "language model float16": lambda: _language("float16"),
    "robot policy in half": _robot_policy_in_half,
}
IMPORT_MUCH = [door for door in DOORS if "lightning" in door or "huggingface" in door or "BaseTrainer" in door]


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "door", [pytest.param(door, marks=pytest.mark.slow if door in IMPORT_MUCH else ()) for door in DOORS]
)
def test_every_door_asks_before_it_calculates(cpu: Callable[[str], None], door: str) -> None:
    cpu("")
    with pytest.raises(ConfigError, match=r"16.* cannot be used on this machine's CPU.*; use float32"):
        DOORS[door]()


# ---- in processes of their own --------------------------------------------------------------------------------------

FRESH = """
import sys
from etude import low_precision
low_precision.PROBE = sys.argv[2:]
import torch
if sys.argv[1] == "late":
    torch.ones(64, 64) @ torch.ones(64, 64)
low_precision.require_low_precision("bf16")
print("oneDNN multiplies bf16:", torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_the_cap_holds_in_onednn_itself_or_the_process_is_told_to_start_again(
    cpu: Callable[[str], None], when: str
) -> None:
    """Nothing on this machine dies, so the cap is one whose effect shows: without AVX512 oneDNN multiplies no bf16."""
    cpu("AVX2")
    command = [sys.executable, "-c", FRESH, when, *low_precision.PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if when == "early":
        assert done.stdout == "oneDNN multiplies bf16: False\n", done.stderr
    elif "avx512" in Path("/proc/cpuinfo").read_text():
        assert "start Python again with that variable set" in done.stderr
        assert "ONEDNN_MAX_CPU_ISA=AVX2" in done.stderr


@pytest.mark.slow
def test_all_operations_of_the_probe_run() -> None:
    """What raises an exception in there would be taken for survival."""
    done = subprocess.run(low_precision.PROBE, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
