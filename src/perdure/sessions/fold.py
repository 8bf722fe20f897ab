"""An exhausted conversation becomes a summary and its last turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from perdure.chat.chat_format import ChatFormat, reply_room
from perdure.chat.message import Message
from perdure.chat.options import ChatOptions
from perdure.chat.plans import summary
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.decode.request import Reply, Request
from perdure.decode.stream import DeltaReader, Stream
from perdure.errors import ContextOverflow, SessionError
from perdure.sessions.history import History
from perdure.sessions.turn import Turn, context

HEADING = "Summary of the conversation so far:"

TurnStream: TypeAlias = Stream[ChatDelta, ChatReply]
"""The reply of a turn in the making."""
FoldPlan: TypeAlias = Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], Turn]
"""The plan of a fold: it returns the turn that goes on from the summary."""


def turns_to_compact(start: Turn, history: History, keep: int) -> list[Turn]:
    """The start, and the last turns as far as a fold looks back: to the fold before it, and further only
    for the turns that it keeps."""
    folded, talked, first = False, 0, 0
    for depth, turn in history.back():
        folded, talked = folded or turn.kind == "fold", talked + (turn.kind == "turn")
        if folded and talked > keep:
            first = depth
            break
    return [start, *history.page(max(0, first - 1), None)]


def fold_turn(turns: Sequence[Turn], summary: str, keep: int) -> Turn:
    """The turn that goes on from a summary of `turns` and the last `keep` of them.

    It stands behind the turns that it sums up, so that they stay reachable.
    """
    talked = _said(turns)
    # Without the summaries of earlier folds.
    head = list(turns[0].messages)
    text = f"{HEADING}\n{summary.strip()}"
    if head and head[0].role == "system":
        head = [replace(head[0], content=f"{head[0].content or ''}\n\n{text}"), *head[1:]]
    else:
        head = [Message(role="system", content=text), *head]
    tail = [message for turn in talked[len(talked) - keep :] for message in context([turn])]
    return Turn(kind="fold", messages=(*head, *tail), created=time.time(), before=turns[-1].digest)


def summarised(
    chat_format: ChatFormat,
    turns: Sequence[Turn],
    keep: int,
    namespace: str,
    settings: Mapping[str, Any],
    deadline: float | None,
) -> FoldPlan:
    """A fold whose summary the model writes."""
    earlier = context(turns[: len(turns) - min(keep, len(_said(turns)) - 1)])
    text = yield from summary(
        chat_format.plan,
        earlier,
        fits=lambda messages, options: chat_format.fits(messages, **options),
        n_ctx=chat_format.n_ctx,
        settings={"namespace": namespace, "deadline": deadline, **settings},
    )
    return fold_turn(turns, text, keep)


def make_room(
    chat_format: ChatFormat,
    base: History,
    start: Callable[[], Turn],
    new: Sequence[Message],
    *,
    namespace: str,
    settings: Mapping[str, Any],
    deadline: float | None,
) -> Generator[tuple[Request, DeltaReader[ChatDelta] | None], list[Reply], Turn | None]:
    """The fold before a turn that says something behind `base`, where that does not fit; else None. Nothing
    is stored before the turn's reply."""
    limit = chat_format.n_ctx - 1

    def needed_by(messages: Sequence[Message]) -> tuple[int, bool]:
        """Tokens of a prompt that starts with `messages`, and of the reply to it; and whether these are only
        a lower bound, since it surely does not fit."""
        room = reply_room(settings, chat_format.n_ctx)
        options, _ = ChatOptions.split(settings)
        try:
            prompt = chat_format.prompt([*messages, *new], options, namespace=namespace, must_fit=True)
        except ContextOverflow as error:
            return error.needed + room, True
        return len(prompt) + room, False

    if needed_by(base.messages)[0] <= limit:
        return None
    first = start()
    # Before anything is written: what no summary makes room for.
    needed, at_least = needed_by(first.messages)
    for keep in (2, 1, 0) if needed <= limit else ():
        turns = turns_to_compact(first, base, keep)
        own = {"adapters": settings.get("adapters")}
        turn = yield from summarised(chat_format, turns, keep, namespace, own, deadline)
        needed, at_least = needed_by(turn.messages)
        if needed <= limit:
            return turn
    raise ContextOverflow(
        f"even after folding, this message needs {'at least ' if at_least else ''}{needed} tokens with "
        f"its reply, and {limit} fit: send less, or ask for a shorter reply",
        needed=needed,
        fits=limit,
        at_least=at_least,
    )


def _said(turns: Sequence[Turn]) -> list[Turn]:
    talked = [turn for turn in turns if turn.kind == "turn"]
    if not talked:
        raise SessionError("there is nothing to fold: nothing was said yet")
    return talked


def cut_short(summary: ChatReply) -> ChatReply:
    """What comes of a turn whose summary was cut short: nothing."""
    raw = replace(
        summary.raw, text="", tokens=(), end=None, stop=None, logprobs=None, finish_reason="cancelled"
    )
    return ChatReply(
        message=Message(role="assistant", content=""), raw=raw, not_kept="the turn ended by cancelled"
    )
