"""Whether a class offers what a protocol asks for."""

from __future__ import annotations

import inspect
from typing import Any


def missing_of(component: type, protocol: type | str) -> list[str]:
    """Name what a class lacks of a protocol; for `build` methods the arguments must fit too."""
    names = protocol.split() if isinstance(protocol, str) else _members(protocol)
    missing = [f"{name}()" for name in names if not offers(component, name)]
    if missing or isinstance(protocol, str) or names != ["build"]:
        return missing
    # Factories of all kinds are called `build`: only its arguments tell a dataset factory from an optimizer factory.
    wanted = [p for p in inspect.signature(vars(protocol)["build"]).parameters if p != "self"]
    try:
        inspect.signature(component.build).bind(None, *wanted)  # type: ignore[attr-defined]
    except TypeError:
        return [f"build({', '.join(wanted)})"]
    except ValueError:  # written in C: it cannot be asked
        return []
    return []


def _members(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]


def offers(component: type, name: str) -> bool:
    """Tell whether a class has a method that does something."""
    member = getattr(component, name, None)
    # torch.nn.Module has a `forward` that only raises.
    return callable(member) and getattr(member, "__name__", "") != "_forward_unimplemented"


def is_dataset_factory(component: Any) -> bool:
    """Tell whether a component of the data registry builds data rather than being data."""
    is_data = any(offers(component, name) for name in ("take", "__getitem__", "__iter__"))
    return hasattr(component, "build") and not is_data


def is_train_step(component: Any) -> bool:
    """Tell whether a component of the trainer registry brings its own update and no `fit`."""
    return hasattr(component, "train_step") and not hasattr(component, "fit")
