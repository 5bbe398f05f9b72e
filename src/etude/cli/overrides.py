"""Commands that take KEY=VALUE: a setting that is written as an option is answered with how to write it."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from etude.errors import ConfigError


class TakesOverrides(TyperCommand):
    """A command whose settings are overrides of a configuration, not options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse `--lr 3`, and name `training.lr=3`."""
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for place, text in enumerate(args):
            option, equals, value = text.partition("=")
            if option == "--":
                break
            if option.startswith("-") and option not in known:
                following = args[place + 1] if place + 1 < len(args) else ""
                spelled = spell_override(option, value if equals else following)
                if spelled is not None:
                    raise ConfigError(f"there is no option {option}; settings are written without dashes: {spelled}")
        return super().parse_args(ctx, args)


def spell_override(option: str, value: str) -> str | None:
    """Return the override that an option was meant for; None if no key of a configuration is called so."""
    from etude.config.schema import ExperimentConfig

    key = option.lstrip("-").replace("-", "_")
    value = value if value and not value.startswith("--") and "=" not in value else "VALUE"
    if "." in key:
        return f"{key}={value}" if key.split(".")[0] in ExperimentConfig.model_fields else None
    for section in ("training", "run"):
        if key in ExperimentConfig.model_fields[section].annotation.model_fields:  # type: ignore[union-attr]
            return f"{section}.{key}={value}"
    is_component = key in ("policy", "data", "eval_data", "algorithm", "trainer", "engine")
    return f"{key}={value}" if is_component else None
