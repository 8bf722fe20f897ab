"""`/v1/models/pull`: models of the hub, fetched for the operator. One at a time; asked again and again, it
tells how far it is."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from perdure.models.puller import Pull
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, Caller, CallerDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.schemas import RequestSchema, ResponseSchema, errors, refuse_fields
from perdure.server.protocols.operator_pull import begin_pull, check_operator

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

    @classmethod
    def of(cls, pull: Pull) -> PullAnswer:
        return cls(
            model=pull.model,
            state=pull.state,
            completed=pull.completed,
            total=pull.total,
            error=pull.error,
            started=pull.started,
            ended=pull.ended,
        )


@router.post("", responses=errors(403, 404, 409), status_code=202)
async def start_pull(body: PullRequest, app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """Begin to fetch a model, with a key of the operator. A pull that was cancelled or failed goes on where
    it stopped."""
    refuse_fields(body, strict=app_state.strict, refused={}, notes=caller.notes)
    return PullAnswer.of(await begin_pull(body.model, app_state, caller))


@router.get("", responses=errors(403, 404))
async def read_pull(app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """How far the pull is that runs, or how the last one ended."""
    return _latest(app_state, caller)


@router.delete("", responses=errors(403, 404))
async def cancel_pull(app_state: AppStateDep, caller: CallerDep) -> PullAnswer:
    """End the pull that runs. What was fetched by then is kept for the next try."""
    _latest(app_state, caller)
    app_state.life.puller.cancel()
    return _latest(app_state, caller)


def _latest(app_state: AppState, caller: Caller) -> PullAnswer:
    check_operator(caller)
    if (pull := app_state.life.puller.latest) is None:
        raise ApiError(
            404, "no model was pulled since the server started", kind="not_found_error", code="not_found"
        )
    return PullAnswer.of(pull)
