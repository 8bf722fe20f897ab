"""A tool out of a Python function: its parameters by their types, and what they are for by its docstring."""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.errors import InvalidInputError

_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    dict: {"type": "object"},
    list: {"type": "array"},
    Any: {},
    inspect.Parameter.empty: {},
}
_DESCRIBED = re.compile(r"^\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$")
"""A line of a docstring about a parameter, as Google's and Sphinx's styles have it."""


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """What a model reads of a function: its name, its docstring, and a schema of its parameters."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise InvalidInputError(f"a tool is a function with a name, got {function!r}")
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidInputError(f"the parameters of tool {name!r} cannot be read: {error}") from None
    text, told = _documented(inspect.getdoc(function) or "", signature.parameters)
    properties, required = {}, []
    for each in signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise InvalidInputError(f"tool {name!r}: a model gives arguments by name, not {str(each)!r}")
        schema = _schema(hints.get(each.name, each.empty), f"tool {name!r}, parameter {each.name!r}")
        if each.name in told:
            schema = {"description": told[each.name], **schema}
        if each.default is each.empty:
            required.append(each.name)
        elif isinstance(each.default, (str, int, float, bool)):
            schema = {**schema, "default": each.default}
        properties[each.name] = schema
    shape = {"properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": text, "parameters": {"type": "object", **shape}}


def _documented(text: str, names: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """A docstring without the lines about parameters, and what those say."""
    lines, told = [], {}
    for line in text.splitlines():
        if (found := _DESCRIBED.match(line)) and found[1] in names:
            told[found[1]] = found[2]
        elif line.strip().rstrip(":") not in ("Args", "Arguments", "Parameters"):
            lines.append(line)
    return "\n".join(lines).strip(), told


def _schema(kind: Any, where: str) -> dict[str, Any]:
    """The JSON schema of an annotation."""
    if kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        told = next((each for each in arguments[1:] if isinstance(each, str)), None)
        schema = _schema(arguments[0], where)
        return schema if told is None else {"description": told, **schema}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, where) for each in arguments]}
    if origin in (list, tuple, set, frozenset, Sequence):
        if origin is tuple and (len(arguments) != 2 or arguments[1] is not ...):
            raise InvalidInputError(f"{where}: use list[...] instead of {kind}")
        return {"type": "array", "items": _schema(arguments[0], where)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind]}
    if callable(write := getattr(kind, "model_json_schema", None)):
        return dict(write())
    if typing.is_typeddict(kind):
        fields = typing.get_type_hints(kind, include_extras=True)
        return {
            "type": "object",
            "properties": {name: _schema(each, where) for name, each in fields.items()},
            "required": sorted(kind.__required_keys__),
        }
    raise InvalidInputError(
        f"{where} has no JSON schema: {kind!r} is not str, int, float, bool, list, dict, Literal, an Enum, a "
        "TypedDict or a class of pydantic"
    )
