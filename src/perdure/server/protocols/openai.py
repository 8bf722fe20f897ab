"""Cache marks in OpenAI's protocols: breakpoints on parts of messages, and a key for the whole prompt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from perdure.decode.request import KeptPrefix
from perdure.errors import ContextOverflow, InvalidInputError
from perdure.server.core.api_error import invalid
from perdure.server.core.app_state import AppState
from perdure.server.core.schemas import RequestSchema

BREAKPOINT = "prompt_cache_breakpoint"
MARKS = 4
"""Of one request, the one behind its last message included: the latest count."""
_SECONDS = 1800.0
"""OpenAI knows one time alone, of 30 minutes."""


class PromptCacheOptions(RequestSchema):
    mode: Literal["implicit", "explicit"] = "implicit"
    """Whether there is a mark behind the last message too."""
    ttl: str = Field("30m", max_length=16)
    """Taken: what is marked is kept for 30 minutes."""


def has_breakpoint(content: Any) -> bool:
    """Whether a part of a message is marked."""
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get(BREAKPOINT) is not None for part in content
    )


def cache_marks(
    befores: Sequence[int], total: int, *, key: str | None, options: PromptCacheOptions | None
) -> list[KeptPrefix]:
    """The marks of a request of `total` messages; `befores` are the messages up to each breakpoint.

    Who sends a key, or options, has its prompt kept: by a key the latest one that came with it.
    """
    implicit = (key is not None or options is not None) and (options is None or options.mode == "implicit")
    latest = sorted(befores)[-(MARKS - implicit) :]
    marks = [KeptPrefix(after=total - before, seconds=_SECONDS) for before in latest]
    return [*marks, KeptPrefix(after=0, seconds=_SECONDS, key=key or "")] if implicit else marks


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


# Answer head: what all chunks and answers of one request say alike.


class AnswerHead:
    """The id, time and model of one answer, whole or in chunks."""

    prefix: str
    """Of the id."""
    chunk_object: str

    def __init__(self, app_state: AppState, name: str = "", created: int | None = None) -> None:
        """With `name` and `created`, those of an answer that is made again."""
        self._app_state = app_state
        self.common: dict[str, Any] = {
            "id": name or new_id(self.prefix),
            "created": int(time.time()) if created is None else created,
            "model": app_state.name,
            "system_fingerprint": app_state.fingerprint,
        }

    def chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk as JSON, with further fields."""
        return {**self.common, "object": self.chunk_object, "choices": choices, **more}

    def piece(self, token: int) -> bytes:
        """The bytes of a token, control tokens written out."""
        return self._app_state.runtime.model.piece(token, special=True)


def fill_in(
    app_state: AppState, before: str, after: str, files: Sequence[tuple[str, str]] = (), param: str = "suffix"
) -> list[int]:
    """The prompt that fills in between two texts; `param` is the field that asks for it."""
    try:
        return list(app_state.runtime.infill_prompt(before, after, files=files))
    except ContextOverflow:
        raise
    except InvalidInputError as error:
        raise invalid(param, str(error), code="unsupported_parameter") from None


def tier_options(service_tier: str | None) -> dict[str, Any]:
    """OpenAI's service tiers: `flex` waits while others are served."""
    return {"priority": "background"} if service_tier == "flex" else {}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what is all but impossible."""
    return max(logprob, -9999.0)
