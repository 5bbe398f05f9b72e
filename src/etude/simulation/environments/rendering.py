"""Pictures of MuJoCo scenes without a screen: which OpenGL there is, and a renderer that is fast on a CPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etude.errors import MissingExtraError
from etude.extras import import_extra
from etude.simulation.environments.base import Array

EGL_PACKAGES = "libegl1 libegl-mesa0 libgl1-mesa-dri"
OSMESA_PACKAGES = "libosmesa6"
_OFF = ("disable", "disabled", "off", "false", "0", "no")

_PLATFORM_DEVICE = 0x313F  # EGL_PLATFORM_DEVICE_EXT
_MOST_DEVICES = 16
_has_rendered = False


def has_rendered() -> bool:
    """Tell whether this process has used OpenGL, which a forked child could then not use any more."""
    return _has_rendered


@cache
def load_triton() -> None:
    """Import triton, where there is one, before OpenGL: everything that renders comes through here first.

    Mesa's software OpenGL brings a libLLVM, and triton an LLVM of its own under the same symbols. Loaded after Mesa's,
    triton's calls end in the wrong one, which is a segmentation fault as soon as torch imports it; the other way round
    both work. It takes 0.2 s, which training spends on it anyway.
    """
    if "triton" in sys.modules or find_spec("triton") is None or _has_llvm():
        return
    with warnings.catch_warnings(), suppress(Exception):  # one that is broken is torch's to complain about
        warnings.simplefilter("ignore")
        importlib.import_module("triton")


def _has_llvm() -> bool:
    # Somebody else rendered before us: to import triton now is what would end this process.
    try:
        return "libLLVM" in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def prepare_mujoco() -> str:
    """Choose how MuJoCo renders, before we import it, and return the choice: egl, osmesa or disable.

    What the user set as MUJOCO_GL stands. Where neither EGL nor OSMesa works MuJoCo still simulates, and only asking
    for a picture is an error.
    """
    load_triton()
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower()
    if not chosen and sys.platform == "linux":
        chosen = "egl" if find_egl_fault() is None else "osmesa" if find_osmesa_fault() is None else "disable"
        os.environ["MUJOCO_GL"] = chosen
        if "mujoco.gl_context" in sys.modules and chosen not in _OFF:
            # Imported before us, it has settled for a window system, which a machine without a screen has not got.
            vars(sys.modules["mujoco.gl_context"])["GLContext"] = import_extra(f"mujoco.{chosen}", "sim").GLContext
    return chosen


def require_rendering() -> None:
    """Raise, naming the Debian packages to install, if pictures cannot be rendered here."""
    if prepare_mujoco() not in _OFF:
        return
    egl, osmesa = find_egl_fault(), find_osmesa_fault()
    if egl is None or osmesa is None:
        raise MissingExtraError(
            f"rendering is switched off by MUJOCO_GL={os.environ.get('MUJOCO_GL')}; unset it before Python starts"
        )
    raise MissingExtraError(
        f"rendering needs EGL or OSMesa, and neither works here ({egl}; {osmesa}); "
        f"on Debian run: apt-get install {EGL_PACKAGES}, or: apt-get install {OSMESA_PACKAGES}"
    )


@cache
def find_egl_fault() -> str | None:
    """Return why EGL cannot render without a screen, or None if it can."""
    load_triton()  # to ask EGL for a display is enough to load Mesa's LLVM
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return "libEGL.so.1 is missing"
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    query_address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    display_address = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
    if not query_address or not display_address:
        return "libEGL.so.1 has no devices without a screen"
    pointer = ctypes.c_void_p
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, pointer, pointer)(query_address)
    display_of = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)(display_address)
    devices, count = (pointer * _MOST_DEVICES)(), ctypes.c_int(0)
    if not query(_MOST_DEVICES, devices, ctypes.byref(count)) or not count.value:
        return "EGL finds no device: libegl-mesa0 is missing"
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    for device in devices[: count.value]:
        display = display_of(_PLATFORM_DEVICE, device, None)
        if display and egl.eglInitialize(display, None, None):
            return None
    return "EGL cannot start any device: libgl1-mesa-dri is missing"


@cache
def find_osmesa_fault() -> str | None:
    """Return why OSMesa cannot render, or None if it can."""
    load_triton()
    names = [ctypes.util.find_library("OSMesa"), "libOSMesa.so.8", "libOSMesa.so.6"]
    for name in filter(None, names):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return None
    return "libOSMesa is missing"


def quicken_rendering(model: Any) -> None:
    """Switch off what costs most on a CPU and shows least in a small picture; before the renderer is made.

    Shadows, reflections and multisampling: 7 frames a second with them, about 100 without, at 96 pixels.
    """
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0


class CameraRenderer:
    """Renders the cameras of one model at one size; the OpenGL context is made with the first picture."""

    def __init__(self, model: Any, height: int, width: int, turned: Mapping[str, bool] | None = None) -> None:
        """Get ready.

        Args:
            model: A MuJoCo model.
            height: Of the pictures, in pixels.
            width: Of the pictures, in pixels.
            turned: Cameras that stand on their head, and whose pictures are turned by half a circle.
        """
        self._model, self._height, self._width = model, height, width
        self._turned = turned or {}
        self._renderer: Any = None

    def render(self, data: Any, camera: str) -> Array:
        """Return what a camera sees, (height, width, 3) uint8."""
        if self._renderer is None:
            self._renderer = self._open()
        self._renderer.update_scene(data, camera=camera)
        picture: Array = self._renderer.render()
        return picture[::-1, ::-1].copy() if self._turned.get(camera) else picture

    def _open(self) -> Any:
        require_rendering()
        global _has_rendered
        _has_rendered = True
        mujoco = import_extra("mujoco", "sim")
        # A frame buffer larger than the picture is cleared and read in vain.
        self._model.vis.global_.offwidth = self._width
        self._model.vis.global_.offheight = self._height
        try:
            return mujoco.Renderer(self._model, self._height, self._width)
        except (RuntimeError, ImportError, AttributeError) as error:
            raise MissingExtraError(
                f"MuJoCo cannot render with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')} ({error}); "
                f"on Debian run: apt-get install {EGL_PACKAGES} {OSMESA_PACKAGES}"
            ) from error

    def close(self) -> None:
        """Release the OpenGL context."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
