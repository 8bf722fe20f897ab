"""Everything as one ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.server import refusal
from perdure.server.desk import Desk
from perdure.server.middleware.access_log import AccessLog
from perdure.server.middleware.auth import OPEN, Auth
from perdure.server.middleware.body_limits import BodyLimits
from perdure.server.middleware.host_check import HostCheck
from perdure.server.refusal import crowded
from perdure.server.routes import cache, chat, completions, embeddings, memories, models, operation, sessions
from perdure.server.shapes.base import ErrorAnswer

_ABOUT = "Local language models whose sessions last. OpenAI's routes, and sessions as resources."
_UNTRUE = ("HTTPValidationError", "ValidationError")
"""FastAPI documents these errors everywhere; here they have the shape of all others."""
_ERROR = {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}


def build(desk: Desk) -> FastAPI:
    """The routes, without what stands before them."""
    from importlib.metadata import version

    app = FastAPI(
        title="perdure", version=version("perdure"), description=_ABOUT, docs_url=None, redoc_url=None
    )
    app.state.desk = desk
    for module in (chat, completions, embeddings, models, sessions, memories, cache, operation):
        app.include_router(module.router)
    refusal.install(app)
    app.openapi = lambda: _document(app, desk)  # type: ignore[method-assign]
    return app


def served(desk: Desk) -> ASGIApp:
    """The routes behind everything that a request has to pass."""
    app: ASGIApp = Auth(BodyLimits(build(desk), desk.limits), desk.keys)
    if desk.hosts is not None:
        app = HostCheck(app, desk.hosts)
    return AccessLog(app, desk.figures)


def turned_away(desk: Desk) -> ASGIApp:
    """What answers on a connection that is one too many."""
    refused = crowded(desk.limits.connections)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await refused.response()(scope, receive, send)

    return AccessLog(answer, desk.figures)


def _document(app: FastAPI, desk: Desk) -> dict[str, Any]:
    """The OpenAPI document as things are: with the keys that are needed, without errors that never come."""
    if app.openapi_schema is None:
        shown = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = shown["components"]["schemas"]
        for name in _UNTRUE:
            schemas.pop(name, None)
        for path, methods in shown["paths"].items():
            for operation_ in methods.values():
                answers = operation_["responses"]
                if "HTTPValidationError" in str(answers.get("422")):
                    del answers["422"]
                for status in answers:
                    if status >= "400":
                        # Whatever a route gives, its errors are JSON.
                        answers[status]["content"] = {"application/json": {"schema": _ERROR}}
                if len(desk.keys) and path not in OPEN:
                    operation_["security"] = [{"key": []}]
        if len(desk.keys):
            shown["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if desk.strict:
            for schema in schemas.values():
                if schema.get("additionalProperties") is True:
                    schema["additionalProperties"] = False
        app.openapi_schema = shown
    return app.openapi_schema
