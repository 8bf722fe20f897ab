"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from perdure.server.api_error import ApiError


def error_body(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error."""
    return error.status, error.body
