"""Requests that come at once begin a few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from perdure.server.core import middleware
from perdure.server.core.middleware import Starts

COUNT = 50


def begun_in(paths: list[str], *, left: frozenset[int] = frozenset()) -> dict[int, int]:
    """The turn of the loop that each request began in. Those in `left` are cancelled while they wait."""
    turns: dict[int, int] = {}

    async def everything() -> None:
        turn = 0

        def count(loop: asyncio.AbstractEventLoop) -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count, loop)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            turns[scope["number"]] = turn

        starts = Starts(app)
        tasks = [
            asyncio.ensure_future(starts({"path": path, "number": number}, None, None))  # type: ignore[arg-type]
            for number, path in enumerate(paths)
        ]
        asyncio.get_running_loop().call_soon(count, asyncio.get_running_loop())
        await asyncio.sleep(0)
        for number in left:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(everything())
    return turns


def test_a_few_begin_in_each_turn_of_the_loop_in_their_order() -> None:
    turns = begun_in(["/v1/sessions"] * COUNT)
    assert list(turns) == list(range(COUNT))
    assert max(Counter(turns.values()).values()) == middleware.STARTS


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_who_asks_how_the_server_is_does_not_wait_for_them(path: str) -> None:
    turns = begun_in([*["/v1/sessions"] * COUNT, path])
    assert turns[COUNT] == turns[0] < turns[COUNT - 1]


def test_those_that_leave_while_they_wait_hold_nobody_up() -> None:
    left = frozenset(range(10, 40))
    turns = begun_in(["/v1/sessions"] * COUNT, left=left)
    assert turns.keys() == set(range(COUNT)) - left
    assert max(turns.values()) <= COUNT / middleware.STARTS
