"""Ollama's API: `/api/…`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, Caller, CallerDep
from perdure.server.core.embeddings import check_width, embed
from perdure.server.core.follow import answer
from perdure.server.core.protocol import JSON_LINES, Protocol, event
from perdure.server.core.schemas import errors, refuse_fields
from perdure.server.protocols.ollama.errors import OllamaErrorAnswer, error_body
from perdure.server.protocols.ollama.library import VERSION, Library, tagged
from perdure.server.protocols.ollama.requests import (
    CopyRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelNamed,
    OllamaChatRequest,
    OptionsRequest,
    chat_request,
    check_keep_alive,
    generate_request,
    is_unload,
)
from perdure.server.protocols.ollama.stream import OllamaWriter, idle, nanoseconds

router = APIRouter(tags=["Ollama"])


def _lines(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": "Lines of JSON, or with `stream` false one object",
            "content": {JSON_LINES.media_type: {}},
        },
        **errors(504, *statuses),
    }


@router.post("/api/chat", responses=_lines(), response_model=dict[str, Any])
async def chat(
    asked: OllamaChatRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any] | Response:
    """A reply to a conversation. Any `model` is served by this one."""
    if not asked.messages:
        check_keep_alive(asked.keep_alive)
        return _idle(asked, app_state, "chat")
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    wanted, notes = chat_request(asked, app_state)
    writer = OllamaWriter(app_state.name, "chat", notes)
    job = await app_state.call(wanted.submit, app_state.runtime, caller.namespace)
    return await _answered(job, writer, asked, request, app_state, caller)


@router.post("/api/generate", responses=_lines(), response_model=dict[str, Any])
async def generate(
    asked: GenerateRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any] | Response:
    """A reply to a prompt, by the chat template or, with `raw`, as it is."""
    if not asked.prompt:
        check_keep_alive(asked.keep_alive)
        return _idle(asked, app_state, "generate")
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    wanted, notes = generate_request(asked, app_state)
    writer = OllamaWriter(app_state.name, "generate", notes)
    job: Any
    if asked.raw:
        options: Any = {name: value for name, value in wanted.options.items() if name not in _CHAT_ONLY}
        job = await app_state.call(
            app_state.runtime.submit, asked.prompt, namespace=caller.namespace, **options
        )
    else:
        job = await app_state.call(wanted.submit, app_state.runtime, caller.namespace)
    return await _answered(job, writer, asked, request, app_state, caller)


_CHAT_ONLY = frozenset({"variables", "limit_to_context"})


async def _answered(
    job: Any,
    writer: OllamaWriter,
    asked: OptionsRequest,
    request: Request,
    app_state: AppState,
    caller: Caller,
) -> dict[str, Any] | Response:
    return await answer(
        job,
        request,
        app_state,
        caller,
        whole=writer.whole,
        writer=writer if asked.streams else None,
    )


def _idle(asked: OptionsRequest, app_state: AppState, kind: Any) -> dict[str, Any] | Response:
    shown = idle(app_state.name, kind, "unload" if is_unload(asked.keep_alive) else "load")
    return _all_lines([shown]) if asked.streams else shown


def _all_lines(lines: Sequence[dict[str, Any]]) -> Response:
    body = b"".join(JSON_LINES.frame(event(each)) for each in lines)
    return Response(body, media_type=JSON_LINES.media_type)


@router.post("/api/embed", responses=errors(504), response_model=dict[str, Any])
async def embed_texts(
    asked: EmbedRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> Response:
    """Texts as vectors. What does not fit is an error, never cut."""
    check_keep_alive(asked.keep_alive)
    texts = [asked.input] if isinstance(asked.input, str) else list(asked.input)
    started = time.perf_counter()
    await check_width(asked.dimensions, app_state)
    found = await embed(texts, request, app_state, caller)

    def body() -> bytes:
        shown = {
            "model": app_state.name,
            "embeddings": [vector.tolist() for vector in found.vectors],
            "total_duration": nanoseconds(time.perf_counter() - started),
            "load_duration": 0,
            "prompt_eval_count": sum(found.tokens),
        }
        return json.dumps(shown).encode()

    return Response(await app_state.call(body), media_type="application/json")


@router.post("/api/embeddings", responses=errors(504))
async def embeddings(
    asked: EmbeddingsRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any]:
    """An older route for one text."""
    check_keep_alive(asked.keep_alive)
    found = await embed([asked.prompt], request, app_state, caller)
    return {"embedding": found.vectors[0].tolist()}


@router.get("/api/tags", responses=errors())
async def tags(app_state: AppStateDep, caller: CallerDep) -> dict[str, Any]:
    """The model that is served, under each of its names."""
    model = await app_state.call(Library(app_state).listed)
    names = [tagged(name) for name in app_state.names.get(caller.namespace, {})]
    return {"models": [model, *({**model, "name": name, "model": name} for name in names)]}


@router.get("/api/ps", responses=errors())
async def ps(app_state: AppStateDep) -> dict[str, Any]:
    """The models that are loaded: the same one."""
    return {"models": [await app_state.call(Library(app_state).running)]}


@router.post("/api/show", responses=errors())
async def show(asked: ModelNamed, app_state: AppStateDep) -> dict[str, Any]:
    """The model, its template and what it can do."""
    return await app_state.call(Library(app_state).shown)


@router.get("/api/version", responses=errors())
async def version(app_state: AppStateDep) -> dict[str, str]:
    return {"version": VERSION}


@router.post("/api/pull", responses=_lines(), response_model=dict[str, Any])
async def pull(asked: OptionsRequest, app_state: AppStateDep) -> dict[str, Any] | Response:
    """Says that the model is there. A client cannot have this server fetch anything."""
    lines = Library(app_state).pulled()
    if not asked.streams:
        return lines[-1]
    return _all_lines(lines)


@router.post("/api/copy", responses=errors())
async def copy(asked: CopyRequest, app_state: AppStateDep, caller: CallerDep) -> dict[str, str]:
    """Another name for the model, listed for those who gave it until the server ends."""
    names = app_state.names.setdefault(caller.namespace, {})
    if asked.destination not in names and len(names) >= _NAMES:
        raise ApiError(400, f"destination: {_NAMES} names are enough; delete one first", code="invalid_value")
    names[asked.destination] = None
    return {"status": "success"}


@router.delete("/api/delete", responses=errors(404))
async def delete(asked: ModelNamed, app_state: AppStateDep, caller: CallerDep) -> dict[str, str]:
    """Take a name back that was given by a copy. The model itself is chosen when the server is started."""
    name = asked.model or asked.name
    if name in app_state.names.get(caller.namespace, {}):
        del app_state.names[caller.namespace][name]
        return {"status": "success"}
    if tagged(name) == tagged(app_state.name):
        raise ApiError(
            403,
            "no client can delete the model; `perdure models` manages those of this machine",
            kind="permission_error",
            code="forbidden",
        )
    raise ApiError(404, f"model {name[:100]!r} not found", kind="not_found_error", code="model_not_found")


_NAMES = 64
"""That one namespace may give."""


@router.api_route("/", methods=["GET", "HEAD"], response_class=PlainTextResponse, include_in_schema=False)
async def running() -> Response:
    """How clients find out that somebody is there."""
    return PlainTextResponse("Ollama is running")


PROTOCOL = Protocol(
    name="Ollama",
    prefix="/api/",
    routers=(router,),
    writer=OllamaWriter,
    framing=JSON_LINES,
    error_schema=OllamaErrorAnswer,
    error_body=error_body,
    # Its documentation's own `curl -d` names another type.
    any_content_type=True,
)
