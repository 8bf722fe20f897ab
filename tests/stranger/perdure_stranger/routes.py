"""`GET /v1/hello`."""

from __future__ import annotations

from fastapi import APIRouter

from perdure.spi.server import ServedDep, errors

router = APIRouter(prefix="/v1", tags=["stranger"])


@router.get("/hello", responses=errors(), response_model=None)
async def hello(app_state: ServedDep) -> dict[str, str]:
    """Greets, and names the model."""
    return {"hello": app_state.runtime.model.info.architecture}
