"""An exhausted conversation becomes a summary and its last turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.errors import SessionError
from perdure.sessions.turn import Turn, context

_ASK = "Summarise our conversation so far: names, facts, decisions, open questions."
_HEADING = "Summary of the conversation so far:"


def folded(
    chat_format: ChatFormat,
    turns: Sequence[Turn],
    summary: str | None,
    keep: int,
    namespace: str,
    settings: Mapping[str, Any],
) -> Turn:
    """The turn that goes on from a summary of `turns` and the last `keep` of them.

    It stands behind the turns that it sums up, so that they stay reachable.
    """
    said = [turn for turn in turns if turn.kind == "turn"]
    if not said:
        raise SessionError("there is nothing to fold: nothing was said yet")
    head = _head(turns)
    if summary is None:
        earlier = context(turns[: len(turns) - min(keep, len(said) - 1)])
        summary = _written(chat_format, earlier, namespace, settings)
    text = f"{_HEADING}\n{summary.strip()}"
    if head and head[0].role == "system":
        head = [replace(head[0], content=f"{head[0].content or ''}\n\n{text}"), *head[1:]]
    else:
        head = [Message(role="system", content=text), *head]
    tail = [message for turn in said[len(said) - keep :] for message in context([turn])]
    return Turn(kind="fold", messages=(*head, *tail), created=time.time(), before=turns[-1].digest)


def _head(turns: Sequence[Turn]) -> list[Message]:
    """What stands before the conversation, without the summaries of earlier folds."""
    return list(turns[0].messages)


def _written(
    chat_format: ChatFormat, messages: list[Message], namespace: str, settings: Mapping[str, Any]
) -> str:
    """The model's own summary."""
    wanted = {"max_tokens": min(192, chat_format.n_ctx // 8), **settings}
    wanted |= {"overflow": "drop_oldest", "reasoning": "hide"}
    # A small model may have nothing to say at first.
    for temperature in (0.0, 0.7, 1.0):
        job = chat_format.submit(
            [*messages, Message(role="user", content=_ASK)],
            namespace=namespace,
            **{"temperature": temperature, "seed": 1, **wanted},
        )
        try:
            text = job.reply().text.strip()
        finally:
            job.cancel()
        if text:
            return text
    raise SessionError("the model wrote an empty summary: give one")
