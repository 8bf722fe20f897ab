"""What can be proved of a damaged database of sessions, in a new one; the damaged one is put aside, whole."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perdure import CorruptStateError, SessionInfo, StoreDamagedError, StoreKeyError, StoreLockedError, Turn
from perdure.spi.base import make_private, sync_folder, translate_os_errors
from perdure.spi.cache import Encryption, Index, block_folders
from perdure.spi.sessions import SqlStore, check_turn, every_row
from perdure.spi.sqlite import (
    APPLICATION,
    FILE,
    FIRST,
    INSERT_SESSION,
    INSERT_TURN,
    MEMORY_COLUMNS,
    MENDED,
    MIGRATIONS,
    SESSION_COLUMNS,
    STORE_BYTES,
    TURN,
    TURN_COLUMNS,
    USAGE,
    DiskTier,
    Findings,
    SessionFolder,
    SqliteStore,
    UseLock,
    parse_turn,
    read_memory,
    read_record,
    row_checksum,
    table_of,
    turn_values,
    unopened,
)

FOUND = "lost+found"
"""The namespace of turns whose session is not known any more."""
_PAGE = 4096
_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Even the words with which SQLite says what is wrong can be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What came of it."""

    sessions: int
    turns: int
    memories: int
    cut: Sequence[str]
    """Sessions that stand at an earlier turn now, or are gone; memories that are gone."""
    found: Sequence[str]
    """Sessions that were made of turns to which nothing led any more."""
    aside: Path
    """Where the damaged database lies."""


def repair(folder: Path) -> Repair:
    """Put what can be proved of the sessions in `folder` in its place. `StoreDamagedError` if nothing can."""
    lock = UseLock(folder, alone=True)
    try:
        aside = next(path for path in _places(folder) if not path.exists())
        if (folder / MENDED).exists():
            _exchange(folder, aside)
            return Repair(sessions=0, turns=0, memories=0, cut=(), found=(), aside=aside)
        temporary = folder / f"{MENDED}.tmp"
        with _copied(folder) as db:
            proved = _ProvedTurns(db)
            if not proved.turns:
                raise StoreDamagedError(f"nothing in {folder / FILE} can be proved: restore it from a copy")
            known = SessionFolder(folder).mark() or proved.id
            _remove(temporary)
            new = Index(temporary, readonly=False, migrations=MIGRATIONS, functions={"seal": row_checksum})
            with closing(new), new.writing():
                files = _copy_files(db, new)
                proved.write(new)
                for turn, file in _pairs(db):
                    if turn in proved.turns and file in files:
                        new.run("INSERT OR IGNORE INTO turn_file (turn, file) VALUES (?, ?)", turn, file)
                if known:
                    new.run("UPDATE register SET id = ?", known)
        with translate_os_errors(folder):
            os.replace(temporary, folder / MENDED)
        sync_folder(folder)
        _exchange(folder, aside)
        return Repair(
            sessions=len(proved.sessions),
            turns=sum(turn.kind != "start" for turn in proved.turns.values()),
            memories=len(proved.memories),
            cut=proved.cut,
            found=[str(values["name"]) for values in proved.sessions if values["namespace"] == FOUND],
            aside=aside,
        )
    finally:
        lock.release()


def _exchange(folder: Path, aside: Path) -> None:
    """From here on the new database counts: after an interruption the next repair goes on at this place."""
    with translate_os_errors(folder):
        # The log before what it belongs to, and both before the new one comes: it would be taken for its own.
        for suffix in ("-shm", "-wal", ""):
            with suppress(FileNotFoundError):
                os.replace(folder / f"{FILE}{suffix}", aside.with_name(aside.name + suffix))
        sync_folder(folder)
        os.replace(folder / MENDED, folder / FILE)
    sync_folder(folder)


def _places(folder: Path) -> Iterator[Path]:
    return (folder / f"sessions.damaged-{number}.sqlite" for number in itertools.count(1))


@contextmanager
def _copied(folder: Path) -> Iterator[sqlite3.Connection]:
    """A copy to read from, with a header such as ours have: little else is needed to reach the rows."""
    copy = folder / "sessions.repair"
    try:
        with translate_os_errors(folder), unopened(folder / FILE):
            for suffix in ("", "-wal"):
                if (folder / f"{FILE}{suffix}").exists():
                    make_private(folder / f"{copy.name}{suffix}")
                    shutil.copyfile(folder / f"{FILE}{suffix}", folder / f"{copy.name}{suffix}")
            with copy.open("r+b") as file:
                head = bytearray(file.read(100).ljust(100, b"\0"))
                pages = copy.stat().st_size // _PAGE
                head[:24] = b"SQLite format 3\0" + struct.pack(">HBBBBBB", _PAGE, 2, 2, 0, 64, 32, 32)
                head[28:32] = struct.pack(">I", pages)
                head[44:48], head[52:60] = struct.pack(">I", 4), struct.pack(">II", 0, 1)
                head[60:72] = struct.pack(">III", len(MIGRATIONS), 0, APPLICATION)
                head[92:96] = head[24:28]
                file.seek(0)
                file.write(head)
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield db
    except _UNREADABLE as error:
        raise StoreDamagedError(
            f"{folder / FILE} cannot be read: restore it from a copy ({error})"
        ) from error
    finally:
        _remove(copy)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with translate_os_errors(path):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


class _ProvedTurns:
    """What can be read and proved.

    A turn is proved by its digest, or by its row checksum if the digest is what was damaged; then its parent
    is known too, through the digest of the turn before it. Where a turn is not proved but its row checksum
    holds, the turn before it is still known, and a session goes back to it.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._raw = {
            row["number"]: row for row in _rows(db, "turn", "turn_parent", (*TURN_COLUMNS, "seal"), TURN)
        }
        self.turns: dict[int, Turn] = {}
        self.depths: dict[int, int] = {}
        for number in sorted(self._raw):
            self._prove(number)
        self.cut: list[str] = []
        self.sessions: list[dict[str, Any]] = []
        self.memories: list[dict[str, Any]] = []
        for table in ("session", "record"):
            for row in _rows(db, table, f"{table}_head", (*SESSION_COLUMNS, "seal")):
                self._session(row)
        for row in _rows(db, "memory", "memory_turn", (*MEMORY_COLUMNS, "seal")):
            self._memory(row)
        self._adopt()
        self.last = self._numbers(db)
        """The last number given out, for each table."""
        self.id = ""
        with suppress(*_UNREADABLE, TypeError):
            [(self.id,)] = db.execute("SELECT id FROM register")

    def write(self, index: Index) -> None:
        for number, turn in self.turns.items():
            parent = self._raw[number]["parent"]
            index.run(INSERT_TURN, *turn_values(number, parent, self.depths[number], turn))
        for table, last in self.last.items():
            index.run(
                "UPDATE counter SET last = ?, seal = ? WHERE name = ?", last, row_checksum(table, last), table
            )
        for values in self.sessions:
            head = values["head"]
            columns = [values[column] for column in SESSION_COLUMNS]
            place = (None, None) if head is None else (self.depths[head], self.turns[head].digest)
            index.run(
                INSERT_SESSION.format(table_of(values["kind"])), *columns, row_checksum(*columns, *place)
            )
        for values in self.memories:
            columns = [values[column] for column in MEMORY_COLUMNS]
            index.run(
                f"INSERT INTO memory ({', '.join(MEMORY_COLUMNS)}, seal)"
                f" VALUES ({', '.join('?' * len(columns))}, ?)",
                *columns,
                row_checksum(*columns),
            )

        index.run(f"INSERT INTO usage {USAGE}")

    def _numbers(self, db: sqlite3.Connection) -> dict[str, int]:
        largest = {
            "turn": max(self._raw, default=0),
            "session": max((row["number"] for row in self.sessions), default=0),
            "memory": max((row["number"] for row in self.memories), default=0),
        }
        for table, last in largest.items():
            with suppress(*_UNREADABLE):
                for number, proof in db.execute("SELECT last, seal FROM counter WHERE name = ?", [table]):
                    if row_checksum(table, number) == proof:
                        largest[table] = max(last, number)
        return largest

    def _prove(self, number: int) -> None:
        row = self._raw[number]
        parent = row["parent"]
        if parent is not None and parent not in self.turns:
            return
        before = FIRST if parent is None else self.turns[parent].digest
        depth = 0 if parent is None else self.depths[parent] + 1
        try:
            turn = parse_turn(row["whole"], before)
        except CorruptStateError:
            return
        proved = (
            turn.digest == row["digest"] or row_checksum(number, parent, depth, turn.digest) == row["seal"]
        )
        if proved and (turn.kind == "start") == (parent is None):
            self.turns[number], self.depths[number] = turn, depth

    def _session(self, row: dict[str, Any]) -> None:
        what, head = f"session {row['name']!r}{_of(row['namespace'])}", row["head"]
        if head in self.turns:
            stands: tuple[Any, Any] = self.depths[head], self.turns[head].digest
        else:
            raw = self._raw.get(head, {})
            stands = raw.get("depth"), raw.get("digest")
        if row_checksum(*(row[column] for column in SESSION_COLUMNS), *stands) != row["seal"]:
            self.cut.append(f"{what}: its entry is damaged")
            return
        last = self._last(head) if head is not None else None
        if last is None and head is not None:
            self.cut.append(f"{what}: its turns are damaged")
            return
        if last is not None and last != head:
            depth = self.depths[last]
            self.cut.append(f"{what}: turn {depth + 1} is damaged, so that it stands after turn {depth} now")
        self.sessions.append({**row, "head": last})

    def _memory(self, row: dict[str, Any]) -> None:
        whole = row_checksum(*(row[column] for column in MEMORY_COLUMNS)) == row["seal"]
        turn = self.turns.get(row["turn"])
        if whole and turn is not None and turn.digest == row["digest"]:
            self.memories.append(row)
        else:
            what = f"memory {row['label']!r} of session {row['session']!r}{_of(row['namespace'])}"
            self.cut.append(f"{what}: it is damaged")

    def _last(self, number: int) -> int | None:
        """The last turn up to `number` that is proved, if the way there can be trusted."""
        while number not in self.turns:
            row = self._raw.get(number)
            if row is None or row_checksum(*(row[column] for column in TURN_COLUMNS)) != row["seal"]:
                return None
            number = row["parent"]
        return number

    def _adopt(self) -> None:
        """Give turns that nothing leads to any more to sessions of their own."""
        led = {row["head"] for row in self.sessions} | {row["turn"] for row in self.memories}
        taken = {row["name"] for row in self.sessions if row["namespace"] == FOUND}
        for number in sorted(self.turns, reverse=True):
            if number not in led and self.depths[number]:
                now = time.time()
                name = next(name for name in _names(number) if name not in taken)
                values = (
                    1 + max((row["number"] for row in self.sessions), default=0),
                    FOUND,
                    name,
                    "session",
                    number,
                    json.dumps({}),
                    json.dumps({"how": "verify", "session": "", "turn": self.depths[number]}),
                    now,
                    now,
                )
                self.sessions.append(dict(zip(SESSION_COLUMNS, values, strict=True)))
                led.add(number)
            parent = self._raw[number]["parent"]
            if number in led and parent is not None:
                led.add(parent)
        for number in [number for number in self.turns if number not in led]:
            del self.turns[number]


def _of(namespace: object) -> str:
    return f" of namespace {namespace!r}" if namespace else ""


def _names(turn: int) -> Iterator[str]:
    yield f"turn {turn}"
    yield from (f"turn {turn} ({again})" for again in itertools.count(2))


def _rows(
    db: sqlite3.Connection, table: str, index: str, columns: Sequence[str], whole: str = ""
) -> Iterator[dict[str, Any]]:
    """The rows of a table that can be read at all, by their numbers."""
    numbers: set[int] = set()
    for source in (f"{table} NOT INDEXED", f"{table} INDEXED BY {index}"):
        with suppress(*_UNREADABLE):
            for (number,) in db.execute(f"SELECT number FROM {source}"):
                numbers.add(number)
    names = [*columns, *(["whole"] if whole else [])]
    for number in sorted(number for number in numbers if isinstance(number, int)):
        with suppress(*_UNREADABLE):
            cursor = db.execute(
                f"SELECT {', '.join(f't.{column}' for column in columns)}{', ' if whole else ''}{whole}"
                f" FROM {table} t NOT INDEXED WHERE t.number = ?",
                [number],
            ).fetchall()
            for row in cursor:
                parts = [*row[: len(columns)], *([row[len(columns) :]] if whole else [])]
                yield dict(zip(names, parts, strict=True))


def _copy_files(db: sqlite3.Connection, new: Index) -> set[int]:
    """Copy the files that turns name, one in memory at a time, but for damaged ones; their numbers."""
    columns = ("namespace", "digest", "data", "checksum", "created")
    copied: set[int] = set()
    for row in _rows(db, "file", "sqlite_autoindex_file_1", ("number", *columns)) if _has_files(db) else ():
        data = row["data"]
        if isinstance(data, bytes) and hashlib.sha256(data).digest() == row["checksum"]:
            new.run(
                f"INSERT INTO file (number, {', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?)",
                *(row["number"], *(row[column] for column in columns)),
            )
            copied.add(row["number"])
    return copied


def _pairs(db: sqlite3.Connection) -> Iterator[tuple[int, int]]:
    """Which turn names which file, as far as it can be read."""
    with suppress(*_UNREADABLE):
        yield from db.execute("SELECT turn, file FROM turn_file")


def _has_files(db: sqlite3.Connection) -> bool:
    """Whether the database is of a version that has files."""
    with suppress(*_UNREADABLE):
        return bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'file'").fetchone())
    return False


# Checking a store: every turn of every session, and every block.

Progress = Callable[[int, int], None]
Chain = tuple[Sequence[int], Sequence[Turn]]


@dataclass(slots=True, kw_only=True)
class Verification:
    """What was found in a store. It is sound only if all of it could be looked at and nothing was wrong."""

    store: Path
    sessions: int = 0
    turns: int = 0
    memories: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """What is not what its digest says, and why."""
    database: str = ""
    """What is wrong with the database of sessions."""
    repair: Repair | None = None
    """What was kept of it, if some of it was damaged."""
    not_repaired: str = ""
    """Why nothing could be done about that."""
    blocks: Findings | None = None
    unread: str = ""
    """Why blocks could not be looked at."""

    @property
    def sound(self) -> bool:
        whole = self.blocks is None or self.blocks.sound
        return whole and not (self.damaged or self.database or self.unread)

    def plain(self) -> dict[str, Any]:
        return {
            "store": str(self.store),
            "sound": self.sound,
            "sessions": self.sessions,
            "turns": self.turns,
            "memories": self.memories,
            "damaged": [{"what": what, "why": why} for what, why in self.damaged],
            "database": self.database or "ok",
            "repair": _repair(self.repair) if self.repair is not None else None,
            "not_repaired": self.not_repaired or None,
            "blocks": dataclasses.asdict(self.blocks) if self.blocks is not None else None,
            "unread": self.unread or None,
        }


def verify(
    folder: Path, progress: Progress, encryption: Callable[[], Encryption | None] = lambda: None
) -> Verification:
    """Prove every turn that a session or a memory leads to, then have every block read; `encryption` finds
    the key of blocks that are encrypted."""
    verification = Verification(store=folder)
    try:
        _read_sessions(folder, verification, progress)
    except (StoreDamagedError, CorruptStateError) as error:
        verification.database = str(error)
    if verification.damaged or verification.database:
        try:
            verification.repair = repair(folder)
        except (StoreDamagedError, StoreLockedError) as error:
            verification.not_repaired = str(error)
    read_blocks(folder, verification, progress, encryption)
    return verification


def _read_sessions(folder: Path, verification: Verification, progress: Progress) -> None:
    with closing(SqliteStore(folder, readonly=True)) as store:
        store.index.check()
        store.index.check_schema()
        prove_sessions(store, verification, progress)


def prove_sessions(store: SqlStore, verification: Verification, progress: Progress) -> None:
    """Prove every turn that a session or a memory of an open store leads to."""
    sessions, memories = every_row(store)
    verification.sessions, verification.memories = len(sessions), len(memories)
    points: list[tuple[str, Callable[[], Chain]]] = []
    for row in sessions:
        what = f"session {_quoted(str(row[2]))}{_of(row[1])}"
        points.append((what, partial(_session, store, row)))
    for row in memories:
        columns = dict(zip(MEMORY_COLUMNS, row, strict=False))
        what = f"memory {_quoted(str(columns['label']))} of {_quoted(str(columns['session']))}"
        points.append((what + _found_in(columns["namespace"]), partial(_memory, store, row)))
    proved: dict[int, str] = {}
    for number, (what, prove) in enumerate(points, 1):
        try:
            numbers, turns = prove()
            for at, turn in zip(numbers, turns, strict=True):
                if at not in proved:
                    # What goes on from a turn believes this; the turns behind it prove only its content.
                    check_turn(store, at, turn.digest)
                    proved[at] = turn.kind
        except CorruptStateError as error:
            verification.damaged.append((what, str(error)))
        progress(number, len(points))
    verification.turns = sum(kind != "start" for kind in proved.values())
    store.check_counts()


def _session(store: SqlStore, row: tuple[Any, ...]) -> Chain:
    known = read_record(row)
    return store.chain(known.head, known.name) if isinstance(known, SessionInfo) else ((), ())


def _memory(store: SqlStore, row: tuple[Any, ...]) -> Chain:
    return store.chain_of(read_memory(row))


def _repair(made: Repair) -> dict[str, Any]:
    return {**dataclasses.asdict(made), "aside": str(made.aside)}


def _quoted(name: str) -> str:
    """A name as one line, whatever is in it."""
    return name if name.isprintable() and name.strip() == name and name else repr(name)


def _found_in(namespace: object) -> str:
    return f" of namespace {_quoted(str(namespace))}" if namespace else ""


def read_blocks(
    folder: Path, verification: Verification, progress: Progress, encryption: Callable[[], Encryption | None]
) -> None:
    """Have every block of a store read and proved."""
    for place in block_folders(folder):
        try:
            disk = DiskTier(place, budget=STORE_BYTES, rebuild=True, encryption=encryption())
        except (StoreLockedError, StoreKeyError) as error:
            verification.unread = str(error)
            continue
        try:
            findings = disk.verify(progress)
        finally:
            disk.close()
        verification.blocks = findings if verification.blocks is None else verification.blocks + findings
