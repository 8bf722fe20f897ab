"""Runner: answers the batches of a server in the background, oldest first, one a namespace at a time.

A line is a request that the server makes of itself, behind all that clients ask for (`flex`). Its answer is
written down once; what was being answered when a server ended is asked again by the next one. Where several
servers share a store, the one that has taken a batch answers it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from perdure import PerdureError, StoreFullError
from perdure.ext.batches import batch as batch_module
from perdure.ext.batches import files as files_module
from perdure.ext.batches.batch import BATCH, RUNNING, Batches, read_line
from perdure.spi.chat import PAYER
from perdure.spi.server import ApiError, KeyAccount, ServerState
from perdure.spi.sessions import Record

log = logging.getLogger("perdure.server")

_LOOK, _SWEEP = 5.0, 3600.0
"""Seconds between two looks for batches of other servers, and for what has expired."""
_CANCELLED = 1.0
"""Seconds between two looks whether a batch is cancelled, by another server."""
_TRIES, PAUSE, LONGEST = 4, 0.5, 60.0
"""How often a line is asked whose answer is the server's failure, and the seconds of the first and of the
longest pause between."""
_BUSY = (429, 503, 529)
"""Answers that say: ask again later. They count as no try."""
_FLEX = frozenset({"/v1/chat/completions", "/v1/responses"})


async def run_batches(state: ServerState) -> None:
    """Answer batches for as long as a server runs."""
    runner = _runners[state] = Runner(state)
    try:
        await runner.run()
    finally:
        del _runners[state]
        await runner.stop()


def runner_of(state: ServerState) -> Runner:
    """That of a server; 503 where it has none, as in a program that serves the application by itself."""
    if (runner := _runners.get(state)) is None:
        raise ApiError(503, "this server answers no batches: `perdure serve` does", code="no_batches")
    return runner


class Runner:
    """Lives in the event loop."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._store = state.sessions.store
        self._work = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        """By namespace."""
        self.stop_lines: dict[str, asyncio.Event] = {}
        """Of batches that are being answered here, by their ids: set where no more lines are wanted."""
        self._lines: asyncio.Semaphore | None = None
        self._over: set[str] = set()
        """Batches that are known to be over: they are not read again."""

    def wake(self) -> None:
        """There is a batch, or one is cancelled."""
        self._work.set()

    def cancelled(self, batch_id: str) -> None:
        if (stop := self.stop_lines.get(batch_id)) is not None:
            stop.set()

    async def run(self) -> None:
        swept = -_SWEEP
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            if loop.time() - swept >= _SWEEP:
                swept = loop.time()
                await self.state.work(self._sweep)
            for namespace, batch in await self.state.call(self._waiting):
                if namespace not in self._running:
                    task = asyncio.create_task(self._carry_on(namespace, batch))
                    self._running[namespace] = task
                    task.add_done_callback(functools.partial(self._ended, namespace))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK if self._store.is_shared else _SWEEP):
                    await self._work.wait()

    async def stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, namespace: str, task: asyncio.Task[None]) -> None:
        del self._running[namespace]
        if not task.cancelled():
            # What else the namespace has.
            self._work.set()

    def _sweep(self) -> None:
        now = time.time()
        batch_module.sweep(self._store, now)
        files_module.sweep(self._store, now)

    def _waiting(self) -> list[tuple[str, Record]]:
        """The oldest batch of each namespace that is not over."""
        found: dict[str, Record] = {}
        for namespace, name in self._store.expired(time.time() + 1, limit=2**31 - 1, kind=BATCH):
            if name in self._over:
                continue
            with suppress(PerdureError):
                record = self._store.record(namespace, BATCH, name)
                before = found.get(namespace)
                older = before is None or record.number < before.number
                if record.origin["status"] not in RUNNING:
                    self._over.add(name)
                elif older and name not in self.stop_lines:
                    found[namespace] = record
        return list(found.items())

    async def _carry_on(self, namespace: str, batch: Record) -> None:
        if not await self.state.call(self._store.take, batch):
            # Another server has it.
            await asyncio.sleep(_LOOK)
            return
        self.stop_lines[batch.name] = asyncio.Event()
        try:
            await _Answering(self, namespace, await self._again(namespace, batch)).run()
        except PerdureError as error:
            # Of the store: what is written down stays, and it is tried again.
            log.warning("batch %s waits: %s", batch.name, error)
            await asyncio.sleep(_LOOK)
        except Exception:
            log.exception("batch %s waits", batch.name)
            await asyncio.sleep(_LOOK)
        finally:
            self.stop_lines.pop(batch.name, None)
            await asyncio.shield(self.state.call(self._store.release, batch))

    async def _again(self, namespace: str, batch: Record) -> Record:
        """As it is now that it is taken."""
        return await self.state.call(Batches(self._store, namespace).get, batch.name)

    @property
    def lines(self) -> asyncio.Semaphore:
        """How many lines are asked at once: no more than half of the engine's slots, but one."""
        if self._lines is None:
            runtime = self.state.models.first.runtime
            slots = runtime.slots if runtime.backend.is_known else 1
            self._lines = asyncio.Semaphore(max(1, slots // 2))
        return self._lines


_runners: WeakKeyDictionary[ServerState, Runner] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _BatchEnd:
    """Why no more lines are asked."""

    status: str
    code: str
    message: str


class _Answering:
    """One batch, while it is answered."""

    def __init__(self, runner: Runner, namespace: str, batch: Record) -> None:
        self._runner = runner
        self._state = runner.state
        self._namespace = namespace
        self._batch = batch
        self._batches = Batches(self._state.sessions.store, namespace)
        self._stop = runner.stop_lines[batch.name]
        self._counts = {"completed": 0, "failed": 0}
        self._problem: _BatchEnd | None = None
        self._asked = 0.0
        self._noting = asyncio.Lock()
        key = None if batch.origin["key"] is None else self._state.keys.live(batch.origin["key"])
        self._account = None if key is None else KeyAccount(key, self._state.keys)

    async def run(self) -> None:
        if self._batch.origin["status"] == "validating":
            try:
                self._batch = await self._state.work(self._batches.begin, self._batch, self._state.limits)
            except (ApiError, StoreFullError) as error:
                told = {"code": "not_begun", "message": str(error), "param": None, "line": None}
                await self._state.call(self._batches.fail, self._batch, [told])
                return
        if self._batch.origin["status"] not in RUNNING:
            return
        PAYER.set(self._account)
        if self._batch.origin["status"] == "in_progress":
            async with asyncio.TaskGroup() as group:
                try:
                    await self._ask_all(group)
                except ApiError as error:
                    self._problem = _BatchEnd("failed", "input_file_gone", f"the file ended early: {error}")
        await self._finish()

    async def _ask_all(self, group: asyncio.TaskGroup) -> None:
        """Ask every line that has no answer."""
        lines = self._unanswered()
        while (ended := await self._ended()) is None:
            found = await self._state.call(next, lines, None)
            if found is None:
                return
            await self._runner.lines.acquire()
            group.create_task(self._line(*found))
        self._problem = ended

    async def _finish(self) -> None:
        ended = self._problem
        then = str(self._batch.origin.get("then", "completed")) if ended is None else ended.status
        if ended is not None:
            await self._state.work(self._give_up, ended)
            if then == "failed":
                told = {"code": ended.code, "message": ended.message, "param": None, "line": None}
                self._batch = await self._state.call(
                    lambda: self._batches.note(self._batch, errors={"object": "list", "data": [told]})
                )
        counts = await self._state.work(self._count)
        await self._state.work(self._batches.finish, self._batch, then, counts)
        log.info("batch %s is %s", self._batch.name, then, extra={"fields": {"namespace": self._namespace}})

    def _unanswered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._read():
            ok = self._batches.has_answer(self._batch, number)
            if ok is None:
                yield number, line
            else:
                self._counts["completed" if ok else "failed"] += 1

    def _read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        file = self._batches.files.get(self._batch.origin["input_file_id"])
        limits = self._state.limits
        for number, text in enumerate(self._batches.files.lines(file, limits.body_bytes)):
            yield number, read_line(text, self._batch.origin["endpoint"], limits)

    def _count(self) -> dict[str, int]:
        """What is written down, by this server and by those before it."""
        total = int(self._batch.origin["counts"]["total"])
        found = [self._batches.has_answer(self._batch, number) for number in range(total)]
        return {"total": total, "completed": found.count(True), "failed": found.count(False)}

    def _give_up(self, ended: _BatchEnd) -> None:
        """Say of every line without an answer why there will be none."""
        error = {"code": ended.code, "message": ended.message}
        # Where the file is gone, or the store is full, the counts alone say so.
        with suppress(ApiError, StoreFullError):
            for number, line in self._unanswered():
                self._batches.answer(self._batch, number, _shown(line, None, error), ok=False)

    async def _ended(self) -> _BatchEnd | None:
        """Why no further line is asked, if none is."""
        if self._problem is not None:
            return self._problem
        now = time.time()
        if now >= self._batch.origin["expires_at"]:
            return _BatchEnd("expired", "batch_expired", "the batch was not answered within its 24 hours")
        if self._state.keys.required and (self._account is None or not self._account.is_good):
            return _BatchEnd("failed", "key_withdrawn", "the key of the batch was withdrawn, or has expired")
        if now - self._asked >= _CANCELLED:
            self._asked = now
            if await self._state.call(self._batches.is_cancelled, self._batch):
                self._stop.set()
        if self._stop.is_set():
            return _BatchEnd("cancelled", "batch_cancelled", "the batch was cancelled")
        return None

    async def _note_counts(self) -> None:
        async with self._noting:
            counts = {**self._batch.origin["counts"], **self._counts}
            self._batch = await self._state.call(self._batches.note, self._batch, counts=counts)

    async def _line(self, number: int, line: dict[str, Any]) -> None:
        """Ask one line until it has an answer, and keep that."""
        try:
            answer = await self._answer(number, line)
            if answer is None:
                return
            status, request_id, body = answer
            response = {"status_code": status, "request_id": request_id, "body": body}
            shown, ok = _shown(line, response, None), status == 200
            await self._state.call(self._batches.answer, self._batch, number, shown, ok=ok)
            self._counts["completed" if ok else "failed"] += 1
            await self._note_counts()
        except PerdureError as error:
            # The store takes no more: of the namespace's quota, or at all.
            self._problem = _BatchEnd("failed", "not_kept", f"an answer could not be kept: {error}")
        finally:
            self._runner.lines.release()

    async def _answer(self, number: int, line: dict[str, Any]) -> tuple[int, str, Any] | None:
        """The status, the id and the body of the answer to a line; None where the batch ended meanwhile."""
        path, body = self._batch.origin["endpoint"], line["body"]
        if path in _FLEX:
            body = {"service_tier": "flex", **body}
        sent = json.dumps(body).encode()
        tries, pause = 0, PAUSE
        while await self._ended() is None:
            if self._account is not None and (over := await self._account.admit()) is not None:
                await self._pause(over.retry_after)
                continue
            request_id = f"{self._batch.name}-{number:06}"
            status, answer = await self._ask(path, sent, request_id)
            tries += status not in _BUSY
            if (status < 500 and status not in _BUSY) or tries >= _TRIES:
                try:
                    return status, request_id, json.loads(answer)
                except ValueError:
                    return status, request_id, answer.decode("utf-8", "replace")
            await self._pause(pause)
            pause = min(2 * pause, LONGEST)
        return None

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than the batch is wanted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, LONGEST)):
                await self._stop.wait()

    async def _ask(self, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        """The answer to a request that the server makes of itself."""
        notes = {"namespace": self._namespace} if self._account is not None else {}
        headers = {"content-type": "application/json", "user-agent": "batch", "x-request-id": request_id}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "state": {"namespace": self._namespace, "account": self._account, "notes": notes},
        }
        status, parts = 500, []
        left: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Mapping[str, Any]:
            return whole.pop() if whole else await left

        async def send(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            else:
                parts.append(message.get("body", b""))

        try:
            with self._state.in_flight.admit(self._state.limits.requests):
                await self._state.routes(scope, receive, send)  # type: ignore[arg-type]
        except ApiError as error:
            return error.status, json.dumps(error.body).encode()
        return status, b"".join(parts)


def _shown(
    line: Mapping[str, Any], response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line["custom_id"],
        "response": response,
        "error": error,
    }
