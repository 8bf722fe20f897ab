"""The contract of a session store, on every store there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.servers import PostgresServer
from perdure import Message, QuotaError, SessionError, Turn
from perdure.sessions.info import SessionInfo
from perdure.sessions.store.base import Quota, SessionStore
from perdure.sessions.store.postgres.place import stand_in
from perdure.sessions.store.registry import open_store
from sessions.memory_store import Data, MemoryStore

Open = Callable[[], SessionStore]
START = Turn(kind="start", messages=())


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store, as another process would."""
    data, stores = Data(), list[SessionStore]()
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        stand_in(server.url(tmp_path))

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


def test_x20_turns_that_sessions_share_count_once_and_for_as_long_as_one_has_them(opened: Open) -> None:
    store = opened()
    info = created(store, "one", 3, size=1000)
    [size] = store.sizes()
    for number in range(5):
        store.create("a", f"fork {number}", head=info.head, digest=info.digest)
    [now] = store.sizes()
    assert (now.nbytes, now.sessions, now.turns) == (size.nbytes, 6, 3)
    store.limit("a", Quota(nbytes=now.nbytes))
    store.delete(info)
    with pytest.raises(QuotaError):
        created(store, "two", 1)
    for number in range(5):
        store.delete(store.find("a", f"fork {number}"))
    created(store, "two", 1)


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
    pages: list[SessionInfo] = []
    while page := store.list("a", text="x", limit=40, after=pages[-1] if pages else None):
        pages += page
    assert len(pages) == len({each.name for each in pages}) == 151


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
