"""Patience: what others wait for while a server reads a long prompt of 30,000 tokens.

`/v1/machine`, `/v1/cache` and `/v1/requests` (which `perdure status` and the page ask), the first token of a
short request, and cancelling the long one: until its stream ends. Each is the worst of all that were tried,
in the first seconds of the reading and again late in it, where a token takes longest. The late part begins
when three quarters are read, or after some minutes: its figures say how much was read by then.
Two threads, one process that serves and one that computes, as `perdure serve` has it.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_most
from bench.machine import Watch
from bench.processes.servers import CHAT, THREADS, launched

_LONG = "The lighthouse keeper wrote down the weather, the ships and the birds of the day. "
_LOOKS = ("/v1/machine", "/v1/cache", "/v1/requests")
_LATE = 0.75
"""The share of the prompt that is read when it is looked at again."""


def reading(run: Run) -> Iterator[Figure]:
    tokens, looks, shorts = run.pick((30_000, 30, 5), (24_000, 6, 1))
    # All of it within eight minutes: a slow machine has not read three quarters by then, and says so.
    patience = run.pick(300.0, 60.0)
    with ExitStack() as held:
        captured_errors: Any = held.enter_context(tempfile.TemporaryFile("w+"))
        options = ("--ctx", str(tokens + 2048), "--slots", "2", "--threads", str(THREADS), "--no-store")
        url = launched(held, captured_errors, _model(run, held), *options)
        client = held.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=600))
        _first_token(client, "Hello.")
        counted = client.post("/tokenize", json={"content": _LONG * 16}).raise_for_status().json()
        each = counted["count"] / 16
        with Watch() as watch, _LongPrompt(url, _LONG * int(tokens / each)) as long:
            parts = [_looked(client, looks, shorts, long)]
            long.until(_LATE, patience)
            parts.append(_looked(client, looks, shorts, long))
            began = time.perf_counter()
            client.post(f"/v1/requests/{long.id}/cancel", json={}).raise_for_status()
            long.ended.wait(600)
            cancelled = time.perf_counter() - began
        figures = [(f"cancelling the long one at {parts[-1].read:,} tokens", cancelled, 0.5)]
        for part in parts:
            figures += [
                (f"slots, queue and cache told at {part.read:,} tokens, worst", part.looked, 0.2),
                (f"first token of a short request at {part.read:,} tokens, worst", part.first, 3.0),
            ]
        for name, value, limit in figures:
            yield Figure(
                name=f"{name}, while {tokens:,} tokens are read",
                against="what a user bears",
                unit="s",
                gauge=Gauge.RATE,
                pairs=Pairs((value,), (limit,)),
                target=at_most(limit, "s"),
                machine=watch.machine,
            )


@dataclass(frozen=True)
class _Part:
    """What others waited for at one place of the reading, the worst each."""

    read: int
    """Tokens of the long prompt by then."""
    looked: float
    first: float


def _looked(client: httpx.Client, looks: int, shorts: int, long: _LongPrompt) -> _Part:
    read = long.read
    looked = [_seconds(client, path) for _ in range(looks // len(_LOOKS)) for path in _LOOKS]
    firsts = [_first_token(client, f"Hello, number {number}, at {read}.") for number in range(shorts)]
    if long.ended.is_set():
        raise RuntimeError("the long prompt was read before all was measured: take a longer one")
    return _Part(read, max(looked), max(firsts))


class _LongPrompt:
    """A streamed request in a thread of its own, from before its reading until it ends."""

    def __init__(self, url: str, text: str) -> None:
        self.id = "bench-long-prompt"
        self.ended = threading.Event()
        self.read = self.total = 0
        """Tokens of the prompt that are read, and all."""
        self._started = threading.Event()
        self._url, self._text = url, text
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _LongPrompt:
        self._thread.start()
        # Whoever streams is told how far the prompt is read, so there is something before the first token.
        self._started.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        """The server ends soon, and its stream with it."""

    def until(self, share: float, seconds: float) -> None:
        """Wait until that share of the prompt is read, so many seconds at most."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and not self.ended.is_set():
            if self.total and self.read >= share * self.total:
                return
            self.ended.wait(0.2)

    def _note(self, line: str) -> None:
        """How far the prompt is read, where a line of the stream says so."""
        found = re.search(r'"prompt_progress": ?(\{[^}]*\})', line)
        if found is not None:
            progress = json.loads(found[1])
            self.read, self.total = int(progress["processed"]), int(progress["total"])

    def _run(self) -> None:
        body = {
            "messages": [{"role": "user", "content": self._text}],
            "max_tokens": 8,
            "stream": True,
            "return_progress": True,
        }
        try:
            with (
                httpx.Client(trust_env=False, timeout=600) as client,
                client.stream(
                    "POST", f"{self._url}{CHAT}", json=body, headers={"x-request-id": self.id}
                ) as answer,
            ):
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self._note(line)
                    self._started.set()
        finally:
            self._started.set()
            self.ended.set()


def _seconds(client: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    client.get(path).raise_for_status()
    return time.perf_counter() - began


def _first_token(client: httpx.Client, text: str) -> float:
    """Seconds to the first token of a short request; all of it is read."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    began, first = time.perf_counter(), None
    with client.stream("POST", CHAT, json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if first is None and line.startswith("data: {") and _has_text(json.loads(line[6:])):
                first = time.perf_counter() - began
    return time.perf_counter() - began if first is None else first


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk.get("choices", ()))


def _model(run: Run, held: ExitStack) -> str:
    """The default model; for a quick run a toy of the zoo."""
    if not run.quick:
        return model_path()
    from bench.agents.peer import toy_model

    return toy_model(Path(held.enter_context(tempfile.TemporaryDirectory())))


main = Bench("patience", [reading])
