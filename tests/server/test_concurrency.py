"""Many clients at once, for long."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from perdure.ext.workers.remote import RemoteBackend
from server.live_server import PATIENCE, LiveServer, check_freed, hello, live_server, opened

CHAT = "/v1/chat/completions"


async def crowd(server: LiveServer, clients: int, seconds: float) -> dict[str, int]:
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
                    later = int(response.headers["retry-after"])
                    if time.monotonic() < until:
                        await asyncio.sleep(later)
                    continue
                assert response.status_code == 200, await response.aread()
                last = ""
                async for line in response.aiter_lines():
                    if line:
                        last = line
                    assert not line.startswith('data: {"error"'), line
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
    with opened(zoo_path("llama"), threads=1, slots=4, isolated=True) as rt, live_server(rt) as server:
        counts = asyncio.run(crowd(server, 40, 0))
        assert counts["whole"] + counts["left"] + counts["refused"] == 40
        assert counts["whole"] > 20
        check_freed(rt)


@pytest.mark.soak
def test_two_hundred_clients_for_five_minutes(zoo_path: Callable[[str], Path]) -> None:
    with (
        opened(zoo_path("llama"), threads=1, slots=8, queue=16, isolated=True) as rt,
        live_server(rt) as server,
    ):
        assert isinstance(rt.backend, RemoteBackend)
        engine = rt.backend.health().pid
        assert engine is not None
        with Scales(os.getpid(), engine) as scales:
            counts = asyncio.run(crowd(server, 200, 300))
        print(f"{counts}; resident MiB of server and clients, of the engine: {scales}")
        assert counts["whole"] > 200
        assert counts["refused"] > 0
        check_freed(rt)
        with server.client() as client:
            assert client.get("/ready").json()["restarts"] == 0
        for before, after in scales.halves():
            assert after < before * 1.05 + 8


class Scales:
    """Weighs processes every second while it is open."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._weights: list[list[float]] = [[] for _ in pids]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._weigh)

    def __enter__(self) -> Scales:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _weigh(self) -> None:
        while not self._over.wait(1):
            for process, weights in zip(self._processes, self._weights, strict=True):
                weights.append(process.memory_info().rss / (1 << 20))

    def halves(self) -> list[tuple[float, float]]:
        """The middles of the second quarter and of the last, in MiB: in the first, caches fill."""
        quarters = [
            (each[len(each) // 4 : len(each) // 2], each[-len(each) // 4 :]) for each in self._weights
        ]
        return [(statistics.median(before), statistics.median(after)) for before, after in quarters]

    def __str__(self) -> str:
        shown = [
            f"at first {each[0]:.0f}, second quarter {before:.0f}, last {after:.0f}, most {max(each):.0f}"
            for each, (before, after) in zip(self._weights, self.halves(), strict=True)
        ]
        return "; ".join(shown)
