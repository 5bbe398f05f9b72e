"""What a trainer was configured with: read by attribute or by key, and it remembers what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from etude.errors import ConfigError
from etude.reading.suggest import did_you_mean


class MissingSetting(ConfigError, AttributeError, KeyError):
    """A setting that the configuration does not have; `hasattr` and `except KeyError` see it as what they know."""

    def __str__(self) -> str:  # a KeyError would put its message into quotes
        return str(self.args[0])


class Settings:
    """A section of a configuration: `s.name`, `s["name"]`, `s.get("name", default)` and `"name" in s` read one value.

    Sections within are `Settings` too. What was read is remembered, so that what nobody reads can be named.
    """

    _values: dict[str, Any]
    _read: set[str]
    _path: str

    def __init__(self, values: Mapping[str, Any] | None = None, path: str = "") -> None:
        own = vars(self)
        own["_values"] = {
            str(key): Settings(value, f"{path}{key}.") if isinstance(value, Mapping) else value
            for key, value in (values or {}).items()
        }
        own["_read"], own["_path"] = set(), path

    @classmethod
    def of(cls, given: Any) -> Settings:
        """Return settings as they are, or make them of a dictionary, of OmegaConf's, or of a pydantic model."""
        if isinstance(given, Settings):
            return given
        if type(given).__module__.partition(".")[0] == "omegaconf":
            from omegaconf import OmegaConf

            given = OmegaConf.to_container(given, resolve=True)
        elif callable(getattr(given, "model_dump", None)):
            given = given.model_dump()
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"a trainer is made from one configuration, a mapping; got {type(given).__name__}")
        return cls(given)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_values" not in vars(self):  # while it is being copied there is nothing to read
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name in self._values:
            return self._values[name]
        near = did_you_mean(name, self._values)
        known = ", ".join(self._values) or "nothing"
        raise MissingSetting(f"the configuration has no {self._path}{name}{near or f'; it has {known}'}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting, or the default."""
        self._read.add(name)
        return self._values.get(name, default)

    def section(self, name: str) -> Settings:
        """Return a section; an absent one is empty."""
        found = self.get(name)
        if found is None:
            return Settings(path=f"{self._path}{name}.")
        if not isinstance(found, Settings):
            raise ConfigError(f"{self._path}{name} must be a section with keys, got {found!r}")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self.plain() == (other.plain() if isinstance(other, Settings) else other)

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        return f"Settings({self.plain()!r})"

    def keys(self) -> list[str]:
        """Return the names of the settings."""
        return list(self._values)

    def values(self) -> list[Any]:
        """Return the values; all of them count as read."""
        return [self[name] for name in self._values]

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values; all of them count as read."""
        return [(name, self[name]) for name in self._values]

    def plain(self) -> dict[str, Any]:
        """Return a plain dictionary of it; this reads nothing."""
        return {k: v.plain() if isinstance(v, Settings) else v for k, v in self._values.items()}

    def unread(self) -> list[str]:
        """Name what nobody has read, by its path."""
        found = []
        for name, value in self._values.items():
            if name not in self._read:
                found.append(f"{self._path}{name}")
            elif isinstance(value, Settings):
                found += value.unread()
        return found

    # ---- writing -----------------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = Settings(value, f"{self._path}{name}.") if isinstance(value, Mapping) else value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_OF_ONE_SERVICE = frozenset(
    ["api_key", "backend", "base_model", "config", "identifier", "lora_rank", "model", "resource", "role", "seed"]
) | {"timeout_s", "url", "world_size"}


def train_service(settings: Settings, role: str = "actor") -> Settings:
    """Return the section of the training service in a role: `train_service` itself, or the one by name that has it.

    Without such a section it is empty. One that says no role is the actor's, unless it is named after another.
    """
    section = settings.section("train_service")
    if not section:  # where recipes have it
        section = settings.section("service").section("train_service")
    if any(name in _OF_ONE_SERVICE for name in section):
        found = {"actor": section}
    else:
        found = {name: one for name, one in section.items() if isinstance(one, Settings)}
    chosen = [
        one for name, one in found.items() if one.get("role", "teacher" if name == "teacher" else "actor") == role
    ]
    if len(chosen) > 1:
        raise ConfigError(f"train_service has {len(chosen)} services in the role {role!r}; one is needed")
    return chosen[0] if chosen else Settings(path="train_service.")
