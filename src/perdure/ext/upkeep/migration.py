"""Bring all sessions of a store into another one, either way between a folder and a database, while in use.

A turn's digest is over all that led to it, so it is the same turn in both: what is there already is not
written again, and a run that was interrupted goes on where it was. Forks share their turns in the new store
as in the old one. Each session is read back from the new store and proved before it counts. Nothing is
changed in the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from perdure import CorruptStateError, PerdureError, SessionInfo, SessionMemory, SessionNotFoundError, Turn
from perdure.spi.sessions import SqlStore, bring_memory, bring_session, every_row, has_turn
from perdure.spi.sqlite import STREAM, read_memory, read_session

_PASSES = 20
"""How often sessions that changed meanwhile are looked at again."""


@dataclass(slots=True, kw_only=True)
class Migration:
    """What came of it."""

    sessions: int = 0
    """That are in the new store now, and were proved there."""
    turns: int = 0
    """That were written by this run."""
    memories: int = 0
    ahead: list[str] = field(default_factory=list)
    """Sessions that were continued in the new store meanwhile."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """What was not brought over, and why."""
    changing: list[str] = field(default_factory=list)
    """Sessions that changed in the old store again and again: run it once more."""

    @property
    def whole(self) -> bool:
        return not (self.left_out or self.changing)


def migrate_sessions(source: SqlStore, target: SqlStore, progress: Callable[[int, int], None]) -> Migration:
    """Bring every session and memory of `source` into `target`."""
    run = _Run(source, target)
    for number in range(_PASSES):
        rows = _sessions(source)
        waiting = [row for row in rows if run.seen.get(row[0]) != (row[4], row[8])]
        run.forget_deleted({row[0] for row in rows})
        if number and not waiting:
            break
        # The oldest first: lists are in the order of the last change.
        for done, row in enumerate(sorted(waiting, key=lambda row: (row[8], row[0])), 1):
            run.session(row)
            progress(done, len(waiting))
    else:
        run.found.changing = sorted(
            str(row[2]) for row in _sessions(source) if run.seen.get(row[0]) != (row[4], row[8])
        )
    for row in every_row(source)[1]:
        run.memory(row)
    run.found.sessions = len(run.proved)
    return run.found


def _sessions(source: SqlStore) -> list[Sequence[Any]]:
    """All but the records of streams: these are of use for minutes, to the servers of their store."""
    return [row for row in every_row(source)[0] if row[3] != STREAM]


class _Run:
    """One run: which turns are in the new store by their digests, and which sessions it has written."""

    def __init__(self, source: SqlStore, target: SqlStore) -> None:
        self._source = source
        self._target = target
        self._numbers: dict[int, int] = {}
        """Of turns in the new store, by their numbers in the old one."""
        self._written: dict[int, SessionInfo] = {}
        """Sessions of the new store as this run has left them, by their numbers in the old one."""
        self.seen: dict[int, tuple[object, object]] = {}
        self.proved: set[int] = set()
        self.found = Migration()

    def session(self, row: Sequence[Any]) -> None:
        """Bring a session over, or say why not."""
        number, name = int(str(row[0])), str(row[2])
        self.seen[number] = (row[4], row[8])
        self.proved.discard(number)
        try:
            info = read_session(row)
            numbers, turns = self._source.chain(info.head, info.name)
            if turns[-1].digest != info.digest:
                raise CorruptStateError("its turns are not those that led to it")
            self._bring(info, numbers, turns)
        except SessionNotFoundError:
            # It was deleted, or rewound: the next look finds out.
            self.seen.pop(number, None)
        except PerdureError as error:
            if not any(what == name for what, _ in self.found.left_out):
                self.found.left_out.append((name, str(error)))

    def forget_deleted(self, there: set[int]) -> None:
        """What this run has brought over and was deleted in the old store meanwhile goes here too."""
        for number in [each for each in self.seen if each not in there]:
            del self.seen[number]
            self.proved.discard(number)
            ours = self._written.pop(number, None)
            now = self._there(ours) if ours is not None else None
            if now is not None and ours is not None and now.digest == ours.digest:
                self._target.delete(now)

    def _there(self, info: SessionInfo) -> SessionInfo | None:
        """What has its name in the new store."""
        with suppress(SessionNotFoundError):
            there = self._target.record(info.namespace, info.kind, info.name)
            assert isinstance(there, SessionInfo)
            return there
        return None

    def memory(self, row: Sequence[Any]) -> None:
        try:
            memory = read_memory(row)
            numbers, turns = self._source.chain_of(memory)
            if not self._has(memory):
                parent, missing = self._missing(numbers, turns)
                self._bring_files(memory.namespace, missing)
                bring_memory(self._target, memory, missing, head=parent)
                self.found.turns += len(missing)
            self.found.memories += 1
        except SessionNotFoundError:
            return
        except PerdureError as error:
            self.found.left_out.append((f"memory {row[5]}", str(error)))

    def _has(self, memory: SessionMemory) -> bool:
        there = self._target.memories(
            memory.namespace, label=memory.label, session=memory.session, turn=memory.turn
        )
        return any(each.digest == memory.digest for each in there)

    def _bring(self, info: SessionInfo, numbers: Sequence[int], turns: Sequence[Turn]) -> None:
        target = self._target
        there = self._there(info)
        if there is not None:
            self._know(there, numbers, turns)
            if there.digest != info.digest and not self._go_on(info, there, numbers, turns):
                return
        else:
            parent, missing = self._missing(numbers, turns)
            self._bring_files(info.namespace, missing)
            bring_session(target, info, missing, head=parent)
            self.found.turns += len(missing)
        now = self._there(info)
        assert now is not None
        # Read back: each turn is proved by its digest.
        self._know(now, numbers, turns)
        if now.digest != info.digest:
            raise CorruptStateError("it is not the same in the new store: run this once more")
        self._written[info.number] = now
        self.proved.add(info.number)

    def _go_on(
        self, info: SessionInfo, there: SessionInfo, numbers: Sequence[int], turns: Sequence[Turn]
    ) -> bool:
        """Bring what is new of a session that is there already; False where it was continued there."""
        target = self._target
        digests = {turn.digest for turn in turns}
        written = self._written.get(info.number)
        ours = written is not None and written.digest == there.digest
        if not ours and there.digest not in digests:
            chain = target.chain(there.head, there.name)[1]
            if info.digest in {turn.digest for turn in chain}:
                self.found.ahead.append(info.name)
                self.proved.add(info.number)
                return False
            raise CorruptStateError(
                "there is another session of that name in the new store: rename or delete one of them"
            )
        parent, missing = self._missing(numbers, turns)
        assert parent is not None
        if missing:
            self._bring_files(info.namespace, missing)
            target.add(there, missing, parent=parent, expected=there.head)
        else:
            target.move(there, parent, digest=info.digest, expected=there.head)
        self.found.turns += len(missing)
        return True

    def _bring_files(self, namespace: str, turns: Sequence[Turn]) -> None:
        """Bring the files that turns name, before the turns."""
        for digest in {digest: None for turn in turns for digest in turn.files}:
            if self._target.file(namespace, digest) is None:
                data = self._source.file(namespace, digest)
                if data is not None:
                    self._target.keep_file(namespace, digest, data)
                elif not any(what == digest for what, _ in self.found.left_out):
                    self.found.left_out.append((f"image {digest[:12]}…", "its file is gone or damaged"))

    def _missing(self, numbers: Sequence[int], turns: Sequence[Turn]) -> tuple[int | None, Sequence[Turn]]:
        """The last turn that the new store has already, and those behind it."""
        for at in range(len(turns) - 1, -1, -1):
            number = self._numbers.get(numbers[at])
            if number is not None and has_turn(self._target, number, turns[at].digest):
                return number, turns[at + 1 :]
        return None, turns

    def _know(self, there: SessionInfo, numbers: Sequence[int], turns: Sequence[Turn]) -> None:
        """Which turns of the old store those of a session in the new one are."""
        chain = self._target.chain(there.head, there.name)
        for number, turn, here, known in zip(numbers, turns, *chain, strict=False):
            if turn.digest == known.digest:
                self._numbers[number] = here
