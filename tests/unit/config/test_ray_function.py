"""What `train_func` may be given: a path, or a dictionary with one. Nothing of Ray's is needed to refuse the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.config.ray_function import _read, train_func
from etude.errors import ConfigError


@pytest.mark.parametrize("given", ["x.yaml", Path("x.yaml"), {"config_path": "x.yaml"}, {"train_config": "x.yaml"}])
def test_a_path_is_taken_in_any_form(given: Any) -> None:
    request = _read(given)
    assert (request.path, request.namespace, request.overrides, request.options) == ("x.yaml", None, (), {})


def test_a_dictionary_may_say_more() -> None:
    request = _read({"config_path": "x.yaml", "namespace": "mine", "overrides": ["a=1"], "publish_every": 5})
    assert request.namespace == "mine" and request.overrides == ("a=1",) and request.options == {"publish_every": 5}


@pytest.mark.parametrize(
    "given, complaint",
    [
        (3, "takes the path of an experiment file, got int"),
        ({}, "give the experiment file once"),
        ({"config_path": "x.yaml", "path": "y.yaml"}, "give the experiment file once"),
        ({"config_path": 3}, "give the experiment file once"),
        ({"config_pth": "x.yaml"}, "unknown key 'config_pth'; did you mean 'config_path'"),
        ({"config_path": "x.yaml", "overrides": "a=1"}, "overrides is a list of texts"),
        ({"config_path": "x.yaml", "publish_every": 0}, "publish_every is a number of updates, at least 1, got 0"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        train_func(given)
    assert "\n" not in str(caught.value)
