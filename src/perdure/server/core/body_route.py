"""Body route: reads a large JSON body in a thread, so that no client waits while another's is parsed.

FastAPI parses and checks bodies in the event loop. What is short goes that way: a thread would cost more.

A thread alone is not enough: the parser and the checker are compiled, and keep the interpreter to themselves
until they are done. So both call a line of Python for each object (here and in `RequestSchema`), where the
interpreter changes hands. And one body is read at a time: the event loop waits for one thread, not for many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, cast, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from perdure.extension import part
from perdure.server.core.schemas import RequestSchema
from perdure.server.core.server_state import ServerState

LARGE = 32 << 10
"""Bytes of a body that is read in a thread: less takes under 5 ms, whatever it holds."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """A route whose endpoint gets the same, whatever the size of the body: its schema, or the same error."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        schema = body_schema(self.endpoint)
        if schema is None:
            return handle

        async def read_first(request: Request) -> Response:
            state: ServerState = request.app.state.server
            sent = await request.body()
            body = await with_linked_images(sent, state, request.state.namespace)
            if len(body) > LARGE or body is not sent:
                request = _ReadRequest(request, body, await state.read(read_body, schema, body, state))
            return await handle(request)

        return read_first


async def with_linked_images(body: bytes, state: ServerState, namespace: str) -> bytes:
    """A body as if its client had sent the images behind URLs, where the operator has named their hosts."""
    if not state.image_hosts:
        return body
    fetch = part("images behind URLs", "images")
    return cast("bytes", await fetch(body, state.image_hosts, namespace, state.limits.body_bytes))


class _ReadRequest(Request):
    """A request whose body was read: FastAPI finds the schema itself where it looks for JSON."""

    def __init__(self, request: Request, body: bytes, read: RequestSchema | ValueError) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes = body
        self._read = read

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        if isinstance(self._read, ValueError):
            raise self._read
        return self._read


def body_schema(endpoint: Callable[..., Any]) -> type[RequestSchema] | None:
    """What an endpoint takes as its body."""
    kinds = get_type_hints(endpoint).values()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RequestSchema)), None)


def read_json(body: bytes | str) -> Any:
    """What a large body says; other threads have their turns meanwhile."""
    return json.loads(body, object_hook=_pass_on)


def _pass_on(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def read_body(schema: type[RequestSchema], body: bytes, state: ServerState) -> RequestSchema | ValueError:
    """The body as its schema, or why it is no JSON."""
    try:
        fields = read_json(body)
    except ValueError as error:
        return error
    if isinstance(fields, dict) and isinstance(messages := fields.get("messages"), list):
        # Before each of them is checked.
        state.check_message_count(len(messages))
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
        raise RequestValidationError(problems) from None
