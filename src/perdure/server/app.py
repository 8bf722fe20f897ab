"""Everything as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.server import api_error
from perdure.server.api_error import too_many_connections
from perdure.server.app_state import AppState
from perdure.server.middleware.access_log import AccessLog
from perdure.server.middleware.auth import OPEN, Auth
from perdure.server.middleware.body_limits import BodyLimits
from perdure.server.middleware.cors import Cors
from perdure.server.middleware.host_check import HostCheck
from perdure.server.protocols.chat import routes as chat
from perdure.server.protocols.messages import routes as messages
from perdure.server.protocols.messages.errors import MessagesErrorAnswer
from perdure.server.protocols.ollama import routes as ollama
from perdure.server.protocols.ollama.errors import OllamaErrorAnswer
from perdure.server.protocols.responses import compact, conversations, websocket
from perdure.server.protocols.responses import routes as responses
from perdure.server.protocols.responses.runs import Runs
from perdure.server.routes import (
    cache,
    completions,
    embeddings,
    machine,
    memories,
    models,
    operation,
    page,
    rerank,
    sessions,
)
from perdure.server.schemas.base import ErrorAnswer, ResponseSchema

_ABOUT = "Local language models whose sessions last. OpenAI's routes, and sessions as resources."
_UNTRUE = ("HTTPValidationError", "ValidationError")
"""FastAPI documents these errors everywhere; here they have the shape of all others."""
_ERRORS: dict[str, type[ResponseSchema]] = {
    "/v1/messages": MessagesErrorAnswer,
    "/api/": OllamaErrorAnswer,
    "": ErrorAnswer,
}
"""What errors look like, by how a path begins."""


def build(app_state: AppState) -> FastAPI:
    """The routes, without what stands before them."""
    from importlib.metadata import version

    app = FastAPI(
        title="perdure", version=version("perdure"), description=_ABOUT, docs_url=None, redoc_url=None
    )
    app.state.app_state = app_state
    app.state.runs = Runs()
    if app_state.page:
        # Before Ollama's: both have an answer for `/`, and a browser says that it wants HTML.
        app.include_router(page.router)
    for module in (
        chat,
        messages,
        # Before the routes of a response: `compact` is no id.
        compact,
        responses,
        conversations,
        websocket,
        ollama,
        completions,
        embeddings,
        rerank,
        models,
        sessions,
        memories,
        cache,
        machine,
        operation,
    ):
        app.include_router(module.router)
    api_error.install(app)
    app.openapi = lambda: _document(app, app_state)  # type: ignore[method-assign]
    return app


def served(app_state: AppState) -> ASGIApp:
    """The routes behind everything that a request has to pass."""
    app: ASGIApp = Auth(BodyLimits(build(app_state), lambda: app_state.limits), app_state.keys)
    app = HostCheck(app, lambda: app_state.hosts)
    app = Cors(app, lambda: app_state.origins)
    return AccessLog(app, app_state.metrics)


def turned_away(app_state: AppState) -> ASGIApp:
    """What answers on a connection that is one too many."""
    refused = too_many_connections(app_state.limits.connections)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await refused.response()(scope, receive, send)

    return AccessLog(answer, app_state.metrics)


def _error(path: str) -> dict[str, str]:
    name = next(form.__name__ for prefix, form in _ERRORS.items() if path.startswith(prefix))
    return {"$ref": f"#/components/schemas/{name}"}


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
        for form in _ERRORS.values():
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
