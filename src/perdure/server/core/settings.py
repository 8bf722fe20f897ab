"""How much anybody may ask for, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from perdure.checks import is_number
from perdure.errors import InvalidInputError
from perdure.options import options_of
from perdure.request_options import Sampling
from perdure.server.core.middleware.host_check import AllowedHosts


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
    """Of silence after which a stream is begun, and then told that its answer goes on."""
    send_seconds: float = 60.0
    """For a client to take what it was sent."""
    response_seconds: float = 30 * 86400.0
    """That a stored response is kept. What later ones go on from stays."""
    grace_seconds: float = 20.0
    """For requests to finish once the server was told to stop."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not is_number(value) or not 0 < value < 2**53:
                raise InvalidInputError(f"{each.name} is a number above 0, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDefaults:
    """Sampling settings, and the most tokens of a reply. What a request says wins, also if it is none."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        known = options_of(Sampling)
        sampling = {name: known[name].to_json(value) for name, value in self.sampling.items()}
        return {"sampling": sampling, "max_tokens": self.max_tokens}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ReplyDefaults:
        known = options_of(Sampling)
        sampling = stored.get("sampling") or {}
        return cls(
            sampling={
                name: known[name].from_json(value) for name, value in sampling.items() if name in known
            },
            max_tokens=stored.get("max_tokens"),
        )

    def fill(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked of a reply, whole."""
        found = {**self.sampling, **options}
        if self.max_tokens is not None and "max_tokens" not in found:
            # A limit that the client never chose is no reason to refuse its prompt.
            found.update(max_tokens=self.max_tokens, limit_to_context=True)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Settings that hold for requests from now on. Each is a field of the app state, of the same name."""

    limits: Limits
    hosts: AllowedHosts | None
    origins: tuple[str, ...]
    aliases: tuple[str, ...]
    strict: bool
    log_text: bool
    defaults: ReplyDefaults
