"""Arguments of tool calls: the types that a tool's schema gives them, and whether they fit it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perdure.chat.message import Tool, ToolCall
from perdure.errors import InvalidInputError

_KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_WORDS = {"True": True, "False": False, "None": None}
_DEEPEST = 20


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, (list, tuple)):
        return frozenset(each for each in declared if isinstance(each, str))
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    if values is None and "const" in schema:
        values = [schema["const"]]
    if values is not None:
        return frozenset(_KINDS.get(type(each), "string") for each in values)
    if isinstance(schema.get("$ref"), str):
        return kinds_of(resolved(schema, root), root, depth + 1)
    kinds: frozenset[str] = frozenset()
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            kinds |= kinds_of(each, root, depth + 1)
    return kinds


def resolved(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """A schema, or what its reference within the root names; nothing else is ever looked up."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    if not reference.startswith("#/"):
        return {}
    place: Any = root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        place = place.get(step) if isinstance(place, Mapping) else None
    return resolved(place, root, depth + 1)


def typed(raw: str, kinds: frozenset[str]) -> str:
    """JSON for a value that was written bare. What fits no other type is a string."""
    if kinds == {"string"}:
        return json.dumps(raw, ensure_ascii=False)
    value, is_json = raw.strip(), True
    try:
        parsed = _WORDS[value] if value in _WORDS else json.loads(value)
    except (ValueError, RecursionError):
        parsed, is_json = raw, False
    kind = _KINDS.get(type(parsed), "string")
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if kind == "number" and "integer" in kinds and isinstance(parsed, float) and parsed.is_integer():
        fits = True
    if not is_json or ("string" in kinds and (not fits or kind == "string")):
        return json.dumps(raw, ensure_ascii=False)
    if value in _WORDS:
        return json.dumps(parsed)
    try:
        # NaN and the like are no JSON, though Python reads them.
        json.dumps(parsed, allow_nan=False)
    except ValueError:
        return json.dumps(raw, ensure_ascii=False)
    return value


def check_arguments(call: ToolCall, tools: Iterable[Tool]) -> str | None:
    """What is wrong with a call, by its tool's schema, in a sentence; None if nothing is."""
    known = {tool.name: tool for tool in tools}
    tool = known.get(call.name)
    if tool is None:
        return f"there is no tool {call.name!r}; the tools are: {', '.join(known) or 'none'}"
    try:
        arguments = call.parsed
    except InvalidInputError as error:
        return str(error)
    # Slow to import, and needed only where there are calls.
    from perdure.chat.parsing.schema import first_problem

    try:
        problem = first_problem(tool.parameters, arguments)
    except Exception as error:
        # A tool's schema is its author's; what fails in it is not the model's fault.
        return f"the schema of {tool.name} cannot be used: {_brief(str(error))}"
    if problem is None:
        return None
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem.absolute_path)
    return f"the arguments of {call.name} do not fit its schema: arguments{place}: {_brief(problem.message)}"


def _brief(words: str, longest: int = 300) -> str:
    return words if len(words) <= longest else words[:longest] + " …"
