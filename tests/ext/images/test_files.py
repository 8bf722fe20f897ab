"""Files of images that sessions name: kept with them, counted, and gone with the last one that names them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import CorruptStateError, Image, Message, QuotaError, Runtime
from perdure.ext.upkeep.backup import back_up, restore
from perdure.ext.upkeep.migration import migrate_sessions
from perdure.ext.upkeep.repair import verify
from perdure.sessions.info import Quota
from perdure.sessions.sessions import Sessions
from perdure.sessions.store.sqlite.store import SqliteStore

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

ASK: Any = {"max_tokens": 4, "temperature": 0.0}
FIRST, SECOND = Image(picture(seed=1)), Image(picture(seed=2))


@pytest.fixture(scope="module")
def model(toy: Toy) -> Path:
    return toy("llava")[0]


def opened(model: Path, store: Path) -> Runtime:
    return perdure.open(model, store=store, n_ctx=2048, slots=2, threads=1)


def seen(*parts: str | Image) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def there(rt: Runtime, image: Image, namespace: str = "") -> bool:
    store = rt.sessions.store
    assert isinstance(store, SqliteStore)
    store.check_counts()
    return store.file(namespace, image.digest) is not None


def test_a_file_goes_with_the_last_session_that_names_it(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        one = rt.session("one")
        one.say(seen(FIRST, "what?"), **ASK)
        fork = one.fork("fork")
        other = rt.session("other")
        other.say(seen(FIRST, SECOND, "what?"), **ASK)
        one.delete()
        assert there(rt, FIRST)
        assert there(rt, SECOND)
        other.rewind(1)
        assert there(rt, FIRST)
        assert not there(rt, SECOND)
        # A memory holds its turn, and so the file.
        fork.label("seen")
        fork.delete()
        assert there(rt, FIRST)
        rt.memories.forget(rt.memories.search()[0].address)
        assert not there(rt, FIRST)
    assert FIRST.data is not None
    assert FIRST.data not in (tmp_path / "sessions.sqlite").read_bytes()


def test_another_namespace_finds_no_file(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        rt.session("one", namespace="ada").say(seen(FIRST, "what?"), **ASK)
        assert there(rt, FIRST, "ada")
        assert not there(rt, FIRST, "bob")
        assert not there(rt, FIRST)
        rt.session("one", namespace="bob").say(seen(FIRST, "what?"), **ASK)
        rt.sessions.delete("one", "ada")
        assert there(rt, FIRST, "bob")
        assert not there(rt, FIRST, "ada")


def test_files_count_in_what_a_namespace_may_store(model: Path, tmp_path: Path) -> None:
    assert FIRST.data is not None
    with opened(model, tmp_path) as rt:
        store = rt.sessions.store
        store.limit("ada", Quota(nbytes=len(FIRST.data)))
        session = rt.session("one", namespace="ada")
        with pytest.raises(QuotaError):
            session.say(seen(FIRST, "what?"), **ASK)
        assert not there(rt, FIRST, "ada")
        store.limit("ada", Quota(nbytes=2 * len(FIRST.data)))
        session.say(seen(FIRST, "what?"), **ASK)
        assert store.sizes()[0].nbytes > len(FIRST.data)
        with pytest.raises(QuotaError):
            session.say(seen(SECOND, "what?"), **ASK)
        # The same file counts once.
        session.say(seen(FIRST, "and now?"), **ASK)


def test_what_was_never_named_goes_an_hour_later(model: Path, tmp_path: Path) -> None:
    """A process was killed between the file and the turn."""
    with opened(model, tmp_path) as rt:
        store = rt.sessions.store
        store.keep_file("", FIRST.digest, b"a")
        store.keep_file("", SECOND.digest, b"b")
        assert there(rt, FIRST)
        with closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as db, db:
            db.execute("UPDATE file SET created = created - 4000 WHERE digest = ?", [FIRST.digest])
        store.keep_file("", "c" * 64, b"c")
        assert not there(rt, FIRST)
        assert there(rt, SECOND)


def test_a_pending_turn_holds_its_file(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        one = rt.session("one")
        one.say(seen(FIRST, "what?"), **ASK)
        two = rt.session("two")
        stream = two.stream(seen(FIRST, "and this?"), max_tokens=400, ignore_eos=True)
        next(stream)
        one.delete()
        assert there(rt, FIRST)
        stream.close()
        two.discard()
        assert two.pending is None
        assert not there(rt, FIRST)


def test_e5_a_damaged_file_is_none_and_is_written_again(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        rt.session("one").say(seen(FIRST, "what?"), **ASK)
        with closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as db, db:
            db.execute("UPDATE file SET data = CAST('other' AS BLOB)")
        assert rt.sessions.store.file("", FIRST.digest) is None
        rt.session("two").say(seen(FIRST, "what?"), **ASK)
        assert rt.chat_format.image_reader().file(FIRST.digest, "") == FIRST.data
        assert rt.sessions.get("one").history()[0].messages[0] == Message.parse(seen(FIRST, "what?"))


def test_an_export_has_the_files_of_its_images_and_an_import_verifies_them(
    model: Path, tmp_path: Path
) -> None:
    with opened(model, tmp_path / "a") as rt:
        session = rt.session("walk")
        session.say(seen("see ", FIRST, SECOND, "?"), **ASK)
        path = session.export(tmp_path / "walk.perdure", state=False)
    exported = path.read_bytes()
    assert FIRST.data is not None
    at = exported.index(FIRST.data[40:90])
    with opened(model, tmp_path / "b") as rt:
        result = rt.sessions.import_(path, namespace="ada")
        assert "files" not in result.left_out
        assert there(rt, FIRST, "ada")
        assert there(rt, SECOND, "ada")
        assert result.session.say("and now?", **ASK).kept
        result.session.delete()
        assert not there(rt, FIRST, "ada")
        damaged = tmp_path / "damaged.perdure"
        damaged.write_bytes(exported[:at] + bytes([exported[at] ^ 1]) + exported[at + 1 :])
        with pytest.raises(CorruptStateError):
            rt.sessions.import_(damaged)
    with Sessions(tmp_path / "c") as sessions:
        result = sessions.import_(path)
        assert "2 images" in result.left_out["files"]


def test_a_backup_and_a_migration_have_the_files(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "a") as rt:
        rt.session("walk").say(seen(FIRST, "?"), **ASK)
    back_up(tmp_path / "a", tmp_path / "a.backup")
    restore(tmp_path / "a.backup", tmp_path / "b")
    with (
        closing(SqliteStore(tmp_path / "b")) as source,
        closing(SqliteStore(tmp_path / "c")) as target,
    ):
        assert source.file("", FIRST.digest) == FIRST.data
        assert migrate_sessions(source, target, lambda done, total: None).whole
        assert target.file("", FIRST.digest) == FIRST.data
        target.check_counts()
        target.delete(target.find("", "walk"))
        assert target.file("", FIRST.digest) is None
        assert source.file("", FIRST.digest) == FIRST.data


def test_a_repair_keeps_whole_files_and_drops_damaged_ones(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        rt.session("walk").say(seen(FIRST, SECOND, "?"), **ASK)
    with closing(sqlite3.connect(tmp_path / "sessions.sqlite")) as db, db:
        db.execute("UPDATE file SET data = zeroblob(length(data)) WHERE digest = ?", [SECOND.digest])
    found = verify(tmp_path, lambda done, total: None)
    assert "damaged" in found.database
    assert found.repair is not None
    with closing(SqliteStore(tmp_path)) as store:
        store.check_counts()
        assert store.file("", FIRST.digest) == FIRST.data
        assert store.file("", SECOND.digest) is None
        store.delete(store.find("", "walk"))
        assert store.file("", FIRST.digest) is None


def test_z1_files_are_encrypted_where_state_is(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    assert FIRST.data is not None
    store = tmp_path / "store"
    with perdure.open(model, store=store, encrypt=str(key), n_ctx=2048, slots=2, threads=1) as rt:
        session = rt.session("walk")
        session.say(seen(FIRST, "?"), **ASK)
        assert rt.sessions.file("", FIRST.digest) == FIRST.data
        session.export(tmp_path / "walk.perdure", state=False)
    for path in store.rglob("*"):
        assert not path.is_file() or FIRST.data[40:90] not in path.read_bytes()
    assert FIRST.data[40:90] in (tmp_path / "walk.perdure").read_bytes()


def test_y3_a_chat_that_is_not_stored_leaves_no_file(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path) as rt:
        rt.chat([seen(FIRST, "?")], **ASK)
        session = rt.session("walk")
        session.submit_unkept([Message.parse(seen(FIRST, "?"))], **ASK).reply()
        assert not there(rt, FIRST)
