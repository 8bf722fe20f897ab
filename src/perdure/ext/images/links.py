"""Images behind URLs: fetched where the operator has named their hosts (`perdure serve --image-hosts`).

    {"messages": [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "https://images.example.org/a.png"}}]}]}
    →                              "data:image/png;base64,…"

A body comes out as if its client had sent the files: all that follows knows of no URL. Fetched is

- from a host that is named, at the port that is named or 443; nothing else, whatever redirects say
- over https; over http too where the entry has a port or is a loopback address
- from public addresses, whatever the name resolves to, unless the entry is that very address or localhost;
  the connection goes to the address that was checked
- a PNG, JPEG, WebP or GIF file; other bytes are dropped, so that nothing else can be read back
- as many bytes as the body might have had, within 30 seconds for all files of a body

No proxy, cookie or credential is used.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
from anyio import to_thread

from perdure import BusyError, InvalidInputError
from perdure.ext.images.encoder import MOST_BYTES
from perdure.spi.runtime import BackgroundThread, BackgroundTimer
from perdure.spi.server import invalid

SECONDS = 30.0
"""For all files of one body."""
MOST_LINKS = 100
"""Of one body."""
_REDIRECTS = 3
_URL = 4096
"""Characters of a URL."""
_AT_ONCE = 4
"""Bodies of one namespace whose files are being fetched."""
_AT_ONCE_IN_ALL = 32
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*")
_TYPES = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"))
_PORTS = {"http": 80, "https": 443}
_LINKED = re.compile(rb'"(?:image_)?url"\s*:\s*"https?:', re.IGNORECASE)
"""What a body has where it has the URL of an image."""
_WITH_PARTS = ("messages", "input", "items", "content", "output")
"""Fields whose items may be images, or messages with images."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Iterable[str]]


@dataclass(frozen=True, slots=True)
class ImageHost:
    """An entry of the operator: `images.example.org`, `files.lan:9000`, `127.0.0.1:8000`, `[::1]`."""

    name: str
    port: int | None = None

    @classmethod
    def parse(cls, entry: str) -> ImageHost:
        name, port = entry.strip().lower(), ""
        if match := re.fullmatch(r"(\[[^\]]*\]|[^:]*):(\d{1,5})", name):
            name, port = match.groups()
        name = name.removeprefix("[").removesuffix("]").removesuffix(".")
        if (not _NAME.fullmatch(name) and _address(name) is None) or (port and not 0 < int(port) < 65536):
            raise InvalidInputError(
                "an image host is a name or an address, and a port if it is not 443, such as "
                f"images.example.org or 127.0.0.1:9000, got {entry!r}"
            )
        return cls(str(_address(name) or name), int(port) if port else None)

    @property
    def is_loopback(self) -> bool:
        address = _address(self.name)
        return self.name == "localhost" or (address is not None and address.is_loopback)

    def allows(self, url: SplitResult, port: int) -> bool:
        """Whether a URL with this port is one of this host's."""
        if url.hostname is None:
            return False
        name = url.hostname.removesuffix(".")
        if str(_address(name) or name) != self.name:
            return False
        if self.port is not None:
            return port == self.port
        return port == _PORTS[url.scheme] and (url.scheme == "https" or self.is_loopback)

    def accepts(self, address: Address) -> bool:
        """Whether a connection may go to this address of the host."""
        if self.name == "localhost":
            return address.is_loopback
        return address == _address(self.name) or is_public(address)


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, and no way to another one that is not."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
    if address in ipaddress.ip_network("64:ff9b::/96"):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(inner)
    return address in ipaddress.ip_network("2000::/3") and address.is_global


def _resolved(name: str, port: int) -> list[str]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


@dataclass(frozen=True, slots=True)
class LinkedImages:
    """Fetches files of images from the hosts of an operator. Safe from any thread."""

    hosts: Sequence[ImageHost]
    seconds: float = SECONDS
    resolve: Resolve = _resolved
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context

    def with_files(self, body: bytes, most: int) -> bytes:
        """A body of at most `most` bytes, with the files in the places of their URLs."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            # Its reader says what is wrong.
            return body
        places = list(_links(fields))
        if not places:
            return body
        if len(places) > MOST_LINKS:
            raise _refused(places[0].where, f"{len(places)} images have URLs, {MOST_LINKS} may have")
        room, until = most - len(body), time.monotonic() + self.seconds
        fetched: dict[str, str] = {}
        for place in places:
            if place.url not in fetched:
                data = self.fetch(place.url, place.where, min(MOST_BYTES, room * 3 // 4), until)
                kind = type_of_image(data)
                fetched[place.url] = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            place.parent[place.key] = fetched[place.url]
            room -= len(fetched[place.url])
            if room < 0:
                raise _refused(place.where, f"the request has more than {most} bytes with this image")
        return json.dumps(fields).encode()

    def fetch(self, url: str, where: str, most: int, until: float) -> bytes:
        """The file behind a URL."""
        first: tuple[str, int] | None = None
        for _ in range(_REDIRECTS + 1):
            parts, port, host = self._checked(url, where)
            if first is None:
                first = host.name, port
            elif first != (host.name, port):
                raise _refused(where, "the URL redirects to another host")
            try:
                answer = self._get(parts, port, host, where, most, until)
            except TimeoutError:
                raise _refused(where, f"the image did not come within {self.seconds:g} seconds") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() >= until:
                    raise _refused(where, f"the image did not come within {self.seconds:g} seconds") from None
                raise _refused(where, f"{host.name} cannot be asked: {type(error).__name__}") from None
            if isinstance(answer, bytes):
                return answer
            if parts.scheme == "https" and urlsplit(urljoin(url, answer)).scheme != "https":
                raise _refused(where, "the URL redirects from https to another scheme")
            url = urljoin(url, answer)
        raise _refused(where, f"the URL redirects more than {_REDIRECTS} times")

    def _checked(self, url: str, where: str) -> tuple[SplitResult, int, ImageHost]:
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
            plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= _URL
        except (ValueError, KeyError):
            plain = False
        if not plain or parts.hostname is None or parts.username is not None or "\\" in url:
            raise _refused(where, "this is no URL of http or https that images are fetched from")
        host = next((each for each in self.hosts if each.allows(parts, port)), None)
        if host is None:
            raise _refused(
                where,
                f"images are not fetched from {parts.scheme}://{parts.hostname[:100]}:{port}, only from "
                "hosts that the operator has named (--image-hosts); send it as data:image/png;base64,…",
            )
        return parts, port, host

    def _get(
        self, url: SplitResult, port: int, host: ImageHost, where: str, most: int, until: float
    ) -> bytes | str:
        """The file, or where the URL redirects to."""
        with self._connected(url, port, host, where, until) as connection:
            connection.request(
                "GET",
                (url.path or "/") + (f"?{url.query}" if url.query else ""),
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "perdure"},
            )
            with connection.getresponse() as answer:
                if answer.status in (301, 302, 303, 307, 308):
                    return answer.getheader("Location") or ""
                if answer.status != 200:
                    raise _refused(where, f"{host.name} answered with status {answer.status}")
                if answer.getheader("Content-Encoding", "identity") != "identity":
                    raise _refused(where, f"{host.name} sent the image compressed, which was not asked for")
                if (answer.length or 0) > most:
                    raise _too_many_bytes(where, most)
                data = bytearray()
                while part := answer.read1(1 << 16):
                    data += part
                    if len(data) > most:
                        raise _too_many_bytes(where, most)
                    if len(data) >= 16 and type_of_image(data) is None:
                        break
                # What was cut by the clock is not whole.
                _left(until)
                if type_of_image(data) is None:
                    raise _refused(where, "what is there is no PNG, JPEG, WebP or GIF file")
                if answer.length:
                    raise _refused(where, f"{host.name} ended before the image did")
            return bytes(data)

    @contextmanager
    def _connected(
        self, url: SplitResult, port: int, host: ImageHost, where: str, until: float
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection to an address that was checked. It is cut where it takes too long, whatever it waits
        for then."""
        addresses = [_address(each) for each in self._addresses(host.name, port, until)]
        usable = [str(each) for each in addresses if each is not None and host.accepts(each)]
        if not usable:
            raise _refused(
                where,
                f"{host.name} has no address that images may be fetched from: the operator can name a "
                "private one itself (--image-hosts ADDRESS)",
            )
        # Each read has a timeout, but a sender that gives a byte at a time would never meet it.
        opened = _reached(usable, port, until)
        cut = BackgroundTimer(_left(until), lambda: _shut(opened), name="perdure-image-fetch")
        cut.start()
        connection = http.client.HTTPConnection(host.name, port)
        try:
            if url.scheme == "https":
                opened = self.tls().wrap_socket(
                    opened, server_hostname=host.name, do_handshake_on_connect=False
                )
                opened.do_handshake()
            connection.sock = opened
            yield connection
        finally:
            cut.cancel()
            connection.close()
            opened.close()

    def _addresses(self, name: str, port: int, until: float) -> Sequence[str]:
        """What a name resolves to. A resolver has no time limit."""
        if _address(name) is not None:
            return [name]
        found: list[str] = []
        failed: list[OSError] = []

        def ask() -> None:
            try:
                found.extend(self.resolve(name, port))
            except OSError as error:
                failed.append(error)

        asking = BackgroundThread(ask, name="perdure-image-name")
        asking.start()
        asking.join(_left(until))
        if asking.is_alive():
            raise TimeoutError
        if failed:
            raise failed[0]
        return found


class _Turns:
    """How many bodies have their files fetched now, by namespace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = Counter[str]()

    @contextmanager
    def take(self, namespace: str) -> Iterator[None]:
        with self._lock:
            mine, all_ = self._running[namespace], self._running.total()
            if mine >= _AT_ONCE or all_ >= _AT_ONCE_IN_ALL:
                raise BusyError(
                    f"images of {mine} requests of yours and of {all_ - mine} others are being fetched; ask "
                    "again later",
                    waiting=all_,
                    limit=_AT_ONCE,
                )
            self._running[namespace] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[namespace] -= 1
                if not self._running[namespace]:
                    del self._running[namespace]


_TURNS = _Turns()


async def with_files(body: bytes, hosts: Sequence[str], namespace: str, most: int) -> bytes:
    """A body with the files in the places of the URLs of its images."""
    if not _LINKED.search(body):
        return body
    linked = LinkedImages(tuple(map(ImageHost.parse, hosts)))
    with _TURNS.take(namespace):
        # Not among the threads of other calls: these wait for the network.
        return await to_thread.run_sync(linked.with_files, body, most, limiter=anyio.CapacityLimiter(1))


def check_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """The entries of an operator; InvalidInputError for one that is none."""
    entries = tuple(hosts)
    for entry in entries:
        ImageHost.parse(entry)
    return entries


@dataclass(frozen=True, slots=True)
class _Link:
    """Where a body has the URL of an image."""

    where: str
    parent: dict[str, Any]
    key: str
    url: str


def _links(fields: Any, where: str = "") -> Iterator[_Link]:
    """The URLs of images in a body: in its messages and items, and nowhere else. What a schema or a call of a
    tool has is no image, however it looks."""
    if not isinstance(fields, dict):
        return
    kind, image, source = fields.get("type"), fields.get("image_url"), fields.get("source")
    if kind == "image_url" and isinstance(image, dict):
        yield from _link(image, "url", f"{where}image_url.url")
    elif kind == "input_image" or not where:
        yield from _link(fields, "image_url", f"{where}image_url")
    elif kind == "image" and isinstance(source, dict) and source.get("type") == "url":
        yield from _link(source, "url", f"{where}source.url")
    for name in _WITH_PARTS:
        parts = fields.get(name)
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            yield from _links(part, f"{where}{name}.{at}.")


def _link(parent: dict[str, Any], key: str, where: str) -> Iterator[_Link]:
    url = parent.get(key)
    if isinstance(url, str) and url[:8].lower().startswith(("http://", "https://")):
        yield _Link(where, parent, key, url)


def type_of_image(data: bytes | bytearray) -> str | None:
    """What a file says that it is; None where it is no image that is read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _TYPES if data.startswith(start)), None)


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text) if "%" not in text else None
    except ValueError:
        return None


def _left(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _reached(addresses: Sequence[str], port: int, until: float) -> socket.socket:
    """A connection to the first address that takes one."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), timeout=_left(until) / 2)
    return socket.create_connection((addresses[-1], port), timeout=_left(until))


def _shut(opened: socket.socket) -> None:
    # Of the connection itself: TLS would forget its keys, and hand on what is encrypted.
    with suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


def _refused(where: str, problem: str) -> Exception:
    return invalid(where, problem, code="invalid_image_url")


def _too_many_bytes(where: str, most: int) -> Exception:
    return _refused(where, f"the image has more than the {most} bytes that this request may still have")
