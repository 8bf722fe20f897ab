"""Rows of a database that are not what they were: refused, or all as before; never other words.

`sessions/test_damage.py` changes the bytes of SQLite's files. The files of PostgreSQL are its server's own,
and nothing here repairs them: a row is what can be changed behind our back. `verify` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ext.cluster.servers import PostgresServer
from perdure.ext.cluster.postgres.place import parse_place, stand_in
from perdure.sessions.info import Record
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sql import tables
from perdure.sessions.store.sql.tables import row_checksum
from perdure.sessions.turn import Turn
from sessions.test_damage import equal, everything, live, read

pytestmark = pytest.mark.extension("upkeep")

TABLES = ("turn", "session", "record", "memory")
NAMES = ("session.namespace", "session.name", "memory.namespace")
"""What a row is found by: under another name it is as if it were deleted, and nobody else gets it."""


class Rows:
    """The rows of a store, past everything that looks after them."""

    def __init__(self, url: str, folder: Path) -> None:
        import psycopg

        self.folder = folder
        place = parse_place(url)
        self.db = psycopg.connect(place.conninfo, autocommit=True)
        self.db.execute(f"SET search_path = {place.schema}".encode())

    def cells(self) -> Iterator[tuple[str, str, int]]:
        """Each column of each row, by the row's number."""
        for table in TABLES:
            cursor = self.db.execute(f"SELECT * FROM {table} ORDER BY number".encode())
            columns = [each.name for each in cursor.description or ()]
            for row in cursor.fetchall():
                yield from ((table, column, row[0]) for column in columns if column != "number")

    def value(self, cell: tuple[str, str, int]) -> Any:
        table, column, number = cell
        [row] = self.db.execute(f"SELECT {column} FROM {table} WHERE number = {number}".encode())
        return row[0]

    def put(self, cell: tuple[str, str, int], value: Any) -> bool:
        """Whether the database took it: it has separate rules."""
        import psycopg

        table, column, number = cell
        try:
            self.db.execute(f"UPDATE {table} SET {column} = %s WHERE number = {number}".encode(), [value])
        except psycopg.IntegrityError:
            return False
        return True


@pytest.fixture
def rows(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rows]:
    url = postgres.url(tmp_path / "own")
    folder = stand_in(url)
    with live(folder):
        pass
    found = Rows(url, folder)
    with closing(found.db):
        yield found


def other(value: Any) -> Any:
    """Nearly the same."""
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1, *value[1:]]) if value else b"\0"
    if isinstance(value, str):
        at = next((at for at, letter in enumerate(value) if letter.isalnum()), len(value))
        return f"{value[:at]}{'b' if value[at : at + 1] == 'a' else 'a'}{value[at + 1 :]}"
    return 1 if value is None else value + 1


def each_cell(rows: Rows, step: int) -> None:
    from perdure.ext.upkeep.store import verify

    known = everything(rows.folder)
    changed = refused = 0
    for cell in list(rows.cells())[::step]:
        before = rows.value(cell)
        if not rows.put(cell, other(before)):
            continue
        changed += 1
        try:
            if f"{cell[0]}.{cell[1]}" in NAMES or read(rows.folder, known, equal):
                refused += 1
                assert not verify(rows.folder, lambda done, total: None).sound, cell
        finally:
            rows.put(cell, before)
        with closing(Sessions(rows.folder)) as sessions:
            if sessions.store.has("", "woken"):
                sessions.delete("woken")
    print(f"{changed} cells changed, {refused} refused")
    assert refused > 0.9 * changed
    assert everything(rows.folder) == known


def test_a_changed_cell_is_refused_or_changes_nothing(rows: Rows) -> None:
    """S2: some of them; all are in `make soak`."""
    each_cell(rows, 23)


@pytest.mark.soak
def test_every_changed_cell_is_refused_or_changes_nothing(rows: Rows) -> None:
    each_cell(rows, 1)


@pytest.mark.soak
def test_rows_that_are_believed_unproved_are_found(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the entry of a session, and what was said, are taken as they lie."""
    known = everything(rows.folder)
    [number] = rows.db.execute(b"SELECT number FROM session WHERE namespace = '' AND name = 'alice'")
    [other_head] = rows.db.execute(b"SELECT head FROM session WHERE name = 'bob'")
    cell = ("session", "head", number[0])
    before = rows.value(cell)
    proved = tables.read_record

    def session_as_it_lies(row: Any, advice: str = "") -> Record:
        *said, depth, digest, _, usage = row
        return proved((*said, depth, digest, row_checksum(*said, depth, digest), usage))

    with monkeypatch.context() as patched:
        patched.setattr(tables, "read_record", session_as_it_lies)
        assert rows.put(cell, other_head[0])
        with pytest.raises(AssertionError):
            read(rows.folder, known, equal)
    rows.put(cell, before)

    def turn_as_it_lies(row: Any, before: bytes) -> Turn:
        turn = tables.parse_turn(row, before)
        object.__setattr__(turn, "_digest", row[-1])
        return turn

    monkeypatch.setattr(tables, "read_turn", turn_as_it_lies)
    rows.db.execute(b"UPDATE turn SET messages = replace(messages, 'Message 0', 'Massage 0')")
    with pytest.raises(AssertionError):
        read(rows.folder, known, equal)
