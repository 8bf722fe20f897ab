"""The contract of a session store, on every store there is."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import perdure
from perdure import (
    InvalidInputError,
    Message,
    QuotaError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    Turn,
)
from perdure.sessions.history import TurnReference
from perdure.sessions.info import Quota, SessionInfo
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import open_store, store_folder
from perdure.sessions.store.sql.database import COUNTED
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.testing.toy import ToyModel
from sessions.memory_store import Data, MemoryStore

Open = Callable[[], SessionStore]
START = Turn(kind="start", messages=())


@pytest.fixture(params=["sqlite", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store, as another process would."""
    data, stores = Data(), list[SessionStore]()

    def opened() -> SessionStore:
        stores.append(MemoryStore(data) if request.param == "memory" else open_store(tmp_path))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def turns(count: int, size: int = 10, before: Turn = START) -> list[Turn]:
    made: list[Turn] = []
    for number in range(count):
        last = made[-1] if made else before
        said = (Message(role="user", content=f"{number} " + "x" * size),)
        made.append(Turn(kind="turn", messages=said, created=float(number), before=last.digest))
    return made


def created(store: SessionStore, name: str, count: int, namespace: str = "a", size: int = 10) -> SessionInfo:
    return store.create(namespace, name, [START, *turns(count, size)])


def test_x20_a_page_holds_no_more_turns_and_bytes_than_were_asked_for(opened: Open) -> None:
    store = opened()
    info = created(store, "s", 20, size=1000)
    whole = turns(20, 1000)
    assert store.page(info.head, "s", after=0) == whole
    assert store.page(info.head, "s", after=5, limit=3) == whole[5:8]
    assert store.page(info.head, "s", after=20) == []
    by_bytes = store.page(info.head, "s", after=5, nbytes=4000)
    assert by_bytes == whole[5 : 5 + len(by_bytes)]
    assert 2 <= len(by_bytes) <= 4
    # One at least, or nobody would come to the end.
    assert store.page(info.head, "s", after=5, nbytes=1) == whole[5:6]
    read: list[Turn] = []
    while page := store.page(info.head, "s", after=len(read), nbytes=3000):
        read += page
    assert read == whole


def test_x20_a_namespace_stores_no_more_than_its_quota(opened: Open) -> None:
    store = opened()
    first = created(store, "one", 2)
    created(store, "other", 2, namespace="b")
    store.limit("a", Quota(sessions=2))
    created(store, "two", 1)
    with pytest.raises(QuotaError, match="may") as raised:
        created(store, "three", 1)
    assert (raised.value.needed, raised.value.limit) == (3, 2)
    assert not store.has("a", "three")
    # Another namespace has its own bound, and what goes makes room.
    created(store, "three", 1, namespace="b")
    store.delete(first)
    created(store, "three", 1)
    store.limit("a", Quota(nbytes=20_000))
    long = turns(1, 30_000, before=turns(1)[-1])
    info = store.find("a", "three")
    with pytest.raises(QuotaError):
        store.add(info, long, parent=info.head, expected=info.head)
    assert store.find("a", "three").head == info.head
    short = turns(1, 10_000, before=turns(1)[-1])
    [number] = store.add(info, short, parent=info.head, expected=info.head)
    # Going back makes room again.
    store.limit("a", Quota(nbytes=50_000))
    now = store.find("a", "three")
    more = turns(1, 45_000, before=short[-1])
    with pytest.raises(QuotaError):
        store.add(now, more, parent=number, expected=number)
    store.move(now, info.head, digest=info.digest, expected=number)
    store.add(info, turns(1, 30_000, before=turns(1)[-1]), parent=info.head, expected=info.head)
    store.limit("a", None)
    created(store, "four", 9, size=10_000)


def test_records_of_extensions_count_by_their_bytes_alone(opened: Open) -> None:
    store = opened()
    created(store, "one", 1)
    store.limit("a", Quota(sessions=1, nbytes=20_000))
    before = time.time() - 1
    for name in ("first", "second"):
        record = store.put("a", "made:up", name, {"text": "x" * 5000})
        assert store.record("a", "made:up", name) == record
    store.put("b", "made:up", "other", {})
    later = time.time() + 1
    assert store.expired(later, limit=9, kind="made:up", namespace="a") == [("a", "first"), ("a", "second")]
    assert store.expired(later, limit=1, kind="made:up") == [("a", "first")]
    assert store.expired(later, limit=9, kind="made:up", namespace="nobody") == []
    assert store.expired(before, limit=9, kind="made:up") == []
    [size] = [each for each in store.sizes() if each.namespace == "a"]
    assert size.sessions == 1
    assert size.nbytes > 10_000
    # They are no sessions, and no other kind's.
    assert not store.has("a", "first")
    assert [each.name for each in store.list("a")] == ["one"]
    with pytest.raises(QuotaError):
        store.put("a", "made:up", "third", {"text": "x" * 15_000})
    with pytest.raises(SessionExistsError):
        store.put("a", "made:up", "first", {})
    store.delete(store.record("a", "made:up", "first"))
    with pytest.raises(SessionNotFoundError):
        store.record("a", "made:up", "first")


def test_x20_turns_that_sessions_share_count_once_and_for_as_long_as_one_has_them(opened: Open) -> None:
    store = opened()
    info = created(store, "one", 3, size=1000)
    [size] = store.sizes()
    for number in range(5):
        store.create("a", f"fork {number}", head=info.head, digest=info.digest)
    [now] = store.sizes()
    assert (now.sessions, now.turns) == (6, 3)
    assert now.nbytes - size.nbytes < 5 * 500, "a fork counts for itself, and not for the turns it shares"
    store.limit("a", Quota(nbytes=now.nbytes))
    store.delete(info)
    with pytest.raises(QuotaError):
        created(store, "two", 1)
    for number in range(5):
        store.delete(store.find("a", f"fork {number}"))
    created(store, "two", 1)


def test_y5_a_quota_counts_what_sessions_and_memories_have_besides_turns(opened: Open) -> None:
    """Y5, Y6: origins, settings, labels and notes count as turns do, and count no more once they are gone."""
    store = opened()
    info = created(store, "one", 1)
    at = TurnReference(info.head, info.digest, info.depth)
    [empty] = store.sizes()
    big = "x" * 10_000
    grown: list[Callable[[], object]] = [
        lambda: store.note(info, {"metadata": big}),
        lambda: store.label(info, at, "l", "k", big),
        lambda: store.create("a", "two", head=info.head, digest=info.digest, origin={"o": big}),
        lambda: store.create("a", "two", head=info.head, digest=info.digest, settings={"o": big}),
    ]
    for grow in grown:
        store.limit("a", Quota(nbytes=empty.nbytes + 9_000))
        with pytest.raises(QuotaError):
            grow()
        assert store.sizes() == [empty], "what is refused counts for nothing"
        store.limit("a", None)
        grow()
        [now] = store.sizes()
        assert now.nbytes - empty.nbytes >= 10_000
        # As it was.
        store.note(info, {})
        for memory in store.memories("a"):
            store.forget(memory)
        if store.has("a", "two"):
            store.delete(store.find("a", "two"))
        assert store.sizes() == [empty]
    store.label(info, at, "l", "k", big)
    store.label(info, at, "l", "k", "")
    [now] = store.sizes()
    assert now.nbytes - empty.nbytes < 1_000, "a memory in the place of another counts alone"
    store.limit("a", Quota(nbytes=now.nbytes))
    store.note(info, {"ended": "failed"}, bounded=False)


def test_x7_a_search_finds_what_was_said_before_a_fork_and_in_pages(opened: Open) -> None:
    store = opened()
    for number in range(150):
        info = created(store, f"s{number}", 1)
    said = turns(1, before=turns(1)[-1])[0]
    needle = Turn(
        kind="turn", messages=(Message(role="user", content="the Needle"),), before=turns(1)[-1].digest
    )
    store.add(info, [needle], parent=info.head, expected=info.head)
    head = store.find("a", "s149")
    store.create("a", "fork", head=head.head, digest=head.digest)
    first = store.find("a", "s0")
    store.add(first, [said], parent=first.head, expected=first.head)
    assert {each.name for each in store.list("a", text="nEEdle")} == {"s149", "fork"}
    assert [each.name for each in store.list("a", text="needle", limit=1)] == ["fork"]
    assert len(store.list("a", text="xxx", limit=70)) == 70
    assert [each.name for each in store.list("a", text="S14", limit=3)] == ["s149", "s148", "s147"]
    assert store.list("b", text="needle") == []
    store.note(store.find("a", "s7"), {"title": "A Journey to Lisbon"})
    assert [each.name for each in store.list("a", text="lisbon")] == ["s7"]
    pages: list[SessionInfo] = []
    while page := store.list("a", text="x", limit=40, after=pages[-1] if pages else None):
        pages += page
    assert len(pages) == len({each.name for each in pages}) == 151


def test_a_session_that_another_has_changed_is_not_changed_by_what_was_read_before(opened: Open) -> None:
    """Two that stand at one turn: the second to say something is refused, and so is a move."""
    store, other = opened(), opened()
    info = created(store, "s", 2)
    whole = turns(4)
    store.add(info, whole[2:3], parent=info.head, expected=info.head)
    moved, _ = other.head(info)
    with pytest.raises(SessionError, match="changed meanwhile: nothing was done"):
        other.add(info, whole[2:4], parent=info.head, expected=info.head)
    with pytest.raises(SessionError, match="changed meanwhile: nothing was done"):
        other.move(info, info.head, digest=info.digest, expected=info.head)
    assert other.head(info) == (moved, False)
    assert store.page(moved, "s", after=0) == whole[:3]


def test_a_session_is_taken_by_one_at_a_time(opened: Open) -> None:
    first, second = opened(), opened()
    info = created(first, "s", 1)
    assert first.take(info)
    assert not second.take(info)
    first.release(info)
    assert second.take(info)
    first.release(info)
    assert not first.take(info)


def test_a_holder_that_slept_through_its_lease_is_refused() -> None:
    """Fencing: a lease that ran out and was taken by another lets nothing be written any more."""
    data = Data()
    first, second = MemoryStore(data), MemoryStore(data)
    info = created(first, "s", 1)
    assert first.take(info)
    data.run_out(info.number)
    assert second.take(info)
    more = turns(1, before=turns(1)[-1])
    for change in (
        lambda: first.add(info, more, parent=info.head, expected=info.head),
        lambda: first.move(info, info.head, digest=info.digest, expected=info.head),
        lambda: first.delete(info),
    ):
        with pytest.raises(SessionError, match="taken over"):
            change()
    assert second.find("a", "s") == info
    # It is the other's until that one lets go of it.
    first.release(info)
    assert not first.take(info)
    second.add(info, more, parent=info.head, expected=info.head)
    second.release(info)
    assert first.take(info)


OURS = {
    ("turn", "kind"),
    ("turn", "finish_reason"),
    ("turn", "digest"),
    ("turn", "seal"),
    ("session", "seal"),
    ("record", "seal"),
    ("memory", "seal"),
    ("memory", "digest"),
    ("register", "id"),
    ("counter", "name"),
    ("counter", "seal"),
    ("file", "checksum"),
    ("usage", "namespace"),
}
"""Columns of texts and bytes of whose length no client has a say."""


def test_every_column_that_a_client_can_fill_is_counted_y5_y6(tmp_path: Path) -> None:
    """Y5, Y6 (class 2): a new column, or a new table, fails here until it counts or has a reason."""
    with closing(SqliteStore(tmp_path)), closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = {
            (table, name)
            for table in tables
            for _, name, kind, *_ in database.execute(f"PRAGMA table_info({table})")
            if kind in ("TEXT", "BLOB", "")
        }
    counted = {(table, name) for table, names in COUNTED.items() for name in names}
    assert columns == counted | OURS
    assert not counted & OURS


def test_c12_a_session_has_one_pending_turn_until_it_moves_on_or_goes(opened: Open) -> None:
    store, other = opened(), opened()
    info = created(store, "one", 1)
    [empty] = store.sizes()
    store.limit("a", Quota(sessions=1, nbytes=empty.nbytes))
    assert store.pending(info) is None
    assert other.head(info) == (info.head, False)
    first = store.pend(info, {"asked": "x" * 1000})
    assert first is not None
    assert other.pending(info) == first
    assert other.head(info) == (info.head, True)
    # It is part of a session, and no quota refuses it.
    assert [size.sessions for size in store.sizes()] == [1]
    assert store.note(first, {"asked": "y"}, bounded=False).origin == {"asked": "y"}
    assert store.list("a") == [info]
    second = store.pend(info, {"asked": "z"})
    # What was written down before never comes back.
    with pytest.raises(SessionNotFoundError):
        store.note(first, {"asked": "late"})
    assert other.pending(info) == second
    store.limit("a", None)
    [turn] = turns(1, before=turns(1)[-1])
    [number] = store.add(info, [turn], parent=info.head, expected=info.head)
    assert other.pending(info) is None
    store.pend(info, {"asked": "z"})
    store.move(info, info.head, digest=info.digest, expected=number)
    assert other.pending(info) is None
    store.pend(info, {"asked": "z"})
    assert store.pend(info, None) is None
    assert other.pending(info) is None
    assert store.sizes() == [empty]
    store.pend(info, {"asked": "z"})
    store.delete(info)
    assert other.pending(info) is None
    if isinstance(store, SqliteStore):
        store.check_counts()


def test_the_url_of_a_server_that_nothing_opens_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="no extension opens nosuch://…: install") as raised:
        store_folder("nosuch://me:secret@there/chats")
    assert "secret" not in str(raised.value)
    with pytest.raises(InvalidInputError):
        perdure.open(ToyModel(), store="nosuch://there/chats")
    assert list(tmp_path.iterdir()) == []
    assert store_folder("a:b/c") == Path("a:b/c")
