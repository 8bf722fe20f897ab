"""Operator's pull: a model that the server fetches, and the progress that a waiting client gets, as Ollama's.

{"status": "pulling manifest"}
{"status": "pulling owner/repo", "total": 5242880, "completed": 1048576}
{"status": "success"}
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from perdure.models.puller import Pull
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.keys import METRICS
from perdure.server.core.protocol import JSON_LINES, event
from perdure.server.core.schemas import RequestSchema, ResponseSchema, errors, refuse_fields
from perdure.server.core.visit import Caller

_TOLD = 1.0
"""Seconds after which a client gets the progress again, also where nothing has come."""


def is_operator(caller: Caller) -> bool:
    return caller.namespace == METRICS


def check_operator(caller: Caller) -> None:
    if not is_operator(caller):
        raise ApiError(
            403,
            f"only a key of the namespace {METRICS} has this server fetch a model (`perdure keys add "
            f"{METRICS}` makes one); `perdure pull NAME` on its machine fetches one too",
            code="forbidden",
        )


async def begin_pull(name: str, app_state: AppState, caller: Caller) -> Pull:
    """Have a model fetched for the operator; nobody else makes this server fetch something."""
    check_operator(caller)
    if (pull := await app_state.call(app_state.server.puller.start, name)) is None:
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
    puller, name = app_state.server.puller, pull.model
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
    started: float
    ended: float | None


@router.post("", responses=errors(403, 404, 409), status_code=202)
async def start_pull(body: PullRequest, app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """Begin to fetch a model, with a key of the operator. A pull that was cancelled or failed goes on where
    it stopped."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    return PullAnswer.model_validate(await begin_pull(body.model, app_state, caller))


@router.get("", responses=errors(403, 404))
async def read_pull(app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """How far the pull is that runs, or how the last one ended."""
    return _latest(app_state, caller)


@router.delete("", responses=errors(403, 404))
async def cancel_pull(app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """End the pull that runs. What was fetched by then is kept for the next try."""
    _latest(app_state, caller)
    app_state.server.puller.cancel()
    return _latest(app_state, caller)


def _latest(app_state: AppState, caller: Caller) -> PullAnswer:
    check_operator(caller)
    if (pull := app_state.server.puller.latest) is None:
        raise ApiError(404, "no model was pulled since the server started", code="not_found")
    return PullAnswer.model_validate(pull)
