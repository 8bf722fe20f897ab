"""`/v1/where`, for routers: is this conversation warm here, and what would it cost to answer it here?

GET /v1/where?session=trip
{"tokens": 812, "warm": 800, "tiers": {"slot": 800}, "compute": 12, "read_bytes": 0,
 "waiting": 0, "running": 1, "slots": 4, "draining": false}
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from perdure import InvalidInputError, Plan
from perdure.spi.server import AppState, AppStateDep, Caller, CallerDep, ResponseSchema, errors

_AT_HAND = ("slot", "memory")
_LONGEST = 100_000


class WhereAnswer(ResponseSchema):
    tokens: int
    """Of the conversation, or of the prompt."""
    warm: int
    """Of them, those whose state is in this process."""
    tiers: dict[str, int]
    """Tokens that need not be computed, by where their state is."""
    compute: int
    """Tokens that would be computed."""
    read_bytes: int
    """State that would be read."""
    waiting: int
    """Requests that wait for a slot."""
    running: int
    slots: int
    draining: bool
    """Whether this server takes its leave: it answers, and wants no new conversations."""


router = APIRouter(tags=["operation"])


@router.get("/v1/where", responses=errors(400, 404))
async def where(
    app_state: AppStateDep,
    caller: CallerDep,
    session: Annotated[str | None, Query(max_length=1000, description="A session.")] = None,
    prompt: Annotated[
        str | None, Query(max_length=_LONGEST, description="The beginning of a prompt, as plain text.")
    ] = None,
) -> WhereAnswer:
    """How much of a session, or of a prompt, is warm here, and how busy this server is. Nothing is moved."""
    if (session is None) == (prompt is None):
        raise InvalidInputError("give `session` or `prompt`, one of them")
    plan = await app_state.call(lambda: _plan(app_state, caller, session, prompt or ""))
    waiting, running = app_state.runtime.load
    return WhereAnswer.copy_of(
        plan,
        warm=sum(plan.tiers.get(tier, 0) for tier in _AT_HAND),
        compute=plan.computed,
        read_bytes=plan.nbytes,
        waiting=waiting,
        running=running,
        slots=app_state.runtime.slots,
        draining=app_state.server.draining,
    )


def _plan(app_state: AppState, caller: Caller, session: str | None, prompt: str) -> Plan:
    runtime = app_state.runtime
    if session is not None:
        return runtime.sessions.get(session, caller.namespace).plan_wake()
    return runtime.cache.plan(runtime.model.tokenize(prompt), namespace=caller.namespace)
