"""A walk over everything that a store keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import tally
from perdure.errors import CorruptStateError, StoreDamagedError, StoreLockedError
from perdure.sessions.register import Register

if TYPE_CHECKING:
    from perdure.store.disk import Findings

Progress = Callable[[int, int], None]


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
    if (folder / "blocks").is_dir():
        _read_blocks(folder, found, progress)
    return found


def _read_register(folder: Path, found: Inspection, progress: Progress) -> None:
    register = Register(folder, readonly=True)
    try:
        register.index.check()
        heads = [
            (f"session {tally.quoted(name)}{_of(namespace)}", head, None)
            for name, namespace, head in register.index.rows("SELECT name, namespace, head FROM session")
        ]
        found.sessions = len(heads)
        remembered = [
            (f"memory {tally.quoted(label)} of {tally.quoted(session)}{_of(namespace)}", turn, digest)
            for label, session, namespace, turn, digest in register.index.rows(
                "SELECT label, session, namespace, turn, digest FROM memory"
            )
        ]
        found.memories = len(remembered)
        proved: set[int] = set()
        for number, (what, head, digest) in enumerate([*heads, *remembered], 1):
            try:
                numbers, turns = register.chain(head)
            except CorruptStateError as error:
                found.damaged.append((what, str(error)))
            else:
                proved.update(at for at, turn in zip(numbers, turns, strict=True) if turn.kind != "start")
                if digest is not None and turns[-1].digest != digest:
                    found.damaged.append((what, "it is not what was remembered: its digest differs"))
            progress(number, len(heads) + len(remembered))
        found.turns = len(proved)
    finally:
        register.close()


def _of(namespace: str) -> str:
    return f" of namespace {tally.quoted(namespace)}" if namespace else ""


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
