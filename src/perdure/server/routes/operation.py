"""`/health`, `/ready`, `/metrics`: for whoever runs the server."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from perdure.server.desk import ADesk
from perdure.server.refusal import Refused, stopping
from perdure.server.routes.documented import errors
from perdure.server.shapes.base import Given

router = APIRouter(tags=["operation"])


class HealthAnswer(Given):
    status: Literal["ok"] = "ok"


class ReadyAnswer(Given):
    status: Literal["ready"] = "ready"
    model: str
    slots: int
    restarts: int


@router.get("/health")
async def health() -> HealthAnswer:
    """The process lives."""
    return HealthAnswer()


@router.get("/ready", responses=errors())
async def ready(desk: ADesk) -> ReadyAnswer:
    """The engine is there, and requests will be answered."""
    if desk.stopping:
        raise stopping()
    state, restarts = desk.engine()
    if state != "ready":
        raise Refused(
            503, f"the engine is {state}", kind="server_error", code="engine_unavailable", retry_after=2
        )
    return ReadyAnswer(model=desk.name, slots=desk.runtime.slots, restarts=restarts)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
)
async def metrics(desk: ADesk) -> Response:
    """Figures in Prometheus' text format."""
    return Response(await desk.call(desk.figures.text), headers={"content-type": CONTENT_TYPE_LATEST})
