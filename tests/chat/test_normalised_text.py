"""I6 where text is written in place of what a template does not show: tools, calls, results, developers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench.processes.reread import marks_of

import perdure
from perdure import Template
from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import parse_messages
from perdure.chat.options import ChatOptions
from perdure.chat.template import rewriting
from perdure.chat.template.template import UNGUARDED
from perdure.testing.toy import ToyModel

FOLDER = Path(__file__).parent / "templates"
ALL = [*sorted(FOLDER.glob("*.jinja")), *sorted((FOLDER / "llama.cpp").glob("*.jinja"))]


def asked(text: str) -> dict[str, Any]:
    """A conversation whose every field that somebody outside may fill is `text`."""
    schema = {
        "type": "object",
        "properties": {text: {"type": "string", "description": text, "enum": [text]}},
        "required": [text],
    }
    escaped = "".join(f"\\u{ord(char):04x}" for char in text)
    calls = [
        {"id": "abcdefgh1", "function": {"name": text, "arguments": {text: [text, {text: text}]}}},
        {"id": "abcdefgh2", "function": {"name": "f", "arguments": f'{{"k": "{escaped}", "{escaped}": 1}}'}},
    ]
    broken = {"id": "abcdefgh3", "function": {"name": "f", "arguments": text}}
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "developer", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": text, "tool_call_id": "abcdefgh1", "name": text},
            {"role": "tool", "content": text, "tool_call_id": "abcdefgh2", "name": "f"},
            {"role": "assistant", "content": None, "tool_calls": [broken]},
            {"role": "tool", "content": text, "tool_call_id": "abcdefgh3", "name": "f"},
            {"role": "assistant", "content": "ok"},
            {"role": "system", "content": text},
            {"role": "user", "content": text},
        ],
        "tools": [
            {"type": "function", "function": {"name": text, "description": text, "parameters": schema}}
        ],
    }


def marks_in(chat_format: ChatFormat, text: str) -> Counter[int]:
    request = asked(text)
    options = ChatOptions.split({"tools": request["tools"], "date": "2026-01-31"})[0]
    prompt = chat_format.prompt(parse_messages(request["messages"]), options)
    found = chat_format.tokenizer.marks
    return Counter(token for token in prompt.transcript.tokens if token in found)


def runtime(path: Path) -> perdure.Runtime:
    template = Template(path.read_text(), bos="<s>", eos="</s>")
    return perdure.open(ToyModel(marks=marks_of(template)), n_ctx=32768, slots=1, template=template)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_what_is_written_instead_brings_in_no_control_token_i6(path: Path) -> None:
    """I6: every mark, whole and cut at its edges, in all fields at once."""
    with runtime(path) as rt:
        usual = marks_in(rt.chat_format, "x")
        for mark in sorted(set(rt.chat_format.tokenizer.marks.values())):
            for text in (mark, mark[:-1], mark[1:]):
                assert marks_in(rt.chat_format, text) == usual, text


def test_without_the_guard_a_mark_would_come_in_i6(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: of Gemma 2, whose tools and calls are written into the text."""
    [path] = [each for each in ALL if each.stem == "google-gemma-2-2b-it"]
    rewriter = rewriting.MessageRewriter
    monkeypatch.setattr(
        rewriting, "MessageRewriter", lambda shown, writer, guard: rewriter(shown, writer, UNGUARDED)
    )
    with runtime(path) as rt:
        usual = marks_in(rt.chat_format, "x")
        assert marks_in(rt.chat_format, "<end_of_turn>") != usual
