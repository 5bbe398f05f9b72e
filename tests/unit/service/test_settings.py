"""Settings read like the configurations people know, and know what was read."""

from __future__ import annotations

import copy

import pytest
from omegaconf import OmegaConf

from etude.errors import ConfigError
from etude.service.settings import Settings, train_service


def test_a_setting_is_read_by_attribute_by_key_and_with_a_default() -> None:
    settings = Settings.of({"algorithm": {"my_param": 0.5, "list": [1]}, "name": "x"})
    assert settings.algorithm.my_param == settings["algorithm"]["my_param"] == settings.algorithm.get("my_param") == 0.5
    assert settings.algorithm.get("other", 3) == 3 and "my_param" in settings.algorithm and "other" not in settings
    assert dict(settings.algorithm.items()) == {"my_param": 0.5, "list": [1]} == {**settings.algorithm}
    assert hasattr(settings, "name") and not hasattr(settings, "nam") and len(settings) == 2
    settings.algorithm.fresh = {"a": 1}
    assert settings.algorithm.fresh.a == 1 and copy.deepcopy(settings) == settings


def test_what_is_missing_is_named_by_its_path() -> None:
    settings = Settings.of(OmegaConf.create({"algorithm": {"discount_factor": 0.9}, "twice": "${algorithm}"}))
    assert settings.twice.discount_factor == 0.9
    for read in (lambda: settings.algorithm.discount_facto, lambda: settings.algorithm["discount_facto"]):
        with pytest.raises(ConfigError, match=r"no algorithm\.discount_facto; did you mean") as raised:
            read()
        assert isinstance(raised.value, KeyError) and isinstance(raised.value, AttributeError)
    with pytest.raises(ConfigError, match="made from one configuration, a mapping; got list"):
        Settings.of([1])


def test_what_nobody_read_is_named() -> None:
    settings = Settings.of({"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}})
    assert settings.unread() == ["a", "b", "e"]
    assert settings.b.get("c") == 2 and "a" in settings
    assert settings.unread() == ["a", "b.d", "e"]
    settings.plain()
    settings.e.values()
    assert settings.unread() == ["a", "b.d"]


@pytest.mark.parametrize(
    "given, backend",
    [
        ({"train_service": {"backend": "a", "world_size": 8}}, "a"),
        ({"train_service": {"main": {"backend": "b"}}}, "b"),
        ({"train_service": {"student": {"backend": "c", "role": "actor"}, "other": {"role": "teacher"}}}, "c"),
        ({"train_service": {"actor": {"backend": "d"}, "teacher": {"backend": "t"}}}, "d"),
        ({"service": {"train_service": {"x": {"backend": "e"}}}}, "e"),
        ({}, None),
    ],
)
def test_the_training_service_is_flat_or_by_name(given: dict[str, object], backend: str | None) -> None:
    assert train_service(Settings.of(given)).get("backend") == backend


def test_two_services_in_one_role_are_refused() -> None:
    settings = Settings.of({"train_service": {"a": {"backend": "x"}, "b": {"backend": "y"}}})
    with pytest.raises(ConfigError, match="2 services in the role 'actor'"):
        train_service(settings)
