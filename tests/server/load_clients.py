"""Clients of the load test, in a process of their own.

`python -m server.load_clients URL FIRST COUNT SECONDS KEYS`, in the folder tests. Clients have the
keys in the file KEYS, one a line, in turn. Says "ready" once all have a session, and at last prints what was
acknowledged to each, and what they met, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 300.0
OVERFLOW = {"overflow": "drop_oldest"}
"""A context of 512 tokens is full after some thirty turns."""


class Clients:
    """Turn after turn in one session each, streamed; some leave in the middle of a turn."""

    def __init__(self, url: str, seconds: float, secrets: Sequence[str]) -> None:
        self._url = url
        self._secrets = secrets
        self._seconds = seconds
        self._ends = 0.0
        self.acknowledged: dict[str, list[str]] = {}
        self.counts: Counter[str] = Counter()

    async def run(self, numbers: range) -> None:
        await asyncio.gather(*(self._open(number) for number in numbers))
        print("ready", flush=True)
        self._ends = time.monotonic() + self._seconds
        await asyncio.gather(*(self._talk(number) for number in numbers))

    def _client(self, number: int) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self._secrets[number % len(self._secrets)]}"}
        return httpx.AsyncClient(base_url=self._url, headers=headers, timeout=PATIENCE, trust_env=False)

    async def _open(self, number: int) -> None:
        async with self._client(number) as client:
            answer = await client.post("/v1/sessions", json={"name": f"client-{number}"})
            assert answer.status_code == 201, answer.text

    async def _talk(self, number: int) -> None:
        name = f"client-{number}"
        said = self.acknowledged[name] = []
        async with self._client(number) as client:
            at = 0
            while time.monotonic() < self._ends:
                at += 1
                text = f"{name} says {at}"
                body = {"message": text, "max_tokens": 8, "stream": True, "perdure": OVERFLOW}
                if await self._say(client, name, body, leaves=(number + at) % 7 == 0):
                    said.append(text)
                    self.counts["turns"] += 1

    async def _say(self, client: httpx.AsyncClient, name: str, body: dict[str, Any], *, leaves: bool) -> bool:
        kept = False
        async with client.stream("POST", f"/v1/sessions/{name}/turns", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                assert answer.status_code in (409, 429, 503), answer.text
                self.counts[str(answer.status_code)] += 1
                return False
            async for line in answer.aiter_lines():
                if leaves and line.startswith("data: "):
                    self.counts["left"] += 1
                    return False
                if line.startswith("data: {"):
                    kept = kept or bool((json.loads(line[6:]).get("perdure") or {}).get("kept"))
        return kept


def main() -> None:
    url, first, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    clients = Clients(url, seconds, Path(sys.argv[5]).read_text().split())
    asyncio.run(clients.run(range(first, first + count)))
    print(json.dumps({"acknowledged": clients.acknowledged, "counts": clients.counts}))


if __name__ == "__main__":
    main()
