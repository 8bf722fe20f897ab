"""Everything as one ASGI application."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.extension import brought
from perdure.server.api import cache, machine, models, page, sessions
from perdure.server.core import api_error
from perdure.server.core.api_error import too_many_connections
from perdure.server.core.body_route import body_schema
from perdure.server.core.event_log import EventLogs
from perdure.server.core.middleware import OPEN, AccessLog, Auth, BodyLimits, Cors, HostCheck, Starts
from perdure.server.core.protocol import OPENAI, Protocol
from perdure.server.core.schemas import RequestSchema
from perdure.server.core.server_state import ServerState
from perdure.server.core.visit import Visits
from perdure.server.protocols import chat_routes

_API = (
    sessions.router,
    sessions.memories,
    cache.router,
    machine.router,
    machine.operation,
)
_ABOUT = "Local language models whose sessions last. OpenAI's routes, and sessions as resources."
_UNTRUE = ("HTTPValidationError", "ValidationError")
"""FastAPI documents these errors everywhere; here they have the shape of all others."""


@functools.cache
def protocols() -> tuple[Protocol, ...]:
    """All protocols, those of extensions too."""
    return (chat_routes.PROTOCOL, *brought("protocols"))


def _routers() -> Iterator[APIRouter]:
    """The routes of all protocols, then the other ones."""
    for protocol in protocols():
        yield from protocol.routers
    yield from _API
    yield from brought("routes")
    # Last: its names of models have slashes, and would take the place of other routes below `/v1/models`.
    yield models.router


def build(state: ServerState) -> FastAPI:
    """The routes, without what stands before them."""
    from importlib.metadata import version

    app = FastAPI(title="perdure", version=version("perdure"), description=_ABOUT, openapi_url=None)
    app.state.server = state
    app.state.logs = EventLogs()
    if state.page:
        # Before a protocol's: Ollama's has an answer for `/` too, and a browser says that it wants HTML.
        for router in (*brought("page_routes"), page.router):
            app.include_router(router)
    for router in _routers():
        app.include_router(router)
    api_error.install(app)
    app.openapi = lambda: _document(app, state)  # type: ignore[method-assign]

    # No coroutine: to write the document takes as long as fifty requests, and a thread has that time.
    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    _prepare(app)
    return app


def request_schemas() -> dict[type[RequestSchema], list[str]]:
    """What clients may send, and the paths that take it."""
    paths: dict[type[RequestSchema], list[str]] = {}
    for router in _routers():
        for route in router.routes:
            if isinstance(route, APIRoute) and (schema := body_schema(route.endpoint)) is not None:
                paths.setdefault(schema, []).append(route.path)
    return paths


def _prepare(app: FastAPI) -> None:
    """Have FastAPI make up its routes now: it does so when a path is first looked for, in the event loop,
    where it takes as long as fifty requests."""
    nowhere: Scope = {"type": "http", "method": "GET", "path": "/\0", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches(nowhere)


def served(state: ServerState) -> ASGIApp:
    """The routes behind everything that a request has to pass."""
    routes = Visits(build(state))
    state.routes = AccessLog(routes, state.ledger.metrics, protocols())
    app: ASGIApp = Auth(BodyLimits(routes, state), state.keys)
    app = Cors(HostCheck(app, state), state)
    return AccessLog(Starts(app), state.ledger.metrics, protocols())


def rejecting(state: ServerState) -> ASGIApp:
    """What answers on a connection that is one too many."""
    refused = too_many_connections(state.limits.connections)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await refused.response()(scope, receive, send)

    return AccessLog(answer, state.ledger.metrics, protocols())


def _error(path: str) -> dict[str, str]:
    protocol = next((each for each in protocols() if path.startswith(each.prefix)), OPENAI)
    return {"$ref": f"#/components/schemas/{protocol.error_schema.__name__}"}


def _document(app: FastAPI, state: ServerState) -> dict[str, Any]:
    """The OpenAPI document as things are: with the keys that are needed, without errors that never come."""
    if app.openapi_schema is None or app.state.strict is not state.strict:
        app.state.strict = state.strict
        shown = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = shown["components"]["schemas"]
        for name in _UNTRUE:
            schemas.pop(name, None)
        for form in {protocol.error_schema for protocol in (*protocols(), OPENAI)}:
            shown_form = form.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(shown_form.pop("$defs", {}))
            schemas[form.__name__] = shown_form
        for path, methods in shown["paths"].items():
            for operation_ in methods.values():
                answers = operation_["responses"]
                if "HTTPValidationError" in str(answers.get("422")):
                    del answers["422"]
                for status in answers:
                    if status >= "400":
                        # Whatever a route gives, its errors are JSON.
                        answers[status]["content"] = {"application/json": {"schema": _error(path)}}
                if state.keys.required and path not in OPEN:
                    operation_["security"] = [{"key": []}]
        if state.keys.required:
            shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if state.strict:
            for schema in schemas.values():
                if schema.get("additionalProperties") is True:
                    schema["additionalProperties"] = False
        app.openapi_schema = shown
    return app.openapi_schema
