"""How much anybody may ask for, and how long it may take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from perdure.checks import is_number
from perdure.config import Overflow
from perdure.errors import InvalidInputError
from perdure.request_options import options_of_replies

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """The names under which a server may be asked: this machine's, where it listens, and further ones."""

    def __init__(
        self, bound: str = "127.0.0.1", further: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> None:
        """`origins` are pages of other sites that may use the server, as CORS defines it."""
        self._origins = frozenset(origins)
        self._further = frozenset(_checked(host) for host in further)
        self._names = frozenset((*LOOPBACK, bound.lower())) | self._further

    def __contains__(self, host: str) -> bool:
        return host in self._names

    def trusts_page(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may ask the server at `host`: its own, and those of further names."""
        if origin in self._origins:
            return True
        parts = _split(origin)
        if parts is None:
            return False
        scheme, place = parts
        name = host_name(place)
        return (scheme in ("http", "https") and place == host.lower()) or name in self._further


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All limits of a server. Each is a number above 0; times are in seconds."""

    body_bytes: int = 16 << 20
    """Of a request, exported sessions apart."""
    upload_bytes: int = 8 << 30
    """Of an exported session that comes in."""
    messages: int = 4096
    """Of one request."""
    depth: int = 64
    """How deeply JSON may be nested."""
    values: int = 1 << 18
    """Of one request's JSON: numbers, texts, lists and objects."""
    members: int = 1 << 16
    """The same, lists, objects and their fields alone: these take the longest to read."""
    requests: int = 512
    """In flight at once, waiting ones included."""
    uploads: int = 4
    """Exported sessions that come in at once: each takes up to `upload_bytes` of disk."""
    connections: int = 2048
    """Open at once, idle ones included."""
    head_seconds: float = 15.0
    """From the opening of a connection to the end of a request's headers."""
    body_seconds: float = 60.0
    """From the headers to the end of the body."""
    upload_seconds: float = 1800.0
    """The same for an exported session. No part of it may take longer than `body_seconds`."""
    request_seconds: float = 900.0
    """From the body to the last token."""
    silent_seconds: float = 5.0
    """Of silence after which a stream is begun: until then an error has its HTTP status."""
    progress_seconds: float = 1.0
    """Of silence after which a stream that was begun reports how far the prompt is read."""
    send_seconds: float = 60.0
    """For a client to take what it was sent."""
    response_seconds: float = 30 * 86400.0
    """That a stored response is kept. What later ones go on from stays."""
    grace_seconds: float = 20.0
    """For requests to finish once the server is stopping."""
    drain_seconds: float = 0.0
    """Before that, in which it answers as ever but for `/ready`, so that routers send nothing more."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not is_number(value) or not 0 < value + (each.name == "drain_seconds") < 2**53:
                raise InvalidInputError(f"{each.name} is a number above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDefaults:
    """Sampling settings, and the most tokens of a reply. What a request says wins, also if it is none."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stable_prefix: bool = True
    """Whether volatile text of prompts is moved behind the rest (`ext/agents/volatile_text.py`)."""
    settle: int = 0
    """Tokens of a next prompt's beginning that are read while the engine is idle (`chat/prefetch.py`)."""
    overflow: Overflow | None = None
    """What happens when a conversation no longer fits; None: as its session has it, or an error."""

    def to_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        known = options_of_replies()
        sampling = {name: known[name].to_json(value) for name, value in self.sampling.items()}
        return {
            "sampling": sampling,
            "max_tokens": self.max_tokens,
            "stable_prefix": self.stable_prefix,
            "settle": self.settle,
            "overflow": self.overflow,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ReplyDefaults:
        known = options_of_replies()
        sampling = stored.get("sampling") or {}
        return cls(
            sampling={
                name: known[name].from_json(value) for name, value in sampling.items() if name in known
            },
            max_tokens=stored.get("max_tokens"),
            stable_prefix=stored.get("stable_prefix", True),
            settle=stored.get("settle", 0),
            overflow=stored.get("overflow"),
        )

    def fill(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked of a reply, whole."""
        filled = {
            "stable_prefix": self.stable_prefix,
            "settle": self.settle,
            **self.sampling,
            **options,
        }
        if self.overflow is not None:
            filled.setdefault("overflow", self.overflow)
        if self.max_tokens is not None and "max_tokens" not in filled:
            # A limit that the client never chose is no reason to refuse its prompt.
            filled.update(max_tokens=self.max_tokens, limit_to_context=True)
        return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Settings that hold for requests from now on. Each is a field of the app state, of the same name."""

    limits: Limits
    hosts: AllowedHosts | None
    origins: tuple[str, ...]
    image_hosts: tuple[str, ...]
    aliases: tuple[str, ...]
    strict: bool
    conversations: bool
    warm: int
    log_text: bool
    defaults: ReplyDefaults


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _split(origin: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return (parts.scheme.lower(), parts.netloc.lower()) if parts.netloc else None


def _checked(host: str) -> str:
    name = host_name(host)
    if not name or name != host.strip().lower().strip("[]") or "/" in name or "*" in name:
        raise InvalidInputError(
            f"--allow-host takes the name of a host, such as chat.example.org, got {host!r}"
        )
    return name


def check_origins(origins: Iterable[str], *, keys: int) -> tuple[str, ...]:
    """Pages of other sites that may use a server: `https://chat.example.org`, or `*` for any."""
    sites = tuple(origins)
    for origin in sites:
        parts = _split(origin)
        if origin == "*":
            if not keys:
                raise InvalidInputError(
                    "--cors '*' lets every page that is open in a browser here use the server: give --keys "
                    "too, or name the pages"
                )
        elif parts is None or origin != f"{parts[0]}://{parts[1]}":
            raise InvalidInputError(
                f"--cors takes an origin such as https://chat.example.org, or *, got {origin!r}"
            )
    return sites
