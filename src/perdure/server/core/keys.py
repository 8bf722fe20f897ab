"""Keys: which clients may use the server, in which namespace, until when, and how much."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
import time
import tomllib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio.to_thread

from perdure.atomic import atomic_write, read_file, read_text
from perdure.checks import is_whole
from perdure.errors import InvalidInputError
from perdure.events.background import BackgroundTimer
from perdure.sessions.info import Quota

log = logging.getLogger("perdure.server")

METRICS = "metrics"
"""The operator's namespace: its keys open /metrics and what all keys have used, and no conversation."""

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_day", "sessions", "stored_bytes", "weight")
_MINUTE, _DAY = 60.0, 86400.0
_KEPT_DAYS = 31
SAVED_AFTER = 10.0
"""Seconds after a change at which usage is written."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is kept: only its digest, so that the file gives nobody entry."""

    namespace: str
    digest: str
    expires: str | None = None
    """The first day, in UTC, on which it is not good any more: 2027-01-31."""
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    """Of prompts and replies together, by the days of UTC."""
    sessions: int | None = None
    """Sessions and stored responses of its namespace."""
    stored_bytes: int | None = None
    """Of all sessions, stored responses, turns and memories of its namespace."""
    weight: int | None = None
    """What part of the engine its namespace has while others ask too; None: 1."""

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise InvalidInputError(
                f"a key's name has 1 to 64 letters, digits, dots, dashes and underscores, "
                f"got {self.namespace!r}"
            )
        if not _DIGEST.fullmatch(self.digest):
            raise InvalidInputError(
                f"the key of {self.namespace} is not a SHA-256 in 64 lower-case hex digits; "
                "`perdure keys add NAME` makes a key and its line"
            )

        if self.expires is not None and _day(self.expires) is None:
            raise InvalidInputError(f"expires is a day such as 2027-01-31, got {self.expires!r}")
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise InvalidInputError(f"{name} is a whole number from 1, got {value!r}")

    @property
    def id(self) -> str:
        """What it is called in lists: the start of its digest."""
        return self.digest[:12]

    @property
    def line(self) -> str:
        more = {name: getattr(self, name) for name in ("expires", *_LIMITS)}
        terms = [f"{name}={value}" for name, value in more.items() if value is not None]
        return " ".join([f"{self.namespace}:{self.digest}", *terms])

    def is_expired(self, now: float) -> bool:
        day = _day(self.expires) if self.expires is not None else None
        return day is not None and now >= day.timestamp()


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Why a key has to wait, and for how many seconds."""

    why: str
    retry_after: int


@dataclass(slots=True, kw_only=True)
class DayUsage:
    """What a key has used on one day of UTC."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, those that were not computed again."""
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class KeyUsage:
    """What each key has used, by day, for the last 31 days. For any thread.

    With a file it outlasts the server: it is written some seconds after a change, and at `save`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._changing = threading.Lock()
        self._requests: dict[str, deque[float]] = {}
        self._days: dict[str, dict[int, DayUsage]] = _read_usage(path)
        self._timer: BackgroundTimer | None = None

    def days(self, key: Key) -> dict[str, DayUsage]:
        """What a key has used, by the dates of days, the first one first."""
        with self._changing:
            days = sorted(self._days.get(key.digest, {}).items())
            return {_date(day): replace(usage) for day, usage in days}

    def save(self) -> None:
        """Write what there is to the file. A disk that is full loses no more than this."""
        if self._path is None:
            return
        with self._changing:
            self._timer = None
            table = {
                digest: {str(day): asdict(usage) for day, usage in days.items()}
                for digest, days in self._days.items()
            }
        try:
            with atomic_write(self._path, private=True, durable=False) as file:
                file.write(json.dumps(table).encode())
        except OSError as error:
            log.warning("what keys have used cannot be written to %s: %s", self._path, error.strerror)

    def _changed(self) -> None:
        if self._path is not None and self._timer is None:
            self._timer = BackgroundTimer(SAVED_AFTER, self.save, name="perdure-usage")
            self._timer.start()

    def _today(self, key: Key, day: int) -> DayUsage:
        days = self._days.setdefault(key.digest, {})
        for old in [each for each in days if each <= day - _KEPT_DAYS]:
            del days[old]
        return days.setdefault(day, DayUsage())

    waits = False
    """Whether `admit` may wait for another machine: it is then called in a thread."""

    def tokens_left(self, key: Key, now: float) -> int | None:
        """What a key may still use today; None is without a bound."""
        if key.tokens_per_day is None:
            return None
        with self._changing:
            return max(0, key.tokens_per_day - self._today(key, int(now // _DAY)).tokens)

    def admit(self, key: Key, now: float, clock: float) -> OverLimit | None:
        """Count a request, or say why it has to wait. Days go by the time `now`, minutes by a `clock` that
        never jumps."""
        with self._changing:
            day = int(now // _DAY)
            used = self._today(key, day).tokens
            if key.tokens_per_day is not None and used >= key.tokens_per_day:
                left = int((day + 1) * _DAY - now) + 1
                return OverLimit(
                    f"this key has used {used} tokens today, {key.tokens_per_day} are allowed: ask again "
                    "after 00:00 UTC, or ask the operator of the server for more",
                    left,
                )
        left_of_minute = self._minute(key, clock) if key.requests_per_minute is not None else None
        if left_of_minute is None:
            return None
        return OverLimit(
            f"{key.requests_per_minute} requests a minute are allowed for this key", int(left_of_minute) + 1
        )

    def _minute(self, key: Key, clock: float) -> float | None:
        """Count a request of a key with a limit; or the seconds until there may be one more."""
        with self._changing:
            recent = self._requests.setdefault(key.digest, deque())
            while recent and recent[0] <= clock - _MINUTE:
                recent.popleft()
            if len(recent) >= (key.requests_per_minute or 0):
                return recent[0] + _MINUTE - clock
            recent.append(clock)
            return None

    def spend(self, key: Key, now: float, *, prompt: int, completion: int = 0) -> None:
        """Count the tokens of a request that is over."""
        with self._changing:
            today = self._today(key, int(now // _DAY))
            today.prompt_tokens += prompt
            today.completion_tokens += completion
            self._changed()

    def reply(self, key: Key, now: float, *, cached: int) -> None:
        """Count a request that was answered, and the tokens of its prompt that were not computed."""
        with self._changing:
            today = self._today(key, int(now // _DAY))
            today.requests += 1
            today.cached_tokens += cached
            self._changed()


@dataclass(frozen=True, slots=True)
class KeyAccount:
    """A key and what it may still use: for work that outlasts its request, or shares a connection."""

    key: Key
    keys: Keys

    @property
    def is_good(self) -> bool:
        """Whether the key was neither withdrawn nor has expired since."""
        live = self.keys.live(self.key.digest)
        return live is not None and not live.is_expired(time.time())

    async def admit(self) -> OverLimit | None:
        return await self.keys.admit(self.keys.live(self.key.digest) or self.key)

    @property
    def tokens_left(self) -> int | None:
        return self.keys.usage.tokens_left(self.keys.live(self.key.digest) or self.key, time.time())

    def spend(self, prompt: int, completion: int = 0) -> None:
        self.keys.usage.spend(self.key, time.time(), prompt=prompt, completion=completion)

    def reply(self, cached: int) -> None:
        self.keys.usage.reply(self.key, time.time(), cached=cached)


class Keys:
    """The keys of a server. Without any, everybody comes in, and all are in the namespace "". A file whose
    last key was withdrawn lets nobody in."""

    def __init__(self, keys: Iterable[Key] = (), *, path: Path | None = None) -> None:
        self._keys = {key.digest: key for key in keys}
        self._path = path
        self.required = path is not None or bool(self._keys)
        """Whether a request needs a key."""
        self.usage = KeyUsage(usage_file(path) if path is not None else None)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    async def admit(self, key: Key) -> OverLimit | None:
        """Count a request of a key, or say why it has to wait."""
        now, clock = time.time(), time.monotonic()
        if self.usage.waits and key.requests_per_minute is not None:
            return await anyio.to_thread.run_sync(self.usage.admit, key, now, clock)
        return self.usage.admit(key, now, clock)

    def replace(self, keys: Iterable[Key], *, required: bool) -> None:
        """Have other keys from now on. Once a key was needed, one is needed always."""
        self._keys = {key.digest: key for key in keys}
        self.required = self.required or required

    @property
    def has_file(self) -> bool:
        return self._path is not None

    def reload(self) -> None:
        """Read the file again. What is wrong with it is raised, and the keys stay as they were."""
        if self._path is not None:
            self._keys = {key.digest: key for key in _read(self._path)}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def namespaces(self) -> list[str]:
        return sorted({key.namespace for key in self})

    def manages(self, namespace: str) -> bool:
        """Whether a caller decides for all, such as when a model is unloaded: where there are keys, the
        operator alone."""
        return not self.required or namespace == METRICS

    def quota(self, namespace: str) -> Quota:
        """What a namespace may store: the smallest bound among its keys."""
        keys = [key for key in self if key.namespace == namespace]
        return Quota(
            sessions=min((key.sessions for key in keys if key.sessions is not None), default=None),
            nbytes=min((key.stored_bytes for key in keys if key.stored_bytes is not None), default=None),
        )

    @property
    def weights(self) -> dict[str, float]:
        """Of the namespaces: the largest among the keys of each."""
        weights: dict[str, float] = {}
        for key in self:
            weights[key.namespace] = max(weights.get(key.namespace, 1), key.weight or 1)
        return weights

    def namespace(self, secret: str | None) -> str | None:
        """Whose key this is; None where it is nobody's. Takes as long for a wrong key as for a right one."""
        if not self.required:
            return ""
        key = self.find(secret)
        return key.namespace if key is not None else None

    def find(self, secret: str | None) -> Key | None:
        """The key of that secret, expired or not. Takes as long for a wrong one as for a right one."""
        digest = hashlib.sha256((secret or "").encode("utf-8", "surrogatepass")).hexdigest()
        match: Key | None = None
        for key in self:
            if hmac.compare_digest(key.digest, digest):
                match = key
        return match if secret else None

    def live(self, digest: str) -> Key | None:
        """The key of that digest as the file has it now; None where it was withdrawn."""
        return self._keys.get(digest)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Keys out of a file: lines of `namespace:sha256`, or the same in TOML under `[keys]`. A server does
        not start with a file that has none."""
        keys = _read(path)
        if not keys:
            raise InvalidInputError(
                f"{path} has no key in it; `perdure keys add NAME` makes one and its line"
            )
        return cls(keys, path=path)


class KeyStore(ABC):
    """Keys that are kept with the sessions of several servers. A call may wait, and raise `StoreError`."""

    @abstractmethod
    def keys(self) -> list[Key]: ...

    @abstractmethod
    def add(self, key: Key) -> None: ...

    @abstractmethod
    def withdraw(self, key: Key) -> None: ...

    @abstractmethod
    def usage(self) -> KeyUsage:
        """What each key has used, on all servers."""

    @abstractmethod
    def share(self, keys: Keys, changed: Callable[[], object]) -> None:
        """Count what `keys` use here from now on, and, unless they are in a file, have these keys there. When
        they are others than before, `changed` is called, in a thread."""


def usage_file(keys: Path) -> Path:
    """Where it is written what the keys of a file have used."""
    return keys.with_name(f"{keys.name}.usage")


_USAGE_BYTES = 64 << 20


def _read_usage(path: Path | None) -> dict[str, dict[int, DayUsage]]:
    """What was written; nothing where it cannot be read: no server stays down for it."""
    if path is None:
        return {}
    try:
        table = json.loads(read_file(path, _USAGE_BYTES))
        return {
            str(digest): {int(day): DayUsage(**usage) for day, usage in days.items()}
            for digest, days in table.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("what keys have used cannot be read from %s: %s", path, error)
        return {}


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY, UTC).strftime("%Y-%m-%d")


def new_key(
    namespace: str,
    *,
    expires: str | None = None,
    requests_per_minute: int | None = None,
    tokens_per_day: int | None = None,
    sessions: int | None = None,
    stored_bytes: int | None = None,
    weight: int | None = None,
) -> tuple[str, Key]:
    """A fresh secret, and the key as it is kept."""
    secret = f"pk-{secrets.token_urlsafe(32)}"
    return secret, Key(
        namespace,
        hashlib.sha256(secret.encode()).hexdigest(),
        expires=expires,
        requests_per_minute=requests_per_minute,
        tokens_per_day=tokens_per_day,
        sessions=sessions,
        stored_bytes=stored_bytes,
        weight=weight,
    )


def _read(path: Path) -> list[Key]:
    try:
        text = read_text(path, regular=False)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the keys in {path} cannot be read: {error}") from None
    return _toml(path, text) if path.suffix.lower() == ".toml" else _lines(path, text)


def _lines(path: Path, text: str) -> list[Key]:
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if entry := line.split("#")[0].strip():
            try:
                keys.append(parse_line(entry))
            except InvalidInputError as error:
                raise InvalidInputError(f"{path}, line {number}: {error}") from None
    return keys


def parse_line(entry: str) -> Key:
    """A key as `Key.line` writes it."""
    first, *more = entry.split()
    namespace, separator, digest = first.rpartition(":")
    if not separator:
        raise InvalidInputError("not `namespace:sha256`")
    return Key(namespace, digest.lower(), **_terms(more))


def _terms(words: Iterable[str]) -> Mapping[str, Any]:
    """What stands behind a key in its line: `expires=2027-01-31 requests_per_minute=60`."""
    terms: dict[str, Any] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in ("expires", *_LIMITS):
            raise InvalidInputError(
                f"{word!r} is not known: after the hash there can be expires=DAY, {'=N, '.join(_LIMITS)}=N"
            )
        if name in _LIMITS and not (value.isascii() and value.isdigit()):
            raise InvalidInputError(f"{name} is a whole number from 1, got {value!r}")
        terms[name] = int(value) if name in _LIMITS else value
    return terms


def _day(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return None


def _toml(path: Path, text: str) -> list[Key]:
    try:
        table = tomllib.loads(text).get("keys", {})
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is no TOML: {error}") from None
    if not isinstance(table, dict):
        raise InvalidInputError(f"{path}: keys is a table of namespaces")
    keys = []
    for namespace, digests in table.items():
        for digest in digests if isinstance(digests, list) else [digests]:
            if not isinstance(digest, str):
                raise InvalidInputError(f"{path}: the key of {namespace} is a text, or a list of texts")
            keys.append(parse_line(f"{namespace}:{digest}"))
    return keys
