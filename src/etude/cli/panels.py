"""What `etude --help` groups commands under: what one wants to do. Plain help has the same groups as a terminal's."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

START = "Start"
TRAIN = "Train"
LOOK = "Look at runs"
ROBOTS = "Robots and their data"
LANGUAGE = "Models and language"
DEPLOY = "Deploy and serve"
ORDER = (START, TRAIN, LOOK, ROBOTS, LANGUAGE, DEPLOY)


class GroupedCommands(TyperGroup):
    """Lists commands by panel, also where rich does not."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of their panels; those without one come last."""
        places = {panel: place for place, panel in enumerate(ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: places.get(self._panel(name), len(ORDER)))

    def _panel(self, name: str) -> str:
        panel = getattr(self.commands[name], "rich_help_panel", None)
        return panel if isinstance(panel, str) else "Commands"

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands for each panel, in the order in which they were added."""
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panels.setdefault(self._panel(name), []).append((name, command))
        longest = max((len(name) for members in panels.values() for name, _ in members), default=0)
        limit = formatter.width - 6 - longest
        for panel, members in panels.items():
            with formatter.section(panel):
                formatter.write_dl(
                    [(name.ljust(longest), command.get_short_help_str(limit)) for name, command in members]
                )
