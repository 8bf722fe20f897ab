"""`/v1/machine`, `/v1/requests`, `/v1/report`: what the server runs on, and how it answers."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from perdure.cache.cache_view import SlotState
from perdure.chat.difference import Miss
from perdure.errors import PerdureError
from perdure.events.background import FAILURES
from perdure.server.core.api_error import ApiError, stopping
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.keys import METRICS
from perdure.server.core.metrics import RecentRequest
from perdure.server.core.schemas import (
    PAGE,
    Limit,
    ResponseSchema,
    ReuseAnswer,
    TimingsAnswer,
    UsageAnswer,
    errors,
)
from perdure.server.pool import PooledModel


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
    kv_type: str
    """Of its K/V cache, as `--kv-type` has it: one for both, or K:V; empty while no engine runs."""
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
    agent: str = ""
    """The program that asked, by its User-Agent."""
    miss: Miss | None = None
    """What was computed again, and why."""

    @classmethod
    def of(cls, request: RecentRequest) -> RequestAnswer:
        return cls.copy_of(request, usage=UsageAnswer.of([request.usage]))


class RequestList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[RequestAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `before`, the number of the last one."""


class UsageDay(ResponseSchema):
    """What a key has used on one day of UTC."""

    key: str
    """Its id, as `perdure keys ls` shows it."""
    namespace: str
    day: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_day: int | None
    """That the key may use, where it has a limit."""


class UsageList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[UsageDay]


class ReportSums(ResponseSchema):
    """What your requests reused and computed again, over a time."""

    requests: int
    reused_tokens: int
    computed_tokens: int
    prefill_seconds: float
    saved_seconds: float
    """That the reused tokens would have taken at the speed of those that were computed."""
    misses: dict[str, dict[str, int]]
    """Tokens computed again, by cause and then by client."""


class ReportDay(ReportSums):
    """One day of UTC."""

    day: str
    written_bytes: int | None
    """State that was written to the disk and shared tiers, of all; none where the server has keys."""


class ReportAnswer(ReportSums):
    """The same since the start of the server, and by day for the last seven."""

    object: Literal["report"] = "report"
    since: float
    days: list[ReportDay]
    """The first one first; those before the start of the server too, where it has a store."""


RequestId = Annotated[str, Path(pattern="^[A-Za-z0-9._-]{1,64}$")]


router = APIRouter(prefix="/v1", tags=["machine"])


@router.get("/usage", responses=errors())
async def usage(app_state: AppStateDep, caller: CallerDep) -> UsageList:
    """What your keys have used by day, the latest first; with a key of the operator, what every key has."""
    everyone = caller.namespace == METRICS
    days = [
        UsageDay.copy_of(
            each, key=key.id, namespace=key.namespace, day=day, tokens_per_day=key.tokens_per_day
        )
        for key in app_state.server.keys
        if everyone or key.namespace == caller.namespace
        for day, each in app_state.server.keys.usage.days(key).items()
    ]
    return UsageList(data=sorted(days, key=lambda each: (each.day, each.namespace), reverse=True))


@router.get("/machine", responses=errors())
async def read(app_state: AppStateDep, caller: CallerDep) -> MachineAnswer:
    """The models with their engines, and the slots as they are now. Only its owner sees what a slot holds."""
    return await app_state.call(_machine, app_state, caller.namespace)


@router.get("/requests", responses=errors())
async def requests(
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    before: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
) -> RequestList:
    """Your last requests, the latest first: tokens by tier, and why not more was reused."""
    recent = app_state.server.ledger.latest(caller.namespace, limit=limit + 1, before=before)
    return RequestList(data=[RequestAnswer.of(each) for each in recent[:limit]], has_more=len(recent) > limit)


class CancelAnswer(ResponseSchema):
    object: Literal["request.cancelled"] = "request.cancelled"
    id: str
    replies: int
    """How many were being made for it."""


@router.post("/requests/{request_id}/cancel", responses=errors(404))
async def cancel(request_id: RequestId, app_state: AppStateDep, caller: CallerDep) -> CancelAnswer:
    """End a request of yours by its `x-request-id`, whatever its protocol. Its client gets what there is."""
    replies = app_state.server.cancel(caller.namespace, request_id)
    if not replies:
        raise ApiError(
            404,
            f"no request {request_id!r} of yours is running; the id is its header x-request-id",
            code="request_not_found",
        )
    return CancelAnswer(id=request_id, replies=replies)


@router.get("/report", responses=errors())
async def report(app_state: AppStateDep, caller: CallerDep) -> ReportAnswer:
    """What the cache saved you, and what was computed again by cause and client."""
    week = await app_state.call(app_state.server.ledger.daily.week, caller.namespace)
    hidden = app_state.server.keys.required
    days = [
        ReportDay.copy_of(each, day=day, written_bytes=None if hidden else nbytes)
        for day, each, nbytes in week
    ]
    return ReportAnswer.copy_of(app_state.server.ledger.report(caller.namespace), days=days)


def _machine(app_state: AppState, namespace: str) -> MachineAnswer:
    return MachineAnswer(
        version=version("perdure"),
        started=app_state.server.started,
        needs_key=app_state.server.keys.required,
        models=[_model(app_state, namespace)]
        if len(app_state.server.models.pooled) < 2
        else [_pooled(app_state, model, namespace) for model in app_state.server.models.pooled],
    )


def _model(app_state: AppState, namespace: str) -> MachineModel:
    runtime = app_state.runtime
    state, restarts = app_state.model.engine()
    slots: list[SlotState] = []
    devices = kv_type = ""
    waiting = 0
    if state == "ready":
        try:
            slots, identity = runtime.cache.slots(), runtime.cache.identity()
            devices, kv_type = identity.devices, identity.kv_type
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
        nbytes=app_state.model.nbytes or None,
        n_ctx=runtime.n_ctx,
        kv_type=kv_type,
        devices=devices,
        waiting=waiting,
        slots=[_slot(app_state, slot, namespace) for slot in slots],
    )


def _pooled(app_state: AppState, model: PooledModel, namespace: str) -> MachineModel:
    """One of several models: describing it does not load it."""
    if model.is_known:
        return _model(app_state.with_model(model), namespace)
    facts = model.facts()
    return MachineModel(
        id=model.name,
        state=model.loading,
        restarts=0,
        architecture=facts.architecture,
        size=facts.size,
        nbytes=facts.nbytes or None,
        n_ctx=facts.n_ctx,
        kv_type="",
        devices="",
        waiting=len(model.waiters),
        slots=[],
    )


def _slot(app_state: AppState, slot: SlotState, namespace: str) -> SlotAnswer:
    own = slot.namespace == namespace and bool(slot.length)
    return SlotAnswer(
        busy=slot.busy,
        own=own,
        tokens=slot.length if own else None,
        text=app_state.runtime.model.detokenize(slot.tokens, special=True) if own else None,
    )


# `/health`, `/ready`, `/metrics`: for the operator of the server.

operation = APIRouter(tags=["operation"])


class HealthAnswer(ResponseSchema):
    status: Literal["ok"] = "ok"


class ReadyAnswer(ResponseSchema):
    status: Literal["ready"] = "ready"
    model: str
    slots: int
    restarts: int
    not_kept: int
    """Turns that could not be stored since the server started; its log says why."""
    failed_threads: dict[str, int]
    """Background threads that failed since then, here and in the engines' processes, by name, and how often;
    its log says why."""


@operation.get("/health")
async def health() -> HealthAnswer:
    """The process lives."""
    return HealthAnswer()


@operation.get("/ready", responses=errors())
async def ready(
    app_state: AppStateDep, draining: Annotated[Literal["404", "503"], Query()] = "503"
) -> ReadyAnswer:
    """The engine is there, and requests will be answered.

    `draining` is the status of a server that drains: HAProxy takes 404 for one that finishes what it has, and
    503 for one that is dead.
    """
    if app_state.server.stopping:
        raise stopping()
    app_state.server.drain.asked()
    if app_state.server.draining:
        raise ApiError(
            int(draining),
            "the server is draining: what it has begun is finished, ask another one",
            kind="server_error",
            code="draining",
            retry_after=5,
        )
    state, restarts = app_state.model.engine()
    # A model that is not loaded is loaded by the first request for it.
    waits = app_state.server.models.pool is not None and state in ("starting", "unloading", "unloaded")
    if state != "ready" and not waits:
        raise ApiError(503, f"the engine is {state}", code="engine_unavailable", retry_after=2)
    runtimes = app_state.server.models.loaded_runtimes()
    failed = sum((Counter(each.backend.health().failed_threads) for each in runtimes), Counter(FAILURES))
    return ReadyAnswer(
        model=app_state.name,
        slots=sum(runtime.slots for runtime in runtimes),
        restarts=restarts,
        not_kept=app_state.server.ledger.not_kept,
        failed_threads=dict(failed),
    )


@operation.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
)
async def metrics(app_state: AppStateDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(
        await app_state.call(app_state.server.ledger.metrics.text),
        headers={"content-type": CONTENT_TYPE_LATEST},
    )
