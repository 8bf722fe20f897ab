"""Errors in Ollama's shape: a text."""

from __future__ import annotations

from typing import Any

from perdure.server.core.api_error import ApiError
from perdure.server.core.schemas import ResponseSchema


class OllamaErrorAnswer(ResponseSchema):
    """What every error of Ollama's routes looks like."""

    error: str


def error_body(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error."""
    status = 400 if error.code == "context_length_exceeded" else error.status
    return status, {"error": str(error)}
