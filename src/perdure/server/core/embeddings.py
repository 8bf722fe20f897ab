"""Embeddings for a client: vectors of its texts, paid for as they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request

from perdure.decode.embedding import Embeddings
from perdure.errors import InvalidInputError
from perdure.server.core.api_error import ApiError, deadline, stopping
from perdure.server.core.app_state import AppState, Caller
from perdure.server.core.follow import while_connected

_BAD = "invalid_value"


async def embed(
    texts: Sequence[str] | Sequence[list[int]],
    request: Request,
    app_state: AppState,
    caller: Caller,
    *,
    param: str = "input",
    limit: int = 2048,
) -> Embeddings:
    """Vectors of texts, unless the client of `request` leaves or they take too long: then the tokens that
    were read so far are paid for. `param` is the field that has the texts."""
    if not texts or not all(texts):
        raise _invalid(param, "give at least one text, and none that is empty")
    if len(texts) > limit:
        raise _invalid(param, f"{len(texts)} texts, {limit} are allowed")
    try:
        work = await app_state.call(app_state.runtime.submit_embed, texts)
    except InvalidInputError as error:
        raise _invalid(param, str(error)) from None
    app_state.running.add(work)
    if app_state.stopping:
        work.cancel()
    seconds = app_state.limits.request_seconds
    try:
        async with asyncio.timeout(seconds):
            return await while_connected(request, asyncio.wrap_future(work))
    except TimeoutError:
        raise deadline(seconds) from None
    except asyncio.CancelledError:
        if app_state.stopping:
            raise stopping() from None
        raise
    except InvalidInputError as error:
        raise _invalid(param, str(error)) from None
    finally:
        work.cancel()
        caller.charge(work.tokens_read)
        app_state.metrics.embedded(work.tokens_read)


async def check_width(width: int | None, app_state: AppState) -> None:
    """Refuse vectors of another width than the model's."""
    if width is None:
        return
    own = await app_state.call(lambda: app_state.runtime.embedding_width)
    if width != own:
        raise _invalid(
            "dimensions", f"the vectors of this model have {own}, {width} were asked for; leave it out"
        )


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}", param=param, code=_BAD)
