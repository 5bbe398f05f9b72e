"""Whether this machine's CPU can calculate below float32.

Some CPUs, mostly virtual ones, announce AMX and then die of using it: the first bf16 attention or backward ends the
process with SIGILL, in the middle of a training. So a child process tries it first, once per machine, kernel and torch
build, and where the child dies, oneDNN is kept from the instructions that kill.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.runs.cache import cache_directory
from etude.runs.durable import write_atomically

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("etude")

ISA = "ONEDNN_MAX_CPU_ISA"
VERDICT = "ETUDE_LOW_PRECISION"
"""Variable by which child processes know what was found, also where the cache cannot be written."""
CAPS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
"""What oneDNN may use at most, tried from the fastest on; the first leaves out AMX (and AVX512-FP16) alone."""
NOTHING_WORKS = "nothing"

# -P: the program's folder is this package, whose types.py is not Python's.
PROBE = [sys.executable, "-P", str(Path(__file__).with_name("low_precision_probe.py"))]
PROBE_LIMIT_S = 120.0  # It takes 2 CPU seconds, nearly all of them to import torch.
_DEATHS = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
_CPU_LINES = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags", "Features", "CPU ")


def require_low_precision(dtype: Any, device: Any = "cpu") -> None:
    """See to it that this process survives calculating in a type; call it before the first such operation.

    Returns at once for types of 32 bits and more and for other devices than the CPU. Where the CPU dies of what it
    announces, sets ONEDNN_MAX_CPU_ISA, which this process and its children then keep.

    Args:
        dtype: A torch dtype, or its name in any spelling: bf16, float16, 16-mixed, "32-true".
        device: Where it is to be calculated.

    Raises:
        ConfigError: If no setting lets it survive, or oneDNN was in use before it could be set.
    """
    if "16" not in str(dtype) or str(device).partition(":")[0] != "cpu":
        return
    key, given = _machine_key(), os.environ.get(ISA, "")
    known, _, inherited = os.environ.get(VERDICT, "").partition(":")
    is_inherited = known == key and given in ("", inherited)
    cap = inherited if is_inherited else _find_cap(f"{key}-{given}" if given else key)
    if cap == NOTHING_WORKS:
        raise ConfigError(
            f"{dtype} cannot be used on this machine's CPU: calculating in it kills the process, also with "
            f"{ISA}={CAPS[-1]}; use float32 (training.precision: float32)"
        )
    if cap and cap != given:
        _apply(cap, dtype, given)
        if not is_inherited and os.environ.get("RANK", "0") == "0":
            log.warning(
                "calculating in %s as this CPU offers to kills the process; going on with %s=%s", dtype, ISA, cap
            )
    os.environ[VERDICT] = f"{key}:{cap or given}"


def require_low_precision_of(module: nn.Module) -> None:
    """See to it that this process survives a module whose weights on the CPU are below float32."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.element_size() == 2:
            return require_low_precision(tensor.dtype)
    return None


def _find_cap(name: str) -> str:
    """Return what is remembered, or try; of processes that start together one tries, and the others wait for it.

    The answer is the first cap that the CPU survives, "" if it needs none or cannot be asked, or NOTHING_WORKS.
    """
    path = cache_directory() / "low-precision" / f"{name}.json"
    if (known := _remembered(path)) is not None:
        return known
    with _alone(path.with_suffix(".lock")):
        if (known := _remembered(path)) is not None:
            return known
        cap = _try_caps()
        if cap is None:
            return ""
        about = {"cap": cap, "machine": platform.node(), "kernel": platform.release(), "torch": _torch_build()}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(about, indent=2) + "\n").encode())
        return cap


def _remembered(path: Path) -> str | None:
    try:
        cap = json.loads(path.read_bytes())["cap"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return cap if cap in ("", NOTHING_WORKS, *CAPS) else None


def _try_caps() -> str | None:
    given = os.environ.get(ISA, "")
    for cap in ("", *CAPS):
        survived = _survives(cap or given)
        if survived is None:
            return None
        if survived:
            return cap
    return NOTHING_WORKS


def _survives(cap: str) -> bool | None:
    """Return whether a child process survives; None if that cannot be told."""
    env = {name: value for name, value in os.environ.items() if name != ISA}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **({ISA: cap} if cap else {})}
    try:
        done = subprocess.run(
            PROBE, env=env, timeout=PROBE_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot tell whether this CPU can calculate below float32: %s", error)
        return None
    if done.returncode >= 0:  # An exception is an answer too: it will be raised again where it can be read.
        return True
    return False if -done.returncode in _DEATHS else None


def _apply(cap: str, dtype: Any, given: str) -> None:
    os.environ[ISA] = cap
    if _is_ignored(cap):
        if given:
            os.environ[ISA] = given
        else:
            del os.environ[ISA]
        raise ConfigError(
            f"{dtype} kills the process on this CPU unless {ISA}={cap} is set before the first calculation, and this "
            f"process has calculated already; start Python again with that variable set"
        )


def _is_ignored(cap: str) -> bool:
    """Return whether oneDNN had read its settings before the cap was set; any matrix product makes it do so."""
    import torch

    # Both ask oneDNN what it will use: AVX512-FP16, which every CPU with AMX has, and any AVX512 at all.
    name = "_is_mkldnn_bf16_supported" if cap == "AVX2" else "_is_mkldnn_fp16_supported"
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is not None and bool(supported())


@cache
def _machine_key() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    kinds = sorted({line for line in lines if line.startswith(_CPU_LINES)}) or lines[:1]
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    system = [platform.machine(), platform.node(), platform.release(), platform.version()]
    return hashlib.sha256("\n".join([*system, _torch_build(), capability, *kinds]).encode()).hexdigest()[:16]


@cache
def _torch_build() -> str:
    """Return what tells one build of torch from another, without importing it."""
    found = find_spec("torch")
    text = Path(found.origin).with_name("version.py").read_text() if found is not None and found.origin else ""
    return " ".join(re.findall(r"^(?:__version__|git_version) = '(.+)'", text, re.MULTILINE))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock, if it can be had; waiting for another's try ends when that could not take longer."""
    descriptor = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + PROBE_LIMIT_S * (1 + len(CAPS))
        while descriptor is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # No locks on this file system.
                break
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
