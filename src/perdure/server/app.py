"""Everything as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.server.api import analysis, cache, events, machine, models, page, sessions
from perdure.server.core import api_error
from perdure.server.core.api_error import too_many_connections
from perdure.server.core.app_state import AppState
from perdure.server.core.body_route import body_schema
from perdure.server.core.event_log import EventLogs
from perdure.server.core.middleware import OPEN, AccessLog, Auth, BodyLimits, Cors, HostCheck
from perdure.server.core.protocol import OPENAI
from perdure.server.core.schemas import RequestSchema
from perdure.server.core.visit import Visits
from perdure.server.protocols import chat_routes, completions, embeddings, llama_server, pulls, sglang
from perdure.server.protocols.messages import answers as messages
from perdure.server.protocols.ollama import routes as ollama
from perdure.server.protocols.responses import routes as responses
from perdure.server.protocols.responses.runs import Runs

PROTOCOLS = (
    chat_routes.PROTOCOL,
    messages.PROTOCOL,
    responses.PROTOCOL,
    ollama.PROTOCOL,
    completions.PROTOCOL,
)
_API = (
    embeddings.router,
    # Before the routes of a model: it is no name of one.
    pulls.router,
    models.router,
    sessions.router,
    sessions.memories,
    analysis.router,
    cache.router,
    machine.router,
    machine.operation,
    events.router,
    llama_server.router,
    sglang.router,
)
_ABOUT = "Local language models whose sessions last. OpenAI's routes, and sessions as resources."
_UNTRUE = ("HTTPValidationError", "ValidationError")
"""FastAPI documents these errors everywhere; here they have the shape of all others."""


def build(app_state: AppState) -> FastAPI:
    """The routes, without what stands before them."""
    from importlib.metadata import version

    app = FastAPI(title="perdure", version=version("perdure"), description=_ABOUT, openapi_url=None)
    app.state.app_state = app_state
    app.state.runs = Runs()
    app.state.logs = EventLogs()
    if app_state.page:
        # Before Ollama's: both have an answer for `/`, and a browser says that it wants HTML.
        app.include_router(page.router)
    for protocol in PROTOCOLS:
        for router in protocol.routers:
            app.include_router(router)
    for router in _API:
        app.include_router(router)
    api_error.install(app)
    app.openapi = lambda: _document(app, app_state)  # type: ignore[method-assign]

    # No coroutine: to write the document takes as long as fifty requests, and a thread has that time.
    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    _prepare(app)
    return app


def request_schemas() -> dict[type[RequestSchema], list[str]]:
    """What clients may send, and the paths that take it."""
    paths: dict[type[RequestSchema], list[str]] = {}
    routers = [router for protocol in PROTOCOLS for router in protocol.routers]
    for router in [*routers, *_API]:
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


def served(app_state: AppState) -> ASGIApp:
    """The routes behind everything that a request has to pass."""
    app: ASGIApp = Auth(BodyLimits(Visits(build(app_state)), app_state), app_state.keys)
    app = Cors(HostCheck(app, app_state), app_state)
    return AccessLog(app, app_state.metrics, PROTOCOLS)


def turned_away(app_state: AppState) -> ASGIApp:
    """What answers on a connection that is one too many."""
    refused = too_many_connections(app_state.limits.connections)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await refused.response()(scope, receive, send)

    return AccessLog(answer, app_state.metrics, PROTOCOLS)


def _error(path: str) -> dict[str, str]:
    protocol = next((each for each in PROTOCOLS if path.startswith(each.prefix)), OPENAI)
    return {"$ref": f"#/components/schemas/{protocol.error_schema.__name__}"}


def _document(app: FastAPI, app_state: AppState) -> dict[str, Any]:
    """The OpenAPI document as things are: with the keys that are needed, without errors that never come."""
    if app.openapi_schema is None or app.state.strict is not app_state.strict:
        app.state.strict = app_state.strict
        shown = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = shown["components"]["schemas"]
        for name in _UNTRUE:
            schemas.pop(name, None)
        for form in {protocol.error_schema for protocol in (*PROTOCOLS, OPENAI)}:
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
                if app_state.keys.required and path not in OPEN:
                    operation_["security"] = [{"key": []}]
        if app_state.keys.required:
            shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if app_state.strict:
            for schema in schemas.values():
                if schema.get("additionalProperties") is True:
                    schema["additionalProperties"] = False
        app.openapi_schema = shown
    return app.openapi_schema
