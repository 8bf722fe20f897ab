"""`/v1/events`: what happens in the engine, as server-sent events, for the operator of the server.

event: Placed
data: {"kind":"Placed","time":1763391265.1,"request":"5f2a-7","slot":0,"tiers":{"slot":212},…}
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from perdure.ext.inspection.sinks import json_line
from perdure.spi.runtime import Event, Subscription, TokenDrawn
from perdure.spi.server import (
    SSE,
    AppState,
    AppStateDep,
    CallerDep,
    EventResponse,
    Events,
    ProtocolEvent,
    Sink,
    named_event,
)

router = APIRouter(prefix="/v1", tags=["operation"])

_NAP = 0.1
"""Seconds between two looks: a client at the other end sees no difference."""


@router.get("/events", include_in_schema=False)
async def events(
    app_state: AppStateDep, caller: CallerDep, kind: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Every event from now on, or those of some kinds, until the client leaves. Where the server has keys,
    texts and token ids of replies are left out: they are for those who asked."""
    subscription = await app_state.call(app_state.runtime.events, kind)
    return EventResponse(_Source(subscription, app_state), SSE, app_state.server.limits)


class _Source:
    """Writes what a subscription brings to one client."""

    def __init__(self, subscription: Subscription, app_state: AppState) -> None:
        self._subscription = subscription
        self._app_state = app_state
        self._private = app_state.server.keys.required
        self._dropped = 0

    async def write_to(self, sink: Sink) -> None:
        # At once, so that a client knows that it is heard.
        await sink.send(self.keep_alive())
        while not self._subscription.over and not self._app_state.server.stopping:
            events = [self._event(each) for each in self._subscription.poll()]
            if (dropped := self._subscription.dropped) > self._dropped:
                events.append(named_event({"type": "Dropped", "dropped": dropped - self._dropped}))
                self._dropped = dropped
            if events:
                await sink.send(events)
            await asyncio.sleep(_NAP)
        await sink.close(())

    def _event(self, event: Event) -> ProtocolEvent:
        if self._private and isinstance(event, TokenDrawn):
            hidden = tuple(each._replace(token=-1, text="") for each in event.alternatives)
            event = dataclasses.replace(event, token=-1, text="", alternatives=hidden)
        return ProtocolEvent(event.kind.encode(), json_line(event).encode())

    def keep_alive(self) -> Events:
        return (named_event({"type": "ping"}),)

    def close(self) -> None:
        self._subscription.close()
