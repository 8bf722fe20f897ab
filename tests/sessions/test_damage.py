"""A database of sessions whose bytes are not what they were: refused, or all as before; never other words."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import CorruptStateError, SessionError, StateError, StoreDamagedError, StoreError
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sql import tables
from perdure.sessions.store.sql import tables as schema_module
from perdure.sessions.store.sqlite import FILE
from perdure.sessions.store.sqlite.folder import MARK
from perdure.sessions.store.sqlite.store import MIGRATIONS, SqliteStore
from perdure.sessions.turn import Turn
from perdure.testing.toy import ToyModel
from sessions.talking import talking
from store.conftest import folder_in_memory
from subjects import Subject

REFUSED = (StateError, StoreError, SessionError)
LOG = f"{FILE}-wal"

Told = tuple[tuple[Any, ...], ...]
"""The turns of a session, with everything in them."""
Known = dict[tuple[str, str], Told]
Damaged = Callable[[Path, Callable[[Path], None]], Path]


def live(folder: Path, words: str = "") -> perdure.Runtime:
    """A store with forks, memories and namespaces, still open."""
    rt = perdure.open(ToyModel(), store=folder, n_ctx=1024, slots=1)
    ask: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    alice = rt.session("alice", system=f"Be terse. {words}", seed=3)
    for number in range(3):
        alice.say(f"Message {number} {words}, which goes on for a while and then comes to an end", **ask)
    bob = alice.fork("bob", turn=1)
    bob.say(f"Another way {words}", **ask)
    alice.label("here", kind="fact", note="of some worth")
    rt.session("alice", namespace="yours").say(f"A secret {words}", **ask)
    return rt


@pytest.fixture(scope="module")
def closed() -> Iterator[Path]:
    """A store that was closed: all is in the database."""
    with folder_in_memory() as base:
        with live(base / "store"):
            pass
        shutil.rmtree(base / "store" / "blocks")
        yield base / "store"


@pytest.fixture(scope="module")
def killed() -> Iterator[Path]:
    """A store whose process was killed: the latest is in the log beside the database."""
    with folder_in_memory() as base:
        with live(base / "running"):
            shutil.copytree(
                base / "running",
                base / "store",
                ignore=shutil.ignore_patterns("*lock", "*.socket", "*blocks"),
            )
        assert (base / "store" / LOG).stat().st_size > 4096
        yield base / "store"


@pytest.fixture
def damaged() -> Iterator[Damaged]:
    """A copy of a store, changed."""
    with folder_in_memory() as base:

        def damaged(store: Path, change: Callable[[Path], None]) -> Path:
            folder = base / "store"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for path in store.iterdir():
                if path.is_file() and not path.name.endswith("lock"):
                    shutil.copyfile(path, folder / path.name)
            change(folder)
            return folder

        yield damaged


def flip(name: str, place: int, bit: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ (1 << bit)]))

    return change


def cut(name: str, length: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(length)

    return change


def told(session: perdure.Session) -> Told:
    turns = tuple(
        (
            turn.kind,
            *(str(message.to_dict()) for message in turn.messages),
            turn.text,
            turn.added.text,
            *turn.added.tokens,
            turn.finish_reason,
        )
        for turn in session.history()
    )
    settings, origin = dict(session.settings), dict(session.origin)
    return ((session.system, str(settings), str(origin), session.kind), *turns)


def everything(folder: Path) -> Known:
    with closing(Sessions(folder, readonly=True)) as sessions:
        rows = sessions.store.list()
        return {(row.namespace, row.name): told(sessions.get(row.name, row.namespace)) for row in rows}


def read(folder: Path, known: Known, same: Callable[[Told, Told], bool]) -> int:
    """Open every session as a runtime does. How many were refused; what is not must be the `same`."""
    try:
        opened = Sessions(folder, readonly=False)
    except REFUSED:
        return len(known)
    refused = 0
    with closing(opened) as sessions:
        for (namespace, name), right in known.items():
            try:
                found = told(sessions.open(name, namespace=namespace))
            except REFUSED:
                refused += 1
                continue
            assert same(found, right), f"{name}: {found} for {right}"
        try:
            listed = {(row.namespace, row.name) for row in sessions.store.list()}
            marked = [(memory.address, memory.note) for memory in sessions.memories.search()]
        except REFUSED:
            return refused + 1
        assert listed == set(known)
        if same is equal:
            assert marked == [("perdure://alice/3#here", "of some worth")]
            try:
                woken = told(sessions.memories.wake(None, "woken"))
            except REFUSED:
                return refused + 1
            assert woken[1:] == known["", "alice"][1:]
    return refused


def equal(found: Told, right: Told) -> bool:
    return found == right


def beginning(found: Told, right: Told) -> bool:
    """As it was at an earlier time: its first turns, or what it is before it is made."""
    return found == right[: len(found)] or len(found) == 1


def mended(folder: Path, known: Known) -> Any:
    """`perdure sessions verify` keeps what can be proved, and nothing that cannot."""
    from perdure.ext.upkeep.repair import FOUND, Verification, verify

    try:
        found = verify(folder, lambda done, total: None)
    except StoreError as error:
        # It says that it is of another program, or of another version of this one.
        return Verification(store=folder, database=str(error))
    if found.repair is not None:
        again = verify(folder, lambda done, total: None)
        assert again.sound, again.plain()
        for (namespace, name), turns in everything(folder).items():
            if namespace == FOUND:
                assert any(turns[1:] == right[1 : len(turns)] for right in known.values()), name
            else:
                assert turns == known[namespace, name][: len(turns)], name
    return found


def places(size: int, count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(place, rng.randrange(8)) for place in sorted(rng.sample(range(100, size), count))]


# The database.


def flips_of_the_database(store: Path, damaged: Damaged, sampled: int, bits: range) -> None:
    known = everything(store)
    size = (store / FILE).stat().st_size
    header = [(place, bit) for place in range(100) for bit in bits]
    seen = kept = 0
    chosen = [*header, *places(size, sampled, 7)]
    for number, (place, bit) in enumerate(chosen):
        refused = read(damaged(store, flip(FILE, place, bit)), known, equal)
        seen += refused > 0
        if number % 5 == 0 or bits.stop == 8:
            found = mended(damaged(store, flip(FILE, place, bit)), known)
            kept += found.repair is not None
            # Whatever is refused, the walk over everything finds; but for a byte that forbids writing.
            assert not found.sound or not refused or place == 18, (place, bit)
    print(f"{len(chosen)} flips of {size} bytes: {seen} refused, {kept} of those looked into repaired")
    assert seen > sampled // 10


@pytest.mark.extension("upkeep")
def test_a_flipped_bit_in_the_database_is_refused_or_changes_nothing(closed: Path, damaged: Damaged) -> None:
    """S2: every byte of its header, and sampled places of its pages."""
    flips_of_the_database(closed, damaged, 120, range(1))


@pytest.mark.extension("upkeep")
@pytest.mark.soak
def test_flipped_bits_in_the_database_for_long(closed: Path, damaged: Damaged) -> None:
    flips_of_the_database(closed, damaged, 4000, range(8))


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE counter SET last = last - 1 WHERE name = 'turn'",
        "ALTER TABLE counter RENAME COLUMN seal TO sexl",
    ],
)
def test_d1_numbers_that_are_damaged_are_found_and_mended(
    change: str, closed: Path, damaged: Damaged
) -> None:
    """With them nothing new could be kept: a store is not sound then, though all its turns are."""
    from perdure.ext.upkeep.repair import verify

    def spoil(folder: Path) -> None:
        with closing(sqlite3.connect(folder / FILE)) as db, db:
            db.execute(change)

    folder = damaged(closed, spoil)
    found = verify(folder, lambda done, total: None)
    assert not found.sound
    assert found.database
    assert found.repair is not None, found.not_repaired
    assert verify(folder, lambda done, total: None).sound
    with closing(SqliteStore(folder)) as store:
        store.check_counts()


@pytest.mark.extension("upkeep")
def test_a_damaged_description_of_a_table_is_found_and_mended(closed: Path, damaged: Damaged) -> None:
    """S2: all turns can be read, but no change would be taken any more."""
    at = (closed / FILE).read_bytes().index(b"REFERENCES turn (number)") + len("REFERENCES turn (numbe")
    known = everything(closed)
    folder = damaged(closed, flip(FILE, at, 6))
    found = mended(folder, known)
    assert found.database
    assert found.repair is not None
    assert everything(folder) == known


@pytest.mark.extension("upkeep")
def test_a_database_that_is_cut_short_is_refused(closed: Path, damaged: Damaged) -> None:
    """At every page, and within each."""
    known = everything(closed)
    size = (closed / FILE).stat().st_size
    for length in sorted({*range(0, size, 4096), *range(1, size, 1500), size - 1}):
        refused = read(damaged(closed, cut(FILE, length)), known, equal)
        assert refused or length > size - 4096, length
        mended(damaged(closed, cut(FILE, length)), known)


def test_a_database_that_is_gone_is_not_taken_for_a_new_one(closed: Path, damaged: Damaged) -> None:
    folder = damaged(closed, lambda folder: (folder / FILE).unlink())
    with pytest.raises(StoreDamagedError, match=f"gone.*delete {MARK}"):
        SqliteStore(folder)
    assert not (folder / FILE).exists()
    (folder / MARK).unlink()
    with closing(SqliteStore(folder)) as store:
        assert store.list() == []


def test_the_database_of_another_store_is_refused(closed: Path, damaged: Damaged, tmp_path: Path) -> None:
    """Its sessions have the same names; it counts only if somebody says so."""
    with live(tmp_path / "other", words="elsewhere"):
        pass
    theirs = everything(tmp_path / "other")

    def swap(folder: Path) -> None:
        shutil.copyfile(tmp_path / "other" / FILE, folder / FILE)

    folder = damaged(closed, swap)
    for readonly in (False, True):
        with pytest.raises(StoreDamagedError, match="not the one that was here"):
            SqliteStore(folder, readonly=readonly)
    (folder / MARK).unlink()
    assert everything(folder) == theirs


def test_a_swapped_database_never_mixes_with_the_log_of_another(
    closed: Path, killed: Path, damaged: Damaged
) -> None:
    """The log of one over the pages of another: what is read is of one or the other, whole."""
    ours, theirs = everything(closed), everything(killed)

    def swap(folder: Path) -> None:
        shutil.copyfile(closed / FILE, folder / FILE)

    folder = damaged(killed, swap)

    def whole(found: Told, right: Told) -> bool:
        return any(beginning(found, each) for known in (ours, theirs) for each in known.values())

    read(folder, theirs, whole)


def test_a_mark_that_is_damaged_or_gone_costs_no_words(closed: Path, damaged: Damaged) -> None:
    known = everything(closed)
    for place in range((closed / MARK).stat().st_size):
        assert read(damaged(closed, flip(MARK, place, 1)), known, equal) == len(known)
    assert read(damaged(closed, lambda folder: (folder / MARK).unlink()), known, equal) == 0


# Its log, after a kill.


def flips_of_the_log(store: Path, damaged: Damaged, sampled: int) -> None:
    known = everything(store)
    size = (store / LOG).stat().st_size
    header = [(place, place % 8) for place in (*range(56), *range(32 + 4096 + 24, 32 + 4096 + 48))]
    for place, bit in [*header, *places(size, sampled, 9)]:
        # SQLite takes a damaged log for one that ends there: the latest turns may be gone, none is another.
        for key, turns in readable(damaged(store, flip(LOG, place, bit))).items():
            assert beginning(turns, known[key]), (place, bit)


def readable(folder: Path) -> Known:
    """What is read of a store; nothing where it is refused."""
    try:
        return everything(folder)
    except REFUSED:
        return {}


def test_a_flipped_bit_in_the_log_changes_no_turn(killed: Path, damaged: Damaged) -> None:
    flips_of_the_log(killed, damaged, 60)


@pytest.mark.soak
def test_flipped_bits_in_the_log_for_long(killed: Path, damaged: Damaged) -> None:
    flips_of_the_log(killed, damaged, 1000)


def test_a_log_that_is_cut_short_or_gone_changes_no_turn(killed: Path, damaged: Damaged) -> None:
    known = everything(killed)
    size = (killed / LOG).stat().st_size
    for length in [*range(0, size, 4096 + 24), *range(32, size, 4096 + 24), 31, size - 1]:
        for key, turns in readable(damaged(killed, cut(LOG, length))).items():
            assert beginning(turns, known[key]), length
    for key, turns in readable(damaged(killed, lambda folder: (folder / LOG).unlink())).items():
        assert beginning(turns, known[key])


# Putting right.


def changed(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with closing(sqlite3.connect(folder / FILE)) as database, database:
            assert database.execute(statement).rowcount == 1

    return change


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("column", ["text = 'x'", "tokens = x'01000000'", "messages = '['", "seed = 9"])
def test_verify_keeps_the_turns_before_a_damaged_one(closed: Path, damaged: Damaged, column: str) -> None:
    """The error names session and turn; then what was before it, and whoever else shares it, is whole."""
    known = everything(closed)
    statement = f"UPDATE turn SET {column} WHERE number = 3"
    folder = damaged(closed, changed(statement))
    with closing(Sessions(folder, readonly=True)) as sessions:
        with pytest.raises(CorruptStateError, match=r"turn 2 of session 'alice'.*perdure sessions verify"):
            sessions.get("alice").history()
        assert told(sessions.get("bob")) == known["", "bob"]
    found = mended(folder, known)
    assert found.repair is not None
    assert found.repair.cut == [
        "session 'alice': turn 2 is damaged, so that it stands after turn 1 now",
        "memory 'here' of session 'alice': it is damaged",
    ]
    assert everything(folder) == {**known, ("", "alice"): known["", "alice"][:2]}
    # The damaged one is still there, for whoever knows more.
    aside = folder / "sessions.damaged-1.sqlite"
    assert found.repair.aside == aside
    assert aside.read_bytes() == (damaged(closed, changed(statement)) / FILE).read_bytes()


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("column", ["digest = x'00'", "seal = x'00'", "depth = 7"])
def test_verify_puts_right_what_only_says_where_a_turn_is(
    closed: Path, damaged: Damaged, column: str
) -> None:
    known = everything(closed)
    folder = damaged(closed, changed(f"UPDATE turn SET {column} WHERE number = 4"))
    mended(folder, known)
    assert everything(folder) == known


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("column", ["head = 5", "name = 'alicf'", "settings = '{}'", "namespace = 'yours!'"])
def test_a_session_that_is_not_what_it_was_is_not_given_to_anybody(
    closed: Path, damaged: Damaged, column: str
) -> None:
    """What was said in it is kept, where only whoever has the store finds it."""
    from perdure.ext.upkeep.repair import FOUND

    known = everything(closed)
    folder = damaged(closed, changed(f"UPDATE session SET {column} WHERE number = 1"))
    with closing(Sessions(folder, readonly=True)) as sessions, pytest.raises(CorruptStateError):
        sessions.store.list()
    found = mended(folder, known)
    assert found.repair is not None
    assert not found.repair.found
    # A memory leads there still.
    with closing(Sessions(folder, readonly=False)) as sessions:
        assert told(sessions.memories.wake(None, "again"))[1:] == known["", "alice"][1:]
        sessions.memories.forget("perdure://alice/3#here")
    folder = damaged(closed, changed(f"UPDATE session SET {column} WHERE number = 1"))
    with closing(SqliteStore(folder)) as store, store.index.writing():
        store.index.run("DELETE FROM memory")
    found = mended(folder, known)
    assert found.repair is not None
    [name] = found.repair.found
    assert everything(folder)[FOUND, name][1:] == known["", "alice"][1:]
    assert ("", "alice") not in everything(folder)


@pytest.mark.extension("upkeep")
def test_a_repair_that_was_interrupted_is_finished(
    closed: Path, damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.ext.upkeep.repair import verify

    known = everything(closed)
    replace, stops = os.replace, 0
    while True:
        folder = damaged(closed, changed("UPDATE turn SET text = 'x' WHERE number = 3"))
        left = 1 + stops

        def interrupted(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", interrupted)
        try:
            verify(folder, lambda done, total: None)
            break
        except KeyboardInterrupt:
            stops += 1
        finally:
            monkeypatch.undo()
        with pytest.raises(StoreDamagedError, match="interrupted"):
            SqliteStore(folder)
        mended(folder, known)
        assert everything(folder) == {**known, ("", "alice"): known["", "alice"][:2]}
    assert stops >= 2


# Registers of before, and of nobody.


@pytest.mark.extension("upkeep")
def test_a_database_of_before_there_were_seals_is_taken_over(closed: Path, tmp_path: Path) -> None:
    from perdure.ext.upkeep.repair import verify

    known = everything(closed)
    old = tmp_path / "old"
    old.mkdir()
    with closing(sqlite3.connect(old / FILE)) as database, database:
        database.executescript(MIGRATIONS[0])
        database.execute("ATTACH ? AS now", [str(closed / FILE)])
        for table in ("turn", "session", "memory"):
            columns = [row[1] for row in database.execute(f"PRAGMA main.table_info({table})")]
            chosen = ", ".join(columns)
            database.execute(f"INSERT INTO main.{table} ({chosen}) SELECT {chosen} FROM now.{table}")
        database.execute("PRAGMA main.user_version = 1")
        database.execute(f"PRAGMA main.application_id = {0x50455244}")
    with closing(SqliteStore(old)) as store:
        assert len(store.list()) == 3
    assert everything(old) == known
    assert verify(old, lambda done, total: None).sound


def test_sessions_without_a_store_leave_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would a process that is killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with perdure.open(ToyModel(), n_ctx=512) as rt:
        rt.session("alice").say("Hello", max_tokens=4)
        assert rt.session("alice").turns == 1
        assert list(tmp_path.iterdir()) == []


# Faults planted on purpose.


def test_a_session_that_is_believed_unproved_is_found(
    closed: Path, damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the entry of a session is taken as it lies."""
    known = everything(closed)
    monkeypatch.setattr(schema_module, "check_session", lambda row, advice="": None)
    folder = damaged(closed, changed("UPDATE session SET head = 5 WHERE number = 1"))
    with pytest.raises(AssertionError):
        read(folder, known, equal)


def test_a_turn_that_is_believed_unproved_is_found(
    closed: Path, damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what was said is taken as it lies."""

    def believing(row: Any, before: bytes) -> Turn:
        turn = schema_module.parse_turn(row, before)
        object.__setattr__(turn, "_digest", row[-1])
        return turn

    monkeypatch.setattr(tables, "read_turn", believing)
    known = everything(closed)
    folder = damaged(
        closed, changed("UPDATE turn SET messages = replace(messages, 'Mess', 'Mass') WHERE number = 3")
    )
    with pytest.raises(AssertionError):
        read(folder, known, equal)


@pytest.mark.extension("upkeep")
def test_a_damaged_session_goes_on_after_verify(toy: Subject, tmp_path: Path) -> None:
    """W≡C on what is left: state that is kept of the lost turns is not taken for it."""
    from perdure.ext.upkeep.repair import verify

    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        for text in ("One, which takes a while to say", "Two, and so does this", "Three"):
            talk.say(s, text)
    changed("UPDATE turn SET text = 'x' WHERE number = 3")(tmp_path)
    with talking(toy, tmp_path) as talk, pytest.raises(CorruptStateError):
        talk.session("alice").history()
    verify(tmp_path, lambda done, total: None)
    with talking(toy, tmp_path) as talk:
        s = talk.session("alice")
        assert s.turns == 1
        assert talk.say(s, "Two, again").kept
