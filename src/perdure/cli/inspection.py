"""A walk over everything that a store keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import tally
from perdure.errors import CorruptStateError, StoreDamagedError, StoreLockedError
from perdure.sessions.memory import MEMORY, proved, read_memory
from perdure.sessions.register import Register
from perdure.sessions.rows import SESSION, read_session
from perdure.sessions.salvage import FOUND, Salvage, salvage
from perdure.sessions.schema import MEMORY_SEAL
from perdure.sessions.turn import Turn

if TYPE_CHECKING:
    from perdure.store.disk import Findings

Progress = Callable[[int, int], None]
Chain = tuple[Sequence[int], Sequence[Turn]]


@dataclass(slots=True, kw_only=True)
class Inspection:
    """What was found in a store. It is sound only if all of it could be looked at and nothing was wrong."""

    store: Path
    sessions: int = 0
    turns: int = 0
    memories: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """What is not what its digest says, and why."""
    register: str = ""
    """What is wrong with the database of sessions."""
    salvage: Salvage | None = None
    """What was kept of it, if some of it was damaged."""
    unmended: str = ""
    """Why nothing could be done about that."""
    blocks: Findings | None = None
    unread: str = ""
    """Why blocks could not be looked at."""

    @property
    def sound(self) -> bool:
        whole = self.blocks is None or self.blocks.sound
        return whole and not (self.damaged or self.register or self.unread)

    def plain(self) -> dict[str, Any]:
        return {
            "store": str(self.store),
            "sound": self.sound,
            "sessions": self.sessions,
            "turns": self.turns,
            "memories": self.memories,
            "damaged": [{"what": what, "why": why} for what, why in self.damaged],
            "register": self.register or "ok",
            "salvage": _salvage(self.salvage) if self.salvage is not None else None,
            "unmended": self.unmended or None,
            "blocks": dataclasses.asdict(self.blocks) if self.blocks is not None else None,
            "unread": self.unread or None,
        }

    def lines(self) -> Iterator[str]:
        yield (
            f"{tally.count(self.sessions, 'session')}, {tally.count(self.turns, 'turn')}, "
            f"{self.memories} memories: {len(self.damaged)} damaged"
        )
        yield from (f"  {what}: {why}" for what, why in self.damaged)
        if self.register:
            yield f"the database of sessions is damaged: {self.register}"
        if self.salvage is not None:
            kept = self.salvage
            yield (
                f"kept {tally.count(kept.sessions, 'session')}, {tally.count(kept.turns, 'turn')} and "
                f"{kept.memories} memories; the damaged database is {kept.aside.name} now"
            )
            yield from (f"  {what}" for what in kept.cut)
            if kept.found:
                yield f"  turns whose session is not known are in the namespace {FOUND!r}"
        if self.unmended:
            yield f"nothing was done about it: {self.unmended}"
        found = self.blocks
        if found is not None:
            yield (
                f"{tally.count(found.blocks, 'block')}, {found.nbytes} bytes: {found.missing} missing, "
                f"{found.adopted} adopted, {found.mended} entries mended, {found.quarantined} damaged and "
                f"moved aside, {found.leftovers} leftovers deleted"
            )
            if found.rebuilt:
                yield "the index of blocks was damaged and has been rebuilt; labels were lost with it"
        if self.unread:
            yield f"blocks were not looked at: {self.unread}"
        if self.sound:
            yield "all is well"
        elif not self.damaged and not self.register and not self.unread:
            yield "sessions are whole; state that is gone is computed anew when it is needed"


def inspect(folder: Path, progress: Progress) -> Inspection:
    """Prove every turn that a session or a memory leads to, then have every block read."""
    found = Inspection(store=folder)
    try:
        _read_register(folder, found, progress)
    except StoreDamagedError as error:
        found.register = str(error)
    if found.damaged or found.register:
        try:
            found.salvage = salvage(folder)
        except (StoreDamagedError, StoreLockedError) as error:
            found.unmended = str(error)
    if (folder / "blocks").is_dir():
        _read_blocks(folder, found, progress)
    return found


def _read_register(folder: Path, found: Inspection, progress: Progress) -> None:
    register = Register(folder, readonly=True)
    try:
        register.index.check()
        sessions = register.index.rows(SESSION)
        memories = register.index.rows(MEMORY)
        found.sessions, found.memories = len(sessions), len(memories)
        points: list[tuple[str, Callable[[], Chain]]] = []
        for row in sessions:
            what = f"session {tally.quoted(str(row[2]))}{_of(row[1])}"
            points.append((what, partial(_session, register, row)))
        for row in memories:
            said = dict(zip(MEMORY_SEAL, row, strict=False))
            what = f"memory {tally.quoted(str(said['label']))} of {tally.quoted(str(said['session']))}"
            points.append((what + _of(said["namespace"]), partial(_memory, register, row)))
        proved_turns: set[int] = set()
        for number, (what, prove) in enumerate(points, 1):
            try:
                numbers, turns = prove()
            except CorruptStateError as error:
                found.damaged.append((what, str(error)))
            else:
                chain = zip(numbers, turns, strict=True)
                proved_turns.update(at for at, turn in chain if turn.kind != "start")
            progress(number, len(points))
        found.turns = len(proved_turns)
    finally:
        register.close()


def _session(register: Register, row: tuple[Any, ...]) -> Chain:
    known = read_session(row)
    return register.chain(known.head, known.name)


def _memory(register: Register, row: tuple[Any, ...]) -> Chain:
    return proved(register, read_memory(row))


def _salvage(kept: Salvage) -> dict[str, Any]:
    return {**dataclasses.asdict(kept), "aside": str(kept.aside)}


def _of(namespace: object) -> str:
    return f" of namespace {tally.quoted(str(namespace))}" if namespace else ""


def _read_blocks(folder: Path, found: Inspection, progress: Progress) -> None:
    from perdure.store.disk import DiskTier

    try:
        disk = DiskTier(folder, budget=16 << 30, rebuild=True)
    except StoreLockedError as error:
        found.unread = str(error)
        return
    try:
        found.blocks = disk.verify(progress)
    finally:
        disk.close()
