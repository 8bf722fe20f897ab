"""Calls in a fenced block: lines of Python, or JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.chat.message import Tool
from perdure.chat.parsing.call_format import CallFormat, CallText
from perdure.chat.parsing.call_parser import CallParser
from perdure.chat.parsing.formats.json_objects import JsonObjectsParser
from perdure.chat.parsing.json_scanner import Malformed

_LONGEST = 100_000
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\n\\'\"abfnrtvxuUN01234567")


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedCalls(CallFormat):
    """A fenced block of Python calls or JSON, or a bare object."""

    shape: CallText
    openers: tuple[str, ...] = ("```tool_code\n",)
    leads: str = "{["
    marks: tuple[str, ...] = ()
    opener_is_text: bool = True

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        return FencedParser(tools) if opener else JsonObjectsParser(frozenset(tool.name for tool in tools))


class FencedParser(CallParser):
    """A fenced block of Python calls, or of JSON; read when it is closed."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._body: list[str] = []
        self._ticks = 0

    def _read(self, text: str, at: int) -> int:
        self._body.append(text[at])
        self._ticks = self._ticks + 1 if text[at] == "`" else 0
        if self._ticks == 3:
            self._close("".join(self._body[:-3]).strip())
            self.safe = self.position + 1
            self.done = True
        elif len(self._body) > _LONGEST:
            raise Malformed
        return at + 1

    def _close(self, body: str) -> None:
        if body.startswith(("{", "[{")):
            within = JsonObjectsParser()
            within.push(body)
            within.finish()
            if body[within.safe :].strip():
                raise Malformed
            self.events += within.events
            return
        calls = _python_calls(body)
        if not calls:
            raise Malformed
        written = [(call.func.id, self._arguments(call)) for call in calls if isinstance(call.func, ast.Name)]
        for name, arguments in written:
            self.events += [("name", name), ("arguments", arguments), ("end", "")]

    def _arguments(self, call: ast.Call) -> str:
        assert isinstance(call.func, ast.Name)
        tool = self._tools.get(call.func.id)
        names = list(tool.parameters.get("properties", ())) if tool is not None else []
        if len(call.args) > len(names):
            raise Malformed
        try:
            found = {name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=False)}
            found |= {str(each.arg): ast.literal_eval(each.value) for each in call.keywords if each.arg}
            if len(found) != len(call.args) + len(call.keywords):
                raise Malformed
            return json.dumps(found, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise Malformed from None


def _python_calls(body: str) -> list[ast.Call]:
    """The calls that a few lines of Python make; Malformed where they do anything else."""
    try:
        # An unknown escape would make Python warn about code that is not ours.
        known = _ESCAPE.sub(lambda it: it[0] if it[1] in _ESCAPES else "\\" + it[0], body)
        statements = ast.parse(known).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    calls: list[ast.Call] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for each in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
            call = each
            if _calls(call, "print") and isinstance(call, ast.Call) and len(call.args) == 1:
                call = call.args[0]
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                raise Malformed
            calls.append(call)
    return calls


def _calls(value: ast.expr | None, name: str) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == name


GEMMA = FencedCalls(
    marks=("<start_of_turn>", "<end_of_turn>"),
    shape=CallText(head='{"name": "', middle='", "parameters": ', tail="}", between="\n"),
)
"""Gemma has no format of its own; these two are what its makers suggest."""
