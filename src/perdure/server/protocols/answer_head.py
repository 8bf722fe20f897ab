"""Answer head: what all chunks and answers of one request say alike."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from perdure.server.core.app_state import AppState


class AnswerHead:
    """The id, time and model of one answer, whole or in chunks."""

    prefix: str
    """Of the id."""
    chunk_object: str

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self.common: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": app_state.name,
            "system_fingerprint": app_state.fingerprint,
        }

    def chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk as JSON, with further fields."""
        return {**self.common, "object": self.chunk_object, "choices": choices, **more}

    def piece(self, token: int) -> bytes:
        """The bytes of a token, control tokens written out."""
        return self._app_state.runtime.model.piece(token, special=True)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what is all but impossible."""
    return max(logprob, -9999.0)
