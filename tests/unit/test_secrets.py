from __future__ import annotations

import json
import subprocess
import sys
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from etude import secrets


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_spellings", ())


def test_a_registered_secret_is_hidden_wherever_it_stands() -> None:
    secrets.register_secret("hunter22")
    assert secrets.redact("key=hunter22, again hunter22.") == "key=***, again ***."


def test_a_secret_string_of_pydantic_is_hidden_by_its_value() -> None:
    secrets.register_secret(SecretStr("sk-canary-1"))
    assert secrets.redact("sk-canary-1") == "***"


def test_spellings_in_json_urls_and_reprs_are_hidden_too() -> None:
    value = 'p"a\\ss/wo rd\nü'
    secrets.register_secret(value)
    for text in (json.dumps({"key": value}), repr([value]), f"https://host/?token={quote(value, safe='')}"):
        assert "***" in secrets.redact(text)
        assert "wo" not in secrets.redact(text)


def test_a_secret_that_contains_another_is_hidden_whole() -> None:
    secrets.register_secret("abcd")
    secrets.register_secret("abcdefgh")
    assert secrets.redact("abcdefgh") == "***"


@pytest.mark.parametrize("short", ["", "abc", "  a  "])
def test_values_too_short_to_be_secrets_change_nothing(short: str) -> None:
    secrets.register_secret(short)
    assert secrets.redact("abc a  a  b") == "abc a  a  b"


def test_trees_are_redacted_in_keys_and_leaves_and_keep_their_shape() -> None:
    secrets.register_secret("hunter22")
    secrets.register_secret(12345678)
    tree = {"a": ["hunter22", 1, None], "hunter22": ("x-hunter22-y", 12345678, 2.5), "n": {"deep": True}}
    assert secrets.redact_tree(tree) == {"a": ["***", 1, None], "***": ("x-***-y", "***", 2.5), "n": {"deep": True}}


def test_a_short_secret_inside_innocent_text_is_not_held_against_it() -> None:
    secrets.register_secret("root")
    assert secrets.holds_secret("root")
    assert not secrets.holds_secret("/root/runs")


def test_the_module_imports_no_torch() -> None:
    code = "import sys, etude.secrets; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@pytest.mark.parametrize("ordinary", ["1e-4", "1000", "true", "None", "/", "/tmp", "0.5"])
def test_numbers_words_and_paths_that_exist_are_no_secrets(ordinary: str) -> None:
    secrets.register_secret(ordinary)
    assert secrets.redact(f"lr={ordinary}/x") == f"lr={ordinary}/x"
