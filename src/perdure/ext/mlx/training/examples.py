"""What a model is trained on: conversations as tokens, and from which token on the loss counts.

A line of a file is one conversation, as `{"messages": [{"role": …, "content": …}, …]}` or as
`{"prompt": …, "completion": …}`. Each reply of the assistant in it is an example: what stands before it is
read, and only the reply is learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perdure import InvalidInputError, Message, Template
from perdure.spi.chat import (
    ChatTokenizer,
    Guard,
    detect,
    parse_messages,
    reasoning_markers,
    with_reasoning_apart,
)
from perdure.spi.engine import Tokenizer

_LONGEST_LINE = 16 << 20
_MOST = 1_000_000


class Example(NamedTuple):
    """Tokens, of which those from `start` on are learned."""

    tokens: list[int]
    start: int


def read_chats(path: Path) -> Iterator[tuple[Message, ...]]:
    """The conversations of a JSONL file, one a line."""
    for where, record in read_lines(path):
        yield _chat(record, where)


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSONL file, each with where it stands."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}") from None
    with file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            where = f"line {number} of {path}"
            if len(line) > _LONGEST_LINE or number > _MOST:
                raise InvalidInputError(f"{where}: at most {_MOST} lines of {_LONGEST_LINE} bytes are read")
            if line.strip():
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise InvalidInputError(f"{where} is no JSON: {error}") from None


def _chat(record: Any, where: str) -> tuple[Message, ...]:
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            return parse_messages(record["messages"])
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
    if isinstance(record, dict) and all(
        isinstance(record.get(name), str) for name in ("prompt", "completion")
    ):
        return (
            Message(role="user", content=record["prompt"]),
            Message(role="assistant", content=record["completion"]),
        )
    raise InvalidInputError(f'{where} has neither "messages" nor "prompt" and "completion"')


class ChatEncoder:
    """Writes conversations as a model reads them in chats: with its template, and by the same tokenizer, so
    that no text of a training set becomes a control token."""

    def __init__(self, model: Tokenizer, template: Template) -> None:
        family = detect(template.source, model.info.architecture)
        marks = template.mark_texts | family.marks
        self.tokenizer = ChatTokenizer(model, marks, erased=template.erased_texts)
        self._template = template
        self._guard = Guard(self.tokenizer.guard_field, self.tokenizer.guard_name)
        self._markers = reasoning_markers(family, self.tokenizer)

    def text(self, messages: Sequence[Message], *, reply_follows: bool) -> str:
        return self._template.render(
            with_reasoning_apart(messages, self._markers),
            add_generation_prompt=reply_follows,
            guard=self._guard,
        )


def from_messages(
    encoder: ChatEncoder, messages: Sequence[Message], longest: int, *, last: bool = False
) -> Iterator[Example]:
    """An example for each reply in a conversation, or for the last message, as the template writes it.

    One that has more than `longest` tokens is left out: cut, it would teach to stop in the middle.
    """
    for place, message in enumerate(messages):
        if message.role != "assistant" or not place or (last and place < len(messages) - 1):
            continue
        start = encoder.text(messages[:place], reply_follows=True)
        whole = encoder.text(messages[: place + 1], reply_follows=False)
        if not whole.startswith(start):
            start = encoder.text(messages[:place], reply_follows=False)
        if not whole.startswith(start):
            raise InvalidInputError(
                "the model's template writes a conversation anew once it has a reply: it cannot be seen "
                "where the reply begins"
            )
        head = encoder.tokenizer.encode(start)
        tokens = encoder.tokenizer.encode(whole[len(start) :], head).tokens
        if len(head.tokens) < len(tokens) <= longest:
            yield Example(list(tokens), len(head.tokens))
