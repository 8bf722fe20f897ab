"""`/health`, `/ready`, `/metrics`: for whoever runs the server."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from perdure.server.core.api_error import ApiError, stopping
from perdure.server.core.app_state import AppStateDep
from perdure.server.core.schemas import ResponseSchema, errors

router = APIRouter(tags=["operation"])


class HealthAnswer(ResponseSchema):
    status: Literal["ok"] = "ok"


class ReadyAnswer(ResponseSchema):
    status: Literal["ready"] = "ready"
    model: str
    slots: int
    restarts: int


@router.get("/health")
async def health() -> HealthAnswer:
    """The process lives."""
    return HealthAnswer()


@router.get("/ready", responses=errors())
async def ready(app_state: AppStateDep) -> ReadyAnswer:
    """The engine is there, and requests will be answered."""
    if app_state.stopping:
        raise stopping()
    state, restarts = app_state.engine()
    if state != "ready":
        raise ApiError(
            503, f"the engine is {state}", kind="server_error", code="engine_unavailable", retry_after=2
        )
    return ReadyAnswer(model=app_state.name, slots=app_state.runtime.slots, restarts=restarts)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
)
async def metrics(app_state: AppStateDep) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(
        await app_state.call(app_state.metrics.text), headers={"content-type": CONTENT_TYPE_LATEST}
    )
