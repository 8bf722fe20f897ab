"""Writes docs/options.md: every option, and every field of every request with its bounds; and, into
docs/security.md, the fields that have a bound of their own in bytes or items.

`make api` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.chat.options import ChatOptions
from perdure.engine_config import engine_options
from perdure.options import Option, options_of
from perdure.request_options import RequestOptions, Sampling
from perdure.server.app import request_schemas
from perdure.server.core.schemas import RequestSchema, SamplingSchema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
SECURITY = PAGE.with_name("security.md")
MARKS = "<!-- fields -->\n", "<!-- end of fields -->\n"
"""What the table of docs/security.md stands between."""
TABLES: Mapping[str, type] = {
    "How tokens are drawn": Sampling,
    "How a reply is made": RequestOptions,
    "How a conversation is read": ChatOptions,
}
SURFACES = {"file": "config file", "models": "one of several models"}
"""Where an option of the engine stands, besides commands, which are called as they are."""
HEAD = """# Options

`tools/option_tables.py` writes this page from the definitions; a test holds it to them.

An option has one name, one range and one meaning. In the library it is a keyword
(`rt.generate(prompt, top_k=5)`), over HTTP a field (`"top_k": 5`; the options of a conversation stand under
`perdure`), for the command `--top-k 5`, in the config file `top_k = 5`, in a chat `/set top_k 5`, in Ollama's
API an entry of `options`, on the page a field of its settings. `logit_bias` is `{"1234": -100}` in JSON and
`--logit-bias 1234=-100` for the command.
"""
ENGINE = """
## What a model is opened with

Each is a keyword of `perdure.open`; those of loading are also keywords of `perdure.Model`, and those of a
context of `Model.context`. A command, the config file and what is said of
[one of several models](server.md#several-models) may call it otherwise: `--ctx 8192`, `ctx = 8192`,
`--model a=FILE,ctx=8192`. Processes that share a store have to agree on what is marked with *.

| keyword | default | range | meaning | elsewhere |
|---|---|---|---|---|
"""
BOUNDS = """
## What each field of a request may be

Besides these, every request is bounded in bytes, depth and values as [security.md](security.md) says: a field
without a bound of its own may be as large as its request. A character has at most 4 bytes. A number that is
none (`Infinity`, `NaN`) is refused everywhere. A test sends each field at its bound and beyond it.
What nobody knows is ignored, and named in `perdure.ignored` of
the answer, in its `x-perdure-ignored` header and the access log; with `--strict` it is refused.
"""


def text() -> str:
    parts = [HEAD]
    for title, kind in TABLES.items():
        parts.append(f"\n## {title}\n\n| option | default | range | meaning |\n|---|---|---|---|\n")
        for option in options_of(kind).values():
            default = f"`{option.default_text}`" if option.default is not None else option.default_text
            parts.append(f"| `{option.name}` | {default} | {option.range} | {option.help} |\n")
    parts += [ENGINE, *map(_engine_row, engine_options().values()), BOUNDS]
    common = _fields(SamplingSchema)
    parts.append(f"\n### Every protocol\n\nIn Ollama's API they stand in `options`.\n{_table(common)}")
    for request, paths in request_schemas().items():
        own = {name: what for name, what in _fields(request).items() if name not in common}
        named = ", ".join(f"`{path}`" for path in paths)
        parts.append(f"\n### {named}\n{_table(own)}")
    return "".join(parts)


def _engine_row(option: Option) -> str:
    named = [SURFACES.get(each, f"`{each}`") for each in option.surfaces]
    elsewhere = f"`{option.command}`: {', '.join(named)}" if named else ""
    mark = " *" if option.affects_reply else ""
    return (
        f"| `{option.name}`{mark} | {option.default_text} | {option.range} | {option.help} | {elsewhere} |\n"
    )


def security() -> str:
    """docs/security.md with the table of the fields that are bounded in size."""
    found: dict[tuple[str, str], list[str]] = {}
    count = 0
    for request, paths in request_schemas().items():
        for name, what in _fields(request).items():
            count += 1
            if "at most" in what:
                found.setdefault((name, what), []).append(f"`{paths[0]}`")
    lines = "".join(
        f"| `{name}` | {what} | {', '.join(paths)} |\n" for (name, what), paths in sorted(found.items())
    )
    table = f"Of {count} fields these have a bound of their own:\n\n| field | bound | of |\n|---|---|---|\n"
    before, _, rest = SECURITY.read_text(encoding="utf-8").partition(MARKS[0])
    return f"{before}{MARKS[0]}{table}{lines}{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def _table(fields: Mapping[str, str]) -> str:
    lines = "".join(f"| `{name}` | {what} |\n" for name, what in fields.items())
    return f"\n| field | what it may be |\n|---|---|\n{lines}"


def _fields(kind: type[RequestSchema]) -> dict[str, str]:
    schema = kind.model_json_schema()
    fields: dict[str, list[str]] = {}
    for name, what in rows(schema, schema.get("$defs", {}), "", ()):
        fields.setdefault(name, []).append(what)
    return {name: ", or ".join(dict.fromkeys(said)) for name, said in fields.items()}


def rows(
    schema: Mapping[str, Any], known: Mapping[str, Any], path: str, inside: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """The fields of a schema and of those in it, each with its bounds."""
    for name, field in schema.get("properties", {}).items():
        place = f"{path}{name}"
        yield place, bounds(field, known)
        for reference, suffix in references(field):
            if reference not in inside:
                yield from rows(known[reference], known, f"{place}{suffix}.", (*inside, reference))


def references(field: Mapping[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """The schemas that a field may have in it."""
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2], suffix
    for each in (*field.get("anyOf", ()), *field.get("oneOf", ())):
        yield from references(each, suffix)
    if "items" in field:
        yield from references(field["items"], f"{suffix}[]")


def bounds(field: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    choices = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    if choices:
        said = [bounds(each, known) for each in choices if each.get("type") != "null"]
        return ", or ".join(dict.fromkeys(said))
    if "$ref" in field:
        return "an object"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return "one of " + ", ".join(f"`{each}`" for each in field["enum"])
    kind = field.get("type")
    if kind in ("number", "integer"):
        word = "a number" if kind == "number" else "a whole number"
        if "minimum" in field:
            word += f" from {_number(field['minimum'])}"
        elif "exclusiveMinimum" in field:
            word += f" above {_number(field['exclusiveMinimum'])}"
        if "maximum" in field:
            return f"{word} to {_number(field['maximum'])}"
        return f"{word} below {_number(field['exclusiveMaximum'])}" if "exclusiveMaximum" in field else word
    if kind == "string":
        most = field.get("maxLength")
        return "a text" if most is None else f"a text of at most {most:,} characters"
    if kind == "array":
        most = field.get("maxItems")
        each = bounds(field["items"], known) if field.get("items") else "anything"
        return f"a list, each {each}" if most is None else f"at most {most:,}, each {each}"
    if kind == "object":
        most = field.get("maxProperties")
        values = field.get("additionalProperties")
        each = f", each {bounds(values, known)}" if isinstance(values, Mapping) else ""
        return f"an object{each}" if most is None else f"an object of at most {most:,} entries{each}"
    return "true or false" if kind == "boolean" else "anything"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
    SECURITY.write_text(security(), encoding="utf-8")
