"""Many clients at once, for long."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server.house import PATIENCE, House, check_freed, hello, house, opened

CHAT = "/v1/chat/completions"


async def crowd(server: House, clients: int, seconds: float) -> dict[str, int]:
    """Clients that stream, leave early, or ask for too much: how often each came out as it should."""
    counts = {"whole": 0, "left": 0, "refused": 0}
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=clients)

    async def talk(number: int, client: httpx.AsyncClient) -> None:
        chance = random.Random(number)
        turn = 0
        while turn == 0 or time.monotonic() < until:
            turn += 1
            words = f"Client {number % 20} says {chance.randrange(5)}"
            body = hello(messages=[{"role": "user", "content": words}], max_tokens=chance.randrange(1, 24))
            leaves = chance.random() < 0.1
            async with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
                if response.status_code == 429:
                    counts["refused"] += 1
                    assert response.headers["retry-after"]
                    continue
                assert response.status_code == 200
                last = ""
                async for line in response.aiter_lines():
                    if line:
                        last = line
                    if leaves:
                        break
                if leaves:
                    counts["left"] += 1
                else:
                    assert last == "data: [DONE]"
                    counts["whole"] += 1

    async with httpx.AsyncClient(
        base_url=server.url, limits=limits, timeout=PATIENCE * 10, trust_env=False
    ) as client:
        await asyncio.gather(*(talk(number, client) for number in range(clients)))
    return counts


def test_a_crowd_is_served_and_leaves_nothing_behind(zoo_path: Callable[[str], Path]) -> None:
    with opened(zoo_path("llama"), threads=1, slots=4, isolated=True) as rt, house(rt) as server:
        counts = asyncio.run(crowd(server, 40, 0))
        assert counts["whole"] + counts["left"] + counts["refused"] == 40
        assert counts["whole"] > 20
        check_freed(rt)


@pytest.mark.soak
def test_two_hundred_clients_for_five_minutes(zoo_path: Callable[[str], Path]) -> None:
    with opened(zoo_path("llama"), threads=1, slots=8, isolated=True) as rt, house(rt) as server:
        counts = asyncio.run(crowd(server, 200, 300))
        assert counts["whole"] > 200
        check_freed(rt)
        with server.client() as client:
            assert client.get("/ready").json()["restarts"] == 0
