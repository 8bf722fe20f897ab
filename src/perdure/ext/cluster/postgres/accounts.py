"""Keys of all replicas, and what they have used: in the database of their sessions.

A key is kept as its digest, with its terms as one line of text. One that was withdrawn stays as a row without
terms: a server that has had keys never takes requests without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from perdure.ext.cluster.postgres.database import PostgresDatabase

Counts: TypeAlias = tuple[int, int, int, int]
"""Requests, and tokens of prompts, of those that were not computed, and of replies."""

_MINUTE = 60.0


class Accounts:
    """The tables of keys, for any thread. Every call may wait for the server, and raise `StoreError`."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._db = database

    @property
    def is_closed(self) -> bool:
        return self._db.is_closed

    def lines(self) -> list[str | None]:
        """The keys, a line each as in a file of keys; None for one that was withdrawn."""
        return [line for (line,) in self._db.rows("SELECT line FROM api_key ORDER BY added, digest")]

    def add(self, digest: str, line: str) -> None:
        self._db.change(
            "INSERT INTO api_key (digest, line) VALUES (?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET line = excluded.line",
            digest,
            line,
        )

    def withdraw(self, digest: str) -> None:
        self._db.change("UPDATE api_key SET line = NULL WHERE digest = ?", digest)

    def admit(self, digest: str, limit: int) -> float | None:
        """Count a request of a key; or where there were `limit` in the last minute, over all replicas, the
        seconds until there may be one more. By the clock of the server."""
        recent = "(SELECT coalesce(array_agg(t ORDER BY t), '{}') FROM unnest(w.times) t WHERE t > now.t - ?)"
        self._db.change(
            "INSERT INTO api_key_minute (digest, times) VALUES (?, '{}') ON CONFLICT (digest) DO NOTHING",
            digest,
        )
        # An update waits for the one before it, and reads what that has left: replicas follow each other.
        rows = self._db.change(
            "WITH now AS (SELECT extract(epoch FROM clock_timestamp())::double precision AS t) "
            f"UPDATE api_key_minute w SET times = CASE WHEN cardinality({recent}) < ? "
            f"THEN {recent} || now.t ELSE {recent} END "
            "FROM now WHERE w.digest = ? "
            "RETURNING w.times[cardinality(w.times)] = now.t, w.times[1] + ? - now.t",
            _MINUTE,
            limit,
            _MINUTE,
            _MINUTE,
            digest,
            _MINUTE,
        )
        [(counted, left)] = rows
        return None if counted else max(0.0, float(left))

    def spend(self, used: Mapping[tuple[str, int], Counts], *, forget_before: int) -> None:
        """Add what keys have used, by digest and day; days before another one are forgotten."""
        if not used:
            return
        with self._db.writing():
            for (digest, day), counts in sorted(used.items()):
                self._db.run(
                    "INSERT INTO api_key_day VALUES (?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT (digest, day) DO UPDATE SET "
                    "requests = api_key_day.requests + excluded.requests, "
                    "prompt_tokens = api_key_day.prompt_tokens + excluded.prompt_tokens, "
                    "cached_tokens = api_key_day.cached_tokens + excluded.cached_tokens, "
                    "completion_tokens = api_key_day.completion_tokens + excluded.completion_tokens",
                    digest,
                    day,
                    *counts,
                )
            self._db.run("DELETE FROM api_key_day WHERE day < ?", forget_before)

    def used(self) -> Sequence[tuple[str, int, Counts]]:
        rows = self._db.rows(
            "SELECT digest, day, requests, prompt_tokens, cached_tokens, completion_tokens FROM api_key_day"
        )
        return [(digest, day, (each[0], each[1], each[2], each[3])) for digest, day, *each in rows]
