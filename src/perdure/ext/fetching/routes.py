"""Operator's pull: a model that the server fetches, and the progress that a waiting client gets, as Ollama's.

{"status": "pulling manifest"}
{"status": "pulling owner/repo", "total": 5242880, "completed": 1048576}
{"status": "success"}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from threading import Lock
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from perdure.ext.fetching.catalogue import find, ranked, recommended
from perdure.ext.fetching.puller import Pull, Puller
from perdure.spi.server import (
    JSON_LINES,
    LOOPBACK,
    METRICS,
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    Caller,
    CallerDep,
    ModelDirectory,
    RequestSchema,
    ResponseSchema,
    ServerState,
    errors,
    event,
    host_name,
    is_operator,
    refuse_fields,
)

_FORWARDED = {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"}
"""Headers of requests that came through a proxy."""
_TOLD = 1.0
"""Seconds after which a client gets the progress again, also where nothing has come."""
_LOCK = Lock()
_PULLERS: WeakKeyDictionary[ServerState, Puller] = WeakKeyDictionary()


def puller_of(server: ServerState) -> Puller:
    """What fetches models for the operator of a server. It ends with the server."""
    with _LOCK:
        puller = _PULLERS.get(server)
        if puller is None:
            puller = _PULLERS[server] = Puller()
            puller.arrived = _serving(ref(server.models))
            server.running.add(puller)
        return puller


def _serving(models: ReferenceType[ModelDirectory]) -> Callable[[str, str], str]:
    """What has a pulled model served, for as long as the server is there."""

    def serve(name: str, place: str) -> str:
        directory = models()
        return "" if directory is None else directory.add_pulled(name, place)

    return serve


def check_operator(caller: Caller) -> None:
    if not is_operator(caller):
        raise ApiError(
            403,
            f"only a key of the namespace {METRICS} has this server fetch a model (`perdure keys add "
            f"{METRICS}` makes one); `perdure pull NAME` on its machine fetches one too",
            code="forbidden",
        )


def is_own_page(request: Request, app_state: AppState) -> bool:
    """Whether the page of a server without keys asks, in a browser on the server's machine.

    Everybody on this machine may use such a server, and `HostCheck` has refused pages of other sites. A proxy
    brings people of other machines under a loopback address: it shows by the headers that it adds, and by a
    host that `--allow-host` names.
    """
    headers, client = request.headers, request.client
    return (
        app_state.server.page
        and not app_state.server.keys.required
        and app_state.server.hosts is not None
        and client is not None
        and client.host in LOOPBACK
        and host_name(headers.get("host", "")) in LOOPBACK
        and headers.get("sec-fetch-site", "").lower() == "same-origin"
        and not _FORWARDED.intersection(headers)
    )


def may_pull(request: Request, app_state: AppState, caller: Caller) -> bool:
    """Whether a caller may have this server fetch a model."""
    return is_operator(caller) or is_own_page(request, app_state)


async def _begin_for(name: str, app_state: AppState, request: Request, caller: Caller) -> Pull:
    if is_operator(caller) or not is_own_page(request, app_state):
        return await begin_pull(name, app_state, caller)
    if find(name) is None:
        raise ApiError(
            403,
            "without keys the page fetches models of the catalogue alone; `perdure pull` on this machine "
            f"fetches {name[:100]!r}",
            code="forbidden",
        )
    return await _begin(name, app_state)


async def begin_pull(name: str, app_state: AppState, caller: Caller) -> Pull:
    """Have a model fetched for the operator."""
    check_operator(caller)
    return await _begin(name, app_state)


async def _begin(name: str, app_state: AppState) -> Pull:
    if (pull := await app_state.call(puller_of(app_state.server).start, name)) is None:
        raise ApiError(
            409,
            "another model is being pulled: wait for it, or cancel it with DELETE /v1/models/pull",
            code="pull_running",
        )
    return pull


async def pulled(
    name: str, app_state: AppState, caller: Caller, *, streams: bool
) -> dict[str, Any] | Response:
    """The answer to a client that waits for a model: line by line, or when it is there."""
    lines = _lines(await begin_pull(name, app_state, caller), app_state)
    if streams:
        body = (JSON_LINES.frame(event(line)) async for line in lines)
        return StreamingResponse(body, media_type=JSON_LINES.media_type)
    last: dict[str, Any] = {}
    async for line in lines:
        last = line
    if "error" in last:
        raise ApiError(502, str(last["error"]), code="pull_failed")
    return last


async def _lines(pull: Pull, app_state: AppState) -> AsyncIterator[dict[str, Any]]:
    """The progress for a waiting client. It may leave: the pull goes on."""
    yield {"status": "pulling manifest"}
    puller, name = puller_of(app_state.server), pull.model
    while pull.state == "running" and not app_state.server.stopping:
        latest = await app_state.work(puller.wait, pull, _TOLD)
        if latest is None or latest.model != name or latest.started != pull.started:
            yield {"error": "the pull ended, and another one has begun"}
            return
        pull = latest
        if pull.state == "running" and pull.total is not None:
            yield {"status": f"pulling {name}", "total": pull.total, "completed": pull.completed}
    if pull.state == "done":
        yield {"status": "success"}
    else:
        yield {"error": pull.error or f"the pull was {pull.state}"}


router = APIRouter(prefix="/v1/models/pull", tags=["perdure"], route_class=BodyRoute)


class PullRequest(RequestSchema):
    model: str = Field(min_length=1, max_length=200)
    """A name of the catalogue, `owner/repo` or `owner/repo:Q4_K_M`."""


class PullAnswer(ResponseSchema):
    """How far fetching a model is, or how it ended."""

    object: Literal["model.pull"] = "model.pull"
    model: str
    state: Literal["running", "done", "failed", "cancelled"]
    completed: int
    """Bytes that are here."""
    total: int | None
    """Bytes in all; none before that is known."""
    error: str
    """Why it failed; of one that is done, why it is not served."""
    serves: str
    """The name of the model that can be asked for since it is done; empty: none."""
    started: float
    ended: float | None


@router.post("", responses=errors(403, 404, 409), status_code=202)
async def start_pull(
    body: PullRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> PullAnswer:
    """Begin to fetch a model, with a key of the operator; it is served as soon as it is here. A pull that was
    cancelled or failed goes on where it stopped. Without keys the page on the server's machine may fetch
    models of the catalogue."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    return PullAnswer.model_validate(await _begin_for(body.model, app_state, request, caller))


@router.get("", responses=errors(403, 404))
async def read_pull(request: Request, app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """How far the pull is that runs, or how the last one ended."""
    return _latest(app_state, request, caller)


@router.delete("", responses=errors(403, 404))
async def cancel_pull(request: Request, app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """End the pull that runs. What was fetched by then is kept for the next try."""
    _latest(app_state, request, caller)
    puller_of(app_state.server).cancel()
    return _latest(app_state, request, caller)


def _latest(app_state: AppState, request: Request, caller: Caller) -> PullAnswer:
    if not may_pull(request, app_state, caller):
        check_operator(caller)
    if (pull := puller_of(app_state.server).latest) is None:
        raise ApiError(404, "no model was pulled since the server started", code="not_found")
    return PullAnswer.model_validate(pull)


catalogue_router = APIRouter(prefix="/v1", tags=["machine"])


class CatalogueEntry(ResponseSchema):
    """A model with a short name."""

    name: str
    aliases: list[str]
    fit: Literal["fits", "tight", "not"]
    """Into the memory of the server's machine that is free now."""
    recommended: bool
    served: bool
    nbytes: int
    memory_bytes: int
    context: int
    purpose: str
    licence: str


class CatalogueList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[CatalogueEntry]
    may_pull: bool
    """Whether you may have the server fetch one."""
    pull: PullAnswer | None
    """The pull that runs, or the last one, for those who may."""


@catalogue_router.get("/catalogue", responses=errors())
async def catalogue(request: Request, app_state: AppStateDep, caller: CallerDep) -> CatalogueList:
    """The models that have a short name, the best for this machine first. `perdure pull NAME` on it fetches
    one, and so does `POST /v1/models/pull` with a key of the operator."""
    return await app_state.call(_catalogue, app_state, may_pull(request, app_state, caller))


def _catalogue(app_state: AppState, allowed: bool) -> CatalogueList:
    pull = puller_of(app_state.server).latest if allowed else None
    best, models = recommended(), app_state.server.models.all()
    return CatalogueList(
        data=[
            CatalogueEntry.copy_of(
                model,
                aliases=list(model.aliases),
                fit=fit,
                recommended=model is best,
                served=any(model.name in each.short_names for each in models),
                nbytes=model.size,
                memory_bytes=model.memory,
            )
            for model, fit in ranked()
        ],
        may_pull=allowed,
        pull=None if pull is None else PullAnswer.model_validate(pull),
    )
