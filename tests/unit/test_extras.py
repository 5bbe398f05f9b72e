"""A package that is not installed is named with the extra that brings it."""

import sys

import pytest

from etude.errors import MissingExtraError
from etude.extras import import_extra
from etude.lazy import lazily


def test_an_absent_package_comes_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_extra("json.decoder", "sim").__name__ == "json.decoder"
    for module in ("mujoco", "mujoco.egl"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"^mujoco cannot be imported .*; run: pip install 'etude\[sim\]'$"):
        import_extra("mujoco.egl", "sim")


def test_a_package_that_needs_an_absent_one_says_so_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    get, _ = lazily("etude.types", {"batch": ["Batch"]}, {"lightning": "lightning"})
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(MissingExtraError, match=r"Batch needs lightning; run: pip install 'etude\[lightning\]'"):
        get("Batch")
    with pytest.raises(AttributeError, match="Bach"):
        get("Bach")
