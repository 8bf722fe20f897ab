"""Error format: every error in the shape of the protocol that its route belongs to."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.server.api_error import ApiError
from perdure.server.protocols.chat import errors as chat
from perdure.server.protocols.messages import errors as messages
from perdure.server.protocols.ollama import errors as ollama


def error_body(error: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """The status and body of an error at `path`."""
    if path.startswith("/v1/messages"):
        return messages.error_body(error)
    if path.startswith("/api/"):
        return ollama.error_body(error)
    return chat.error_body(error)


class ErrorResponse(Response):
    """An error, whose shape is known once its request is: middleware and routes alike give these."""

    media_type = "application/json"

    def __init__(self, error: ApiError) -> None:
        super().__init__(b"", status_code=error.status, headers=error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.status_code, shape = error_body(self._error, scope.get("path", ""))
        # Escaped: whatever text an error quotes, its answer can be sent.
        self.body = json.dumps(shape).encode()
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)
