"""Types of arguments: what a schema says that a value is, and the JSON and the rule of a bare value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.spi.chat import Rules

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
_EMPTY = '""'


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


def value_rule(rules: Rules, schema: Any, root: Mapping[str, Any], close: str) -> str:
    """A bare value up to `close`, and that."""
    kinds, meant = kinds_of(schema, root), resolved(schema, root)
    if "string" in kinds:
        values = meant.get("enum") if isinstance(meant.get("enum"), list) else None
        values = [meant["const"]] if values is None and "const" in meant else values
        if values and all(isinstance(each, str) for each in values):
            words = " | ".join(rules.words(each) or _EMPTY for each in values)
            return f"({words}) {rules.literal(close)}"
        return rules.text(close)
    return f"{rules.json(within(schema, root))} {rules.literal(close)}"


def within(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema on its own, with what it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **(schema if isinstance(schema, Mapping) else {})}


def members_rule(rules: Rules, members: Sequence[tuple[str, bool]], separator: str = "") -> str:
    """Members one after the other, those that are not required perhaps."""
    if not separator:
        return " ".join(each if required else f"({each})?" for each, required in members)
    first, later = "", ""
    for each, required in reversed(members):
        go_on = f"{each} {later}"
        with_separator = f"{rules.literal(separator)} {go_on}"
        first, later = (
            rules.rule(go_on if required else f"{go_on} | {first or _EMPTY}"),
            rules.rule(with_separator if required else f"({with_separator}) | {later or _EMPTY}"),
        )
    return first
