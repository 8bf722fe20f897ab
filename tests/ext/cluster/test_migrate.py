"""Sessions brought from one store into another: either way, interrupted, and while they change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ext.cluster.servers import PostgresServer
from perdure import CorruptStateError, InvalidInputError, Message, Turn
from perdure.cli.app import app
from perdure.errors import StoreError
from perdure.sessions.history import TurnReference
from perdure.sessions.info import RESPONSE
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import open_store, store_folder
from perdure.sessions.store.sql.store import SqlStore
from perdure.sessions.store.sql.upkeep import bring_session, every_row
from sessions.test_store_contract import START, created, turns


def quiet(done: int, total: int) -> None:
    pass


def filled(store: SessionStore) -> None:
    """Sessions with forks, memories and a stored response, in two namespaces."""
    info = created(store, "one", 5, size=100)
    store.create("a", "fork", head=info.head, digest=info.digest, origin={"how": "fork"}, settings={"x": 1})
    fork = store.find("a", "fork")
    store.add(fork, turns(1, 7, before=turns(5, 100)[-1]), parent=fork.head, expected=fork.head)
    created(store, "one", 2, namespace="b")
    store.label(info, TurnReference(info.head, info.digest, info.depth), "here", "point", "a note")
    store.create("a", "resp_1", [START, *turns(1)], kind=RESPONSE)
    gone = created(store, "gone", 1)
    store.label(gone, TurnReference(gone.head, gone.digest, gone.depth), "left", "point", "")
    store.delete(gone)


def content(store: SessionStore) -> Any:
    assert isinstance(store, SqlStore)
    sessions = [
        (row[1], row[2], row[3], row[5], row[6], row[7], row[8], row[9], bytes(row[10]))
        for row in every_row(store)[0]
    ]
    memories = [
        (row[1], row[2], row[4], row[5], row[6], row[7], bytes(row[8])) for row in every_row(store)[1]
    ]
    return sorted(sessions), sorted(memories), store.sizes()


@pytest.fixture(params=["to postgres", "to a folder", "between folders"])
def places(request: pytest.FixtureRequest, postgres: PostgresServer, tmp_path: Path) -> tuple[Path, Path]:
    plain, database = tmp_path / "plain", store_folder(postgres.url(tmp_path / "pg"))
    if request.param == "between folders":
        return plain, tmp_path / "other"
    return (plain, database) if request.param == "to postgres" else (database, plain)


@pytest.mark.extension("upkeep")
def test_all_of_a_store_is_in_the_other_one_and_proved(places: tuple[Path, Path]) -> None:
    from perdure.ext.upkeep.store import migrate, verify

    source, target = places
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        filled(first)
        found = migrate(source, target, quiet)
        assert (found.sessions, found.memories, found.whole) == (4, 2, True)
        assert content(second) == content(first)
        assert [each.name for each in second.list("a")] == [each.name for each in first.list("a")]
        # Once more: all is there, and nothing is written.
        again = migrate(source, target, quiet)
        assert (again.sessions, again.turns, again.whole) == (4, 0, True)
        assert content(second) == content(first)
    assert verify(target, quiet).sound


@pytest.mark.extension("upkeep")
def test_files_that_turns_name_come_too_and_go_with_their_sessions(places: tuple[Path, Path]) -> None:
    from perdure.ext.upkeep.store import migrate, verify

    source, target = places
    data = bytes(range(256)) * 40
    digest = hashlib.sha256(data).hexdigest()
    said = Message.parse({"role": "user", "content": "see", "images": [[1, digest]]})
    turn = Turn(kind="turn", messages=(said,), before=START.digest)
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        first.keep_file("a", digest, data)
        first.create("a", "seen", [START, turn])
        info = first.find("a", "seen")
        first.create("a", "fork", head=info.head, digest=info.digest)
        assert migrate(source, target, quiet).whole
        for store in (first, second):
            assert isinstance(store, SqlStore)
            assert store.file("a", digest) == data
            assert store.file("b", digest) is None
            assert store.sizes()[0].nbytes > len(data)
            store.delete(store.find("a", "seen"))
            assert store.file("a", digest) == data
            store.check_counts()
        assert verify(target, quiet).sound
        for store in (first, second):
            assert isinstance(store, SqlStore)
            store.delete(store.find("a", "fork"))
            assert store.file("a", digest) is None
            store.check_counts()


@pytest.mark.extension("upkeep")
def test_what_changes_while_it_is_copied_is_copied_again(places: tuple[Path, Path]) -> None:
    """Sessions are added, continued, rewound and deleted between two looks."""
    from perdure.ext.upkeep.store import migrate, verify

    source, target = places
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        filled(first)
        created(first, "to be deleted", 1)
        changes = iter(["change"])

        def change(done: int, total: int) -> None:
            if done == total and next(changes, None):
                info = first.find("a", "one")
                first.add(info, turns(1, 9, before=turns(5, 100)[-1]), parent=info.head, expected=info.head)
                fork = first.find("a", "fork")
                start = first.read(TurnReference(fork.head, fork.digest, fork.depth), -1, "fork")
                first.move(fork, start.numbers[1], digest=start.turns[1].digest, expected=fork.head)
                created(first, "late", 1)
                first.delete(first.find("a", "to be deleted"))

        found = migrate(source, target, change)
        assert found.whole
        assert {each.name for each in second.list("a")} == {"one", "fork", "late"}
        for name in ("one", "fork", "late"):
            assert second.find("a", name).digest == first.find("a", name).digest
    assert verify(target, quiet).sound


@pytest.mark.extension("upkeep")
def test_what_is_deleted_at_last_while_it_is_copied_is_deleted_there(places: tuple[Path, Path]) -> None:
    """Also if nothing else changes, so that there is nothing more to bring."""
    from perdure.ext.upkeep.store import migrate

    source, target = places
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        filled(first)
        created(first, "to be deleted", 1)

        def change(done: int, total: int) -> None:
            if done == total:
                first.delete(first.find("a", "to be deleted"))

        assert migrate(source, target, change).whole
        assert content(second) == content(first)


@pytest.mark.extension("upkeep")
def test_a_run_that_was_interrupted_goes_on(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.ext.upkeep import migration
    from perdure.ext.upkeep.store import migrate

    source, target = places
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        filled(first)
        bring, calls = bring_session, iter(range(100))

        def failing(self: SqlStore, info: Any, given: Sequence[Turn], *, head: int | None) -> Any:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return bring(self, info, given, head=head)

        with monkeypatch.context() as patch:
            patch.setattr(migration, "bring_session", failing)
            with pytest.raises(KeyboardInterrupt):
                migrate(source, target, quiet)
        found = migrate(source, target, quiet)
        assert found.whole
        assert found.turns < 13
        assert content(second) == content(first)


@pytest.mark.extension("upkeep")
def test_what_was_continued_or_is_another_session_there_is_left_alone(places: tuple[Path, Path]) -> None:
    from perdure.ext.upkeep.store import migrate

    source, target = places
    with closing(open_store(source)) as first, closing(open_store(target)) as second:
        filled(first)
        migrate(source, target, quiet)
        info = second.find("a", "one")
        second.add(info, turns(1, 3, before=turns(5, 100)[-1]), parent=info.head, expected=info.head)
        second.delete(second.find("b", "one"))
        created(second, "one", 1, namespace="b", size=55)
        kept = second.find("a", "one"), second.find("b", "one")
        found = migrate(source, target, quiet)
        assert found.ahead == ["one"]
        assert [what for what, _ in found.left_out] == ["one"]
        assert (second.find("a", "one"), second.find("b", "one")) == kept


@pytest.mark.extension("upkeep")
def test_a_damaged_session_is_named_and_the_others_are_brought(tmp_path: Path) -> None:
    from perdure.ext.upkeep.store import migrate

    source, target = tmp_path / "a", tmp_path / "b"
    with closing(open_store(source)) as first:
        filled(first)
        created(first, "sound", 1)
        index = first.index  # type: ignore[attr-defined]
        with index.writing():
            head = first.find("b", "one").head
            index.run("UPDATE turn SET messages = replace(messages, '1 x', '2 x') WHERE number = ?", head)
        found = migrate(source, target, quiet)
    assert [what for what, _ in found.left_out] == ["one"]
    with closing(open_store(target)) as second:
        assert second.has("a", "sound")
        assert not second.has("b", "one")


@pytest.mark.extension("upkeep")
def test_a_store_is_not_brought_into_itself(tmp_path: Path) -> None:
    from perdure.ext.upkeep.store import migrate

    with closing(open_store(tmp_path / "a")) as store:
        created(store, "s", 1)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InvalidInputError, match="same store"):
        migrate(tmp_path / "a", tmp_path / "b", quiet)
    with pytest.raises(StoreError):
        migrate(tmp_path / "none", tmp_path / "b", quiet)


def test_the_command_says_what_it_did(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(tmp_path / "pg")
    with closing(open_store(tmp_path / "plain")) as store:
        filled(store)
    ran = CliRunner().invoke(app, ["sessions", "migrate", str(tmp_path / "plain"), url])
    assert ran.exit_code == 0, ran.output
    assert "4 sessions and 2 memories are there and proved" in ran.output
    back = CliRunner().invoke(app, ["sessions", "migrate", url, str(tmp_path / "back"), "--json"])
    assert back.exit_code == 0, back.output
    assert '"whole": true' in back.output


@pytest.mark.extension("upkeep")
def test_a_turn_that_does_not_read_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the new store forgets the last turn of what it is given."""
    from perdure.ext.upkeep import migration
    from perdure.ext.upkeep.store import migrate

    with closing(open_store(tmp_path / "a")) as first:
        created(first, "s", 3)
    bring = bring_session

    def forgetful(self: SqlStore, info: Any, given: Sequence[Turn], *, head: int | None) -> Any:
        return bring(self, info, given[:-1], head=head)

    monkeypatch.setattr(migration, "bring_session", forgetful)
    found = migrate(tmp_path / "a", tmp_path / "b", quiet)
    assert not found.whole
    assert CorruptStateError.__name__ not in str(found)


@pytest.mark.extension("upkeep")
def test_backup_and_restore_of_a_database_say_what_does_that(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """A path would have lost one slash of its URL."""
    url = postgres.url(tmp_path / "pg")
    asked = {"backup": [url, str(tmp_path / "file")], "restore": [str(tmp_path / "file"), url]}
    for command, advice in (("backup", "pg_dump --schema="), ("restore", "perdure sessions migrate")):
        refused = CliRunner().invoke(app, [command, *asked[command]])
        assert "is on a server" in str(refused.exception)
        assert advice in str(refused.exception)
