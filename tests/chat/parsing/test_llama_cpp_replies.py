"""The replies that llama.cpp's own tests state, read whole and in random pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perdure import Message, Template, TemplateError, Tool
from perdure.chat.formats.registry import detect
from perdure.chat.parsing.reply_parser import ReplyParser, gather

FOLDER = Path(__file__).parent
DATA = json.loads((FOLDER / "data" / "llama_cpp_replies.json").read_text())
TEMPLATES = FOLDER.parent / "templates" / "llama.cpp"
REPLIES = DATA["replies"]

# Read otherwise on purpose.
OTHERWISE = {
    ("Qwen3.5-4B", "<think>\n\n</think>"): "a mark of reasoning within reasoning is not shown (C8)",
    ("inclusionai-ling-3.0-flash", "I need to check"): "reasoning is told apart whatever the server's option",
    ("meta-llama-Llama-3.1-8B-Instruct", "```json"): "a reply held to a schema has no fence here",
    ("mistralai-Ministral-3-14B-Reasoning-2512", "[THINK]I need to output"): "the same",
}


def is_otherwise(case: dict[str, Any]) -> bool:
    schema = "schema" in case or case["template"] in ("Qwen3.5-4B", "inclusionai-ling-3.0-flash")
    if case["template"] == "inclusionai-ling-3.0-flash" and case.get("reasoning_format") != "none":
        return False
    return schema and any(
        case["template"] == name and case["reply"].startswith(start) for name, start in OTHERWISE
    )


@cache
def template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.jinja").read_text(), bos="<s>", eos="</s>")


def parser(case: dict[str, Any]) -> ReplyParser:
    tools = [Tool.parse(DATA["tools"][name]) for name in case.get("tools", ())]
    asked = case.get("messages", [{"role": "user", "content": "Hey there!"}])
    chosen = template(case["template"])
    try:
        prompt = chosen.render(
            [Message.parse(each) for each in asked],
            tools=tools,
            enable_thinking=case.get("enable_thinking", True),
        )
    except TemplateError:
        # Two of them need values that only their makers' programs give.
        prompt = ""
    family = detect(chosen.source)
    return ReplyParser(family, thinking=family.opens_reasoning(prompt), prompt=prompt, tools=tools)


def said(case: dict[str, Any], pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]], list[str]]:
    reading = parser(case)
    parts = [part for piece in pieces for part in reading.push(piece)] + reading.finish()
    made = gather(parts)
    calls = [(call.name, call.parsed) for call in made.tool_calls]
    ids = [call.id for call in made.tool_calls]
    return (made.content or "").strip(), (made.reasoning or "").strip(), calls, ids


def expected(case: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(call[0], json.loads(call[1])) for call in case.get("calls", ())]
    return case.get("content", "").strip(), case.get("reasoning", "").strip(), calls


def test_all_replies_are_there() -> None:
    assert len(REPLIES) == 375
    assert sum(map(is_otherwise, REPLIES)) == 4


@pytest.mark.extension("families")
@pytest.mark.parametrize("name", sorted({case["template"] for case in REPLIES}))
def test_a_reply_says_what_llama_cpp_says_it_does(name: str) -> None:
    """At least 370 of 375; those that are read otherwise are listed above."""
    for case in REPLIES:
        if case["template"] != name:
            continue
        whole = said(case, [case["reply"]])
        if is_otherwise(case):
            assert whole[:3] != expected(case), "no longer read otherwise: take it off the list"
            continue
        assert whole[:3] == expected(case), case["reply"]
        for call, written in zip(case.get("calls", ()), whole[3], strict=True):
            assert len(call) < 3 or call[2] == written, "an id that the model wrote is kept"


@pytest.mark.parametrize("name", sorted({case["template"] for case in REPLIES}))
def test_a_reply_in_fifty_random_pieces_says_the_same_c8(name: str) -> None:
    """C8: fifty random ways to cut each of them."""
    draw = random.Random(name)
    for case in REPLIES:
        if case["template"] != name:
            continue
        text = case["reply"]
        whole = said(case, [text])[:3]
        for _ in range(50):
            count = draw.choice([1, 2, 5, 20, len(text)])
            ends = [0, *sorted(draw.randrange(len(text) + 1) for _ in range(count)), len(text)]
            assert said(case, [text[start:end] for start, end in pairwise(ends)])[:3] == whole


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_no_mark_is_ever_in_visible_text_c8(name: str) -> None:
    """C8: every mark of a template's family, cut at every place, between words."""
    chosen = detect((TEMPLATES / f"{name}.jinja").read_text())
    for mark in sorted(chosen.marks):
        if chosen.calls is not None and mark in chosen.calls.text_openers:
            continue
        for cut in range(len(mark) + 1):
            reading = ReplyParser(chosen)
            parts = [*reading.push("a " + mark[:cut]), *reading.push(mark[cut:] + " b"), *reading.finish()]
            assert mark not in "".join(part.text for part in parts if part.kind == "text")
