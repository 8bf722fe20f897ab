"""Answering: what comes of a job, whole or as a stream, in the shapes of one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from perdure.chat.message import Message
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.server import sse
from perdure.server.app_state import AppState, Caller
from perdure.server.client_job import Job

T = TypeVar("T")


async def answer(
    job: Job[ChatDelta, ChatReply],
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    timeout: float | None,
    whole: Callable[[Sequence[ChatReply]], T],
    writer: Callable[[], sse.Writer[ChatDelta, ChatReply]] | None = None,
    session: str | None = None,
    said: Sequence[Message] = (),
) -> T | Response:
    """With a `writer` a stream, else what `whole` makes of the replies."""
    client_job = app_state.client_job(job, request, timeout, caller)

    def settle(replies: Sequence[ChatReply]) -> None:
        app_state.settle(replies, caller, session)
        if app_state.log_text:
            caller.notes["messages"] = [message.to_dict() for message in said]
            caller.notes["replies"] = [reply.text for reply in replies]

    if writer is not None:
        return sse.JobStream(client_job, writer(), limits=app_state.limits, notes=caller.notes, settle=settle)
    replies = await client_job.replies()
    settle(replies)
    if (refused := client_job.cut(replies)) is not None:
        raise refused
    return whole(replies)
