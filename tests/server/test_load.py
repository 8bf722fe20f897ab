"""Many clients at once, beside all that a server does besides, and an engine that is killed now and then."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from perdure.cli.store import session_folder
from perdure.sessions.store.registry import back_up
from server.live_server import PATIENCE, live_server, opened
from server.test_deaths import kill

CLIENTS = int(os.environ.get("PERDURE_LOAD_CLIENTS", "200"))
SECONDS = float(os.environ.get("PERDURE_LOAD_SECONDS", "300"))


class Load:
    """What the clients did, and what they were told."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ends = time.monotonic() + SECONDS
        self.acknowledged: dict[str, list[str]] = {}
        self.health: list[float] = []
        self.counts: Counter[str] = Counter()

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.ends

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=PATIENCE * 5, trust_env=False)

    async def talk(self, number: int) -> None:
        """Turn after turn in one session, each streamed; some clients leave in the middle of one."""
        name = f"client-{number}"
        said = self.acknowledged[name] = []
        async with self.client() as client:
            assert (await client.post("/v1/sessions", json={"name": name})).status_code == 201
            at = 0
            while self.goes_on:
                at += 1
                text = f"{name} says {at}"
                body = {"message": text, "max_tokens": 8, "stream": True, "overflow": "drop_oldest"}
                leaves = (number + at) % 7 == 0
                async with client.stream("POST", f"/v1/sessions/{name}/turns", json=body) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        assert answer.status_code in (409, 429, 503), answer.text
                        self.counts[str(answer.status_code)] += 1
                        continue
                    kept = False
                    async for line in answer.aiter_lines():
                        if leaves and line.startswith("data: "):
                            self.counts["left"] += 1
                            break
                        kept = kept or _is_kept(line)
                    if kept:
                        said.append(text)
                        self.counts["turns"] += 1

    async def ask(self, path: str, allowed: tuple[int, ...] = (200,), **body: object) -> None:
        """The same request again and again."""
        async with self.client() as client:
            while self.goes_on:
                answer = await (client.post(path, json=body) if body else client.get(path))
                assert answer.status_code in allowed, (path, answer.text)
                self.counts[path.partition("?")[0]] += 1

    async def watch(self) -> None:
        async with self.client() as client:
            while self.goes_on:
                began = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                self.health.append(time.monotonic() - began)
                await asyncio.sleep(0.1)


def _is_kept(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    return bool((json.loads(line[6:]).get("perdure") or {}).get("kept"))


@pytest.mark.soak
def test_many_clients_beside_searches_backups_exports_compactions_and_kills(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing that was acknowledged is lost. How long `/health` took is printed, not asserted."""
    settings = {"n_ctx": 512, "slots": 8, "threads": 1, "queue": 2 * CLIENTS}
    with (
        opened(zoo_path("llama"), store=tmp_path / "store", isolated=True, **settings) as rt,
        live_server(rt) as server,
    ):
        load = Load(server.url)

        async def backups() -> None:
            number = 0
            while load.goes_on:
                number += 1
                await asyncio.to_thread(
                    back_up, session_folder(tmp_path / "store"), tmp_path / f"backup-{number}"
                )
                (tmp_path / f"backup-{number}").unlink()
                load.counts["backups"] += 1

        async def kills() -> None:
            killed: int | None = None
            while load.goes_on:
                await asyncio.sleep(min(15.0, SECONDS / 4))
                killed = await asyncio.to_thread(kill, rt, killed)
                load.counts["kills"] += 1

        async def everything() -> None:
            busy = (200, 404, 409, 429, 500, 503, 504)
            await asyncio.gather(
                *(load.talk(number) for number in range(CLIENTS)),
                load.ask("/v1/sessions?text=says"),
                load.ask("/v1/sessions/client-0/export?state=false", busy),
                load.ask("/v1/responses/compact", busy, input="The sea is wide."),
                load.watch(),
                backups(),
                kills(),
            )

        asyncio.run(everything())
        for name, texts in load.acknowledged.items():
            turns = rt.session(name).history()
            said = {message.content for turn in turns for message in turn.messages}
            assert said >= set(texts)
        health = sorted(load.health)
        print(
            f"{CLIENTS} clients for {SECONDS:g} s: {dict(load.counts)}; /health took "
            f"{health[len(health) // 2]:.3f} s in the middle and {health[-1]:.3f} s at most"
        )
        assert load.counts["turns"]
        assert load.counts["kills"]
