"""What comes in: too large, too slow, too deep, half open, or nonsense (H3)."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from decode.observed import toy
from perdure.server.core.middleware import JsonScan
from server.live_server import LiveServer, hello, live_server, opened, raw

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server with little patience."""
    with opened(toy()) as rt, live_server(rt, body_bytes=4096, head_seconds=1.0, body_seconds=0.5) as server:
        yield server


def test_a_body_beyond_the_limit_is_413(server: LiveServer) -> None:
    big = hello(messages=[{"role": "user", "content": "x" * 5000}])
    with server.client() as client:
        response = client.post(CHAT, json=big)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        # Without a length it is found out on the way.
        response = client.post(CHAT, content=iter([b" " * 100] * 100), headers=JSON)
        assert response.status_code == 413


def test_a_body_that_comes_slowly_is_408(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(raw(CHAT, b'{"mess', content_length="1000"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"slow_request" in answer


def test_headers_that_never_end_are_shown_out(server: LiveServer) -> None:
    with server.connect() as silent, server.connect() as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h")
        assert silent.recv(100) == b""
        assert half.recv(100) == b""


def test_deep_nesting_is_400(server: LiveServer) -> None:
    with server.client() as client:
        for body in (b"[" * 1000 + b"]" * 1000, b'{"a":' * 500, b'{"messages":' + b"[" * 300):
            response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "nested_too_deeply"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", 0),
        (b"1", 0),
        (b"[]", 1),
        (b'{"a": [1, {"b": 2}]}', 3),
        (b'{"a": "[[[[[[{{{{"}', 1),
        (rb'{"a": "\"[[[[", "b": []}', 2),
        (b'[[[["', 4),
        (b"]]]][[", 0),
    ],
)
def test_depth_counts_brackets_outside_of_texts(body: bytes, expected: int) -> None:
    scan = JsonScan()
    scan.push(body)
    assert scan.depth == expected
    # However it is cut.
    scan = JsonScan()
    for at in range(len(body)):
        scan.push(body[at : at + 1])
    assert scan.depth == expected


@pytest.mark.parametrize(("content", "status"), [("[" * 100, 200), ([[[[["a"]]]]], 400)])
def test_brackets_of_a_short_body_count_where_they_are_none_of_a_text(content: object, status: int) -> None:
    with opened(toy()) as rt, live_server(rt, depth=6) as server, server.client() as client:
        answer = client.post(CHAT, json=hello(messages=[{"role": "user", "content": content}]))
        assert answer.status_code == status
        assert ("nested_too_deeply" in answer.text) == (status == 400)


def test_as_many_messages_as_are_allowed() -> None:
    with opened(toy()) as rt, live_server(rt, messages=3) as server, server.client() as client:
        said = [{"role": "user", "content": "a"}]
        assert client.post(CHAT, json=hello(messages=said * 3)).status_code == 200
        response = client.post(CHAT, json=hello(messages=said * 4))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


def test_a_connection_too_many_is_told_so_and_the_others_go_on_h3() -> None:
    """H3."""
    with (
        opened(toy()) as rt,
        live_server(rt, connections=2) as server,
        server.client() as first,
        server.client() as second,
    ):
        for client in (first, second):
            assert client.post(CHAT, json=hello()).status_code == 200
        with server.client() as third:
            refused = third.post(CHAT, json=hello())
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/json"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "too_many_connections")
        assert first.post(CHAT, json=hello()).status_code == 200
        # One who leaves makes room.
        assert second.get("/health", headers={"connection": "close"}).status_code == 200
        with server.client() as third:
            assert third.post(CHAT, json=hello()).status_code == 200
            assert 'status="503"} 1.0' in third.get("/metrics").text


def test_a_thousand_malformed_requests_cost_nothing_that_lasts_h3(server: LiveServer) -> None:
    """H3: then a good one is answered."""
    chance = random.Random(7)
    held: list[socket.socket] = []
    kinds = (bad_json, wrong_types, nonsense, huge_header, half_open, bad_length, dropped)
    try:
        for number in range(1000):
            kind = kinds[number % len(kinds)]
            connection = server.connect()
            with suppress(ConnectionError):
                connection.sendall(kind(chance))
            if kind in (half_open, bad_length) and len(held) < 40:
                # Left open: they must not be in anybody's way.
                held.append(connection)
                continue
            if kind not in (dropped, half_open, bad_length):
                answer = heard(connection)
                assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
            connection.close()
        with server.client() as client:
            assert client.post(CHAT, json=hello()).status_code == 200
            assert client.get("/ready").json()["status"] == "ready"
        for connection in held:
            rest = heard(connection)
            assert not rest or rest.startswith(b"HTTP/1.1 4")
    finally:
        for connection in held:
            connection.close()
    assert server.runtime.load == (0, 0)


def heard(connection: socket.socket) -> bytes:
    """What comes back; nothing where the connection was cut."""
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""


def bad_json(chance: random.Random) -> bytes:
    good = json.dumps(hello()).encode()
    at = chance.randrange(1, len(good))
    return raw(
        CHAT, good[:at] + chance.choice([b"", b"\x00", b"}", b"NaN,", b"\xff\xfe"]), connection="close"
    )


def wrong_types(chance: random.Random) -> bytes:
    body = hello()
    field = chance.choice(["messages", "max_tokens", "temperature", "n", "stop", "tools", "stream", "seed"])
    body[field] = chance.choice([{}, -1.5, [[]], {"a": {"b": None}}])
    return raw(CHAT, json.dumps(body).encode(), connection="close")


def nonsense(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(1, 200)) + b"\r\n\r\n"


def huge_header(chance: random.Random) -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: h\r\nx-long: " + b"a" * 1_000_000 + b"\r\n\r\n"


def half_open(chance: random.Random) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-"


def bad_length(chance: random.Random) -> bytes:
    return raw(CHAT, b'{"messages": [', content_length="4000")


def dropped(chance: random.Random) -> bytes:
    return raw(CHAT, json.dumps(hello(stream=True)).encode())


def scanned_slowly(body: bytes) -> tuple[int, int, int]:
    """Depth, values and members, byte by byte."""
    level = depth = values = members = 0
    in_text = escaping = False
    for byte in body:
        if byte == ord('"') and not escaping:
            in_text = not in_text
        elif not in_text:
            level += (byte in b"{[") - (byte in b"}]")
            depth = max(depth, level)
            values += byte in b"{[,"
            members += byte in b"{[:"
        escaping = byte == ord("\\") and not escaping
    return depth, values, members


def test_a_body_is_scanned_alike_however_it_comes_in_pieces() -> None:
    """Whatever is cut where: texts, escapes and runs of backslashes too."""
    drawn = random.Random(8)
    for _ in range(2000):
        body = bytes(drawn.choices(b'"\\{}[],:x', k=drawn.randrange(1, 40)))
        scan, at = JsonScan(), 0
        while at < len(body):
            size = drawn.randrange(1, 9)
            scan.push(body[at : at + size])
            at += size
        assert (scan.depth, scan.values, scan.members) == scanned_slowly(body), body
