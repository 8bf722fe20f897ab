"""Nothing waits on the event loop: the debug mode that every test of the server runs in."""

from __future__ import annotations

import asyncio
import difflib
import gc
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from perdure.checks import WaitInEventLoopError, check_may_wait, never_waiting
from perdure.ext.messages.requests import MessagesRequest
from perdure.server.app import build
from perdure.server.core import body_route
from perdure.server.core.body_route import LARGE
from perdure.server.core.schemas import RequestSchema
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HELD, LoopWatch
from perdure.server.protocols.chat import ChatRequest
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, hello, live_server, opened


def test_a_store_that_is_touched_on_the_event_loop_is_refused_x7() -> None:
    """Planted: what a route would do that forgot the thread."""
    with opened(ToyModel()) as runtime:

        async def touch() -> None:
            with never_waiting() as refused:
                with pytest.raises(WaitInEventLoopError, match="store"):
                    runtime.sessions.list("")
                assert refused == ["a store was touched"]
                # As routes do it.
                await asyncio.to_thread(runtime.sessions.list, "")
            runtime.sessions.list("")

        asyncio.run(touch())


def test_the_server_of_a_test_is_watched() -> None:
    with opened(ToyModel()) as runtime, live_server(runtime) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        assert isinstance(server.http_server.loop_watch, LoopWatch)
        assert any(thread.name == "perdure-loop-watch" for thread in threading.enumerate())


def test_a_loop_that_is_held_is_told_with_the_line_that_holds_it() -> None:
    """Planted: a callback that computes until it is noticed."""

    async def run() -> LoopWatch:
        watch = LoopWatch(asyncio.get_running_loop())
        until = time.monotonic() + PATIENCE

        def compute() -> None:
            while not watch.held and time.monotonic() < until:
                sum(range(1000))

        with watch.watching():
            asyncio.get_running_loop().call_soon(compute)
            while not watch.held and time.monotonic() < until:
                await asyncio.sleep(0)
        return watch

    watch = asyncio.run(run())
    assert len(watch.held) == 1
    assert "in compute" in watch.held[0]


def test_garbage_collection_is_not_taken_for_a_held_loop() -> None:
    async def run() -> LoopWatch:
        watch = LoopWatch(asyncio.get_running_loop())
        with watch.watching():
            before = time.thread_time()
            while time.thread_time() - before < 4 * HELD:
                gc.collect()
            await asyncio.sleep(0)
        return watch

    assert asyncio.run(run()).held == []


@pytest.mark.parametrize(
    "body",
    [
        hello(unknown="x" * LARGE),
        hello(max_tokens="many", unknown="x" * LARGE),
        hello(messages=[{"role": "user", "content": "x"}] * 5000),
        b"{" + b" " * LARGE,
    ],
    ids=["a good one", "a wrong field", "too many messages", "no JSON"],
)
def test_a_large_body_is_read_in_a_thread_and_answered_like_a_small_one(
    body: dict[str, object] | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    real = body_route.read_body

    def noted(*args: Any) -> Any:
        readers.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(body_route, "read_body", noted)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with opened(ToyModel()) as runtime, live_server(runtime) as server, server.client() as client:
        large = client.post("/v1/chat/completions", content=content, headers=headers)
        assert len(readers) == 1
        assert readers[0] != "server"
        monkeypatch.setattr(body_route, "LARGE", 1 << 30)
        small = client.post("/v1/chat/completions", content=content, headers=headers)
        assert len(readers) == 1
    assert large.status_code == small.status_code
    if large.status_code != 200:
        assert large.json() == small.json()


def test_a_long_name_under_perdure_is_compared_with_nothing_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class 2: a name of 14 MiB took 570 MB and 3.6 s, in the event loop where a turn is written anew."""
    compared: list[int] = []
    real = difflib.get_close_matches

    def noted(name: str, *args: Any, **keywords: Any) -> list[str]:
        compared.append(len(name))
        return real(name, *args, **keywords)

    monkeypatch.setattr(difflib, "get_close_matches", noted)
    with opened(ToyModel()) as runtime, live_server(runtime) as server, server.client() as client:
        assert client.post("/v1/sessions", json={"name": "talk"}).status_code == 201
        body = {"perdure": {"x" * 100_000: 1}}
        for path, more in (
            ("/v1/sessions/talk/regenerate", {}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            refused = client.post(path, json={**body, **more})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter")
    assert compared == [100, 100]


def test_a_first_request_finds_its_routes_made() -> None:
    """FastAPI makes them up where a path is first looked for: that takes longer than the loop may be held."""
    with opened(ToyModel()) as runtime:
        app = build(ServerState(runtime=runtime, name="toy"))
        made: list[str] = []

        def called(frame: Any, event: str, value: Any) -> None:
            if event == "call" and frame.f_code.co_name == "create_model_field":
                made.append(str(frame.f_code))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/sessions/x/edit",
            "root_path": "",
            "headers": [],
        }
        sys.setprofile(called)
        try:
            for route in app.routes:
                route.matches(scope)
        finally:
            sys.setprofile(None)
        assert made == []


def test_other_threads_may_wait_while_one_may_not() -> None:
    refused: list[BaseException] = []

    def other() -> None:
        try:
            check_may_wait("a disk was waited for")
        except BaseException as error:
            refused.append(error)

    with never_waiting():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(PATIENCE)
        with pytest.raises(WaitInEventLoopError):
            check_may_wait("a disk was waited for")
    check_may_wait("a disk was waited for")
    assert refused == []


PARTS = b",".join([b'{"type": "text", "text": "x"}'] * 20_000)
LARGE_BODIES: dict[str, tuple[type[RequestSchema], bytes]] = {
    "fields that nobody knows": (ChatRequest, b'{"messages": [], "unknown": [' + b"{}," * 60_000 + b"{}]}"),
    "parts of a message": (ChatRequest, b'{"messages": [{"role": "user", "content": [' + PARTS + b"]}]}"),
    "blocks of a system prompt": (
        MessagesRequest,
        b'{"max_tokens": 1, "messages": [], "system": [' + PARTS + b"]}",
    ),
}


@pytest.mark.parametrize("kind", LARGE_BODIES)
def test_others_can_have_their_turns_while_a_large_body_is_read(kind: str) -> None:
    """Class 2: compiled code kept the interpreter for half a second, and `/health` waited. It changes hands
    wherever a line of Python is run."""
    schema, body = LARGE_BODIES[kind]
    lines = 0

    def called(frame: Any, event: str, value: Any) -> None:
        nonlocal lines
        lines += event == "call"

    sys.setprofile(called)
    try:
        fields = body_route.read_json(body)
        read, lines = lines, 0
        with suppress(ValidationError):
            schema.model_validate(fields)
    finally:
        sys.setprofile(None)
    assert read > 20_000
    assert lines > 20_000 or kind == "fields that nobody knows"


def test_large_bodies_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many clients send one, the event loop waits for one thread."""
    reading, most = 0, 0
    real = body_route.read_json

    def noted(body: bytes | str) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        time.sleep(0)
        found = real(body)
        reading -= 1
        return found

    monkeypatch.setattr(body_route, "read_json", noted)
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "unknown": [' + b"{}," * 20_000 + b"{}]}"
    headers = {"content-type": "application/json"}
    with opened(ToyModel()) as runtime, live_server(runtime) as server, ThreadPoolExecutor(8) as pool:

        def send(_: int) -> int:
            with server.client() as client:
                return client.post("/v1/chat/completions", content=body, headers=headers).status_code

        assert set(pool.map(send, range(16))) == {200}
    assert most == 1
