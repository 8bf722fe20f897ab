"""`/v1/responses/compact`: a conversation made shorter, as items that another response goes on from."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.chat.message import Message
from perdure.chat.plans import SUMMARY_TRIES
from perdure.chat.reply import ChatReply
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.follow import answer
from perdure.server.core.schemas import ResponseSchema, errors
from perdure.server.protocols.responses import ids
from perdure.server.protocols.responses.answers import usage
from perdure.server.protocols.responses.items import Item, said_items
from perdure.server.protocols.responses.requests import PromptRequest
from perdure.server.protocols.responses.stored import Responses
from perdure.sessions.fold import HEADING

router = APIRouter(tags=["Responses"])

_AT_LEAST = 0.001
"""Seconds for a try: when they are up, the request has taken too long."""


class CompactionAnswer(ResponseSchema):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """What the user said, and an item that stands for all that was said."""
    usage: dict[str, Any]


@router.post("/v1/responses/compact", responses=errors(404, 409, 504), response_model=CompactionAnswer)
async def compact(
    asked: PromptRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> CompactionAnswer | Response:
    """Have the model sum a conversation up. The summary is sealed: only this server reads it again."""
    app_state.check_model(asked.model or "")
    responses = Responses(app_state, caller.namespace)
    ends = time.monotonic() + app_state.seconds(None)
    for words, temperature in SUMMARY_TRIES:
        left = max(ends - time.monotonic(), _AT_LEAST)
        job, said = await app_state.call(
            responses.submit_summary, asked, words, temperature=temperature, timeout=left
        )
        whole = functools.partial(_compacted, said=said, app_state=app_state, namespace=caller.namespace)
        compacted = await answer(job, request, app_state, caller, timeout=left, whole=whole)
        if compacted is not None:
            return compacted
    raise ApiError(
        500, "the model's summary was empty; ask again, or send less", kind="server_error", code="empty"
    )


def _compacted(
    replies: Sequence[ChatReply], *, said: Sequence[Message], app_state: AppState, namespace: str
) -> CompactionAnswer | None:
    """The answer, unless the summary is empty."""
    [reply] = replies
    if not (summary := reply.text.strip()):
        return None
    response_id = ids.new_response()
    item: Item = {
        "id": ids.item("cmp", response_id),
        "type": "compaction",
        "encrypted_content": app_state.seal.close(f"{HEADING}\n{summary}", namespace),
    }
    counts = reply.usage
    return CompactionAnswer(
        id=response_id,
        created_at=int(time.time()),
        output=[*said_items([each for each in said if each.role == "user"], response_id), item],
        usage=usage(
            counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens, counts.reasoning_tokens
        ),
    )
