"""Class 7: every earlier version is a neighbour. What each of them wrote is read, migrated, restored and
imported; what a later one wrote is refused in words. `data/README.md` says what the files are."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import perdure
from perdure.cli.app import add_extensions, app
from perdure.errors import (
    CorruptStateError,
    IncompatibleStateError,
    PerdureError,
    SessionNotFoundError,
    StoreLockedError,
    StoreVersionError,
)
from perdure.sessions.info import STREAM
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite import FILE
from perdure.sessions.store.sqlite.folder import UseLock
from perdure.sessions.store.sqlite.store import MIGRATIONS, SqliteStore
from perdure.testing.toy import ToyModel

DATA = Path(__file__).parent / "data"
LAST = len(MIGRATIONS)
add_extensions()
VERSIONS = range(1, LAST + 1)
BACKED_UP = range(3, LAST + 1)
"""Versions 1 and 2 had no backups."""
every_version = pytest.mark.parametrize("version", VERSIONS)
older_versions = pytest.mark.parametrize("version", VERSIONS[:-1])


def unpacked(version: int, folder: Path) -> Path:
    """What that version wrote."""
    with tarfile.open(DATA / f"version-{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def version_of(file: Path) -> int:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def branch(version: int) -> str:
    return "alice/b" if version < 5 else "alice-b"


def said(folder: Path) -> dict[str, list[str | None]]:
    with Sessions(folder, readonly=True) as sessions:
        return {
            info.name: [turn.messages[-1].content for turn in sessions.get(info.name).history()]
            for info in sessions.list()
        }


def expected(version: int) -> dict[str, list[str | None]]:
    return {"alice": ["Hello", "And then?"], branch(version): ["Hello", "Or else?"], empty(version): []}


def empty(version: int) -> str:
    return ".." if version < 7 else "empty"


def command(*arguments: object) -> Result:
    add_extensions()
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> str:
    done = command(*arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout


def opened(folder: Path) -> perdure.Runtime:
    settings: dict[str, Any] = {"n_ctx": 512, "slots": 1, "threads": 1}
    return perdure.open(ToyModel(), store=folder / "store", template=folder / "chat.jinja", **settings)


@pytest.mark.extension("upkeep")
@every_version
def test_y20_every_command_that_reads_does_so_and_leaves_the_store_as_it_is(
    version: int, tmp_path: Path
) -> None:
    """Y20: after an update nothing has to be migrated first, and reading is no reason to migrate."""
    from perdure.ext.upkeep.export import read_export

    store = unpacked(version, tmp_path) / "store"
    before = (store / FILE).read_bytes()
    at = ("--store", store)
    listed = json.loads(run("sessions", "ls", "--json", *at))
    assert {row["name"] for row in listed} == set(expected(version))
    assert "And then?" in run("sessions", "show", "alice", *at)
    assert run("sessions", "show", empty(version), *at)
    assert f"{3 + (version > 6)} turns" in run("sessions", "sizes", *at)
    assert json.loads(run("sessions", "verify", "--json", *at))["sound"]
    assert "greeting" in run("sessions", "memories", "search", *at)
    assert run("cache", "stats", *at)
    assert "And then?" in run("sessions", "show", "alice", "--json", *at)
    run("sessions", "export", "alice", tmp_path / "out.md", *at)
    run("sessions", "export", "alice", tmp_path / "out.perdure", "--no-state", *at)
    assert [turn.messages[-1].content for turn in read_export(tmp_path / "out.perdure").turns[1:]] == [
        "Hello",
        "And then?",
    ]
    run("backup", store, tmp_path / "out.backup")
    run("restore", tmp_path / "out.backup", tmp_path / "again")
    assert said(tmp_path / "again") == said(store) == expected(version)
    assert (store / FILE).read_bytes() == before
    assert version_of(store / FILE) == version


@pytest.mark.extension("upkeep")
@every_version
def test_y20_a_store_is_migrated_when_it_is_written_to_and_kept_as_it_was(
    version: int, tmp_path: Path
) -> None:
    from perdure.ext.upkeep.repair import verify

    folder = unpacked(version, tmp_path)
    store, kept = folder / "store", folder / "store" / f"sessions.version-{version}.sqlite"
    with opened(folder) as runtime:
        reply = runtime.session("alice").say("Go on", max_tokens=4)
        assert reply.kept
        # State of a version whose blocks are named otherwise is computed again.
        assert reply.reuse.reused > 0 or version < 6
        runtime.sessions.get(empty(version)).delete()
        assert runtime.sessions.get(branch(version)).turns == 2
        assert version_of(store / FILE) == LAST
        assert verify(store, lambda done, total: None).damaged == []
    now = expected(version) | {"alice": ["Hello", "And then?", "Go on"]}
    del now[empty(version)]
    assert said(store) == now
    assert kept.exists() == (version < LAST)
    if version < LAST:
        # What is kept is that version's own database: put back, it is the store from before.
        assert version_of(kept) == version
        assert kept.stat().st_mode & 0o777 == 0o600
        before = tmp_path / "before"
        before.mkdir()
        shutil.copy(kept, before / FILE)
        assert said(before) == expected(version)
        # It goes after a week.
        long_ago = time.time() - 8 * 86400
        os.utime(kept, (long_ago, long_ago))
        SqliteStore(store).close()
        assert not kept.exists()


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("version", BACKED_UP)
def test_y19_a_backup_of_every_version_restores(version: int, tmp_path: Path) -> None:
    """Y19: with its state, and the conversation goes on in it."""
    from perdure.ext.upkeep.backup import restore
    from perdure.ext.upkeep.repair import verify

    folder = unpacked(version, tmp_path)
    shutil.rmtree(folder / "store")
    backup = restore(folder / "store.backup", folder / "store")
    assert (backup.sessions, backup.turns, backup.left_out) == (
        3 + (version > 5) + (version > 6),
        3 + (version > 6),
        (),
    )
    assert backup.blocks > 0
    assert said(folder / "store") == expected(version)
    with opened(folder) as runtime:
        assert runtime.session("alice").say("Go on", max_tokens=4).kept
    assert verify(folder / "store", lambda done, total: None).sound


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("version", VERSIONS[1:-1])
def test_y19_what_can_be_proved_of_a_damaged_older_store_is_kept(version: int, tmp_path: Path) -> None:
    """Version 1 had nothing by which a row could prove itself."""
    from perdure.ext.upkeep.repair import verify

    store = unpacked(version, tmp_path) / "store"
    with closing(sqlite3.connect(store / FILE)) as db, db:
        db.execute("UPDATE turn SET text = 'somebody else''s words' WHERE depth = 2 AND number = 3")
    found = verify(store, lambda done, total: None)
    # The stored response went on from there.
    behind = ["session resp_1"] if version > 6 else []
    assert [what for what, _ in found.damaged] == ["session alice", *behind]
    assert found.repair is not None
    assert said(store)["alice"] == ["Hello"]
    assert version_of(store / FILE) == LAST


@pytest.mark.extension("upkeep")
@every_version
@pytest.mark.parametrize("name", ["alice.perdure", "words.perdure"])
def test_an_export_of_every_version_is_imported(version: int, name: str, tmp_path: Path) -> None:
    file = unpacked(version, tmp_path) / name
    (tmp_path / "to").mkdir()
    shutil.copy(tmp_path / "chat.jinja", tmp_path / "to")
    with opened(tmp_path / "to") as runtime:
        imported = runtime.sessions.import_(file, "anna", trust_state=True)
        assert imported.turns == 2
        assert [turn.messages[-1].content for turn in imported.session.history()] == ["Hello", "And then?"]
        assert imported.session.say("Go on", max_tokens=4).kept


def test_the_record_of_a_stream_is_read_and_expires(tmp_path: Path) -> None:
    """Records came with version 6. One is found by its id alone, and goes with its time."""
    for version in range(6, LAST + 1):
        store = unpacked(version, tmp_path / str(version)) / "store"
        with Sessions(store) as sessions:
            record = sessions.store.record("", STREAM, "chatcmpl-1")
            assert record.origin["request"] == {"messages": [{"role": "user", "content": "Hi"}]}
            assert "chatcmpl-1" not in [info.name for info in sessions.list()]
            assert not sessions.store.has("", "chatcmpl-1")
            sessions.expire(STREAM, 0.0)
            with pytest.raises(SessionNotFoundError):
                sessions.store.record("", STREAM, "chatcmpl-1")


@pytest.mark.extension("upkeep")
def test_a_stored_response_is_found_by_its_id_and_goes_on(tmp_path: Path) -> None:
    """Until version 7 it was a session. It stands at its turn as before, and branches as before."""
    from perdure.ext.upkeep.repair import verify

    for version in range(7, LAST + 1):
        folder = unpacked(version, tmp_path / str(version))
        with opened(folder) as runtime:
            response = runtime.sessions.response("resp_1")
            assert response.origin["how"] == "response"
            assert [turn.messages[-1].content for turn in response.history()] == [
                "Hello",
                "And then?",
                "Again?",
            ]
            assert "resp_1" not in [info.name for info in runtime.sessions.list()]
            assert response.fork("from-response").say("Go on", max_tokens=4).kept
            response.delete()
            assert runtime.sessions.get("from-response").turns == 4
        assert verify(folder / "store", lambda done, total: None).sound


def test_every_version_has_its_file() -> None:
    """A migration comes with a store that was written before it."""
    assert [version for version in VERSIONS if not (DATA / f"version-{version}.tar.xz").is_file()] == []


@older_versions
def test_a_store_that_an_older_perdure_uses_is_read_and_not_migrated(version: int, tmp_path: Path) -> None:
    """That one would go on writing rows as its own version does."""
    store = unpacked(version, tmp_path) / "store"
    older = UseLock(store)
    try:
        with pytest.raises(StoreLockedError, match="an older perdure uses them"):
            SqliteStore(store)
        assert said(store) == expected(version)
        assert version_of(store / FILE) == version
    finally:
        older.release()
    SqliteStore(store).close()
    assert version_of(store / FILE) == LAST


# What a later version wrote.


def newer_database(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE of_tomorrow (x)")
        db.execute(f"PRAGMA user_version = {LAST + 1}")


def rewritten(file: Path, name: str, change: Any) -> None:
    """A tar archive with one member changed."""
    members = []
    with tarfile.open(file) as archive:
        for member in archive:
            source = archive.extractfile(member)
            assert source is not None
            members.append((member.name, source.read()))
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as archive:
        for each, content in members:
            data = change(content) if each == name else content
            entry = tarfile.TarInfo(each)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.mark.extension("upkeep")
def test_class_7_every_command_refuses_a_newer_store_in_words(tmp_path: Path) -> None:
    store = unpacked(LAST, tmp_path) / "store"
    newer_database(store / FILE)
    before = (store / FILE).read_bytes()
    at = ("--store", store)
    for arguments in (
        ("sessions", "ls", *at),
        ("sessions", "show", "alice", *at),
        ("sessions", "verify", *at),
        ("sessions", "export", "alice", tmp_path / "out", *at),
        ("sessions", "rm", "alice", "--yes", *at),
        ("sessions", "memories", "search", *at),
        ("sessions", "import", tmp_path / "words.perdure", *at),
        ("backup", store, tmp_path / "out"),
    ):
        done = command(*arguments)
        assert isinstance(done.exception, StoreVersionError), arguments
        words = f"is of version {LAST + 1}, this perdure knows up to {LAST}: update perdure"
        assert words in str(done.exception)
    assert (store / FILE).read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.extension("upkeep")
def test_y24_a_newer_backup_is_refused_by_its_own_name(tmp_path: Path) -> None:
    """Y19, Y24: not by that of a folder which is gone when the words are read."""
    from perdure.ext.upkeep.backup import restore

    store = unpacked(LAST, tmp_path) / "store"
    backup = tmp_path / "store.backup"
    database = tmp_path / "newer.sqlite"
    shutil.copy(store / FILE, database)
    newer_database(database)
    content = database.read_bytes()
    rewritten(backup, FILE, lambda _: content)

    def manifest(data: bytes, **fields: Any) -> bytes:
        about = json.loads(data)
        about["files"][FILE] = hashlib.sha256(content).hexdigest()
        return json.dumps({**about, **fields}).encode()

    rewritten(backup, "manifest.json", manifest)
    with pytest.raises(StoreVersionError, match=rf"store\.backup is of version {LAST + 1}, .*update perdure"):
        restore(backup, tmp_path / "new")
    rewritten(backup, "manifest.json", lambda data: manifest(data, format="perdure-backup/2"))
    with pytest.raises(IncompatibleStateError, match=r"format '2'.*update perdure"):
        restore(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*.restoring"))


def resigned(data: bytes, **fields: Any) -> bytes:
    """A manifest with other fields, whole by its own digest."""
    about = {**json.loads(data), **fields}
    del about["digest"]
    text = json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**about, "digest": hashlib.sha256(text.encode()).hexdigest()}).encode()


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"format": 2, "parts": [{"name": "turns.parquet", "bytes": 1, "sha256": "0"}]},
        {"format": 2, "identity": {"of": "tomorrow"}},
    ],
)
def test_class_7_a_newer_export_is_refused_in_words(fields: dict[str, Any], tmp_path: Path) -> None:
    from perdure.ext.upkeep.export import manifest_of, read_export

    file = unpacked(LAST, tmp_path) / "words.perdure"
    rewritten(file, "manifest.json", lambda data: resigned(data, **fields))
    for read in (read_export, manifest_of):
        with pytest.raises(PerdureError, match="update perdure") as raised:
            read(file)
        assert "ValueError" not in str(raised.value)


@pytest.mark.extension("upkeep")
def test_y24_an_export_with_turns_of_a_newer_perdure_is_refused_in_words(tmp_path: Path) -> None:
    """Y24: the format's number is the same, and a message has a role or a field that is not known here."""
    from perdure.ext.upkeep.export import read_export

    whole = unpacked(LAST, tmp_path) / "words.perdure"
    for old, new in ((b'"role": "user"', b'"role": "of tomorrow"'), (b'"seed": ', b'"seeds": ')):
        file = Path(shutil.copy(whole, tmp_path / "newer.perdure"))
        turns = b""

        def changed(data: bytes, old: bytes = old, new: bytes = new) -> bytes:
            nonlocal turns
            turns = data.replace(old, new)
            assert turns != data
            return turns

        rewritten(file, "turns.jsonl", changed)
        part = {"name": "turns.jsonl", "bytes": len(turns), "sha256": hashlib.sha256(turns).hexdigest()}
        rewritten(file, "manifest.json", lambda data, part=part: resigned(data, parts=[part]))
        with pytest.raises(
            CorruptStateError, match=r"turn \d of this export.*newer perdure.*update"
        ) as raised:
            read_export(file)
        assert "Error(" not in str(raised.value)


@pytest.mark.extension("upkeep")
def test_class_7_state_of_another_version_is_left_out_and_the_words_come(tmp_path: Path) -> None:
    """An identity that has fields of a later version proves nothing here; the words are whole."""
    from perdure.ext.upkeep.export import manifest_of

    file = unpacked(LAST, tmp_path) / "alice.perdure"
    known = manifest_of(file)["identity"]
    rewritten(file, "manifest.json", lambda data: resigned(data, identity={**known, "of_tomorrow": 1}))
    with opened(tmp_path) as runtime:
        imported = runtime.sessions.import_(file, "anna", trust_state=True)
        assert (imported.turns, imported.state_tokens) == (2, 0)
        assert imported.left_out["state"] == "another version of perdure computed it"
