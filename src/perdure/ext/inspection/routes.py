"""`/v1/sessions/NAME/turns/N/analysis`: what the model did for a reply, as the page of `perdure analyse`.

event: progress
data: {"type":"progress","stage":"reading","done":64,"total":212}

event: analysis
data: {"type":"analysis","session":"work","turn":2,"tokens":212,"reply_tokens":40,"notes":[],"html":"<!doc…"}

It is computed in a child process (`process.py`), one at a time for the whole server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from perdure import EngineError, InvalidInputError
from perdure.ext.inspection.analysis import ReplyFigures
from perdure.ext.inspection.page import report_script_hash, script_hash
from perdure.ext.inspection.process import AnalysisJob, AnalysisPage, AnalysisProcess, AnalysisProgress
from perdure.spi.runtime import BackgroundThread
from perdure.spi.server import (
    ASSETS,
    HEADERS,
    SSE,
    ApiError,
    AppState,
    BodyRoute,
    Caller,
    CallerDep,
    EventResponse,
    Events,
    Named,
    ProtocolEvent,
    RequestSchema,
    ResponseSchema,
    ServedDep,
    Sink,
    as_policy,
    deadline,
    named_event,
    refuse_fields,
    stopping,
    streamed,
    to_api_error,
    while_connected,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=BodyRoute)

_FRAME_SCRIPT = """
"use strict";
addEventListener("message", function show(event) {
  if (event.source !== parent || typeof event.data !== "string") return;
  removeEventListener("message", show);
  document.open();
  document.write(event.data);
  document.close();
});
parent.postMessage("ready", "*");
"""
"""Shows the one text that the page sends."""
_FRAME = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Analysis</title></head>
<body><script>{_FRAME_SCRIPT}</script></body>
</html>
"""

page_router = APIRouter(include_in_schema=False)

_RETRY = 10
"""Seconds after which one that was refused may be asked for again: most take about as long."""


class AnalysisRequest(RequestSchema):
    stream: bool = False
    """Whether how far it is comes as server-sent events, before the analysis."""


class AnalysisAnswer(ResponseSchema):
    """What a model did for a reply."""

    type: Literal["analysis"] = "analysis"
    session: str
    turn: int
    tokens: int
    """That were looked at: the prompt and the reply."""
    reply_tokens: int
    notes: list[str]
    """What is missing, and why."""
    html: str
    """A page that loads nothing, as `perdure analyse` writes it. Show it in a sandbox: it has a script."""


class ProgressEvent(ResponseSchema):
    type: Literal["progress"] = "progress"
    stage: str
    """`model`, `reading`, `keys and values`, `layers`, `logit lens` or `page`."""
    done: int = 0
    total: int = 0
    """0 where it is not known."""


@router.post(
    "/{name}/turns/{turn}/analysis", responses=streamed(404, 409, 503), response_model=AnalysisAnswer
)
async def analyse(
    name: Named,
    turn: Annotated[int, Path(ge=1, lt=2**31)],
    body: AnalysisRequest,
    request: Request,
    app_state: ServedDep,
    caller: CallerDep,
) -> Response:
    """Look inside a reply: surprise, attention by head, keys and values, logit lens, experts, and the time by
    tier. The model reads the conversation once more, in a separate process; one at a time."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    job = await app_state.call(_job, app_state, caller, name, turn)
    run = AnalysisRun(job, app_state, caller, name, turn)
    if body.stream:
        return EventResponse(run, SSE, app_state.server.limits)
    return Response(await while_connected(request, run.whole()), media_type="application/json")


def _job(app_state: AppState, caller: Caller, name: str, number: int) -> AnalysisJob:
    """What there is to look at in a turn."""
    runtime = app_state.runtime
    session = runtime.sessions.get(name, caller.namespace)
    try:
        history = session.standing(number)
    except InvalidInputError as error:
        raise ApiError(404, str(error), param="turn", code="turn_not_found") from None
    turn = history.last
    if turn.kind != "turn" or turn.reply is None:
        raise _nothing(f"turn {number} has no reply that a model wrote")
    tokens = history.transcript_under(runtime.model.digest).tokens
    if not tokens or turn.model != runtime.model.digest:
        model = str(turn.usage.get("model", "")) or "another model, or elsewhere"
        raise _nothing(
            f"turn {number} was written by {model}, and not by {app_state.name}: name its model with ?model="
        )
    opening = runtime.backend.second_opening(turn.settings.get("adapters"))
    return AnalysisJob(
        opening=opening,
        tokens=tokens,
        prompt=min(turn.counts.get("prompt_tokens", 0), len(tokens) - 1),
        title=f"{name}, turn {number}",
        figures=ReplyFigures.of_usage(turn.counts),
    )


def _nothing(why: str) -> ApiError:
    return ApiError(409, f"there is nothing to look inside: {why}", param="turn", code="nothing_to_analyse")


class AnalysisRun:
    """One analysis for one client. It ends with its client, its deadline, or the server.

    Always holds: while one runs, no other begins; its process is gone when it ends.
    """

    def __init__(self, job: AnalysisJob, app_state: AppState, caller: Caller, name: str, turn: int) -> None:
        self._job = job
        self._process = AnalysisProcess(job)
        self._app_state = app_state
        self._caller = caller
        self._name, self._turn = name, turn
        self._latest = ProgressEvent(stage="model")
        self._seconds = app_state.server.limits.request_seconds

    def cancel(self) -> None:
        self._process.cancel()

    def close(self) -> None:
        self.cancel()

    def keep_alive(self) -> Events:
        return (named_event(self._latest.model_dump()),)

    async def write_to(self, sink: Sink) -> None:
        answer = b""
        try:
            async with aclosing(self._messages()) as messages:
                async for each in messages:
                    if isinstance(each, bytes):
                        answer = each
                        break
                    self._latest = each
                    await sink.send(self.keep_alive())
            # Now that the next one can begin.
            await sink.close([ProtocolEvent(b"analysis", answer)])
        except Exception as error:
            api_error = self._api_error(error)
            if not sink.is_open:
                raise api_error from error
            await sink.close([named_event({"type": "error", **api_error.body})], api_error)

    async def whole(self) -> bytes:
        """The answer, once it is there."""
        try:
            async with aclosing(self._messages()) as messages:
                async for each in messages:
                    if isinstance(each, bytes):
                        return each
        except Exception as error:
            raise self._api_error(error) from error
        raise AssertionError("an analysis ends with a page or an error")

    async def _messages(self) -> AsyncGenerator[ProgressEvent | bytes, None]:
        """How far it is, and at last the answer."""
        server, loop = self._app_state.server, asyncio.get_running_loop()
        if server.analysis is not None:
            raise ApiError(
                429,
                "another reply is being looked into, and the server does that one at a time: ask again later",
                code="analysis_running",
                retry_after=_RETRY,
            )
        came: asyncio.Queue[ProgressEvent | bytes | Exception] = asyncio.Queue()
        ended = asyncio.Event()

        def work() -> None:
            # One thread from its start to its end: where that ends, so does the process.
            try:
                for each in self._process.run():
                    loop.call_soon_threadsafe(came.put_nowait, self._event(each))
            except Exception as error:
                loop.call_soon_threadsafe(came.put_nowait, error)
            except BaseException as error:
                # It is for this thread: in a task of the event loop, SystemExit would end the server.
                reported = EngineError(f"the analysis ended: {error!r}")
                loop.call_soon_threadsafe(came.put_nowait, reported)
                raise
            finally:
                loop.call_soon_threadsafe(ended.set)

        server.analysis = self
        server.running.add(self)
        try:
            # It is computed, whatever becomes of its client.
            self._caller.charge(len(self._job.tokens))
            BackgroundThread(work, name="perdure-analysis").start()
            async with asyncio.timeout(self._seconds):
                while True:
                    each = await came.get()
                    if isinstance(each, Exception):
                        raise each
                    yield each
        finally:
            self.cancel()
            await asyncio.shield(ended.wait())
            server.analysis = None

    def _event(self, each: AnalysisProgress | AnalysisPage) -> ProgressEvent | bytes:
        if isinstance(each, AnalysisProgress):
            return ProgressEvent(stage=each.stage, done=each.done, total=each.total)
        answer = AnalysisAnswer(
            session=self._name,
            turn=self._turn,
            tokens=len(self._job.tokens),
            reply_tokens=len(self._job.tokens) - self._job.prompt,
            notes=list(each.notes),
            html=each.page,
        )
        # In the thread: it may have some megabytes.
        return answer.model_dump_json().encode()

    def _api_error(self, error: Exception) -> ApiError:
        if self._app_state.server.stopping:
            return stopping()
        if isinstance(error, TimeoutError):
            return deadline(self._seconds)
        return to_api_error(error)


@page_router.get(ASSETS + "analysis")
async def analysis_frame() -> Response:
    """A document for the analysis of a reply, with one script: it has no origin, reaches nothing, and runs
    that script and no other, whatever the text is. The page sends it what to show."""
    policy = {
        "sandbox": "allow-scripts",
        "default-src": "'none'",
        "script-src": f"'{script_hash(_FRAME_SCRIPT)}' '{report_script_hash()}'",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'self'",
    }
    headers = {**HEADERS, "content-security-policy": as_policy(policy), "x-frame-options": "SAMEORIGIN"}
    return Response(_FRAME, media_type="text/html", headers={**headers, "cache-control": "no-cache"})
