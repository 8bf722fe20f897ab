"""What a turn, a fork or going back costs does not grow with the conversation, nor a list with the store.

Counted as work: rows that are read and digests that are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from counting import sql_of
from perdure import CorruptStateError, Message
from perdure.chat.transcript import Transcript
from perdure.sessions import turn as turn_module
from perdure.sessions.info import RESPONSE, STREAM
from perdure.sessions.responses import respond
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sql.tables import row_checksum, turn_checksum
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.sessions.turn import FIRST, Turn, transcript
from perdure.store.index import Index
from sessions.database import index_of
from sessions.talking import ASK, talking
from subjects import Subject

SIZES = (10, 1000)


class Work:
    rows = 0
    digests = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work = Work()
    rows, digest_of = Index.rows, turn_module.digest_of

    def reading(self: Index, query: str, *values: Any) -> list[tuple[Any, ...]]:
        found = rows(self, query, *values)
        work.rows += len(found)
        return found

    def computing(turn: Turn) -> bytes:
        work.digests += 1
        return digest_of(turn)

    with monkeypatch.context() as patched:
        patched.setattr(Index, "rows", reading)
        patched.setattr(turn_module, "digest_of", computing)
        yield work


def chain(count: int) -> list[Turn]:
    """A start and `count` turns of a few words."""
    turns = [Turn(kind="start", messages=())]
    for number in range(count):
        turns.append(
            Turn(
                kind="turn",
                messages=(Message(role="user", content=f"Message {number}"),),
                reply=Message(role="assistant", content="Yes"),
                finish_reason="stop",
                before=turns[-1].digest,
            )
        )
    return turns


USES: dict[str, Callable[[Any], object]] = {
    "fork": lambda s: s.fork("b"),
    "fork back": lambda s: s.fork("c", turn=s.turns - 3),
    "rewind": lambda s: s.rewind(1),
    "label": lambda s: s.label("x"),
    "page": lambda s: s.history(limit=5, after=2),
}


@pytest.mark.parametrize("use", USES)
def test_moving_about_reads_as_much_in_a_long_session(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for size in SIZES:
        with Sessions(tmp_path / str(size)) as sessions:
            sessions.store.create("", "a", chain(size))
            session = sessions.get("a")
            session.history()
            with counted(monkeypatch) as work:
                USES[use](session)
            costs.append((work.rows, work.digests))
    assert costs[0] == costs[1]
    assert costs[0][1] == 0


CHANGES: dict[str, tuple[Callable[[Any], object], int]] = {
    "append": (lambda s: s.append("More"), 9),
    "fork": (lambda s: s.fork("b"), 8),
    "rewind": (lambda s: s.rewind(1), 8),
}


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_few_statements(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is read back for its checksum or its size: that took a tenth of a fork's time."""
    from perdure.ext.upkeep.store import verify

    with Sessions(tmp_path) as sessions:
        sessions.store.create("", "a", chain(3))
        session = sessions.get("a")
        session.history()
        use, most = CHANGES[change]
        with sql_of(monkeypatch) as sql:
            use(session)
        assert sql.statements <= most
    assert verify(tmp_path, lambda *_: None).sound


@pytest.mark.parametrize("how", ["say", "regenerate", "edit"])
def test_a_turn_reads_as_much_in_a_long_session(
    how: str, toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One digest for the turn that is new; nothing of the others is read or proved again."""
    costs = []
    for size in (4, 40):
        with talking(toy, tmp_path / str(size), n_ctx=4096) as talk:
            talk.rt.sessions.store.create("", "a", chain(size))
            session = talk.session("a")
            session.say("First", **ASK)
            with counted(monkeypatch) as work:
                {
                    "say": lambda s: s.say("Second", **ASK),
                    "regenerate": lambda s: s.regenerate(**ASK),
                    "edit": lambda s: s.edit(s.turns, "Else", **ASK),
                }[how](session)
            costs.append((work.rows, work.digests))
    assert costs[0] == costs[1]
    assert costs[0][1] == 1


def test_opening_reads_no_turns_and_the_first_use_reads_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sessions(tmp_path) as sessions:
        sessions.store.create("", "a", chain(1000))
    with Sessions(tmp_path) as sessions:
        with counted(monkeypatch) as work:
            session = sessions.get("a")
            assert session.turns == 1000
            assert (work.rows <= 4, work.digests) == (True, 0)
            session.fork("b")
            assert (work.rows < 40, work.digests) == (True, 0)
        with counted(monkeypatch) as work:
            assert len(session.history()) == 1000
            session.messages()
            session.transcript()
            # And one each to see that no other process has moved it.
            assert (work.digests, work.rows) == (1001, 1001 + 3)


@pytest.mark.parametrize("how", ["say", "rewind", "fork", "system", "tokens", "last"])
def test_the_first_use_of_a_long_session_reads_no_more_than_it_needs(
    how: str, toy: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a conversation that was folded, a turn needs what came after; to go back or to fork, a few turns."""
    digests = []
    for size in (40, 400):
        with talking(toy, tmp_path / str(size), n_ctx=4096) as talk:
            turns = chain(size)
            fold = Turn(kind="fold", messages=(Message(role="system", content="s"),), before=turns[-1].digest)
            talk.rt.sessions.store.create("", "a", [*turns, fold])
        with talking(toy, tmp_path / str(size), n_ctx=4096) as talk, counted(monkeypatch) as work:
            session = talk.session("a")
            {
                "say": lambda s: s.say("Go on", **ASK),
                "rewind": lambda s: s.rewind(2),
                "fork": lambda s: s.fork("b", turn=s.turns - 5),
                "system": lambda s: s.system,
                "tokens": lambda s: s.token_count,
                "last": lambda s: s.history(after=s.turns - 3),
            }[how](session)
            digests.append(work.digests)
    assert digests[0] == digests[1] < 40


def test_turns_are_the_same_however_they_are_read(tmp_path: Path) -> None:
    """From the end in pieces, from the start, or all at once; also after going back and on."""
    made = chain(300)
    with Sessions(tmp_path) as sessions:
        sessions.store.create("", "a", made)
    wanted = made[1:]
    for pieces in ([(299, None), (200, 50), (0, None)], [(0, 10), (150, 3)], [(0, None)]):
        with Sessions(tmp_path) as sessions:
            session = sessions.get("a")
            for after, limit in pieces:
                end = None if limit is None else after + limit
                assert session.history(after=after, limit=limit) == wanted[after:end]
            assert session.system is None
    with Sessions(tmp_path) as sessions:
        session = sessions.get("a")
        session.rewind(1)
        assert session.history(after=290) == wanted[290:299]
        session.fold(summary="Short", keep=1)
        assert [turn.kind for turn in session.history(after=297)] == ["turn", "turn", "fold"]
        assert [message.content for message in session.messages()][1:] == ["Message 298", "Yes"]
        session.rewind(to=100)
        assert session.history() == wanted[:100]
        assert len(session.messages()) == 200


def test_a_place_is_sealed_alike_one_by_one_and_at_once() -> None:
    for place in ((1, None, 0, bytes(32)), (2**40, 7, 12, bytes(range(32)))):
        assert turn_checksum(*place) == row_checksum(*place)


@pytest.mark.parametrize("column", ["parent = OTHER", "seal = x'00'", "digest = x'00'"])
def test_a_damaged_place_on_the_way_leads_to_no_start(column: str, tmp_path: Path) -> None:
    """I5: the system message of another session is not taken for this one's."""
    with Sessions(tmp_path) as sessions:
        other = sessions.create("other", system="Of another")
        sessions.store.create("", "a", chain(60))
        assert sessions.get("a").system is None
    with Sessions(tmp_path) as sessions:
        head = sessions.store.find("", "a").head
        with index_of(sessions).writing():
            statement = f"UPDATE turn SET {column} WHERE number = ?"
            index_of(sessions).run(statement.replace("OTHER", str(other.info.head)), head - 30)
        with pytest.raises(CorruptStateError):
            _ = sessions.get("a").system


def test_the_transcript_of_a_session_is_made_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of text is joined once, whatever was cut off its end by the next turn."""
    from array import array

    turns = [Turn(kind="start", messages=())]
    for number in range(200):
        keep = (10 * number, 10 * number)
        added = Transcript("x" * 12, array("i", range(12)), ((10, 10), (12, 12)))
        turns.append(Turn(kind="turn", messages=(), keep=keep, added=added, before=FIRST))
    moved: list[int] = []
    shorten = turn_module.shorten

    def counting(parts: list[Any], by: int) -> None:
        moved.append(by)
        shorten(parts, by)

    monkeypatch.setattr(turn_module, "shorten", counting)
    whole = transcript(turns)
    assert (len(whole.text), len(whole.tokens)) == (2002, 2002)
    assert whole.cuts == (*((10 * n, 10 * n) for n in range(1, 201)), (2002, 2002))
    assert sum(moved) == 2 * 2 * 199


@pytest.mark.parametrize("count", [30, 300])
def test_a_page_of_a_list_reads_a_page(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all pages together are all of them, each once, the latest first."""
    store = SqliteStore(tmp_path)
    with store.index.writing():
        pass
    for number in range(count):
        store.create("other" if number % 3 else "", f"s{number}", chain(0))
    wanted = [info.name for info in store.list("")]
    assert wanted == [f"s{number}" for number in reversed(range(0, count, 3))]
    found: list[str] = []
    last = None
    while True:
        with counted(monkeypatch) as work:
            page = store.list("", limit=7, after=last)
        assert work.rows == len(page) <= 7
        if not page:
            break
        found += [info.name for info in page]
        last = page[-1]
    assert found == wanted
    assert len(store.list(limit=5)) == 5
    store.close()


LISTS: dict[str, tuple[str, Callable[[SqliteStore], object]]] = {
    "the first page": ("session_latest", lambda store: store.list("", limit=7)),
    "a later page": ("session_latest", lambda store: store.list("", limit=7, after=store.find("", "a"))),
    "of all namespaces": ("session_all", lambda store: store.list(limit=7)),
    "expired responses": ("record_age", lambda store: store.expired(1e12, limit=4, kind=RESPONSE)),
    "expired streams": ("record_age", lambda store: store.expired(1e12, limit=4, kind=STREAM)),
    "memories": ("memory_order", lambda store: store.memories("", limit=7)),
}


@pytest.mark.parametrize("use", LISTS)
def test_lists_are_read_through_an_index_and_not_sorted(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count of rows does not show those that SQLite looks at and leaves, such as stored responses."""
    index, read = LISTS[use]
    store = SqliteStore(tmp_path)
    store.create("", "a", chain(0))
    queries: list[tuple[str, tuple[Any, ...]]] = []
    rows = Index.rows

    def noting(self: Index, query: str, *values: Any) -> list[tuple[Any, ...]]:
        queries.append((query, values))
        return rows(self, query, *values)

    with monkeypatch.context() as patched:
        patched.setattr(Index, "rows", noting)
        read(store)
    query, values = queries[-1]
    plan = [row[-1] for row in store.index.rows(f"EXPLAIN QUERY PLAN {query}", *values)]
    assert index in plan[0]
    assert not any("TEMP B-TREE" in step for step in plan)
    store.close()


def test_stored_responses_expire_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first. One that is damaged is in nobody's way, and no other session goes with them."""
    with Sessions(tmp_path) as sessions:
        sessions.create("kept")
        made = [respond(sessions, f"r{number}", {"how": "response"}).name for number in range(10)]
        with index_of(sessions).writing():
            index_of(sessions).run("UPDATE record SET seal = x'00' WHERE name = 'r0'")
        sessions.expire(RESPONSE, 3600)
        assert all(sessions.store.has("", name) for name in made[1:])
        left = []
        for _ in range(5):
            # As if an hour had passed.
            sessions.expire(RESPONSE, -3600)
            left.append([name for _, name in sessions.store.expired(1e12, limit=100, kind=RESPONSE)])
        assert left[0] == ["r0", *made[4:]]
        assert left[-1] == ["r0"]
        assert [info.name for info in sessions.list()] == ["kept"]


@pytest.mark.parametrize("jump", [400 * 86400.0, -400 * 86400.0], ids=["ahead", "back and right again"])
def test_a_clock_that_jumps_ends_no_fresh_response(
    tmp_path: Path, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 4: what was stored a moment ago is no month old, whatever the clock says of it."""
    real = time.time
    if jump < 0:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
    with Sessions(tmp_path) as sessions:
        made = [respond(sessions, f"r{number}", {"how": "response"}).name for number in range(6)]
        monkeypatch.setattr(time, "time", lambda: real() + max(0.0, jump))
        for _ in range(3):
            sessions.expire(RESPONSE, 30 * 86400.0)
        assert all(sessions.store.has("", name) for name in made)


def test_pages_of_memories(tmp_path: Path) -> None:
    with Sessions(tmp_path) as sessions:
        session = sessions.create("a")
        made = [session.label(f"l{number}").address for number in range(10)]
        first = [memory.address for memory in sessions.memories.search(limit=4)]
        rest = [memory.address for memory in sessions.memories.search(after=first[-1])]
        assert first + rest == made
        assert [turn.kind for turn in session.history(limit=3)] == []


@pytest.mark.parametrize("back", [1, 5])
def test_the_memory_of_turns_is_counted_right_after_going_back(
    toy: Subject, tmp_path: Path, back: int
) -> None:
    """Whether few turns or most are left: what was read is given up by this count."""
    with talking(toy, tmp_path, n_ctx=4096) as talk:
        session = talk.session("a")
        for number in range(6):
            session.say(f"Number {number}", **ASK)
        session.rewind(back)
        session.say("Else", **ASK)
        history = session.standing()
        assert history.nbytes == sum(turn.nbytes for turn in history.turns)
