"""What the server runs on: models, slots, and the last requests."""

from __future__ import annotations

from typing import Literal

from perdure.server.recent_requests import RecentRequest
from perdure.server.schemas.base import ResponseSchema, ReuseAnswer, TimingsAnswer, UsageAnswer


class SlotAnswer(ResponseSchema):
    busy: bool
    own: bool
    """Whether what it holds is yours."""
    tokens: int | None
    """That it holds, if they are yours."""
    text: str | None
    """The first of it, if it is yours."""


class MachineModel(ResponseSchema):
    """One model with its engine."""

    id: str
    state: str
    """Of its engine: `ready`, or what it is doing instead."""
    restarts: int
    architecture: str
    size: str
    """As its file calls it, such as 135M; empty where it does not say."""
    nbytes: int | None
    """Of its file, where there is one."""
    n_ctx: int
    """Tokens that one request can hold."""
    devices: str
    """Where it computes."""
    waiting: int
    """Requests that wait for a slot."""
    slots: list[SlotAnswer]


class MachineAnswer(ResponseSchema):
    object: Literal["machine"] = "machine"
    version: str
    started: float
    needs_key: bool
    models: list[MachineModel]


class RequestAnswer(ResponseSchema):
    number: int
    """Counted for you alone, from the start of the server."""
    ended: float
    session: str | None
    finish_reason: str
    usage: UsageAnswer
    reuse: ReuseAnswer
    timings: TimingsAnswer

    @classmethod
    def of(cls, request: RecentRequest) -> RequestAnswer:
        return cls(
            number=request.number,
            ended=request.ended,
            session=request.session,
            finish_reason=request.finish_reason,
            usage=UsageAnswer.of([request.usage]),
            reuse=ReuseAnswer.of(request.reuse),
            timings=TimingsAnswer.of(request.timings),
        )


class RequestList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[RequestAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `before`, the number of the last one."""
