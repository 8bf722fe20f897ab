"""Kills processes at every change they make to a store: `python -m store.crashing SCENARIO FOLDER STEP`.

Every STEP-th change, that is; 0 kills nobody. Runs with shim.c preloaded. Each scenario is prepared once;
then, for each point, a copy of it is given to a child that is killed there, and what is left is checked by
opening it again. What the child had told to be done before it died must have lasted; everything that is
there must be whole.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import perdure
from perdure.cache.block import Block, BlockId
from perdure.cache.tiers import block_folder
from perdure.cache.tiers.block_folder import BlockFolder
from perdure.cache.tiers.disk import DiskTier
from perdure.decode.request import KeptPrefix
from perdure.memory import MEMORY_KINDS, FullAttention, MemorySpec
from perdure.sessions.store.sql.tables import row_checksum, turn_values
from perdure.sessions.store.sqlite.store import MIGRATIONS as SESSION_MIGRATIONS
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.sessions.turn import Turn
from perdure.store.block_schema import MIGRATIONS
from perdure.store.index import APPLICATION
from perdure.testing.toy import ToyModel
from sessions.database import index_of
from store.chains import block, chain, file_of, files, root, same, size

PLENTY = 1 << 30
Ack = Callable[[str], None]


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], None]
    act: Callable[[Path, Ack], None]
    check: Callable[[Path, set[str]], None]


@contextmanager
def opened(folder: Path, budget: int = PLENTY) -> Iterator[DiskTier]:
    with closing(DiskTier(folder, budget=budget)) as disk:
        yield disk


def whole(disk: DiskTier, *candidates: Block) -> set[BlockId]:
    """The blocks that are there, each of them whole and one of `candidates`, with no file besides."""
    versions: dict[BlockId, list[Block]] = {}
    for candidate in candidates:
        versions.setdefault(candidate.id, []).append(candidate)
    there = {BlockId(row[0]) for row in disk.index.rows("SELECT id FROM block")}
    for name in there:
        found = disk.load(name)
        assert any(same(found, version) for version in versions[name]), name.hex()
        entry = disk.lookup(name)
        assert entry is not None
        assert found is not None
        assert found.has_tail_state >= entry.has_tail_state
    assert {path.name for path in files(disk.folder)} == {name.hex() for name in there}
    rows = disk.index.rows("SELECT id, parent, leaf, nbytes FROM block")
    assert (len(disk), disk.nbytes) == (len(rows), sum(row[3] for row in rows))
    parents = {row[1] for row in rows}
    assert all(leaf == (name not in parents) for name, _, leaf, _ in rows)
    findings = disk.verify()
    # The file of a block that is being replaced may be the new one before its entry is.
    assert findings.mended <= 1
    nothing = {"missing": 0, "adopted": 0, "quarantined": 0, "leftovers": 0, "rebuilt": False}
    assert {name: getattr(findings, name) for name in nothing} == nothing
    again = disk.verify()
    assert again.sound
    assert disk.nbytes == sum(path.stat().st_size for path in files(disk.folder))
    return there


def names(*blocks: Block) -> set[BlockId]:
    return {each.id for each in blocks}


# A first opening, and migrations.


def older(version: int) -> Scenario:
    def prepare(folder: Path) -> None:
        if version:
            with closing(sqlite3.connect(folder / "index.sqlite")) as db:
                for number in range(version):
                    db.executescript(MIGRATIONS[number])
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {version}")
                for used, each in enumerate(OLD, 1):
                    file_of(folder, each).parent.mkdir(parents=True, exist_ok=True)
                    file_of(folder, each).write_bytes(b"".join(each.pack()))
                    fields = (each.id, each.parent, each.start, each.tokens.tobytes(), each.has_tail_state)
                    row = (*fields, each.file_size, used)
                    db.execute("INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                db.commit()

    def act(folder: Path, ack: Ack) -> None:
        with opened(folder) as disk:
            ack("opened")
            disk.store(chain([1, 2]))
            ack("put")

    def check(folder: Path, acks: set[str]) -> None:
        with opened(folder) as disk:
            assert disk.index.rows("PRAGMA user_version") == [(len(MIGRATIONS),)]
            there = whole(disk, *chain([1, 2]), *OLD)
            assert there >= names(*(OLD if version else ()))
            assert there >= names(*chain([1, 2])) or "put" not in acks

    return Scenario(prepare, act, check)


# Putting.

OLD, NEW, MORE = (
    chain(list(range(12)), "old"),
    chain(list(range(20)), "new"),
    chain([7] * 9, "more", tail_state=50),
)
BARE, FULL = chain([1, 2, 3], "grows"), chain([1, 2, 3], "grows", tail_state=70)


def put_prepare(folder: Path) -> None:
    with opened(folder) as disk:
        disk.store([*OLD, *BARE])


def put_act(folder: Path, ack: Ack) -> None:
    with opened(folder) as disk:
        disk.store(NEW)
        ack("new")
        disk.store(FULL)
        ack("full")
        disk.store(MORE)
        ack("more")
    ack("closed")


def put_check(folder: Path, acks: set[str]) -> None:
    with opened(folder) as disk:
        there = whole(disk, *OLD, *BARE, *FULL, *NEW, *MORE)
        assert there >= names(*OLD, *BARE)
        assert there >= names(*NEW) or "new" not in acks
        assert there >= names(*MORE) or "more" not in acks
        grown = disk.lookup(FULL[0].id)
        assert grown is not None
        assert grown.has_tail_state or "full" not in acks


# Evicting.

HELD = [each for number in range(8) for each in chain([number] * 8, f"held {number}")]
COMING = chain(list(range(40, 60)), "coming")
TIGHT = size(HELD)


def evict_prepare(folder: Path) -> None:
    with opened(folder, TIGHT) as disk:
        disk.store(HELD)


def evict_act(folder: Path, ack: Ack) -> None:
    with opened(folder, TIGHT) as disk:
        disk.load(HELD[1].id)
        disk.store(COMING[:2])
        ack("some")
        disk.store(COMING[2:])
        ack("all")
    ack("closed")


def evict_check(folder: Path, acks: set[str]) -> None:
    with opened(folder, TIGHT) as disk:
        assert disk.nbytes <= TIGHT
        there = whole(disk, *HELD, *COMING)
        assert there >= names(*COMING[:2]) or "some" not in acks
        assert there >= names(*COMING) or "all" not in acks
        assert HELD[1].id in there
        assert len(names(*HELD) - there) <= len(COMING)


# Dropping, forgetting and clearing.

STEM = chain(list(range(8)), "stem")
SHOOTS = [block([number] * 3, STEM[-1]) for number in range(5)]
ASIDE = chain(list(range(8)), "aside")


def drop_prepare(folder: Path) -> None:
    with opened(folder) as disk:
        disk.store([*STEM, *SHOOTS, *ASIDE])


def drop_act(folder: Path, ack: Ack) -> None:
    with opened(folder) as disk:
        disk.drop([SHOOTS[0].id])
        ack("shoot")
        disk.drop([STEM[1].id])
        ack("stem")
        disk.clear()
        ack("all")
    ack("closed")


def drop_check(folder: Path, acks: set[str]) -> None:
    with opened(folder) as disk:
        there = whole(disk, *STEM, *SHOOTS, *ASIDE)
        states = [
            names(*STEM, *SHOOTS, *ASIDE),
            names(*STEM, *SHOOTS[1:], *ASIDE),
            names(STEM[0], *ASIDE),
            set(),
        ]
        done = [name in acks for name in ("shoot", "stem", "all")].count(True)
        # A step that had begun is done whole, or not at all.
        assert there in states[done : done + 2]


# Records.


def record(tokens: list[int], *labels: str) -> KeptPrefix:
    return KeptPrefix(tokens=tuple(tokens), kept=len(tokens), labels=frozenset(labels), root=root("records"))


SHARED = list(range(8))
FIRST, SECOND = [*SHARED, 1, 1, 1, 1, 1], [*SHARED, 2, 2]
FIRST_BLOCKS, SECOND_BLOCKS = chain(FIRST, "records"), chain(SECOND, "records")


def record_prepare(folder: Path) -> None:
    with opened(folder) as disk:
        disk.store([*FIRST_BLOCKS, *SECOND_BLOCKS])
        disk.keep(record(SECOND, "b"))


def record_act(folder: Path, ack: Ack) -> None:
    with opened(folder) as disk:
        disk.keep(record(FIRST, "a", "both"))
        ack("first")
        disk.keep(record(SECOND, "both"))
        ack("label")
        prefixes, blocks = disk.prefix_table.labelled(["a"])
        disk.drop(blocks, prefixes)
        ack("cleared")
    ack("closed")


def record_check(folder: Path, acks: set[str]) -> None:
    with opened(folder) as disk:
        there = whole(disk, *FIRST_BLOCKS, *SECOND_BLOCKS)
        found = {each.tokens: each for each in disk.prefixes()}
        first, second = found.get(tuple(FIRST)), found[tuple(SECOND)]
        assert second.kept == len(SECOND)
        assert second.labels == ({"b", "both"} if "label" in acks else second.labels & {"b", "both"} | {"b"})
        assert there >= names(*SECOND_BLOCKS)
        if first is not None:
            assert first.labels == {"a", "both"}
            assert first.kept == len(FIRST)
            assert "cleared" not in acks
        else:
            assert "first" not in acks or "label" in acks
        if "cleared" in acks:
            assert there == names(*SECOND_BLOCKS)


# Putting right.


def mend_prepare(folder: Path) -> None:
    with opened(folder) as disk:
        disk.store([*OLD, *NEW, *MORE])
        with disk.index.writing():
            disk.index.run("DELETE FROM block WHERE id = ?", MORE[-1].id)
            disk.index.run("UPDATE block SET nbytes = 3 WHERE id = ?", MORE[0].id)
        file_of(folder, OLD[-1]).unlink()
        path = file_of(folder, NEW[-1])
        path.write_bytes(path.read_bytes()[:-1])
        path.with_name(f"{path.name}.9.tmp").write_bytes(b"half")


def mend_act(folder: Path, ack: Ack) -> None:
    with opened(folder) as disk:
        disk.verify()
        ack("verified")
        path = file_of(folder, NEW[-2])
        os.truncate(path, 9)
        ack("broken")
        disk.forget(names(NEW[-2]))
        ack("forgotten")


def mend_check(folder: Path, acks: set[str]) -> None:
    with opened(folder) as disk:
        disk.verify()
        there = whole(disk, *OLD, *NEW, *MORE)
        assert there >= names(*OLD[:-1], *NEW[:-2], *MORE[:-1])
        # Without an entry it was nobody's, until it was adopted.
        assert MORE[-1].id in there or "verified" not in acks
        assert not there & names(OLD[-1], NEW[-1])


def rebuild_prepare(folder: Path) -> None:
    put_prepare(folder)
    (folder / "index.sqlite").write_bytes(b"no index any more" * 1000)


def rebuild_act(folder: Path, ack: Ack) -> None:
    with closing(DiskTier(folder, budget=PLENTY, rebuild=True)) as disk:
        ack("rebuilt")
        disk.verify()


def rebuild_check(folder: Path, acks: set[str]) -> None:
    with closing(DiskTier(folder, budget=PLENTY, rebuild=True)) as disk:
        disk.verify()
        assert whole(disk, *OLD, *BARE) == names(*OLD, *BARE)


# A whole runtime.

PROMPT, CONTINUED = "a prefix that is kept " * 9, "a prefix that is kept " * 9 + "and goes on"


def cold(kind: type[MemorySpec]) -> list[int]:
    with perdure.open(ToyModel(kind), n_ctx=512, slots=2) as runtime:
        return list(runtime.generate(CONTINUED, max_tokens=6, temperature=0, ignore_eos=True).tokens)


def life(kind: type[MemorySpec]) -> Scenario:
    def prepare(folder: Path) -> None:
        pass

    def act(folder: Path, ack: Ack) -> None:
        runtime = perdure.open(ToyModel(kind), n_ctx=512, slots=2, store=folder)
        ack("opened")
        runtime.cache.warm(PROMPT, labels=["kept"])
        ack("warm")
        runtime.generate(CONTINUED, max_tokens=6, temperature=0, ignore_eos=True)
        runtime.close()
        ack("closed")

    expected = cold(kind)

    def check(folder: Path, acks: set[str]) -> None:
        with opened(folder) as disk:
            assert disk.verify().sound
        with perdure.open(ToyModel(kind), n_ctx=512, slots=2, store=folder) as runtime:
            reply = runtime.generate(CONTINUED, max_tokens=6, temperature=0, ignore_eos=True)
            assert list(reply.tokens) == expected
            if "warm" in acks:
                [kept] = runtime.cache.records(["kept"])
                assert kept.kept == len(PROMPT)
                assert reply.reuse.tiers.get("disk", 0) >= len(PROMPT)
            if "closed" in acks:
                assert reply.reuse.tiers.get("disk", 0) == len(CONTINUED) - 1

    return Scenario(prepare, act, check)


# Sessions.

SAY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
SAID = [f"message {word}, which is long enough to fill more than one block of tokens" for word in "abc"]


@contextmanager
def talking(kind: type[MemorySpec], folder: Path | None, **settings: Any) -> Iterator[perdure.Runtime]:
    with perdure.open(ToyModel(kind), n_ctx=768, slots=1, store=folder, **settings) as runtime:
        yield runtime


_KINDS = {kind.name: kind for kind in MEMORY_KINDS}


@functools.cache
def replies(kind: str, *said: str) -> list[str]:
    """What a fresh runtime answers, with nothing kept."""
    with talking(_KINDS[kind], None, cache=0) as runtime:
        session = runtime.session("fresh", system="Be terse.")
        return [session.say(text, **SAY).text for text in said]


def check_session(runtime: perdure.Runtime, name: str, told: int, possible: Sequence[str]) -> None:
    """A session has a beginning of `possible`, what was told at least, and goes on as a fresh one does."""
    session = runtime.session(name, create=False)
    said = [str(turn.messages[-1].content) for turn in session.history()]
    assert said == list(possible[: len(said)])
    assert len(said) >= told
    kind = runtime.model.memory.name
    assert [turn.text for turn in session.history()] == replies(kind, *said)
    if (pending := session.pending) is not None:
        assert pending.messages[-1].content == possible[len(said)]
        session.discard()
    assert session.say("and now", **SAY).text == replies(kind, *said, "and now")[-1]


def turns(kind: type[MemorySpec], **settings: Any) -> Scenario:
    def prepare(folder: Path) -> None:
        pass

    def act(folder: Path, ack: Ack) -> None:
        with talking(kind, folder, **settings) as runtime:
            session = runtime.session("alice", system="Be terse.")
            ack("created")
            for text in SAID:
                assert session.say(text, **SAY).kept
                ack(text)
            session.sleep()
            ack("asleep")

    def check(folder: Path, acks: set[str]) -> None:
        with opened(folder) as disk:
            assert disk.verify().sound
        with talking(kind, folder, **settings) as runtime:
            index_of(runtime.sessions).check()
            names = [row.name for row in runtime.sessions.list()]
            assert names == ["alice"] or (not names and "created" not in acks)
            if names:
                plan = runtime.session("alice").plan_wake()
                if "asleep" in acks and not settings:
                    assert plan.computed <= 1
                check_session(runtime, "alice", len(acks & set(SAID)), SAID)

    return Scenario(prepare, act, check)


def branches(kind: type[MemorySpec]) -> Scenario:
    def prepare(folder: Path) -> None:
        with talking(kind, folder) as runtime:
            session = runtime.session("alice", system="Be terse.")
            for text in SAID[:2]:
                session.say(text, **SAY)

    def act(folder: Path, ack: Ack) -> None:
        with talking(kind, folder) as runtime:
            session = runtime.session("alice")
            fork = session.fork("bob", turn=1)
            ack("forked")
            fork.say(SAID[2], **SAY)
            ack("said")
            session.label("here")
            ack("labelled")
            session.rewind(2)
            ack("rewound")
            session.delete()
            ack("deleted")

    def check(folder: Path, acks: set[str]) -> None:
        with talking(kind, folder) as runtime:
            index_of(runtime.sessions).check()
            names = {row.name for row in runtime.sessions.list()}
            assert "bob" in names or "forked" not in acks
            assert "alice" in names or "rewound" in acks
            assert "alice" not in names or "deleted" not in acks
            if "labelled" in acks:
                woken = runtime.memories.wake(None, "woken")
                assert len(woken.history()) == 2
                check_session(runtime, "woken", 2, SAID)
            if "bob" in names:
                check_session(runtime, "bob", 2 if "said" in acks else 1, [SAID[0], SAID[2]])
            if "alice" in names:
                check_session(runtime, "alice", 0 if "labelled" in acks else 2, SAID)

    return Scenario(prepare, act, check)


START = Turn(kind="start", messages=())


def older_sessions(version: int) -> Scenario:
    def prepare(folder: Path) -> None:
        if version:
            with closing(sqlite3.connect(folder / "sessions.sqlite")) as db, db:
                db.create_function("seal", -1, row_checksum, deterministic=True)
                db.executescript(SESSION_MIGRATIONS[0])
                values = turn_values(7, None, 0, START)[:-1]
                db.execute(f"INSERT INTO turn VALUES ({', '.join('?' * len(values))})", values)
                db.execute("INSERT INTO session VALUES (5, '', 'old', 'session', 7, '{}', '{}', 0, 0)")
                for number in range(1, version):
                    db.executescript(SESSION_MIGRATIONS[number])
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {version}")

    def act(folder: Path, ack: Ack) -> None:
        with closing(SqliteStore(folder)) as store:
            ack("opened")
            store.create("", "alice", [START])
            ack("created")

    def check(folder: Path, acks: set[str]) -> None:
        with closing(SqliteStore(folder)) as store:
            assert store.index.rows("PRAGMA user_version") == [(len(SESSION_MIGRATIONS),)]
            assert store.has("", "alice") or "created" not in acks
            assert store.has("", "old") or not version
            for kept in folder.glob("sessions.version-*.sqlite"):
                # The copy from before is whole, however often the migration was begun.
                with closing(sqlite3.connect(kept)) as db:
                    assert db.execute("SELECT name FROM session").fetchall() == [("old",)] * bool(version)
                    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert (folder / f"sessions.version-{version}.sqlite").exists() or not version
            for row in store.list():
                assert len(store.chain(row.head, row.name)[1]) == 1
            # Whatever was interrupted, no number is given out again.
            given = dict(store.index.rows("SELECT name, last FROM counter"))
            made = store.has("", "alice")
            assert given == {
                "session": 5 * bool(version) + made,
                "turn": 7 * bool(version) + made,
                "memory": 0,
            }

    return Scenario(prepare, act, check)


# A store that is damaged, and put right.


def damaged_prepare(folder: Path) -> None:
    with closing(SqliteStore(folder)) as store:
        second = Turn(kind="turn", messages=(), finish_reason="stop", before=START.digest)
        third = Turn(kind="turn", messages=(), finish_reason="length", before=second.digest)
        store.create("", "alice", [START, second, third])
        store.create("", "bob", head=2, digest=second.digest)
        with store.index.writing():
            store.index.run("UPDATE turn SET finish_reason = 'stop!' WHERE number = 3")


def damaged_act(folder: Path, ack: Ack) -> None:
    from perdure.ext.upkeep.repair import repair

    repair(folder)
    ack("mended")
    with closing(SqliteStore(folder)) as store:
        store.create("", "carol", [START])
        ack("created")


def damaged_check(folder: Path, acks: set[str]) -> None:
    from perdure.ext.upkeep.repair import verify

    verify(folder, lambda done, total: None)
    with closing(SqliteStore(folder)) as store:
        found = {row.name: len(store.chain(row.head, row.name)[1]) for row in store.list()}
        assert found.pop("carol", 0) == 1 or "created" not in acks
        assert found == {"alice": 2, "bob": 2}


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    **{f"version {number}": partial(older, number) for number in range(len(MIGRATIONS))},
    "put": partial(Scenario, put_prepare, put_act, put_check),
    "evict": partial(Scenario, evict_prepare, evict_act, evict_check),
    "drop": partial(Scenario, drop_prepare, drop_act, drop_check),
    "record": partial(Scenario, record_prepare, record_act, record_check),
    "mend": partial(Scenario, mend_prepare, mend_act, mend_check),
    "rebuild": partial(Scenario, rebuild_prepare, rebuild_act, rebuild_check),
    **{f"runtime {kind.name}": partial(life, kind) for kind in MEMORY_KINDS},
    **{f"session version {n}": partial(older_sessions, n) for n in range(len(SESSION_MIGRATIONS))},
    "session repair": partial(Scenario, damaged_prepare, damaged_act, damaged_check),
    **{f"session turns {kind.name}": partial(turns, kind) for kind in MEMORY_KINDS},
    **{f"session branches {kind.name}": partial(branches, kind) for kind in MEMORY_KINDS},
    "session eviction": partial(turns, FullAttention, store_bytes=6000),
}


# Faults planted on purpose: each must be found.


def write_in_place() -> None:
    block_folder.write_file = lambda path, parts, **_: path.write_bytes(b"".join(parts))  # type: ignore[attr-defined]


def enter_first() -> None:
    put, write = DiskTier.store, BlockFolder.write

    def wrong(self: DiskTier, blocks: Sequence[Block]) -> int:
        with patch.object(BlockFolder, "write"):
            count = put(self, blocks)
        write(self.files, blocks)
        return count

    DiskTier.store = wrong  # type: ignore[method-assign]


def unlink_first() -> None:
    drop = DiskTier.drop

    def wrong(self: DiskTier, blocks: Iterable[BlockId], prefixes: Iterable[KeptPrefix] = ()) -> None:
        names = list(blocks)
        self.files.delete(self.files.path(name) for name in names)
        drop(self, names, prefixes)

    DiskTier.drop = wrong  # type: ignore[method-assign]


def tell_early() -> None:
    """The log is not synced: only the order of steps shows it."""
    connect = sqlite3.connect

    def lax(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **options, factory=Lax)

    class Lax(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *values)

    sqlite3.connect = lax  # type: ignore[assignment]


def sweep_nothing() -> None:
    DiskTier._delete_leftovers = lambda self: None  # type: ignore[method-assign]


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "files are written in place": ("put", write_in_place),
    "entries come before files": ("put", enter_first),
    "files go before entries": ("drop", unlink_first),
    "nothing is swept": ("put", sweep_nothing),
    "the log is not synced": ("put", tell_early),
}


class Shim:
    """What is preloaded into this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]

    def arm(self, folder: Path, at: int, torn: bool, diary: int) -> None:
        self._library.shim_arm(os.fsencode(folder), at, torn, diary)

    def note(self, text: str) -> None:
        self._library.shim_note(text.encode())


@dataclass(frozen=True)
class End:
    killed: bool
    acks: set[str]
    diary: list[str]


def die_at(shim: Shim, scenario: Scenario, folder: Path, at: int, torn: bool) -> End:
    """Run a scenario in a child that is killed at its `at`-th change; 0: at none."""
    told, tell = os.pipe()
    notes = folder.with_name("diary")
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(told)
            diary = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND) if not at else -1

            def ack(text: str) -> None:
                shim.note(text)
                os.write(tell, f"{text}\n".encode())

            shim.arm(folder, at, torn, diary)
            scenario.act(folder, ack)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(tell)
    with os.fdopen(told) as pipe:
        acks = set(pipe.read().split("\n")) - {""}
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.WEXITSTATUS(status) == 0, "the child failed before it was killed"
    return End(killed, acks, [] if at else notes.read_text().splitlines())


def main() -> None:
    name, base, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    shim, scenario = Shim(), SCENARIOS[name]()
    for fault in sys.argv[4:]:
        FAULTS[fault][1]()
    template, folder = base / "template", base / "store"
    template.mkdir()
    scenario.prepare(template)

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)

    fresh()
    end = die_at(shim, scenario, folder, 0, False)
    assert not end.killed
    scenario.check(folder, end.acks)
    steps = [line for line in end.diary if not line.startswith("ack ")]
    (base / "diary.json").write_text(json.dumps(end.diary))
    points = torn_points = 0
    for at in range(1, len(steps) + 1, step) if step else ():
        for torn in [False, True] if steps[at - 1].startswith("write ") else [False]:
            fresh()
            end = die_at(shim, scenario, folder, at, torn)
            try:
                scenario.check(folder, end.acks)
            except BaseException:
                print(f"at {at}{' torn' if torn else ''}, {steps[at - 1]}, told {end.acks}", file=sys.stderr)
                raise
            points += end.killed
            torn_points += end.killed and torn
    kinds = Counter(line.split()[0] for line in steps)
    print(json.dumps({"changes": len(steps), "points": points, "torn": torn_points, **kinds}))


if __name__ == "__main__":
    main()
