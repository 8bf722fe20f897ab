"""Types of arguments: what a schema says that a value is, and the JSON and the rule of a bare value."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        parsed = _WORDS[value] if value in _WORDS else json.loads(value, parse_constant=no_json)
    except (ValueError, RecursionError):
        parsed, is_json = raw, False
    kind = _KINDS.get(type(parsed), "string")
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if kind == "number" and "integer" in kinds and isinstance(parsed, float) and parsed.is_integer():
        fits = True
    if not is_json or ("string" in kinds and (not fits or kind == "string")):
        return json.dumps(raw, ensure_ascii=False)
    return json.dumps(parsed) if value in _WORDS else value


def no_json(word: str) -> Any:
    """NaN and the like are no JSON, though Python reads them."""
    raise ValueError(word)


def value_rule(rules: Rules, schema: Any, root: Mapping[str, Any], close: str) -> str:
    """A bare value up to `close`, and that."""
    texts: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for leaf in leaves(schema, root):
        kinds = kinds_of(leaf, root)
        (texts if "string" in kinds else others).append(leaf)
    kinds = kinds_of(schema, root)
    alternatives = [text_rule(rules, leaf, close, kinds) for leaf in texts]
    if others or not texts:
        json = {"anyOf": others} if texts else schema
        alternatives.append(f"{rules.json(within(json, root))} {rules.literal(close)}")
    alternatives = [each for each in alternatives if each]
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def leaves(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema, each of strings or of anything else."""
    meant = resolved(schema, root)
    for word in ("anyOf", "oneOf"):
        if isinstance(meant.get(word), list) and depth < _DEEPEST:
            for each in meant[word]:
                yield from leaves(each, root, depth + 1)
            return
    values = meant.get("enum") if isinstance(meant.get("enum"), list) else None
    values = [meant["const"]] if values is None and "const" in meant else values
    if values is not None:
        words = [each for each in values if isinstance(each, str)]
        numbers = [each for each in values if not isinstance(each, str)]
        yield from ({"enum": each} for each in (words, numbers) if each)
        return
    kinds = kinds_of(meant, root)
    if "string" in kinds and len(kinds) > 1 and "type" in meant:
        yield {**meant, "type": "string"}
        yield {**meant, "type": sorted(kinds - {"string"})}
        return
    yield meant


_NUMBER = r"\s*-?[0-9][-+0-9.eE]*\s*"
_LIKE = {
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": r"\s*(true|false|True|False)\s*",
    "null": r"\s*(null|None)\s*",
    "object": r"\s*\{(?s:.*)",
    "array": r"\s*\[(?s:.*)",
}
"""What a text is read as another type by."""
_CDATA = r"<!\[CDATA\[(?s:.*)"
"""A text that is quoted as XML does, which some parsers take the quotes from."""


def text_rule(rules: Rules, schema: Mapping[str, Any], close: str, kinds: Collection[str]) -> str:
    """A bare string up to `close`, and that; empty where no such string can be written. Where other `kinds`
    are allowed in its place, it looks like none of them."""
    like = [_LIKE[kind] for kind in sorted(kinds) if kind in _LIKE]
    if "enum" in schema:
        words = [
            each for each in schema["enum"] if not any(re.fullmatch(each_like, each) for each_like in like)
        ]
        words = [each for each in words if close.strip() not in each]
        written = " | ".join(rules.words(each) or _EMPTY for each in words)
        return f"({written}) {rules.literal(close)}" if words else ""
    return rules.bare_text(close, _shape(schema), [*like, _CDATA])


def _shape(schema: Mapping[str, Any]) -> list[str]:
    """Patterns that a string has to match as a whole."""
    shape = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        shape.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if isinstance(pattern := schema.get("pattern"), str):
        # Behind an alternative at the top, an anchor is of that alone.
        starts = pattern.startswith("^") and not _ALTERNATIVES.search(pattern)
        ends = pattern.endswith("$") and not pattern.endswith("\\$") and not _ALTERNATIVES.search(pattern)
        inner = pattern.removeprefix("^") if starts else pattern
        inner = inner.removesuffix("$") if ends else inner
        shape.append(f"{'' if starts else '(?s:.*)'}(?:{_slashed(inner)}){'' if ends else '(?s:.*)'}")
    return shape


def _slashed(pattern: str) -> str:
    return pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")


_ALTERNATIVES = re.compile(r"^(?:[^()\[\]\\|]|\\.|\((?:[^()\\]|\\.)*\)|\[(?:[^\]\\]|\\.)*\])*\|")
"""A pattern that has alternatives at its top."""


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
