"""C8: no mark of any family is ever in visible text, over all templates and every way to cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import Template
from perdure.chat.formats.registry import detect
from perdure.chat.message import Tool, ToolCall
from perdure.chat.parsing.reply_parser import Part, ReplyParser
from perdure.ext.families.learned import learn

FOLDER = Path(__file__).parents[2] / "chat" / "templates"
ALL = [*sorted(FOLDER.glob("*.jinja")), *sorted((FOLDER / "llama.cpp").glob("*.jinja"))]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = (Tool(name="look", parameters=SCHEMA), Tool(name="stop", parameters=SCHEMA))
CALLS = (
    ToolCall(id="abcdefgh1", name="look", arguments='{"at": "sea"}'),
    ToolCall(id="abcdefgh2", name="stop", arguments='{"at": "sky"}'),
)


def shown(parts: list[Part]) -> tuple[str, str, str]:
    """The text, the reasoning and the calls of some parts."""
    gone = {part.call for part in parts if part.dropped}
    calls = "".join(part.name + part.text for part in parts if part.kind == "call" and part.call not in gone)
    text = "".join(part.text for part in parts if part.kind == "text")
    return text, "".join(part.text for part in parts if part.kind == "reasoning"), calls


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_no_mark_shows_wherever_it_is_cut_c8(path: Path) -> None:
    """C8: a reply with reasoning, text, calls and the end of its turn, cut in two at every place, and into
    single characters: the same each time, and no mark in any part of it that a reader sees."""
    template = Template(path.read_text(), bos="<s>", eos="</s>")
    family, form = detect(template.source), learn(template, detect(template.source))
    markers, end = family.reasoning, "".join(family.ends[:1])
    thought = f"{markers.open}I wonder.{markers.close}" if markers is not None else ""
    begun = family.prompt_opener
    calls = form.writer.write(CALLS[: 1 + form.parallel])
    marks = [mark for mark in family.marks if len(mark.strip()) > 2 and not mark.strip().isalnum()]
    replies = [
        thought.removeprefix(begun) + family.restart.removeprefix("" if thought else begun) + calls + end,
        *((thought + "An answer." + end,) if not begun and not family.restart else ()),
    ]
    for reply in replies:
        whole: set[tuple[str, str, str]] = set()
        for pieces in (
            [reply],
            list(reply),
            *([reply[:at], reply[at:]] for at in range(1, len(reply))),
        ):
            parser = ReplyParser(family, thinking=family.opens_reasoning(begun), prompt=begun, tools=TOOLS)
            parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
            whole.add(shown(parts))
        [(text, reasoning, called)] = whole
        for mark in marks:
            assert mark not in text
            assert mark not in reasoning
            assert mark not in called
        if calls in reply:
            assert called.startswith("look")
            assert "sea" in called
