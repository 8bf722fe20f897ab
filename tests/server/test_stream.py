"""Streams whose clients are slow, silent, or gone."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from perdure.server.core.follow import EventResponse, Sink
from perdure.server.core.protocol import SSE, Events, EventTemplate, ProtocolEvent, event
from perdure.server.core.settings import Limits
from perdure.server.direct_write import AnswerTransport
from perdure.server.http_server import bind
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, check_freed, hello, live_server, opened, raw


class Line:
    """A client's end of a stream, in process."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.came = asyncio.Condition()
        self.gone = asyncio.Event()

    async def send(self, message: Message) -> None:
        async with self.came:
            self.sent.append(message.get("body", b""))
            self.came.notify_all()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def until(self, ready: Callable[[list[bytes]], bool]) -> None:
        async with self.came:
            await asyncio.wait_for(self.came.wait_for(lambda: ready(self.sent)), PATIENCE)


class Told:
    """A source of events that a test wrote."""

    def __init__(self, work: Callable[[Sink], Awaitable[None]]) -> None:
        self._work = work
        self.ended: list[str] = []

    async def write_to(self, sink: Sink) -> None:
        try:
            await self._work(sink)
        finally:
            self.ended.append("events")

    def keep_alive(self) -> Events:
        return [ProtocolEvent(b"", b"{}")]

    def close(self) -> None:
        self.ended.append("closed")


async def answered(source: Told, line: Line, **limits: float) -> None:
    response = EventResponse(source, SSE, Limits(**limits))  # type: ignore[arg-type]
    await asyncio.wait_for(response({"type": "http", "method": "POST"}, line.receive, line.send), PATIENCE)


def test_silence_is_filled_and_a_client_that_leaves_ends_the_events() -> None:
    """H2."""

    async def work(sink: Sink) -> None:
        await sink.send([ProtocolEvent(b"", b"1")])
        await asyncio.Event().wait()

    async def run() -> list[bytes]:
        line = Line()
        answering = asyncio.ensure_future(answered(source, line, silent_seconds=0.01))
        await line.until(lambda sent: len(sent) >= 4)
        line.gone.set()
        await answering
        return line.sent

    source = Told(work)
    head, first, *pings = asyncio.run(run())
    assert (head, first) == (b"", b"data: 1\n\n")
    assert set(pings) == {b"data: {}\n\n"}
    assert source.ended == ["events", "closed"]


def test_an_error_between_events_is_raised_once_everything_has_ended() -> None:
    async def work(sink: Sink) -> None:
        await sink.send([ProtocolEvent(b"", b"1")])
        raise ValueError("broken")

    async def run() -> None:
        await answered(source, Line())

    source = Told(work)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())
    assert source.ended == ["events", "closed"]


def test_a_client_that_takes_nothing_is_left_h3(zoo_path: Callable[[str], Path]) -> None:
    """H3: it holds neither a slot nor a connection."""
    body = hello(
        max_tokens=3500, logit_bias={"381": -100, "383": -100}, logprobs=True, top_logprobs=20, stream=True
    )
    with (
        opened(zoo_path("llama"), threads=1, n_ctx=4096) as rt,
        live_server(rt, send_seconds=0.2) as server,
        socket.socket() as silent,
        server.client() as client,
    ):
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.settimeout(PATIENCE)
        silent.connect(("127.0.0.1", server.port))
        silent.sendall(raw("/v1/chat/completions", json.dumps(body).encode()))
        until = time.monotonic() + PATIENCE
        while 'status="499"' not in client.get("/metrics").text:
            assert time.monotonic() < until
        check_freed(rt)
        heard = b""
        while data := silent.recv(1 << 16):
            heard = heard[-100:] + data
        assert b"[DONE]" not in heard


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_out_of_a_template_is_the_event(text: str) -> None:
    def chunk(content: str) -> dict[str, object]:
        return {"id": "chatcmpl-1", "choices": [{"delta": {"content": content}, "logprobs": None}]}

    filled = EventTemplate(chunk)(text)
    assert filled == event(chunk(text))
    assert json.loads(filled.data) == chunk(text)


def test_a_client_that_stopped_reading_is_left_also_while_nothing_is_said() -> None:
    """Nothing is computed for it, and the keep-alive is not taken either."""

    async def silence(sink: Sink) -> None:
        await asyncio.Event().wait()

    class Stuck(Line):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

    async def run() -> None:
        await answered(source, Stuck(), send_seconds=0.05, silent_seconds=0.01)

    source = Told(silence)
    asyncio.run(run())
    assert source.ended == ["events", "closed"]


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_events_are_framed_as_the_client_s_http_wants_them(version: str) -> None:
    """In chunks that any parser takes, or for an old client as they are, until the connection ends."""
    body = json.dumps(hello(stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with opened(ToyModel()) as runtime, live_server(runtime) as live, live.connect() as connection:
        connection.sendall(head.encode() + body)
        came = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "127.0.0.1")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(came)
    parser.receive_data(b"")
    answer = parser.next_event()
    assert isinstance(answer, h11.Response)
    chunked = (b"transfer-encoding", b"chunked") in answer.headers
    assert chunked == (version == "1.1")
    text = b""
    while isinstance(event := parser.next_event(), h11.Data):
        text += event.data
    assert isinstance(event, h11.EndOfMessage)
    *chunks, end = text.decode().split("\n\n")[:-1]
    assert end == "data: [DONE]"
    assert all(json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks)
    assert len(chunks) > 2


def test_an_answer_goes_out_in_no_more_pieces_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's head with its first event, its last events with the end; an answer that is whole at once.
    Every piece wakes the client."""
    pieces: list[bytes] = []
    send = AnswerTransport.send

    def noting(transport: AnswerTransport, data: bytes) -> None:
        pieces.append(transport.buffer + data)
        send(transport, data)

    monkeypatch.setattr(AnswerTransport, "send", noting)
    with opened(ToyModel()) as runtime, live_server(runtime) as live, live.client() as client:
        assert client.post("/v1/chat/completions", json=hello(max_tokens=2, stream=True)).status_code == 200
        first, *_, last = pieces
        assert first.startswith(b"HTTP/1.1 200")
        assert first.count(b"data: ") > 1
        assert b"[DONE]" in last
        assert last.endswith(b"\r\n0\r\n\r\n")
        assert len(pieces) <= 3
        pieces.clear()
        assert client.get("/health").status_code == 200
        assert len(pieces) == 1


def test_what_goes_wrong_before_the_first_event_is_raised_without_a_head() -> None:
    """So it has a separate status."""

    async def work(sink: Sink) -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def run() -> Line:
        line = Line()
        with pytest.raises(ValueError, match="broken"):
            await answered(Told(work), line)
        return line

    assert asyncio.run(run()).sent == []


def test_a_client_that_reads_late_gets_every_token_in_order_h3(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3: what it does not take is kept, once its connection is full, until it does."""

    def narrow(host: str, port: int) -> socket.socket:
        # The system would keep megabytes of it, on this side too.
        listening = bind(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr("server.live_server.bind", narrow)
    never = {str(token): -100 for token in ToyModel().ends}
    asked = hello(max_tokens=400, logit_bias=never, logprobs=True)
    body = json.dumps({**asked, "top_logprobs": 20, "stream": True}).encode()
    with (
        opened(ToyModel()) as runtime,
        live_server(runtime) as live,
        socket.socket() as late,
        live.client() as client,
    ):
        late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        late.settimeout(PATIENCE)
        late.connect(("127.0.0.1", live.port))
        late.sendall(raw("/v1/chat/completions", body))
        whole = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
        until = time.monotonic() + PATIENCE
        while runtime.load != (0, 0):
            assert time.monotonic() < until
        came = b""
        while b"[DONE]" not in came[-100:]:
            came += late.recv(1 << 16)
    text = b"".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "").encode()
        for line in came.splitlines()
        if line.startswith(b"data: {")
    )
    assert text.decode() == whole["message"]["content"]
    assert whole["finish_reason"] == "length"
    # Far more than the connection held.
    assert len(came) > 500_000
