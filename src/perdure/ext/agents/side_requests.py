"""Side requests: what clients ask for beside a conversation, and nobody goes on from.

    system  You are a title generator. You output ONLY a thread title.      opencode
    user    ### Task: Generate a concise, 3-5 word title …                   Open WebUI

They are known by their first words. What such a request leaves is evicted first, and nothing is prefetched
for it; its reply is the same either way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perdure import Message

_LOOKED_AT = 400
"""Characters at the beginning of a message in which the words are looked for."""


@dataclass(frozen=True, slots=True)
class SideRequest:
    """A kind of request beside conversations."""

    client: str
    what: str
    words: re.Pattern[str]


def _words(*patterns: str) -> re.Pattern[str]:
    return re.compile(r"^\s*(?:" + "|".join(patterns) + ")", re.IGNORECASE | re.MULTILINE)


SIDE_REQUESTS: tuple[SideRequest, ...] = (
    SideRequest("opencode", "titles", _words(r"You are a title generator\b")),
    SideRequest(
        "Claude Code",
        "titles and topics",
        _words(
            r"Analyze if this message indicates a new conversation topic",
            r"Summarize this coding conversation in under \d+ characters",
            r"Please write a \d+-\d+ word title",
            r"Generate a concise, sentence-case title",
        ),
    ),
    SideRequest(
        "Open WebUI",
        "titles, tags and follow-ups",
        _words(
            r"### Task:\s+Generate a concise, \d+-\d+ word title",
            r"### Task:\s+Generate \d+-\d+ broad tags",
            r"### Task:\s+Suggest \d+-\d+ relevant follow-up",
        ),
    ),
)
"""The client table. Another client's titles are one line more."""


def side_request(messages: Sequence[Message]) -> SideRequest | None:
    """Which kind these messages are, if any: by a line of the system prompt, or without one by what the user
    begins with. What goes on from a reply is none."""
    if not messages or any(message.role == "assistant" for message in messages):
        return None
    heads = [message for message in messages if message.role in ("system", "developer")]
    text = "\n".join((message.content or "")[:_LOOKED_AT] for message in heads[:2])
    for kind in SIDE_REQUESTS:
        if kind.words.search(text) if heads else kind.words.match((messages[0].content or "")[:_LOOKED_AT]):
            return kind
    return None
