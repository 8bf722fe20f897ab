"""Error format: every error in the shape of the protocol that its route belongs to."""

from __future__ import annotations

from typing import Any

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
