"""`/v1/responses/compact`: a conversation made shorter, as items that another response goes on from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from perdure.chat.message import Message
from perdure.chat.plans import SUMMARY_TRIES
from perdure.chat.reply import ChatReply
from perdure.decode.request import Usage
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, Caller, CallerDep
from perdure.server.core.follow import answer
from perdure.server.core.schemas import ResponseSchema, errors
from perdure.server.protocols.responses import ids
from perdure.server.protocols.responses.answers import usage
from perdure.server.protocols.responses.items import Item, said_items
from perdure.server.protocols.responses.requests import PromptRequest
from perdure.server.protocols.responses.stored import Responses
from perdure.sessions.fold import HEADING

router = APIRouter(tags=["Responses"])

_FAILED = "empty"
"""The code of a summary that could not be had."""
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
    """Have the model sum a conversation up, in several passes where it does not fit into the context at once.
    The summary is sealed: only this server reads it again."""
    app_state.check_model(asked.model or "")
    responses = Responses(app_state, caller.namespace)
    ends = time.monotonic() + app_state.seconds(None)
    passes, said = await app_state.call(responses.to_sum_up, asked)
    used: list[Usage] = []
    while (part := passes.part) is not None:
        reply = await _summed_up(part, responses, request, app_state, caller, ends)
        used.append(reply.usage)
        await app_state.call(passes.add, reply.text.strip())
    response_id = ids.new_response()
    item: Item = {
        "id": ids.item("cmp", response_id),
        "type": "compaction",
        "encrypted_content": app_state.seal.close(f"{HEADING}\n{passes.summary}", caller.namespace),
    }
    return CompactionAnswer(
        id=response_id,
        created_at=int(time.time()),
        output=[*said_items([each for each in said if each.role == "user"], response_id), item],
        usage=usage(
            sum(each.prompt_tokens for each in used),
            sum(each.cached_tokens for each in used),
            sum(each.completion_tokens for each in used),
            sum(each.reasoning_tokens for each in used),
        ),
    )


async def _summed_up(
    part: Sequence[Message],
    responses: Responses,
    request: Request,
    app_state: AppState,
    caller: Caller,
    ends: float,
) -> ChatReply:
    """The reply that sums a part up. Only one that came to its end counts: half a summary would lose the rest
    of the conversation without a word."""
    why = "empty"
    for words, temperature in SUMMARY_TRIES:
        left = max(ends - time.monotonic(), _AT_LEAST)
        job = await app_state.call(
            responses.submit_summary, part, words, temperature=temperature, timeout=left
        )
        answered = await answer(
            job, request, app_state, caller, timeout=left, whole=lambda replies: replies[0]
        )
        assert isinstance(answered, ChatReply)
        if answered.text.strip() and answered.finish_reason == "stop":
            return answered
        why = "not finished" if answered.text.strip() else why
    raise ApiError(
        500,
        f"the model's summary was {why}, so the conversation was not made shorter; ask again, or send less",
        kind="server_error",
        code=_FAILED,
    )
