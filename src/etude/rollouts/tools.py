"""An agent that lets the model call functions.

The model calls one by writing `<tool>name({"argument": value})</tool>`, and is told `<result>...</result>`, until it
answers without a call. What is between the parentheses is JSON: an object with the arguments, or nothing.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError, one_line
from etude.registry import load_object
from etude.rollouts.llm import LLM
from etude.rollouts.tasks import Task

OPEN, CLOSE = "<tool>", "</tool>"
_CALL = re.compile(r"<tool>\s*([A-Za-z_]\w*)\s*\((.*)\)\s*$", re.DOTALL)
_BAD = "error: write a call as <tool>name({...})</tool>, with a JSON object between the parentheses"

Tool = Callable[..., Any]


class ToolAgent:
    """Lets the model call functions until it answers; what they return carries no loss.

    Args:
        tools: Functions, or their places as `file.py:name`; or a mapping of names to either.
        max_turns: Replies at most, the answer included; as many as the rollout may have unless given.
        instructions: Put before the prompt; `{tools}` becomes the list of the functions. Empty puts nothing there.
        result: How the model is told what a call returned; `{result}` becomes that.
        max_result_length: Characters of a result at most; the rest is cut.
    """

    def __init__(
        self,
        tools: Sequence[str | Tool] | Mapping[str, str | Tool],
        max_turns: int | None = None,
        instructions: str = "",
        result: str = "<result>{result}</result>",
        max_result_length: int = 2000,
    ) -> None:
        named = tools.items() if isinstance(tools, Mapping) else [(None, tool) for tool in tools]
        self.tools: dict[str, Tool] = {}
        for name, tool in named:
            found = load_object(tool, "tool") if isinstance(tool, str) else tool
            if not callable(found):
                raise ConfigError(f"a tool is a function, got {found!r}")
            self.tools[name or found.__name__] = found
        if not self.tools:
            raise ConfigError("an agent with tools needs at least one")
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns, self.result, self.max_result_length = max_turns, result, max_result_length
        self.instructions = instructions.replace("{tools}", self.describe())

    def describe(self) -> str:
        """Return a line for each function: its name, its parameters and the first line of its docstring."""
        lines = []
        for name, tool in self.tools.items():
            says = (inspect.getdoc(tool) or "").partition("\n")[0]
            lines.append(f"{name}({', '.join(inspect.signature(tool).parameters)})" + (f": {says}" if says else ""))
        return "\n".join(lines)

    def run(self, task: Task, llm: LLM) -> dict[str, Any]:
        """Return the model's answer, with how often it called and how many of these calls failed."""
        talk = _Talk(task, self.instructions)
        most = llm.turns_left if self.max_turns is None else min(self.max_turns, llm.turns_left)
        calls = failed = 0
        text = ""
        for turn in range(most):
            text = llm.complete(talk.prompt, stop=[CLOSE]).text
            if OPEN not in text or turn == most - 1:
                break
            found, worked = self.call(text)
            calls, failed = calls + 1, failed + (not worked)
            talk.go_on(text, self.result.replace("{result}", found))
        return {"text": text, "score": {"tool_calls": calls, "tool_errors": failed}}

    def call(self, text: str) -> tuple[str, bool]:
        """Run the call that a reply ends with; return what to tell the model, and whether it worked."""
        matched = _CALL.match(text[text.rindex(OPEN) :])
        if matched is None:
            return _BAD, False
        name, given = matched[1], matched[2].strip()
        if name not in self.tools:
            return f"error: there is no tool {name!r}; there are {', '.join(self.tools)}", False
        try:
            arguments = json.loads(given) if given else {}
        except (json.JSONDecodeError, RecursionError):
            return _BAD, False
        if not isinstance(arguments, dict):
            return _BAD, False
        try:
            return str(self.tools[name](**arguments))[: self.max_result_length], True
        except Exception as error:  # noqa: BLE001 - the model may call a function with anything
            return f"error: {type(error).__name__}: {one_line(error)}", False


class _Talk:
    """A prompt that grows: a text, or chat messages."""

    def __init__(self, task: Task, instructions: str) -> None:
        self.prompt: Any = f"{instructions}{task.prompt}"
        if task.messages:
            first = [{"role": "system", "content": instructions}] if instructions else []
            self.prompt = [*first, *task.messages]

    def go_on(self, reply: str, heard: str) -> None:
        """Append a call and what came of it."""
        if isinstance(self.prompt, str):
            self.prompt += f"{reply}{CLOSE}{heard}"
            return
        said = {"role": "assistant", "content": f"{reply}{CLOSE}"}
        self.prompt = [*self.prompt, said, {"role": "user", "content": heard}]
