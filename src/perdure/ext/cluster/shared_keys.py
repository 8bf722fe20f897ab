"""Keys that all replicas share, in the PostgreSQL database of their sessions.

Requests a minute are counted there, each in one statement, so that the limit holds over all
replicas. Tokens are counted here and added there every second: past its limit of the day, a key gets no more
than what all replicas answer in that time. Keys are read every second, too; where the database does not
answer, they stay as they were, and minutes are counted by each replica.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure import InvalidInputError, PerdureError
from perdure.spi.runtime import BackgroundThread
from perdure.spi.server import DayUsage, Key, Keys, KeyStore, KeyUsage, parse_line

if TYPE_CHECKING:
    from perdure.ext.cluster.postgres.accounts import Accounts, Counts

log = logging.getLogger("perdure.server")

_DAY = 86400.0
_KEPT_DAYS = 31
_PERIOD = 1.0
"""Seconds between two looks at the database."""


class SharedUsage(KeyUsage):
    """What each key has used, over all replicas. For any thread."""

    waits = True

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self.accounts = accounts
        self._unsent: dict[tuple[str, int], Counts] = {}
        self._sending = threading.Lock()

    def _minute(self, key: Key, clock: float) -> float | None:
        try:
            return self.accounts.admit(key.digest, key.requests_per_minute or 0)
        except PerdureError as error:
            log.warning("requests a minute are counted by this replica alone: %s", error)
            return super()._minute(key, clock)

    def spend(self, key: Key, now: float, *, prompt: int, completion: int = 0) -> None:
        super().spend(key, now, prompt=prompt, completion=completion)
        self._count(key, now, (0, prompt, 0, completion))

    def reply(self, key: Key, now: float, *, cached: int) -> None:
        super().reply(key, now, cached=cached)
        self._count(key, now, (1, 0, cached, 0))

    def save(self) -> None:
        """Add what was counted to the database, and take what it has."""
        try:
            self.exchange()
        except PerdureError as error:
            log.warning("the usage of keys cannot be written: %s", error)

    def exchange(self) -> None:
        with self._sending:
            with self._changing:
                sent, self._unsent = self._unsent, {}
            try:
                self.accounts.spend(sent, forget_before=int(time.time() // _DAY) - _KEPT_DAYS)
            except BaseException:
                with self._changing:
                    for at, counts in sent.items():
                        self._unsent[at] = _sum(counts, self._unsent.get(at))
                raise
            used = self.accounts.used()
        days: dict[str, dict[int, DayUsage]] = {}
        with self._changing:
            stored_counts = {(digest, day): counts for digest, day, counts in used}
            for digest, day in {*stored_counts, *self._unsent}:
                counts = _sum(stored_counts.get((digest, day), (0, 0, 0, 0)), self._unsent.get((digest, day)))
                days.setdefault(digest, {})[day] = DayUsage(
                    requests=counts[0],
                    prompt_tokens=counts[1],
                    cached_tokens=counts[2],
                    completion_tokens=counts[3],
                )
            self._days = days

    def _count(self, key: Key, now: float, counts: Counts) -> None:
        at = key.digest, int(now // _DAY)
        with self._changing:
            self._unsent[at] = _sum(counts, self._unsent.get(at))


class SharedKeyStore(KeyStore):
    """The keys in the database."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts

    def keys(self) -> list[Key]:
        return _read_keys(self.accounts)[0]

    def add(self, key: Key) -> None:
        self.accounts.add(key.digest, key.line)

    def withdraw(self, key: Key) -> None:
        self.accounts.withdraw(key.digest)

    def usage(self) -> KeyUsage:
        used = SharedUsage(self.accounts)
        used.exchange()
        return used

    def share(self, keys: Keys, changed: Callable[[], object]) -> None:
        usage = SharedUsage(self.accounts)
        keys.usage = usage
        _refresh(keys, usage, self.accounts)
        BackgroundThread(
            _watch, keys, usage, self.accounts, changed, name="perdure-keys", restart=True
        ).start()


def _read_keys(accounts: Accounts) -> tuple[list[Key], bool]:
    """The keys, and whether there is or was one: then a request needs one."""
    keys, lines = [], accounts.lines()
    for line in lines:
        try:
            if line is not None:
                keys.append(parse_line(line))
        except InvalidInputError as error:
            log.error("a key in the database is left out: %s", error)
    return keys, bool(lines)


def _refresh(keys: Keys, usage: SharedUsage, accounts: Accounts) -> bool:
    """Read the keys, and exchange the usage. Whether the keys have changed."""
    before = list(keys)
    if not keys.has_file:
        stored, had_some = _read_keys(accounts)
        keys.replace(stored, required=had_some)
    if len(keys):
        usage.exchange()
    return before != list(keys)


def _watch(keys: Keys, usage: SharedUsage, accounts: Accounts, changed: Callable[[], object]) -> None:
    pause, failed = threading.Event(), False
    while not pause.wait(_PERIOD) and not accounts.is_closed:
        try:
            if _refresh(keys, usage, accounts):
                changed()
            failed = False
        except Exception as error:
            if not failed and not accounts.is_closed:
                log.warning("the keys could not be read again, and are unchanged: %s", error)
            failed = True


def _sum(one: Counts, two: Counts | None) -> Counts:
    return one if two is None else (one[0] + two[0], one[1] + two[1], one[2] + two[2], one[3] + two[3])
