"""Checking a store: every turn of every session, and every block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.config import STORE_BYTES
from perdure.errors import CorruptStateError, StoreDamagedError, StoreLockedError
from perdure.sessions.store.sqlite.repair import Repair, repair
from perdure.sessions.store.sqlite.schema import MEMORY, MEMORY_COLUMNS, SESSION, read_memory, read_session
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.sessions.turn import Turn

if TYPE_CHECKING:
    from perdure.cache.tiers.disk import Findings

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


def verify(folder: Path, progress: Progress) -> Verification:
    """Prove every turn that a session or a memory leads to, then have every block read."""
    found = Verification(store=folder)
    try:
        _read_sessions(folder, found, progress)
    except (StoreDamagedError, CorruptStateError) as error:
        found.database = str(error)
    if found.damaged or found.database:
        try:
            found.repair = repair(folder)
        except (StoreDamagedError, StoreLockedError) as error:
            found.not_repaired = str(error)
    if (folder / "blocks").is_dir():
        _read_blocks(folder, found, progress)
    return found


def _read_sessions(folder: Path, found: Verification, progress: Progress) -> None:
    store = SqliteStore(folder, readonly=True)
    try:
        store.index.check()
        store.index.check_schema()
        sessions = store.index.rows(SESSION)
        memories = store.index.rows(MEMORY)
        found.sessions, found.memories = len(sessions), len(memories)
        points: list[tuple[str, Callable[[], Chain]]] = []
        for row in sessions:
            what = f"session {_quoted(str(row[2]))}{_of(row[1])}"
            points.append((what, partial(_session, store, row)))
        for row in memories:
            said = dict(zip(MEMORY_COLUMNS, row, strict=False))
            what = f"memory {_quoted(str(said['label']))} of {_quoted(str(said['session']))}"
            points.append((what + _of(said["namespace"]), partial(_memory, store, row)))
        proved: dict[int, str] = {}
        for number, (what, prove) in enumerate(points, 1):
            try:
                numbers, turns = prove()
                for at, turn in zip(numbers, turns, strict=True):
                    if at not in proved:
                        # What goes on from a turn believes this; the turns behind it prove only its content.
                        store.check_turn(at, turn.digest)
                        proved[at] = turn.kind
            except CorruptStateError as error:
                found.damaged.append((what, str(error)))
            progress(number, len(points))
        found.turns = sum(kind != "start" for kind in proved.values())
        store.check_counts()
    finally:
        store.close()


def _session(store: SqliteStore, row: tuple[Any, ...]) -> Chain:
    known = read_session(row)
    return store.chain(known.head, known.name)


def _memory(store: SqliteStore, row: tuple[Any, ...]) -> Chain:
    return store.chain_of(read_memory(row))


def _repair(kept: Repair) -> dict[str, Any]:
    return {**dataclasses.asdict(kept), "aside": str(kept.aside)}


def _quoted(name: str) -> str:
    """A name as one line, whatever is in it."""
    return name if name.isprintable() and name.strip() == name and name else repr(name)


def _of(namespace: object) -> str:
    return f" of namespace {_quoted(str(namespace))}" if namespace else ""


def _read_blocks(folder: Path, found: Verification, progress: Progress) -> None:
    from perdure.cache.tiers.disk import DiskTier

    try:
        disk = DiskTier(folder, budget=STORE_BYTES, rebuild=True)
    except StoreLockedError as error:
        found.unread = str(error)
        return
    try:
        found.blocks = disk.verify(progress)
    finally:
        disk.close()
