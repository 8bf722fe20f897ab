"""`/v1/machine` and `/v1/requests`: what the server runs on, and how it answered last."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from perdure.cache.cache_view import SlotState
from perdure.errors import PerdureError
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.recent_requests import RecentRequest
from perdure.server.core.schemas import (
    PAGE,
    Limit,
    ResponseSchema,
    ReuseAnswer,
    TimingsAnswer,
    UsageAnswer,
    errors,
)


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
            reuse=ReuseAnswer.model_validate(request.reuse),
            timings=TimingsAnswer.model_validate(request.timings),
        )


class RequestList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[RequestAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `before`, the number of the last one."""


router = APIRouter(prefix="/v1", tags=["machine"])


@router.get("/machine", responses=errors())
async def read(app_state: AppStateDep, caller: CallerDep) -> MachineAnswer:
    """The models with their engines, and the slots as they are now. What one holds is told to its owner."""
    return await app_state.call(_machine, app_state, caller.namespace)


@router.get("/requests", responses=errors())
async def requests(
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    before: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
) -> RequestList:
    """Your last requests, the latest first: tokens by tier, and why not more was reused."""
    found = app_state.recent.latest(caller.namespace, limit=limit + 1, before=before)
    return RequestList(data=[RequestAnswer.of(each) for each in found[:limit]], has_more=len(found) > limit)


def _machine(app_state: AppState, namespace: str) -> MachineAnswer:
    return MachineAnswer(
        version=version("perdure"),
        started=app_state.started,
        needs_key=app_state.keys.required,
        models=[_model(app_state, namespace)],
    )


def _model(app_state: AppState, namespace: str) -> MachineModel:
    runtime = app_state.runtime
    state, restarts = app_state.engine()
    slots: list[SlotState] = []
    devices = ""
    waiting = 0
    if state == "ready":
        try:
            slots, devices = runtime.cache.slots(), runtime.cache.identity().devices
            waiting, _ = runtime.load
        except PerdureError as error:
            # It died between the two questions.
            state = str(error)
    return MachineModel(
        id=app_state.name,
        state=state,
        restarts=restarts,
        architecture=runtime.model.info.architecture,
        size=runtime.model.info.size_label,
        nbytes=app_state.model_bytes or None,
        n_ctx=runtime.n_ctx,
        devices=devices,
        waiting=waiting,
        slots=[_slot(app_state, slot, namespace) for slot in slots],
    )


def _slot(app_state: AppState, slot: SlotState, namespace: str) -> SlotAnswer:
    own = slot.namespace == namespace and bool(slot.length)
    return SlotAnswer(
        busy=slot.busy,
        own=own,
        tokens=slot.length if own else None,
        text=app_state.runtime.model.detokenize(slot.tokens, special=True) if own else None,
    )
