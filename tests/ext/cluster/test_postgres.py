"""Sessions in PostgreSQL: leases over replicas, faults of server and network, damage, the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from ext.cluster.proxy import Proxy
from ext.cluster.servers import PostgresServer, postgres_server
from perdure import CorruptStateError, InvalidInputError, Message, SessionError, StoreError, Turn
from perdure.cli.app import app
from perdure.errors import SessionExistsError, StoreReadOnlyError
from perdure.events import background
from perdure.ext.cluster.postgres.place import parse_place, place_in, stand_in
from perdure.sessions.info import SessionInfo
from perdure.sessions.store.base import SessionStore
from perdure.sessions.store.registry import has_sessions, open_store, store_folder
from sessions.test_store_contract import START, created

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture
def own() -> Iterator[PostgresServer]:
    """A server that a test may stop."""
    with postgres_server() as server:
        yield server


def more(info: SessionInfo, text: str = "more") -> list[Turn]:
    return [Turn(kind="turn", messages=(Message(role="user", content=text),), before=info.digest)]


def said(store: SessionStore, name: str = "s") -> list[str]:
    info = store.find("a", name)
    return [str(turn.messages[0].content) for turn in store.page(info.head, name, after=0)]


@contextmanager
def replica(folder: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """A process that has taken the session, and waits for a word to commit."""
    process = subprocess.Popen(
        [sys.executable, str(HOLDER), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "taken\n"
        yield process, process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_replica_that_was_thought_dead_and_comes_back_cannot_commit(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """N2: stopped for longer than its lease, while another goes on: SIGCONT changes nothing."""
    stand_in(postgres.url(tmp_path, lease=1))
    with closing(open_store(tmp_path)) as store:
        info = created(store, "s", 1)
        with replica(tmp_path) as (process, words, answers):
            assert not store.take(info)
            os.kill(process.pid, signal.SIGSTOP)
            waiting = threading.Event()
            while not store.take(info):
                waiting.wait(0.05)
            store.add(info, more(info, "of the other"), parent=info.head, expected=info.head)
            store.release(info)
            os.kill(process.pid, signal.SIGCONT)
            words.write("go\n")
            words.flush()
            assert "taken over" in answers.readline()
            assert answers.readline() == "SessionError\n"
        assert said(store) == ["0 xxxxxxxxxx", "of the other"]


def test_a_replica_that_hangs_within_a_change_stops_nobody_else(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the row of its namespace, and PostgreSQL does not take it for idle, because it is in the middle
    of a pipeline. Whoever waits for it in vain ends its transaction, and is through the next time."""
    from perdure.ext.cluster.postgres import database
    from perdure.ext.cluster.postgres.store import PostgresStore

    monkeypatch.setattr(database, "_IDLE", 0.2)
    url = postgres.url(tmp_path / "a", timeout=1)
    hangs, goes_on = threading.Event(), threading.Event()
    ended: list[BaseException] = []
    with closing(open_store(store_folder(url))) as first:
        second = open_store(store_folder(url.replace("%2Fa", "%2Fb")))
        assert isinstance(first, PostgresStore)
        first.create("n", "s", [Turn(kind="start", messages=())])

        def hang() -> None:
            try:
                with first.database.writing():
                    first._lock_namespace("n")
                    first.database.rows("SELECT 1")
                    hangs.set()
                    goes_on.wait()
            except StoreError as error:
                ended.append(error)

        thread = threading.Thread(target=hang)
        thread.start()
        with closing(second):
            assert hangs.wait(60)
            try:
                with pytest.raises(StoreError, match="try again"):
                    second.create("n", "t", [Turn(kind="start", messages=())])
                second.create("n", "t", [Turn(kind="start", messages=())])
            finally:
                goes_on.set()
                thread.join()
        assert ended
        assert {each.name for each in first.list("n")} == {"s", "t"}


def test_the_sessions_of_a_replica_that_was_killed_are_free_at_once(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Its lease would last an hour."""
    stand_in(postgres.url(tmp_path, lease=3600))
    with closing(open_store(tmp_path)) as store:
        info = created(store, "s", 1)
        with replica(tmp_path) as (process, _, _):
            assert not store.take(info)
            process.kill()
            process.wait()
            waiting = threading.Event()
            while not store.take(info):
                waiting.wait(0.05)
        store.add(info, more(info), parent=info.head, expected=info.head)


def test_stores_in_one_database_do_not_wait_for_each_other(postgres: PostgresServer, tmp_path: Path) -> None:
    """Each schema counts its holders from 1, and their locks are those of the whole database."""
    urls = [postgres.url(tmp_path / name, timeout=2) for name in ("one", "two")]
    with closing(open_store(stand_in(urls[0]))) as one, closing(open_store(stand_in(urls[1]))) as two:
        for store in (one, two):
            assert store.take(created(store, "s", 1))


def test_a_lease_lasts_for_as_long_as_its_holder_lives(postgres: PostgresServer, tmp_path: Path) -> None:
    """A turn may take longer than a lease: it is renewed meanwhile."""
    stand_in(postgres.url(tmp_path, lease=0.3))
    with closing(open_store(tmp_path)) as first, closing(open_store(tmp_path)) as second:
        info = created(first, "s", 1)
        assert first.take(info)
        waiting = threading.Event()
        for _ in range(20):
            assert not second.take(info)
            waiting.wait(0.05)
        first.add(info, more(info), parent=info.head, expected=info.head)


def test_leases_are_renewed_by_a_thread_that_goes_on(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a renewal raises."""
    from perdure.ext.cluster.postgres.database import PostgresDatabase

    change, left, again = PostgresDatabase.change, [SystemExit(1)], threading.Event()

    def planted(database: PostgresDatabase, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        if threading.current_thread().name == "perdure-leases":
            if left:
                raise left.pop()
            again.set()
        return change(database, statement, *values)

    monkeypatch.setattr(background, "_PAUSE", 0.001)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(PostgresDatabase, "change", planted)
    before = background.FAILURES["perdure-leases"]
    stand_in(postgres.url(tmp_path, lease=0.3))
    with closing(open_store(tmp_path)):
        assert again.wait(60)
    assert background.FAILURES["perdure-leases"] == before + 1
    background.FAILURES["perdure-leases"] = before


def test_what_was_acknowledged_survives_a_restart_of_the_server(own: PostgresServer, tmp_path: Path) -> None:
    stand_in(own.url(tmp_path))
    with closing(open_store(tmp_path)) as store:
        info = created(store, "s", 1)
        assert store.take(info)
        own.restart()
        # Read again without a word; the session is still ours, and goes on.
        assert said(store) == ["0 xxxxxxxxxx"]
        own.restart()
        store.add(info, more(info), parent=info.head, expected=info.head)
        assert said(store) == ["0 xxxxxxxxxx", "more"]
        store.release(info)


def test_a_server_that_hangs_holds_nobody_up_for_ever(own: PostgresServer, tmp_path: Path) -> None:
    stand_in(own.url(tmp_path, timeout=0.5))
    with closing(open_store(tmp_path)) as store:
        info = created(store, "s", 1)
        own.signal(signal.SIGSTOP)
        for call in _calls(store, info):
            with pytest.raises(StoreError):
                call()
        own.signal(signal.SIGCONT)
        again(lambda: store.add(info, more(info), parent=info.head, expected=info.head))
        assert said(store) == ["0 xxxxxxxxxx", "more"]


def test_a_network_that_is_cut_in_two_holds_nobody_up_for_ever(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with closing(Proxy(postgres.port)) as proxy:
        stand_in(postgres.url(tmp_path, port=proxy.port, timeout=0.5))
        with closing(open_store(tmp_path)) as store:
            info = created(store, "s", 1)
            proxy.partition()
            for call in _calls(store, info):
                with pytest.raises(StoreError):
                    call()
            proxy.heal()
            again(lambda: store.add(info, more(info), parent=info.head, expected=info.head))
            assert said(store) == ["0 xxxxxxxxxx", "more"]


def _calls(store: SessionStore, info: SessionInfo) -> list[Callable[[], object]]:
    return [
        lambda: store.find("a", "s"),
        lambda: store.take(info),
        lambda: store.add(info, more(info), parent=info.head, expected=info.head),
        lambda: created(store, "other", 1),
    ]


def again(call: Callable[[], object]) -> None:
    """Until the pool has connections again: what could not be done has changed nothing."""
    waiting = threading.Event()
    while True:
        try:
            call()
            return
        except StoreError:
            waiting.wait(0.1)


def test_a_commit_whose_answer_is_lost_is_found_out(postgres: PostgresServer, tmp_path: Path) -> None:
    """The server has kept it, or has never heard of it: the caller is told which."""
    with closing(Proxy(postgres.port)) as proxy:
        stand_in(postgres.url(tmp_path, port=proxy.port))
        with closing(open_store(tmp_path)) as store:
            info = created(store, "s", 1)
            proxy.cut_at = (b"COMMIT", True)
            [number] = store.add(info, more(info), parent=info.head, expected=info.head)
            now = store.find("a", "s")
            assert now.head == number
            proxy.cut_at = (b"COMMIT", False)
            with pytest.raises(StoreError, match="was not kept"):
                store.add(now, more(now, "never"), parent=now.head, expected=now.head)
            assert said(store) == ["0 xxxxxxxxxx", "more"]


def test_replicas_that_start_together_make_the_tables_once(postgres: PostgresServer, tmp_path: Path) -> None:
    stand_in(postgres.url(tmp_path))
    made: list[str] = []
    keys: list[bytes | None] = []

    def begin(number: int) -> None:
        with closing(open_store(tmp_path)) as store:
            keys.append(store.key)
            try:
                made.append(store.create("a", "same", [START]).name)
            except SessionExistsError:
                made.append("exists")

    threads = [threading.Thread(target=begin, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == ["exists", "exists", "exists", "same"]
    assert len(set(keys)) == 1


def test_any_text_reads_back_as_it_was(postgres: PostgresServer, tmp_path: Path) -> None:
    """PostgreSQL has no NUL in its texts."""
    stand_in(postgres.url(tmp_path))
    odd = 'nul \0 and \x01 and \x02 \\u0000 \\\\u0000 "quoted" ü 🙂'
    with closing(open_store(tmp_path)) as store:
        info = store.create("a\0b\x01", odd, [START], settings={"x": odd}, origin={"y": odd})
        store.add(info, more(info, odd), parent=info.head, expected=info.head)
        now = store.find("a\0b\x01", odd)
        assert (now.namespace, now.name, now.settings, now.origin) == (
            "a\0b\x01",
            odd,
            {"x": odd},
            {"y": odd},
        )
        [turn] = store.page(now.head, odd, after=0)
        assert turn.messages[0].content == odd
        assert [each.name for each in store.list("a\0b\x01", text="QUOTED")] == [odd]
        assert store.list("a\0b\x01", text="not there") == []
        assert len(store.tree(now, limit=10).turns) == 2
        with pytest.raises(InvalidInputError):
            store.find("a", "\ud800")


@pytest.mark.extension("upkeep")
def test_a_row_that_was_changed_is_refused_and_verify_says_so(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    import psycopg

    from perdure.ext.upkeep.store import verify

    url = postgres.url(tmp_path)
    stand_in(url)
    place = parse_place(url)
    with closing(open_store(tmp_path)) as store:
        created(store, "s", 2)
        created(store, "sound", 2)
        assert verify(tmp_path, lambda done, total: None).sound
        with psycopg.connect(place.conninfo, autocommit=True) as db:
            db.execute(f"SET search_path = {place.schema}")
            db.execute(
                "UPDATE turn SET messages = replace(messages, '1 x', '2 x') WHERE number ="
                " (SELECT head FROM session WHERE name = 's')"
            )
        with pytest.raises(CorruptStateError):
            said(store)
        assert len(said(store, "sound")) == 2
        found = verify(tmp_path, lambda done, total: None)
        assert [what for what, _ in found.damaged] == ["session s of namespace 'a'"]
        assert "restore it" in found.not_repaired


def test_a_store_for_reading_changes_nothing(postgres: PostgresServer, tmp_path: Path) -> None:
    stand_in(postgres.url(tmp_path))
    with pytest.raises(StoreError, match="no sessions"):
        open_store(tmp_path, readonly=True)
    with closing(open_store(tmp_path)) as store:
        created(store, "s", 1)
    with closing(open_store(tmp_path, readonly=True)) as store:
        assert said(store) == ["0 xxxxxxxxxx"]
        with pytest.raises(StoreReadOnlyError):
            created(store, "t", 1)


# Where it is.


def test_a_folder_stands_for_a_database_and_has_no_password_in_it(tmp_path: Path) -> None:
    folder = store_folder(
        f"postgresql://alice:secret@db:5433/chats?folder={tmp_path}/a&lease=30&sslpassword=secret"
    )
    assert folder == tmp_path / "a"
    assert has_sessions(folder)
    place = place_in(folder)
    assert place is not None
    assert (place.schema, place.lease) == ("perdure", 30.0)
    assert place.conninfo == "postgresql://alice:secret@db:5433/chats?sslpassword=secret"
    for file in folder.iterdir():
        assert "secret" not in file.read_text()
    assert "secret" not in place.shown
    with pytest.raises(StoreError, match="keeps the blocks of"):
        store_folder(f"postgresql://db:5433/others?folder={tmp_path}/a")
    (tmp_path / "b").mkdir()
    open_store(tmp_path / "b").close()
    with pytest.raises(StoreError, match="other sessions already"):
        store_folder(f"postgresql://db/chats?folder={tmp_path}/b")


@pytest.mark.parametrize(
    "end", ["?schema=a-b", "?lease=0", "?lease=x", "?pool=0", "?folder=relative", ":port/x", "?timeout=nan"]
)
def test_a_url_that_makes_no_sense_is_refused(end: str) -> None:
    with pytest.raises(InvalidInputError):
        store_folder(f"postgresql://db{end}")


def test_a_server_that_is_not_there_is_told_in_time(tmp_path: Path) -> None:
    pytest.importorskip("psycopg_pool")
    folder = store_folder(f"postgresql://127.0.0.1:1/x?folder={tmp_path}&timeout=1")
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(folder)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store_folder(f"postgresql://db/x?folder={tmp_path}")
    monkeypatch.setitem(sys.modules, "perdure.ext.cluster.postgres.store", None)
    with pytest.raises(StoreError, match=r"perdure\[cluster\]"):
        open_store(folder)


def test_one_machine_imports_nothing_of_this(tmp_path: Path) -> None:
    code = (
        "import sys, perdure, perdure.cli.app; from pathlib import Path;"
        "from perdure.sessions.store.registry import open_store;"
        f"open_store(Path({str(tmp_path)!r})).close();"
        "print([name for name in sys.modules if name.split('.')[0] in ('psycopg', 'psycopg_pool', 'boto3',"
        " 'redis', 'cryptography')])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_command_takes_a_url(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(tmp_path)
    with closing(open_store(store_folder(url))) as store:
        store.create("", "in the database", [START])
    for arguments in (["ls"], ["show", "in the database"], ["verify"]):
        ran = CliRunner().invoke(app, ["sessions", *arguments, "--store", url])
        assert ran.exit_code == 0, ran.output
        assert "in the database" in ran.output or arguments == ["verify"]
    assert CliRunner().invoke(app, ["sessions", "ls", "--store", "postgresql://db?lease=x"]).exit_code == 2


def test_two_changes_of_one_session_at_once_are_one_after_the_other(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    stand_in(postgres.url(tmp_path))
    with closing(open_store(tmp_path)) as store:
        info = created(store, "s", 1)
        ended: list[str] = []

        def change(text: str) -> None:
            try:
                store.add(info, more(info, text), parent=info.head, expected=info.head)
                ended.append("kept")
            except SessionError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=change, args=[str(number)]) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ended.count("kept") == 1
        assert sum("changed meanwhile" in each for each in ended) == 5
        assert len(said(store)) == 2
