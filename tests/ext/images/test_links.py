"""Images behind URLs: fetched from hosts that the operator has named, and from nowhere else."""

from __future__ import annotations

import base64
import ipaddress
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Image, InvalidInputError
from perdure.events.background import FAILURES
from perdure.ext.images.links import ImageHost, LinkedImages, check_hosts, is_public
from perdure.server.core.api_error import ApiError
from server.live_server import PATIENCE, LiveServer, live_server

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

PICTURE = picture(seed=3)
GATE = threading.Event()
"""Until it is set, one of the host's files does not come."""
MOST = 1 << 20


class Files(BaseHTTPRequestHandler):
    """A host with images, which does what hosts may do to who asks them."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind = self.path.partition("?")[0]
        if kind == "/to":
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.end_headers()
        elif kind == "/gated":
            assert GATE.wait(PATIENCE)
            self._send(PICTURE)
        elif kind == "/status":
            self.send_error(404)
        elif kind == "/text":
            self._send(b"root:x:0:0:root:/root:/bin/sh")
        elif kind == "/packed":
            self._send(PICTURE, encoding="gzip")
        elif kind == "/short":
            self._send(PICTURE[:-100], length=len(PICTURE))
        elif kind == "/large":
            self._send(PICTURE, length=MOST + 1)
        elif kind == "/endless":
            self._send(PICTURE, length=None)
            self._go_on(bytes(1 << 16), 0)
        elif kind == "/slow":
            self._send(PICTURE[:20], length=len(PICTURE))
            self._go_on(b"a", 0.02)
        elif kind == "/slow-head":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
            self._go_on(b"a", 0.02)
        else:
            self._send(PICTURE)

    def _send(self, data: bytes, *, length: int | None = -1, encoding: str = "") -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(len(data) if length == -1 else length))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(data)

    def _go_on(self, data: bytes, pause: float) -> None:
        stop = threading.Event()
        try:
            while True:
                self.wfile.write(data)
                stop.wait(pause)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def host(tls: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[str]]]:
    """A host on this machine: its port, and what it was asked."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Host", (Files,), {"asked": asked}))
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[int, list[str]]]:
    with host() as started:
        yield started


def linked(*hosts: str, **more: Any) -> LinkedImages:
    return LinkedImages(tuple(map(ImageHost.parse, hosts)), **more)


def fetched(links: LinkedImages, url: str, most: int = MOST) -> bytes:
    return links.fetch(url, "here", most, time.monotonic() + links.seconds)


def refusal(links: LinkedImages, url: str, most: int = MOST) -> str:
    with pytest.raises(ApiError) as refused:
        fetched(links, url, most)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "invalid_image_url",
        "here",
    )
    return str(refused.value)


def test_i1_hosts_are_those_that_the_operator_has_named(files: tuple[int, list[str]]) -> None:
    port, asked = files
    links = linked("images.example.org", f"127.0.0.1:{port}", "localhost", resolve=lambda *_: ["10.0.0.1"])
    assert fetched(links, f"http://127.0.0.1:{port}/a.png") == PICTURE
    del asked[:]
    for url in (
        "http://images.example.org/a.png",
        "https://images.example.org:8443/a.png",
        "https://images.example.org.evil.example/a.png",
        "https://evil.example/images.example.org",
        f"http://127.0.0.1:{port + 1}/a.png",
        "http://127.0.0.1/a.png",
        f"http://[::ffff:127.0.0.1]:{port}/a.png",
        f"http://2130706433:{port}/a.png",
        f"http://127.1:{port}/a.png",
        f"http://localhost:{port}/a.png",
        "https://[fe80::1%25eth0]/a.png",
    ):
        assert "not fetched from" in refusal(links, url) or "no URL" in refusal(links, url), url
    for url in (
        f"http://user@127.0.0.1:{port}/a.png",
        f"http://127.0.0.1:{port}\\@evil.example/a.png",
        f"http://127.0.0.1:{port}/a b.png",
        f"http://127.0.0.1:{port}/a\r\nX: b",
        "http://127.0.0.1:port/a.png",
        "https:///a.png",
        "https://images.example.org/" + 5000 * "a",
    ):
        assert "no URL" in refusal(links, url), url
    assert asked == []
    assert check_hosts(["A.Example.", "[::1]:9000"]) == ("A.Example.", "[::1]:9000")
    for wrong in ("", "*.example.org", "https://a.example", "a.example/b", "a.example:0", "a b", "::1%eth0"):
        with pytest.raises(InvalidInputError, match="image host"):
            check_hosts([wrong])


def test_i1_a_name_of_a_private_address_is_not_asked(files: tuple[int, list[str]]) -> None:
    """Whatever it resolves to, and whenever: the connection goes to the address that was checked."""
    port, asked = files
    del asked[:]
    for private in ("127.0.0.1", "::1", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "64:ff9b::7f00:1"):
        links = linked(f"images.example.org:{port}", resolve=lambda *_, private=private: [private])
        assert "no address that" in refusal(links, f"http://images.example.org:{port}/a.png")
    answers = iter([["127.0.0.1"], ["127.0.0.1"]])
    # The operator has named this address, and localhost, but no name that turns out to be it.
    links = linked(f"127.0.0.1:{port}", f"localhost:{port}", f"images.example.org:{port}")
    links = replace(links, resolve=lambda *_: next(answers))
    assert "no address that" in refusal(links, f"http://images.example.org:{port}/a.png")
    assert asked == []
    assert fetched(links, f"http://localhost:{port}/a.png") == PICTURE
    public = ("1.1.1.1", "2606:4700::1111", "64:ff9b::101:101")
    assert all(is_public(ipaddress.ip_address(each)) for each in public)
    for each in ("0.0.0.0", "100.64.0.1", "192.168.1.1", "224.0.0.1", "255.255.255.255", "::", "fe80::1"):
        assert not is_public(ipaddress.ip_address(each)), each
    for each in ("fd00::1", "fec0::1", "ff02::1", "2002:7f00:1::", "2001:db8::1", "::7f00:1"):
        assert not is_public(ipaddress.ip_address(each)), each


def test_i1_redirects_stay_with_their_host(files: tuple[int, list[str]]) -> None:
    port, _ = files
    with host() as (other, of_other):
        links = linked(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
        here = f"http://127.0.0.1:{port}"
        assert fetched(links, f"{here}/to?/a.png") == PICTURE
        assert "another host" in refusal(links, f"{here}/to?http://127.0.0.1:{other}/a.png")
        assert "not fetched from" in refusal(links, f"{here}/to?http://169.254.169.254/latest")
        assert "no URL" in refusal(links, f"{here}/to?file:///etc/passwd")
        assert "more than 3 times" in refusal(links, f"{here}/to?/to?/to?/to?/to?/to?/a.png")
        assert of_other == []


def test_i2_a_host_costs_bounded_bytes_and_seconds(files: tuple[int, list[str]]) -> None:
    port, _ = files
    links, url = linked(f"127.0.0.1:{port}", seconds=0.4), f"http://127.0.0.1:{port}"
    for path, problem in (
        ("/large", "more than the"),
        ("/endless", "more than the"),
        ("/slow", "within 0.4 seconds"),
        ("/slow-head", "within 0.4 seconds"),
        ("/short", "ended before"),
        ("/packed", "compressed"),
        ("/text", "no PNG"),
        ("/status", "404"),
    ):
        patient = replace(links, seconds=60) if "slow" not in path else links
        assert problem in refusal(patient, url + path), path
    assert "more than the" in refusal(replace(links, seconds=60), f"{url}/a.png", most=100)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        busy = silent.getsockname()[1]
        # It takes connections, and says nothing.
        assert "within" in refusal(linked(f"127.0.0.1:{busy}", seconds=0.3), f"http://127.0.0.1:{busy}/")
        assert "within" in refusal(linked(f"127.0.0.1:{busy}", seconds=0.3), f"https://127.0.0.1:{busy}/")
    assert "cannot be asked" in refusal(links, f"https://127.0.0.1:{port}/a.png")
    gone = threading.Event()
    slow = linked("images.example.org", seconds=0.2, resolve=lambda *_: [str(gone.wait(20))])
    try:
        assert "within" in refusal(slow, "https://images.example.org/a.png")
    finally:
        gone.set()


def test_a_resolver_that_fails_in_any_way_is_told_and_the_image_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(*_: object) -> list[str]:
        raise SystemExit(1)

    # Python's own words about a thread that ended are not what is tested here.
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    FAILURES.clear()
    try:
        told = refusal(linked("images.example.org", resolve=planted), "https://images.example.org/a.png")
        assert "no address" in told
        assert FAILURES == {"perdure-image-name": 1}
    finally:
        FAILURES.clear()


def test_i1_https_hosts_prove_who_they_are(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        ["openssl", *options.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with host(tls) as (port, asked):
        entries = (f"localhost:{port}", f"127.0.0.1:{port}")
        assert "SSLCertVerificationError" in refusal(linked(*entries), f"https://localhost:{port}/a.png")
        trusting = linked(*entries, tls=lambda: ssl.create_default_context(cafile=certificate))
        assert "SSLCertVerificationError" in refusal(trusting, f"https://127.0.0.1:{port}/a.png")
        assert asked == []
        assert fetched(trusting, f"https://localhost:{port}/a.png") == PICTURE
        hasty = replace(trusting, seconds=0.5)
        assert "within" in refusal(hasty, f"https://localhost:{port}/slow")
        away = f"https://localhost:{port}/to?http://localhost:{port}/a.png"
        assert "from https to another" in refusal(trusting, away)


def test_only_images_of_messages_are_fetched(files: tuple[int, list[str]]) -> None:
    """Not what looks like one in a schema, in the arguments of a call, or in a text."""
    port, asked = files
    del asked[:]
    url = f"http://127.0.0.1:{port}/a.png"
    links = linked(f"127.0.0.1:{port}")
    image = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
    shown = {"type": "image", "source": {"type": "url", "url": url}}
    said: Any = {
        "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": url}]},
            {"role": "user", "content": [{"type": "tool_result", "content": [shown]}]},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": json.dumps(image)}}]},
        ],
        "tools": [{"function": {"parameters": {"properties": image, "example": shown}}}],
        "metadata": {"messages": [shown]},
    }
    body = json.dumps(said).encode()
    read = json.loads(links.with_files(body, MOST))
    data = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
    assert asked == ["/a.png"]
    said = json.loads(body)
    said["messages"][0]["content"][0]["image_url"]["url"] = data
    said["messages"][1]["content"][0]["content"][0]["source"]["url"] = data
    assert read == said
    assert links.with_files(b"{", MOST) == b"{"
    with pytest.raises(ApiError, match="may still have"):
        links.with_files(body, len(body) + len(PICTURE))
    many = {"input": [{"content": [{"type": "input_image", "image_url": url}] * 101}]}
    with pytest.raises(ApiError, match="101 images"):
        links.with_files(json.dumps(many).encode(), MOST)


@pytest.fixture(scope="module")
def serving(
    toy: Toy, files: tuple[int, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    hosts = (f"127.0.0.1:{files[0]}",)
    store = tmp_path_factory.mktemp("store")
    with (
        perdure.open(toy("llava")[0], store=store, n_ctx=2048, slots=2, threads=1, exact=True) as runtime,
        live_server(runtime, image_hosts=hosts) as server,
    ):
        yield server


@pytest.mark.parametrize("protocol", ["chat", "messages", "responses", "session", "count"])
def test_what_is_fetched_is_as_if_it_was_sent(
    serving: LiveServer, files: tuple[int, list[str]], protocol: str
) -> None:
    port, asked = files
    del asked[:]
    sent = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"

    def body(url: str) -> tuple[str, dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": url}}
        shown = {"type": "image", "source": {"type": "url", "url": url}}
        said = [{"role": "user", "content": [part]}]
        few = {"max_tokens": 4, "temperature": 0}
        posts: dict[str, tuple[str, dict[str, Any]]] = {
            "chat": ("/v1/chat/completions", {"messages": said, **few}),
            "messages": ("/v1/messages", {"messages": [{"role": "user", "content": [shown]}], **few}),
            "responses": (
                "/v1/responses",
                {
                    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
                    "max_output_tokens": 4,
                    "temperature": 0,
                },
            ),
            "session": ("/v1/sessions/walk/turns", {"messages": said, **few}),
            "count": ("/v1/images/count", {"image_url": url}),
        }
        return posts[protocol]

    def answer(url: str) -> Any:
        with serving.client() as client:
            if protocol == "session":
                client.post("/v1/sessions", json={"name": "walk"}).raise_for_status()
            read = client.post(body(url)[0], json=body(url)[1]).raise_for_status().json()
            if protocol == "session":
                digest = Image(PICTURE).digest
                assert client.get(f"/v1/sessions/walk/images/{digest}").content == PICTURE
                client.delete("/v1/sessions/walk").raise_for_status()
        usage = read.get("usage", {})
        total = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        text = read["choices"][0]["message"]["content"] if protocol == "chat" else read.get("tokens")
        return text, total

    assert answer(f"http://127.0.0.1:{port}/a.png")[0] == answer(sent)[0]
    assert asked == ["/a.png"]
    with serving.client() as client:
        for url in ("https://example.org/a.png", f"http://127.0.0.1:{port}/text"):
            refused = client.post(body(url)[0], json=body(url)[1])
            assert refused.status_code == 400, refused.text
        assert (
            "operator"
            in client.post(
                body("https://example.org/a.png")[0], json=body("https://example.org/a.png")[1]
            ).text
        )


def test_a_key_has_few_requests_whose_images_are_fetched(
    serving: LiveServer, files: tuple[int, list[str]]
) -> None:
    """The fifth at once is refused, and the first four are not."""
    port, asked = files
    del asked[:]
    part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/gated"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    ended: list[int] = []

    def ask() -> None:
        with serving.client() as client:
            ended.append(client.post("/v1/chat/completions", json=body).status_code)

    waiting = [threading.Thread(target=ask) for _ in range(4)]
    for each in waiting:
        each.start()
    until = time.monotonic() + PATIENCE
    while len(asked) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    ask()
    assert ended == [429]
    GATE.set()
    for each in waiting:
        each.join()
    assert ended[1:] == 4 * [200]
