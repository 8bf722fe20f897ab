"""Writes docs/api.md: every public name with its signature and its docstring.

`make api` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import perdure
from perdure.chat.options import ChatKeywords, TurnKeywords
from perdure.decode.request import ReplyKeywords, RequestKeywords, SamplingKeywords
from perdure.engine_config.keywords import FitKeywords

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"

PARTS = {
    "Runtime": ("open", "Runtime", "Stream"),
    "Sessions": ("Session", "SessionInfo", "SessionMemory", "Turn", "ImportResult"),
    "Requests": (
        "Sampling",
        "Grammar",
        "Message",
        "Tool",
        "ToolCall",
        "Template",
        "KeptPrefix",
    ),
    "Replies": (
        "Reply",
        "ChatReply",
        "Delta",
        "ChatDelta",
        "CallDelta",
        "Usage",
        "Timings",
        "TokenLogprob",
        "ReuseReport",
        "Miss",
        "Difference",
        "Plan",
        "Choice",
        "Embeddings",
    ),
    "Engine": (
        "Model",
        "Context",
        "LogitsView",
        "Candidate",
        "Feed",
        "Checkpoint",
        "Capabilities",
        "Identity",
        "Embedder",
        "Pooling",
    ),
    "Kinds of memory": ("MemorySpec", "FullAttention", "SlidingWindow", "Recurrent", "Hybrid"),
}
"""What is shown where. Names that stand nowhere here come under "More", exceptions under "Errors"."""

KEYWORDS = {
    "SamplingKeywords": SamplingKeywords,
    "ReplyKeywords": ReplyKeywords,
    "RequestKeywords": RequestKeywords,
    "TurnKeywords": TurnKeywords,
    "ChatKeywords": ChatKeywords,
    "FitKeywords": FitKeywords,
}


def page() -> str:
    """The whole page."""
    names = [name for name in perdure.__all__ if not name.startswith("_") and not _is_error(name)]
    placed = {name for part in PARTS.values() for name in part}
    parts = {title: [name for name in part if name in names] for title, part in PARTS.items()}
    parts["More"] = [name for name in names if name not in placed]
    lines = [
        "# API reference",
        "",
        "Every public name of `perdure`, written by `make api` from signatures and docstrings.",
        "[quickstart.md](quickstart.md) shows how things are used together.",
        "",
    ]
    for title, part in parts.items():
        if part:
            lines += [f"## {title}", ""]
            for name in part:
                lines += _shown(name)
    lines += ["## Keywords", "", "Typed dictionaries: what calls with `**` take.", ""]
    for name, kind in KEYWORDS.items():
        lines += _keywords(name, kind)
    lines += ["## Errors", "", "```text", *_error_tree(), "```", ""]
    return "\n".join(lines)


def _is_error(name: str) -> bool:
    value = getattr(perdure, name)
    return inspect.isclass(value) and issubclass(value, BaseException)


def _shown(name: str) -> Iterator[str]:
    value = getattr(perdure, name)
    yield f"### `{name}`"
    yield ""
    if not inspect.isclass(value):
        yield from _call(f"perdure.{name}", value)
        return
    if value.__name__ != name and value.__name__ in perdure.__all__:
        yield from (f"Another name of `{value.__name__}`.", "")
        return
    yield from _doc(value)
    init = vars(value).get("__init__")
    if init is not None and not _is_plain(value):
        yield from _call(name, init, drop_self=True)
    rows = list(_fields(value))
    if rows:
        yield from ("| field | type | meaning |", "|---|---|---|", *rows, "")
    for attribute, member in _members(value):
        if isinstance(member, (property, functools.cached_property)):
            getter = member.fget if isinstance(member, property) else member.func
            kind = _annotation(inspect.signature(getter).return_annotation) if getter else ""
            yield f"**`{attribute}`**{f': `{kind}`' if kind else ''}"
            yield ""
            yield from _doc(member)
        else:
            yield from _call(attribute, member)


def _is_plain(value: type) -> bool:
    return dataclasses.is_dataclass(value) or issubclass(value, (enum.Enum, tuple)) or _is_protocol(value)


def _is_protocol(value: type) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def _fields(value: type) -> Iterator[str]:
    if issubclass(value, enum.Enum):
        for member in value:
            yield f"| `{member.name}` | | `{member.value!r}` |"
    elif dataclasses.is_dataclass(value):
        notes = _attribute_docs(value)
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                kind = _annotation(field.type).replace("|", "\\|")
                yield f"| `{field.name}` | `{kind}` | {notes.get(field.name, '')} |"
    elif issubclass(value, tuple) and hasattr(value, "_fields"):
        notes = _attribute_docs(value)
        for name in value._fields:
            kind = _annotation(value.__annotations__.get(name, "")).replace("|", "\\|")
            yield f"| `{name}` | `{kind}` | {notes.get(name, '')} |"


def _attribute_docs(value: type) -> dict[str, str]:
    """The texts that stand under the fields of a class."""
    found: dict[str, str] = {}
    for base in reversed(value.__mro__):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        pattern = r'^    (\w+): [^\n]+\n    """(.+?)"""$'
        for name, text in re.findall(pattern, source, re.MULTILINE | re.DOTALL):
            found[name] = " ".join(text.split())
    return found


def _members(value: type) -> Iterator[tuple[str, object]]:
    """What a class and those it is made of define, each once, in the order of their source."""
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("perdure"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(member, (staticmethod, classmethod)):
                yield name, member.__func__
            elif inspect.isfunction(member) or isinstance(member, (property, functools.cached_property)):
                yield name, member


def _call(name: str, member: object, *, drop_self: bool = False) -> Iterator[str]:
    call = inspect.unwrap(member) if callable(member) else member
    assert isinstance(call, types.FunctionType)
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    signature = signature.replace(parameters=parameters)
    if drop_self:
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    # A twin for asyncio has the signature of what it wraps, and is a coroutine all the same.
    is_async = inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(call)
    head = "async " if is_async else ""
    yield "```python"
    yield from _wrapped(f"{head}{name}", signature)
    yield "```"
    yield ""
    yield from _doc(member if is_async else call)


def _wrapped(name: str, signature: inspect.Signature) -> list[str]:
    shown = [_parameter(each) for each in signature.parameters.values()]
    kinds = [each.kind for each in signature.parameters.values()]
    first = next((at for at, kind in enumerate(kinds) if kind is inspect.Parameter.KEYWORD_ONLY), None)
    if first is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(first, "*")
    empty = signature.return_annotation is inspect.Signature.empty
    back = "" if empty else f" -> {_annotation(signature.return_annotation)}"
    line = f"{name}({', '.join(shown)}){back}"
    if len(line) <= 100:
        return [line]
    return [f"{name}(", *(f"    {each}," for each in shown), f"){back}"]


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
    kind = "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
    default = "" if each.default is each.empty else f" = {each.default!r}"
    return f"{stars}{each.name}{kind}{default}"


def _annotation(kind: object) -> str:
    if isinstance(kind, typing.ForwardRef):
        kind = kind.__forward_arg__
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", None) or str(kind)
    return re.sub(r"\b(?:typing|collections\.abc|perdure(?:\.\w+)+)\.", "", text).strip("'\"")


def _keywords(name: str, kind: type) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield from _doc(kind)
    own = set(kind.__annotations__)
    smaller = [name for name, other in KEYWORDS.items() if set(other.__annotations__) < own]
    base = max(smaller, key=lambda name: len(KEYWORDS[name].__annotations__), default=None)
    inherited = set(KEYWORDS[base].__annotations__) if base else set()
    if base:
        yield f"Those of `{base}`, and:"
        yield ""
    yield from ("| keyword | type |", "|---|---|")
    for field, annotation in kind.__annotations__.items():
        if field not in inherited:
            shown = _annotation(annotation).replace("|", "\\|")
            yield f"| `{field}` | `{shown}` |"
    yield ""


def _error_tree() -> list[str]:
    """The tree that stands at the top of `perdure.errors`."""
    import perdure.errors

    lines = (perdure.errors.__doc__ or "").splitlines()
    return [line.rstrip() for line in lines if "─" in line or line.startswith("PerdureError")]


def _doc(value: object) -> list[str]:
    text = inspect.getdoc(value)
    if not text or text.startswith(f"{getattr(value, '__name__', '')}("):
        # What the dataclass decorator writes is the signature.
        return []
    return [text, ""]


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.read_text(encoding="utf-8") == text
        print("docs/api.md is true" if same else "docs/api.md is old: run `make api`")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
