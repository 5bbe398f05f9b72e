"""Options that policies share: taken flat, checked, and saved with their defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from etude.policies import ACT, MLP, Diffusion, FlowMatching
from etude.policies.generative import GenerativeOptions
from etude.policies.options import SharedOptions
from etude.registry import POLICY_REGISTRY

GROUPS = {"act": SharedOptions, "mlp": SharedOptions, "diffusion": GenerativeOptions, "flow": GenerativeOptions}


@pytest.mark.parametrize("key", GROUPS)
def test_a_check_sees_every_option_with_its_help(key: str) -> None:
    signature = POLICY_REGISTRY.signature(key)
    seen = {parameter.name: parameter.help for parameter in signature.parameters}
    assert not signature.open
    assert all(seen[field.name] for field in fields(GROUPS[key]))


@pytest.mark.parametrize("kind", [ACT, MLP, Diffusion, FlowMatching])
def test_options_are_taken_flat_and_saved_with_defaults(kind: Any) -> None:
    saved = kind(image_size=[8, 8])._params
    assert (saved["image_size"], saved["image_backbone"]) == ([8, 8], "resnet18")
    with pytest.raises(TypeError, match="unexpected keyword argument 'latency'"):
        kind(latency=2)


def test_a_default_of_the_policys_own_comes_before_the_groups() -> None:
    assert (Diffusion()._params["n_layers"], FlowMatching()._params["n_layers"]) == (8, 6)
    assert (Diffusion().options.dropout, FlowMatching().options.dropout) == (0.01, 0.0)


def test_a_subclass_saves_what_it_was_given_itself() -> None:
    class Small(MLP):
        def __init__(self, width: int = 8) -> None:
            super().__init__(hidden=[width])

    assert Small(4)._params == {"width": 4}
