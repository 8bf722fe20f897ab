"""The index: migrations, refusals, transactions."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from perdure.errors import (
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
)
from perdure.store import index as index_module
from perdure.store.block_schema import MIGRATIONS
from perdure.store.index import APPLICATION, Index, unopened
from perdure.store.table_check import TableCheck
from store import children

ADD = "INSERT INTO record (namespace, tokens, root) VALUES ('', ?, X'00')"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


def tables(path: Path) -> dict[str, str]:
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def tokens(index: Index) -> set[bytes]:
    return {row[0] for row in index.rows("SELECT tokens FROM record")}


def add(index: Index, *rows: bytes, error: BaseException | None = None) -> None:
    with index.writing():
        for row in rows:
            index.run(ADD, row)
        if error is not None:
            raise error


def at_version(path: Path, version: int) -> None:
    """Write an index as the perdure that knew `version` migrations did."""
    with closing(sqlite3.connect(path)) as db:
        for number in range(version):
            db.executescript(MIGRATIONS[number])
        if version:
            db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {version}")
        db.commit()


@pytest.mark.parametrize("version", range(len(MIGRATIONS) + 1))
def test_an_index_of_any_older_version_is_brought_up_to_date(
    path: Path, tmp_path: Path, version: int
) -> None:
    at_version(path, version)
    with closing(Index(path, readonly=False)) as index:
        assert index.created == (version == 0)
        assert index.rows("PRAGMA user_version") == [(len(MIGRATIONS),)]
        assert index.rows("PRAGMA application_id") == [(APPLICATION,)]
        with index.writing():
            index.run(ADD, b"kept")
    fresh = tmp_path / "fresh.sqlite"
    Index(fresh, readonly=False).close()
    assert tables(path) == tables(fresh)
    with closing(Index(path, readonly=False)) as index:
        assert not index.created
        assert tokens(index) == {b"kept"}


def test_a_migration_that_fails_leaves_the_version_before_it(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index, index.writing():
        index.run(ADD, b"kept")
    before = tables(path)
    broken = (*MIGRATIONS, "CREATE TABLE more (x); INSERT INTO nowhere VALUES (1)")
    for readonly in (False, True):
        with pytest.raises(StoreDamagedError):
            Index(path, readonly=readonly, migrations=broken)
    # What could be read stays readable for the perdure that wrote it.
    assert tables(path) == before
    with closing(Index(path, readonly=False)) as index:
        assert tokens(index) == {b"kept"}


def test_y20_an_older_index_is_read_and_stays_as_it_is(path: Path) -> None:
    """Y20: also where the folder cannot be written, and by a thread of the check."""
    with closing(Index(path, readonly=False)) as index, index.writing():
        index.run(ADD, b"kept")
    before = path.read_bytes()
    newer = (*MIGRATIONS, "CREATE TABLE more (x); INSERT INTO more VALUES (7)")
    with closing(Index(path, readonly=True, migrations=newer)) as index:
        assert tokens(index) == {b"kept"}
        assert index.rows("SELECT x FROM more") == [(7,)]
        with index.reading_apart() as rows:
            assert rows("SELECT x FROM more") == [(7,)]
        with closing(TableCheck(index, ["block", "more"])) as check:
            check.wait()
        with closing(Index(path, readonly=True, migrations=newer)) as second:
            assert second.rows("SELECT x FROM more") == [(7,)]
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_an_index_of_a_newer_perdure_is_refused_and_left_as_it_is(path: Path, readonly: bool) -> None:
    Index(path, readonly=False).close()
    newer = len(MIGRATIONS) + 3
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {newer}")
        db.execute("CREATE TABLE of_tomorrow (x)")
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match="update perdure") as raised:
        Index(path, readonly=readonly)
    assert (raised.value.found, raised.value.known) == (newer, len(MIGRATIONS))
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be read as one" * 9, b"\0" * 4096], ids=["text", "zeros"]
)
def test_what_is_no_database_is_damaged(path: Path, readonly: bool, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="perdure cache verify"):
        Index(path, readonly=readonly)
    assert path.read_bytes() == content


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize(
    "pragma",
    ["user_version = 0", f"user_version = {len(MIGRATIONS)}", "user_version = 99", "application_id = 7"],
)
def test_somebody_elses_database_is_refused_and_left_as_it_is(
    path: Path, readonly: bool, pragma: str
) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA {pragma}")
        db.execute("CREATE TABLE recipes (soup)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not of a perdure store") as raised:
        Index(path, readonly=readonly)
    assert type(raised.value) is StoreError
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_version_that_cannot_be_is_damage(path: Path, readonly: bool) -> None:
    """A flipped bit makes it negative."""
    Index(path, readonly=False).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) - (1 << 31)}")
    with pytest.raises(StoreDamagedError, match="of version -"):
        Index(path, readonly=readonly)


def test_no_index_at_all_cannot_be_read(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        Index(path, readonly=True)
    assert not path.exists()


def test_a_folder_name_may_have_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "a?mode=ro&b#c%20 ü'\"\n;"
    folder.mkdir()
    with closing(Index(folder / "index.sqlite", readonly=False)) as index, index.writing():
        index.run(ADD, b"kept")
    with closing(Index(folder / "index.sqlite", readonly=True)) as index:
        assert tokens(index) == {b"kept"}
    assert (folder / "index.sqlite").exists()


def test_an_index_opened_for_reading_takes_no_changes(path: Path) -> None:
    Index(path, readonly=False).close()
    with closing(Index(path, readonly=True)) as index:
        with pytest.raises(StoreReadOnlyError), index.writing():
            pass
        with pytest.raises(StoreReadOnlyError):
            index.rows("INSERT INTO record (namespace, tokens, root) VALUES ('', X'', X'') RETURNING number")


def test_readers_see_whole_transactions_and_wait_for_none(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index, closing(Index(path, readonly=True)) as reader:
        seen: dict[str, set[bytes]] = {}

        def look() -> None:
            seen["same process"] = tokens(index)
            seen["reader"] = tokens(reader)

        with index.writing():
            index.run(ADD, b"new")
            assert tokens(index) == {b"new"}
            # Another thread is answered while the transaction is open: joining it shows that.
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen == {"same process": set(), "reader": set()}
        assert tokens(index) == tokens(reader) == {b"new"}


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_undoes_the_whole_transaction(path: Path, error: BaseException) -> None:
    with closing(Index(path, readonly=False)) as index:
        with pytest.raises(type(error)):
            add(index, b"first", b"second", error=error)
        assert tokens(index) == set()
        with index.writing():
            index.run(ADD, b"third")
        assert tokens(index) == {b"third"}


def test_a_statement_that_fails_undoes_the_whole_transaction(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index:
        with pytest.raises(StoreDamagedError):
            add(index, b"first", b"first")
        with index.writing():
            index.run(ADD, b"second")
        assert tokens(index) == {b"second"}


def test_a_change_outside_of_a_transaction_is_refused(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index:
        with pytest.raises(StoreError, match="transaction"):
            index.run(ADD, b"first")
        assert tokens(index) == set()


def full_in_the_middle(index: Index) -> None:
    index.rows("PRAGMA max_page_count")  # warms the reader; the limit is the writer's
    with index.writing():
        pages = index.rows("PRAGMA page_count")[0][0]
        index.rows(f"PRAGMA max_page_count = {pages}")
        for number in range(1000):
            index.run(ADD, b"%d" % number * 100)


def test_a_full_index_says_so_and_can_be_used_again(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index:
        with index.writing():
            index.run(ADD, b"before")
        with pytest.raises(StoreFullError, match="Free some space"):
            full_in_the_middle(index)
        assert tokens(index) == {b"before"}
        with index.writing():
            index.rows("PRAGMA max_page_count = 100000")
            index.run(ADD, b"after")
        assert tokens(index) == {b"before", b"after"}


def test_use_after_close_is_a_typed_error(path: Path) -> None:
    index = Index(path, readonly=False)
    index.close()
    index.close()
    with pytest.raises(StoreError, match="cannot be used"):
        index.rows("SELECT 1")
    with pytest.raises(StoreError, match="cannot be used"), index.writing():
        pass


OPENED_TWICE = f"""
import sys
from pathlib import Path
from perdure.store.index import Index

path = Path(sys.argv[1])
first = Index(path, readonly=False)
second = Index(path, readonly=False)
second.close()
print("ready", flush=True)
for line in sys.stdin:
    with first.writing():
        first.run({ADD!r}, line.strip().encode())
    print("written", flush=True)
"""
VISIT = """
import sys
from pathlib import Path
from perdure.store.index import Index

Index(Path(sys.argv[1]), readonly=False).close()
"""


def test_x1_a_file_opened_twice_in_one_process_loses_nothing_when_another_leaves(path: Path) -> None:
    """X1: closing any descriptor of the file would drop SQLite's locks, and whoever leaves next would delete
    the log that the first process goes on writing to."""
    Index(path, readonly=False).close()
    with children.holding(OPENED_TWICE, path) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for number in range(6):
            child.stdin.write(f"row {number}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "written\n"
            children.run(VISIT, path)
        child.kill()
        child.wait()
    with closing(Index(path, readonly=False)) as index:
        index.check()
        assert tokens(index) == {b"row %d" % number for number in range(6)}


def test_x1_indexes_of_one_file_share_their_connections_and_close_apart(path: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(tmp_path)
    first = Index(path, readonly=False)
    second = Index(tmp_path / "linked" / path.name, readonly=False)
    add(first, b"by the first")
    assert tokens(second) == {b"by the first"}
    first.close()
    with pytest.raises(StoreError, match="cannot be used"):
        first.rows("SELECT 1")
    add(second, b"by the second")
    second.close()


def test_x1_a_file_that_this_process_has_open_is_not_read_as_bytes(path: Path) -> None:
    with (
        closing(Index(path, readonly=False)),
        pytest.raises(StoreLockedError, match="in use by this process"),
        unopened(path),
    ):
        pass
    with unopened(path):
        assert path.read_bytes()


def overwrite(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_damage_in_the_middle_is_found_by_a_check(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index, index.writing():
        for number in range(300):
            index.run(ADD, b"%d" % number * 50)

    def smash(data: bytearray) -> None:
        data[8192:] = b"\xff" * (len(data) - 8192)

    overwrite(path, smash)
    with closing(Index(path, readonly=False)) as index:
        with pytest.raises(StoreDamagedError, match="perdure cache verify"):
            index.check()
        with pytest.raises(StoreDamagedError):
            index.rows("SELECT * FROM record ORDER BY namespace, tokens, root")


def test_a_sound_index_passes_its_check(path: Path) -> None:
    with closing(Index(path, readonly=False)) as index:
        index.check()


def test_no_statement_numbers_its_parameters() -> None:
    """Python 3.12 warns about numbered parameters that are given in order, and 3.14 refuses them."""
    source = Path(index_module.__file__).parents[1]
    numbered = [path.name for path in source.rglob("*.py") if re.search(r"\?\d", path.read_text("utf-8"))]
    assert numbered == []
