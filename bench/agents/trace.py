"""A trace of an agent at work, and what of it is new: the same for every server.

    main        20 turns, up to about 8,000 tokens, three compactions, two changes of its tools
    subagents   12 beside it, with a system prompt of their own, two turns each
    tokens left a message of the system behind the last one of each request; a client sends only the latest

What is new in a prompt is what no prompt before it had at its place, written as the template writes earlier
turns. A change of the tools has everything behind them read again: that is new too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REASONING = "Let me see what the file says, and what the user wants of it. " * 2
_TURNS, _COMPACTED, _NEW_TOOLS, _SUBAGENTS = 20, (5, 10, 15), (7, 13), 12
_SYSTEM = "You are an agent who works on the code of the user with tools. Be brief, and do not guess. " * 20
_SUBSYSTEM = "You are a subagent: you look for what you are asked for, and report where it is. " * 8


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and the answer to it that its conversation goes on with."""

    conversation: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    answer: str
    texts: tuple[str, str] = ("", "")
    """The prompt as the template would ideally write it, and the same with the answer behind it. A mark of
    the template is one character."""
    goes_on: bool = True
    """Whether another request goes on from the answer."""


@dataclass(slots=True)
class _Talk:
    name: str
    system: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    """The tokens left that were told behind a message, by its index."""

    def ask(self, said: str, answer: str, left: int, *, goes_on: bool = True) -> Ask:
        line = f"<total_tokens>{left} tokens left</total_tokens>"
        self.messages.append({"role": "user", "content": said})
        self.left[len(self.messages) - 1] = line
        head = {"role": "system", "content": self.system}
        asked = (head, *self.messages, {"role": "system", "content": line})
        prompt = self._ideal()
        self.messages.append({"role": "assistant", "content": answer})
        whole = self._ideal()
        opened = f"{prompt}\1assistant\n"
        return Ask(self.name, asked, tuple(self.tools), answer, (opened, whole), goes_on)

    def compact(self, summary: str) -> None:
        self.messages = [{"role": "user", "content": summary}, {"role": "assistant", "content": "I go on."}]
        self.left = {}

    def _ideal(self) -> str:
        tools = "".join(json.dumps(tool) + "\n" for tool in self.tools)
        text = f"\1system\n{tools}{self.system}\1\n"
        for at, message in enumerate(self.messages):
            behind = f"\n\n{self.left[at]}" if at in self.left else ""
            text += f"\1{message['role']}\n{message['content']}{behind}\1\n"
        return text


def trace(turns: int = _TURNS) -> list[Ask]:
    """All requests in their order. The system prompt of the main conversation is that of no subagent."""
    main = _Talk("main", _SYSTEM, [_tool(number) for number in range(4)])
    asks: list[Ask] = []
    started = 0
    for turn in range(turns):
        if turn in _COMPACTED:
            main.compact(f"Summary {turn}: " + "the user asked for a change, and it was made. " * 8)
        if turn in _NEW_TOOLS:
            main.tools = [*main.tools, _tool(100 + turn)]
        said = f"Question {turn}: " + f"line {turn} of the file says so. " * 22
        asks.append(main.ask(said, f"Answer {turn}: " + "it is as the file says. " * 6, 200_000 - 977 * turn))
        while started < _SUBAGENTS * (turn + 1) // turns:
            agent = _Talk(f"agent {started}", _SUBSYSTEM, [_tool(number) for number in range(2)])
            for step in range(2):
                said = f"Task {started}.{step}: " + f"look for the name number {started}. " * 8
                found = f"Report {started}.{step}: " + "it is in two places. " * 4
                asks.append(agent.ask(said, found, 90_000 - started - step, goes_on=not step))
            started += 1
    return asks


def new_tokens(asks: Sequence[Ask]) -> list[int]:
    """Of each request, how many tokens of its prompt no text before it had at their place."""
    texts: list[str] = []
    new = []
    for ask in asks:
        prompt, whole = ask.texts
        new.append(len(prompt) - max((_shared(prompt, text) for text in texts), default=0))
        texts = [text for text in texts if not whole.startswith(text)] + [whole]
    return new


def _tool(number: int) -> dict[str, Any]:
    about = f"Does thing number {number} to a file and says what came of it."
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": f"do_{number}", "description": about, "parameters": schema},
    }


def _shared(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
