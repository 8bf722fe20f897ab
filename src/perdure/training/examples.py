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

from perdure.chat.message import Message, parse_messages
from perdure.chat.template.template import Template
from perdure.engine.contract import Tokenizer
from perdure.errors import InvalidInputError

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


def from_messages(
    model: Tokenizer, template: Template, messages: Sequence[Message], longest: int, *, last: bool = False
) -> Iterator[Example]:
    """An example for each reply in a conversation, or for the last message, as the template writes it.

    One that has more than `longest` tokens is left out: cut, it would teach to stop in the middle.
    """
    for place, message in enumerate(messages):
        if message.role != "assistant" or not place or (last and place < len(messages) - 1):
            continue
        before = template.render(messages[:place], add_generation_prompt=True)
        whole = template.render(messages[: place + 1], add_generation_prompt=False)
        start = (
            before
            if whole.startswith(before)
            else template.render(messages[:place], add_generation_prompt=False)
        )
        if not whole.startswith(start):
            raise InvalidInputError(
                "the model's template writes a conversation anew once it has a reply: it cannot be seen "
                "where the reply begins"
            )
        head = model.tokenize(start, special=True, bos=True)
        tail = model.tokenize(whole[len(start) :], special=True, bos=False)
        if tail and len(head) + len(tail) <= longest:
            yield Example([*head, *tail], len(head))
