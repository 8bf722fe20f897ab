"""Tokens read again in a conversation with tools and reasoning, by template.

`python -m bench.processes.reread FILE…` prints the table. Five turns, three of them with a tool's result,
and reasoning before every reply. Each is what the model of the template would write; what the next prompt
has otherwise is read again. The vocabulary is bytes and the marks of the template, so a token is a character.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import perdure
from perdure import Template
from perdure.chat.chat_format import ChatFormat
from perdure.chat.formats.registry import detect
from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.options import ChatOptions
from perdure.chat.template.capabilities import capabilities
from perdure.chat.transcript import shared_length
from perdure.testing.toy import ToyModel

TOOL = Tool(name="look", description="Looks.", parameters={"type": "object", "properties": {"at": {}}})
QUESTIONS = ("Is it dry?", "And in Rome?", "Thanks. Who are you?", "And in Oslo?", "Good bye.")
QUOTED = 20
LOOKS = (0, 1, 3)
"""Turns in which a tool is called."""


@dataclass(frozen=True, slots=True)
class Reread:
    """Tokens that were read or written before and are read again."""

    tokens: int
    beyond: int
    """Of these, before the last mark up to which the template's own text stayed as it was."""
    kept: int | None
    """With `keep_reasoning`, where the template has a switch for it."""
    departure: tuple[str, str] | None
    """What stood where the first of them is, and what the template writes there now."""


def reread(template: Template) -> Reread:
    family = detect(template.source)
    model = ToyModel(marks=marks_of(template))
    with perdure.open(model, n_ctx=32768, slots=1, template=template) as rt:
        tokens, beyond, departure = _conversation(rt.chat_format, keep=None)
        shown = capabilities(template, with_tools=True)
        kept = None
        if family.reasoning is not None and shown.switch is not None:
            kept, _, _ = _conversation(rt.chat_format, keep=True)
    return Reread(tokens, beyond, kept, departure)


def marks_of(template: Template) -> list[str]:
    """The marks that a vocabulary for the template would have."""
    found = template.mark_texts | detect(template.source).marks
    return [mark for mark in found if len(mark) > 2 and mark.strip() == mark and "\n" not in mark]


def _conversation(chat_format: ChatFormat, keep: bool | None) -> tuple[int, int, tuple[str, str] | None]:
    """Tokens read again, those that the template had left as they were, and where it first had not."""
    thinks = {"enable_thinking": True, "reasoning_effort": "high"}
    options = ChatOptions(tools=(TOOL,), keep_reasoning=keep, date="2026-01-31", variables=thinks)
    said: list[Message] = []
    tokens = beyond = 0
    departure = None
    known = None
    for turn, question in enumerate(QUESTIONS):
        said.append(Message(role="user", content=question))
        for step in ("call", "answer") if turn in LOOKS else ("answer",):
            prompt = chat_format.prompt(said, options, known=known)
            if known is not None:
                base = chat_format.tokenizer.shared_prefix(prompt.transcript.text, known)
                reused = 0 if base is None else len(base.tokens)
                tokens += len(known.tokens) - reused
                shared = shared_length(prompt.transcript.text, known.text)
                if departure is None and reused < len(known.tokens):
                    departure = known.text[shared:], prompt.transcript.text[shared:]
                marks = chat_format.tokenizer.marks
                cuts = [n for at, n in known.cuts if at <= shared and n and known.tokens[n - 1] in marks]
                beyond += max(0, max(cuts, default=0) - reused)
            thought = "I wonder." if chat_format.family.reasoning is not None else None
            calls: tuple[ToolCall, ...] = ()
            if step == "call":
                calls = (ToolCall(id=f"abcdefgh{turn}", name="look", arguments='{"at": "sea"}'),)
            content = None if calls else f"Answer {turn}."
            reply = Message(role="assistant", content=content, reasoning=thought, tool_calls=calls)
            written = _written(chat_format, said, reply, options, prompt.transcript.text)
            known = chat_format.tokenizer.encode(written, prompt.transcript)
            said.append(reply)
            if calls:
                said.append(Message(role="tool", content="dry", tool_call_id=calls[0].id, name="look"))
    return tokens, beyond, departure


def _written(
    chat_format: ChatFormat, said: list[Message], reply: Message, options: ChatOptions, prompt: str
) -> str:
    """What the model writes: what the template has behind the prompt, where it goes on from that."""
    without = replace(options, add_generation_prompt=False)
    whole = chat_format.prompt([*said, reply], without).transcript.text
    if whole.startswith(prompt):
        return whole[len(prompt) :].rstrip("\n")
    form, markers, family = chat_format.call_form, chat_format.family.reasoning, chat_format.family
    body = reply.content or form.writer.write(reply.tool_calls)
    end = whole.rpartition(body)[2].rstrip("\n") if body in whole else ""
    thought = ""
    if markers is not None:
        opener = "" if family.opens_reasoning(prompt) else markers.open
        thought = f"{opener}{reply.reasoning}{markers.close}"
    return thought + body + end


def table(paths: Sequence[Path]) -> str:
    """The rows of template files, in Markdown."""
    head = (
        "template",
        "read again",
        "left as it was",
        "with keep_reasoning",
        "first where it had",
        "has now",
    )
    lines = [head, ("---",) * len(head)]
    for path in paths:
        found = reread(Template.from_file(path, bos="<s>", eos="</s>"))
        kept = "no switch" if found.kept is None else str(found.kept)
        had, has = map(_quoted, found.departure) if found.departure is not None else ("", "")
        lines.append((path.stem, str(found.tokens), str(found.beyond), kept, had, has))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _quoted(text: str) -> str:
    """The beginning of a text as code in a table."""
    begun = text[:QUOTED].replace("\n", "⏎").replace("|", "\\|").replace("`", "ˋ")
    return f"`{begun}`" if begun else "(the end)"


if __name__ == "__main__":
    print(table(sorted(Path(each) for each in sys.argv[1:])))
