"""Random tools, and replies drawn at random from what a lazy grammar of their calls allows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np

from perdure.chat.message import Message, Tool
from perdure.chat.parsing.family import Family
from perdure.chat.parsing.lazy_calls import held_openers, lazy_calls
from perdure.chat.parsing.reply_parser import parse_reply
from perdure.decode.sampling.grammar import Grammars

WORDS = ("Paris", "Zürich", "東京", "a b", "", 'say "hi"', "back\\slash", "<tag>", "two\nlines", "🙂")
PATTERNS = ("^[a-z]{1,4}$", "^[A-Z]{2}-[0-9]+$", "^(north|south)$", "^[^@]+@[a-z]+$")
KEYS = ("city", "unit", "where", "größe", "n", "maybe")
_CONTROLS = frozenset((*range(32), 127)) - {ord("\n")}
_LONG = 400
"""Tokens of a call, behind which what ends it is preferred."""


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["text", "word", "pattern", "integer", "number", "boolean", "null", "union", "const", "short"]
    kind = draw.choice(kinds + ["object", "list", "object"] * (depth < 3))
    if kind == "word":
        return {"enum": draw.sample(WORDS, draw.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == "short":
        return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 9)}
    if kind == "integer":
        return {"type": "integer", "minimum": draw.randint(-9, 0), "maximum": draw.randint(1, 2000)}
    if kind == "union":
        return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
    if kind == "const":
        return {"const": draw.choice([*WORDS, 7, True, None])}
    if kind == "list":
        return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": draw.randint(0, 3)}
    if kind == "object":
        return random_object(draw, depth + 1)
    return {"type": {"text": "string"}.get(kind, kind)}


def random_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    keys = draw.sample(KEYS, draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {key: random_schema(draw, depth) for key in keys},
        "required": [key for key in keys if draw.random() < 0.6],
        "additionalProperties": False,
    }


def random_tools(draw: random.Random) -> list[Tool]:
    names = draw.sample(["get_weather", "search", "look", "a", "do-it", "do_it_all"], draw.randint(1, 3))
    return [Tool(name=name, parameters=random_object(draw)) for name in names]


def toy_free_text(draw: random.Random) -> str:
    pieces = ["Hm. ", "the weather", "<", "tool", "<tool", "[", "{", '{"name": ', "\n", "é", "🙂", "> "]
    return "".join(draw.choices(pieces, k=draw.randint(0, 12)))


def drawn_reply(
    family: Family, tools: Sequence[Tool], grammars: Grammars, draw: random.Random, control: Mapping[str, int]
) -> str | None:
    """A reply with a call, behind free text; None where the family's calls are not held."""
    grammar = lazy_calls(family, family.writer, tools, parallel=True, control=control)
    if grammar is None:
        return None
    matcher = grammars.lazy_matcher(grammar, visible=frozenset(control.values()))
    texts = {token: mark.encode() for mark, token in control.items()}
    opener = draw.choice(held_openers(family, family.writer)).text
    written = list(toy_free_text(draw).encode())
    written += [control[opener]] if opener in control and draw.random() < 0.8 else list(opener.encode())
    for token in written:
        assert not matcher.awake or matcher.allows(token)
        matcher.consume(token)
    assert matcher.awake
    ends = [*_ends(family), *([token] for token in control.values())]
    for count in range(20 * _LONG):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist()
        more = [_choice(draw, allowed)]
        if count > draw.randint(0, _LONG):
            fitting = [end for end in ends if end[0] in allowed and matcher.allows_all(end)]
            more = draw.choice(fitting) if fitting else more
        for token in more:
            matcher.consume(token)
        written += more
        if not matcher.awake or matcher.complete or matcher.accepts_end:
            break
    else:
        raise AssertionError(f"a call has no end: {bytes(t for t in written if t < 256)[-300:]!r}")
    pieces = (texts.get(token) or bytes([token]) for token in written if token < 256 or token in texts)
    return b"".join(pieces).decode("utf-8", "replace")


def _ends(family: Family) -> list[list[int]]:
    """What may end something in a call: marks, and ends of strings and values."""
    writer = family.writer
    texts = {'"', "'", "@a", "a", "A", "-0", "0", "}", "]", ")", ", ", ": ", *family.marks}
    texts |= {getattr(writer, name, "") for name in ("value_end", "tail", "end", "key_end", "name_end")}
    texts |= {line for text in list(texts) for line in text.split("\n")}
    return [list(text.encode()) for text in sorted(texts) if text]


def _choice(draw: random.Random, allowed: Sequence[int]) -> int:
    """Any token, but letters and digits more often than others."""
    # The checker of patterns knows no others of these.
    allowed = [each for each in allowed if each not in _CONTROLS] or allowed
    words = [each for each in allowed if each < 128 and chr(each).isalnum()]
    if words and draw.random() < 0.6:
        return draw.choice(words)
    return draw.choice(allowed)


def problems_of(family: Family, text: str, tools: Sequence[Tool]) -> list[str]:
    """What is wrong with the calls of a reply."""
    made: Message = parse_reply(family, text, tools=tools)
    if not made.tool_calls:
        return ["no call was read"]
    schemas = {tool.name: tool.parameters for tool in tools}
    wrong = []
    for call in made.tool_calls:
        if call.name not in schemas:
            wrong.append(f"no tool {call.name}")
        else:
            problems = jsonschema.Draft202012Validator(schemas[call.name]).iter_errors(call.parsed)
            wrong += [f"{call.arguments}: {problem.message}" for problem in problems]
    return wrong
