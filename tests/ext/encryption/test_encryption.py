"""Encryption of blocks on the disk: nothing can be read there without the key, and nothing is lost by it."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import perdure
from perdure.cache.block import Block, BlockId
from perdure.cache.tiers.archive import model_folder
from perdure.cache.tiers.codec import BEGINNINGS, MARK
from perdure.cache.tiers.disk import DiskTier, delete_encrypted
from perdure.decode.request import KeptPrefix
from perdure.errors import InvalidInputError, StoreKeyError
from perdure.ext.encryption import codec
from perdure.ext.encryption.cipher import Cipher
from perdure.ext.encryption.folder import DiskKey, read_key
from perdure.sessions.store.registry import encryption_of
from perdure.testing.toy import ToyModel
from store import children
from store.chains import block, chain, file_of, files, root, same, size

PLENTY = 1 << 30
KEY, OTHER = DiskKey(b"k" * 32, "/keys/one"), DiskKey(b"q" * 32, "/keys/two")
TOKENS = list(range(7_000_001, 7_000_014))
"""Whose bytes are nowhere by chance."""


@contextmanager
def opened(folder: Path, encryption: DiskKey | None = KEY, **options: bool) -> Iterator[DiskTier]:
    with closing(DiskTier(folder, budget=PLENTY, encryption=encryption, **options)) as disk:
        yield disk


def prefix(blocks: list[Block], namespace: str = "ada's namespace") -> KeptPrefix:
    tokens = tuple(int(token) for each in blocks for token in each.tokens)
    return KeptPrefix(
        tokens=tokens,
        kept=len(tokens),
        labels=frozenset({"a label of hers", "another"}),
        namespace=namespace,
        root=blocks[0].parent,
    )


def readable(folder: Path, blocks: list[Block]) -> list[str]:
    """What of some blocks, and of a prefix of them, can be read in the files of a folder."""
    secrets = [b"ada's namespace", b"a label of hers", blocks[0].parent]
    for each in blocks:
        assert each.rows is not None
        secrets += [each.rows.tobytes(), each.tokens.astype("<i4").tobytes(), each.id, each.id.hex().encode()]
    found = []
    for path in sorted(folder.rglob("*")):
        data = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        found += [f"{path}: {secret[:20]!r}" for secret in secrets if secret in data]
    return found


def check(disk: DiskTier, blocks: list[Block]) -> None:
    """These blocks are there, every byte of them, and nothing else."""
    assert {each.id for each in disk.page()} == {each.id for each in blocks}
    assert len(disk) == len(blocks) == len(files(disk.folder))
    assert disk.nbytes == sum(path.stat().st_size for path in files(disk.folder))
    for each in blocks:
        assert same(disk.load(each.id), each)
        entry = disk.lookup(each.id)
        assert entry is not None
        assert (entry.parent, entry.start) == (each.parent, each.start)
        assert entry.tokens.tolist() == each.tokens.tolist()
        assert each.id in {child.id for child in disk.children(each.parent)}


# Keeping.


def test_what_was_put_is_there_and_nothing_of_it_can_be_read(tmp_path: Path) -> None:
    blocks = chain(TOKENS, tail_state=30)
    with opened(tmp_path) as disk:
        assert disk.store(blocks) == len(blocks)
        disk.keep(prefix(blocks))
        check(disk, blocks)
        # Also while it is open: SQLite's log is a file, too.
        assert readable(tmp_path, blocks) == []
    with opened(tmp_path) as disk:
        check(disk, blocks)
        assert disk.verify().sound
        assert disk.prefixes() == [prefix(blocks)]
        assert disk.prefix_table.labelled(["another"], namespace="ada's namespace")[0] == [prefix(blocks)]
    with opened(tmp_path, readonly=True) as disk:
        check(disk, blocks)
        assert disk.prefixes() == [prefix(blocks)]
    assert readable(tmp_path, blocks) == []
    # The same without a key can all be read: the test looks for the right things.
    with opened(tmp_path / "plain", None) as disk:
        disk.store(blocks)
        disk.keep(prefix(blocks))
    assert len(readable(tmp_path / "plain", blocks)) > 3 * len(blocks)


def test_children_come_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    blocks = [block([number, 7, 8]) for number in (5, 3, 900, 1, 70_000)]
    with opened(tmp_path / "plain", None) as plain, opened(tmp_path / "sealed") as sealed:
        for disk in (plain, sealed):
            disk.store(blocks)
        for start in (b"", *(each.tokens.astype("<i4").tobytes() for each in blocks), b"\xff"):
            for back in (False, True):
                wanted = [each.id for each in plain.children(root(), start=start, back=back)]
                assert [each.id for each in sealed.children(root(), start=start, back=back)] == wanted


def test_a_prefix_that_is_kept_twice_is_there_once_and_can_go(tmp_path: Path) -> None:
    blocks = chain(TOKENS)
    with opened(tmp_path) as disk:
        disk.store(blocks)
        for _ in range(2):
            disk.keep(prefix(blocks))
        assert len(disk.prefix_table) == 1
        disk.drop([blocks[0].id], [prefix(blocks)])
        assert (len(disk.prefix_table), len(disk), files(tmp_path)) == (0, 0, [])


# Keys.


@pytest.mark.parametrize(("given", "says"), [(None, "no key was given"), (OTHER, "another key")])
@pytest.mark.parametrize("readonly", [False, True])
def test_without_the_key_the_folder_is_refused_and_nothing_changes(
    tmp_path: Path, given: DiskKey | None, says: str, readonly: bool
) -> None:
    blocks = chain(TOKENS)
    with opened(tmp_path) as disk:
        disk.store(blocks)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for rebuild in (False, True):
        with pytest.raises(StoreKeyError, match=says) as error:
            DiskTier(tmp_path, budget=PLENTY, encryption=given, readonly=readonly, rebuild=rebuild)
        assert "/keys/one" in str(error.value) or str(tmp_path / MARK) in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with opened(tmp_path) as disk:
        check(disk, blocks)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"check": 5}', b"\xff\xfe"])
def test_a_mark_that_is_damaged_is_refused(tmp_path: Path, data: bytes) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / MARK).write_bytes(data)
    with pytest.raises(StoreKeyError, match="is damaged"):
        DiskTier(tmp_path, budget=PLENTY, encryption=KEY)


def test_a_key_is_32_bytes_or_their_digits_and_not_in_the_store(tmp_path: Path) -> None:
    key = tmp_path / "key"
    for data in (b"k" * 32, b"6b" * 32, b"6b" * 32 + b"\n"):
        key.write_bytes(data)
        assert read_key(key) == b"k" * 32
    for data in (b"", b"short", b"6b" * 33, b"x" * 64, b"k" * 1000):
        key.write_bytes(data)
        with pytest.raises(StoreKeyError, match="holds no key"):
            read_key(key)
    with pytest.raises(StoreKeyError, match="cannot be read"):
        read_key(tmp_path / "none")
    store = tmp_path / "store"
    store.mkdir()
    (store / "key").write_bytes(b"k" * 32)
    with pytest.raises(InvalidInputError, match="lies in the store"):
        encryption_of(store, str(store / "key"))
    with pytest.raises(InvalidInputError, match="needs a store"):
        perdure.open(ToyModel(), encrypt=str(key))
    with pytest.raises(InvalidInputError, match="PostgreSQL"):
        perdure.open(ToyModel(), store=store, encrypt="cluster")
    assert b"k" * 8 not in repr(DiskKey(b"k" * 32, "key")).encode()


def test_a_key_that_was_moved_is_found_where_it_was_last_given(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    moved = DiskKey(KEY.key, "/keys/three")
    with opened(tmp_path, moved):
        pass
    assert json.loads((tmp_path / MARK).read_text())["key"] == "/keys/three"


def test_what_nobody_can_read_any_more_can_be_deleted(tmp_path: Path) -> None:
    blocks = chain(TOKENS)
    with opened(tmp_path) as disk:
        disk.store(blocks)
    assert delete_encrypted(tmp_path) > size(blocks)
    assert files(tmp_path) == []
    with opened(tmp_path, None) as disk:
        disk.store(blocks)
        check(disk, blocks)


# Damage.


def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    first, *rest = blocks = chain(TOKENS)
    with opened(tmp_path) as disk:
        disk.store(blocks)
        path = disk.files.path(first.id)
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert disk.load(first.id) is None
        # A file of another block, a plain one, and one that another key has encrypted.
        other = Cipher(OTHER.key, b"disk").encrypt(path.name, b"".join(first.pack()))
        for data in (disk.files.path(rest[0].id).read_bytes(), b"".join(first.pack()), other, b""):
            path.write_bytes(data)
            assert disk.load(first.id) is None
        disk.forget([first.id])
        assert {each.id for each in disk.page()} == {each.id for each in rest}
        assert (disk.files.quarantined / path.name).is_file()
        disk.store([first])
        check(disk, blocks)
        disk.drop([first.id])
        assert list(disk.files.quarantined.iterdir()) == []


def test_a_lost_index_is_made_anew_and_a_changed_row_is_not_believed(tmp_path: Path) -> None:
    blocks = chain(TOKENS)
    with opened(tmp_path) as disk:
        disk.store(blocks)
    (tmp_path / "index.sqlite").unlink()
    with opened(tmp_path) as disk:
        check(disk, blocks)
        with disk.index.writing():
            disk.index.run("UPDATE block SET parent = id WHERE start = 4")
            disk.index.run("UPDATE block SET tokens = zeroblob(44) WHERE start = 8")
        assert [each.start for each in disk.page()].count(4) == 0
        assert disk.lookup(blocks[2].id) is None
        assert disk.verify().mended == 2
        check(disk, blocks)
    assert readable(tmp_path, blocks) == []


# What was there before.


def test_blocks_that_were_plain_are_encrypted_when_a_key_is_first_given(tmp_path: Path) -> None:
    blocks = chain(TOKENS, tail_state=9) + chain(TOKENS[:7], "elsewhere", tail_state=9)
    with opened(tmp_path, None) as disk:
        disk.store(blocks)
        disk.keep(prefix(blocks[:4]))
    damaged = file_of(tmp_path, blocks[-1])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    # Who only reads can still read it as it is.
    with opened(tmp_path, readonly=True) as disk:
        assert same(disk.load(blocks[0].id), blocks[0])
    with opened(tmp_path) as disk:
        check(disk, blocks[:-1])
        assert disk.prefixes() == [prefix(blocks[:4])]
    # Nobody can encrypt a damaged block: it is deleted, and not moved aside.
    assert not list((tmp_path / "quarantine").glob("*"))
    assert readable(tmp_path, blocks) == []
    assert json.loads((tmp_path / MARK).read_text()) == {
        "key": "/keys/one",
        "check": Cipher(KEY.key, b"disk").name(b"check").hex(),
    }
    # One that is put there plain, from a copy, is encrypted by a walk.
    last = blocks[-1]
    file_of(tmp_path, last).parent.mkdir(exist_ok=True)
    file_of(tmp_path, last).write_bytes(b"".join(last.pack()))
    with opened(tmp_path) as disk:
        assert disk.verify().adopted == 1
        check(disk, blocks)
    assert readable(tmp_path, blocks) == []


def left_behind(folder: Path) -> list[Block]:
    """Have a folder as a long plain life leaves it: with damaged files moved aside, the index among them, and
    rows in free pages that an SQLite without secure deletion kept. What is left behind so."""
    lost = chain([token + 1000 for token in TOKENS], "lost", tail_state=9)
    with opened(folder, None) as disk:
        disk.store(lost)
        for path in (disk.files.path(lost[0].id), disk.files.path(lost[1].id)):
            path.write_bytes(path.read_bytes()[:-1])
        disk.forget([each.id for each in lost[:2]])
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.execute("PRAGMA secure_delete = OFF")
        db.execute("DELETE FROM block")
        for number in range(200):
            db.execute("INSERT INTO record VALUES (?, ?, ?, ?)", (number, "ada's namespace", b"x" * 999, b""))
            db.execute("INSERT INTO label VALUES (?, 'a label of hers')", (number,))
            db.execute("UPDATE record SET root = ? WHERE number = ?", (bytes([number]), number))
        db.commit()
        db.execute("DELETE FROM record WHERE number > 0")
        db.execute("DELETE FROM label")
        db.commit()
    (folder / "quarantine" / "index.sqlite").write_bytes((folder / "index.sqlite").read_bytes())
    for path in files(folder):
        path.unlink()
    assert {line.split(":")[0].rsplit("/", 1)[-1] for line in readable(folder, lost)} >= {
        "index.sqlite",
        lost[0].id.hex(),
    }
    return lost


def test_nothing_that_was_left_behind_stays_plain_y4(tmp_path: Path) -> None:
    """Y4: what was moved aside while a folder was plain, and pages of its index that are free. Also while it
    is open: SQLite's log is a file, too."""
    lost = left_behind(tmp_path)
    blocks = chain(TOKENS)
    with opened(tmp_path, None) as disk:
        disk.store(blocks)
    with opened(tmp_path) as disk:
        assert readable(tmp_path, blocks + lost) == []
        check(disk, blocks)
        # A plain file that somebody puts there, damaged, is not moved aside as it is.
        other = block(TOKENS, root("other"))
        file_of(tmp_path, other).parent.mkdir(exist_ok=True)
        file_of(tmp_path, other).write_bytes(b"".join(other.pack())[:-1])
        disk.verify()
        assert readable(tmp_path, [*blocks, *lost, other]) == []
    assert readable(tmp_path, blocks + lost) == []


def test_a_store_that_is_opened_with_a_key_has_nothing_plain_in_any_folder_y4(tmp_path: Path) -> None:
    """Y4: not how prompts began, and not the blocks of models that are not served now."""
    key, store = tmp_path / "key", tmp_path / "store"
    key.write_bytes(KEY.key)
    blocks = chain(TOKENS)
    lost = left_behind(model_folder(store, "ab" * 32))
    with opened(model_folder(store, "cd" * 32), None) as disk:
        disk.store(blocks)
    written = store / BEGINNINGS / "ab.json"
    written.parent.mkdir()
    written.write_text(json.dumps({"namespace": "ada's namespace"}))
    written.with_name(f"{written.name}.1.2.tmp").write_bytes(written.read_bytes())
    assert len([line for line in readable(store, blocks) if BEGINNINGS in line]) == 2
    perdure.open(ToyModel(), store=store, encrypt=key).close()
    assert readable(store, blocks + lost) == []
    with opened(model_folder(store, "cd" * 32), DiskKey(KEY.key, str(key))) as disk:
        check(disk, blocks)


DIES = """
import os, signal, sys
from pathlib import Path
from perdure.cache.tiers import block_folder, disk
from perdure.ext.encryption import folder
left = int(sys.argv[2])

def dying(call):
    def called(*values, **options):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*values, **options)
    return called

for module, name in ((block_folder, "write_file"), (block_folder, "sync_folder"), (folder, "write_file"),
                     (disk, "write_file"), (block_folder.BlockFolder, "delete"), (disk.Index, "run"),
                     (disk.Index, "vacuum")):
    setattr(module, name, dying(getattr(module, name)))
encryption = folder.DiskKey(b"k" * 32, "/keys/one")
disk.DiskTier(Path(sys.argv[1]), budget=1 << 30, encryption=encryption).close()
"""


def test_a_kill_while_blocks_are_encrypted_loses_none(tmp_path: Path) -> None:
    """At every sixth of the calls that write, until one run ends by itself. Y4: nothing is left plain."""
    blocks = chain(TOKENS)
    for point in range(1, 200, 6):
        folder = tmp_path / str(point)
        lost = left_behind(folder)
        with opened(folder, None) as disk:
            disk.store(blocks)
            disk.keep(prefix(blocks))
        done = subprocess.run([sys.executable, "-c", DIES, str(folder), str(point)], check=False)
        with opened(folder) as disk:
            check(disk, blocks)
            assert disk.prefixes() == [prefix(blocks)]
            assert disk.verify().sound
        assert readable(folder, blocks + lost) == []
        if not done.returncode:
            break
        assert done.returncode == -signal.SIGKILL
    assert point > 12


def test_a_kill_while_blocks_are_stored_leaves_a_store_that_is_sound(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from perdure.cache.tiers.disk import DiskTier
from perdure.ext.encryption.folder import DiskKey
from store.chains import chain
disk = DiskTier(Path(sys.argv[1]), budget=1 << 30, encryption=DiskKey(b"k" * 32, "/keys/one"))
disk.store(chain(list(range(8))))
print("ready", flush=True)
for number in range(10**6):
    disk.store(chain(list(range(number, number + 8)), str(number)))
"""
    with children.holding(script, tmp_path) as child:
        while len(files(tmp_path)) < 40:
            assert child.poll() is None
        child.kill()
        child.wait()
    with opened(tmp_path) as disk:
        assert len(disk) >= 2
        assert disk.verify().sound
        assert same(disk.load(chain(list(range(8)))[0].id), chain(list(range(8)))[0])


# A whole runtime.

TEXT = "A sentence that is long enough to fill a block or two of state, so that some of it is kept. " * 2


@pytest.mark.parametrize("kind", ["toy", "llama"])
def test_a_session_wakes_from_encrypted_state_and_says_the_same(
    kind: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = ToyModel() if kind == "toy" else zoo_path("llama")
    key, store = tmp_path / "key", tmp_path / "store"
    key.write_bytes(b"k" * 32)
    settings = {"max_tokens": 8, "temperature": 0}

    def talk(folder: Path, encrypt: Path | None, text: str) -> perdure.ChatReply:
        with perdure.open(model, n_ctx=512, slots=1, store=folder, encrypt=encrypt) as runtime:
            return runtime.session("ada").say(text, **settings)  # type: ignore[arg-type]

    plain = [talk(tmp_path / "plain", None, text) for text in (TEXT, "And then?")]
    first = talk(store, key, TEXT)
    # What was said once holds: the folder knows where its key is.
    second = talk(store, None, "And then?")
    assert [first.text, second.text] == [turn.text for turn in plain]
    assert second.reuse.tiers.get("disk", 0) == plain[1].reuse.tiers.get("disk", 0) > 0
    rows = [path.read_bytes() for path in files(store)]
    assert rows
    assert not any(b"PERDBLK" in data for data in rows)
    key.write_bytes(b"q" * 32)
    with pytest.raises(StoreKeyError, match="another key"):
        talk(store, None, "hm")
    key.unlink()
    with pytest.raises(StoreKeyError, match="cannot be read"):
        talk(store, None, "hm")
    key.write_bytes(b"k" * 32)
    assert talk(store, None, "And now?").reuse.tiers.get("disk", 0) > 0


def test_damaged_state_costs_a_computation_and_no_reply(tmp_path: Path) -> None:
    key, store = tmp_path / "key", tmp_path / "store"
    key.write_bytes(b"k" * 32)

    def talk(folder: Path, text: str, encrypt: Path | None = None) -> perdure.ChatReply:
        with perdure.open(ToyModel(), n_ctx=512, slots=1, store=folder, encrypt=encrypt) as runtime:
            return runtime.session("ada").say(text, max_tokens=8, temperature=0)

    talk(store, TEXT, key)
    talk(tmp_path / "plain", TEXT)
    for path in files(store):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    again = talk(store, "And then?")
    assert again.text == talk(tmp_path / "plain", "And then?").text
    assert again.reuse.tiers == {}
    assert talk(store, "And now?").reuse.tiers.get("disk", 0) > 0


@pytest.mark.extension("upkeep")
def test_backups_have_state_encrypted_as_it_is(tmp_path: Path) -> None:
    from perdure.ext.upkeep.backup import restore
    from perdure.ext.upkeep.store import back_up, verify

    key, store = tmp_path / "key", tmp_path / "store"
    key.write_bytes(b"k" * 32)
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=store, encrypt=key) as runtime:
        runtime.session("ada").say(TEXT, max_tokens=8)
    back_up(store, tmp_path / "backup", state=True)
    assert b"PERDBLK" not in (tmp_path / "backup").read_bytes()
    restore(tmp_path / "backup", tmp_path / "new")
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=tmp_path / "new") as runtime:
        assert runtime.session("ada").say("And then?", max_tokens=8).reuse.tiers.get("disk", 0) > 0
    found = verify(tmp_path / "new", lambda done, total: None)
    assert found.blocks is not None
    assert found.blocks.sound
    key.unlink()
    found = verify(tmp_path / "new", lambda done, total: None)
    assert found.unread is not None
    assert "cannot be read" in found.unread
    assert np.all([path.is_file() for path in files(tmp_path / "new")])


@pytest.mark.parametrize("most", [65_536, 8, 0])
def test_what_follows_a_block_is_as_without_encryption_whatever_came_and_went(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where few of them are remembered, and after changes that failed."""
    monkeypatch.setattr(codec, "_KNOWN", most)
    random = np.random.default_rng(7)
    roots = [BlockId(bytes([number]) * 32) for number in range(3)]
    pool = [
        Block.make(root, 0, random.integers(0, 3, 6).astype(np.int32), np.zeros((6, 4), np.uint8), None)
        for root in roots
        for _ in range(40)
    ]
    with opened(tmp_path / "plain", None) as plain, opened(tmp_path / "sealed") as sealed:
        for step in range(120):
            some = [pool[at] for at in random.integers(0, len(pool), 5)]
            for disk in (plain, sealed):
                if step % 3 == 0:
                    disk.drop([each.id for each in some])
                else:
                    disk.store(some)
            if step % 10 == 0:
                with suppress(KeyError), sealed.table.writing():
                    sealed.table.add(pool[step], 1)
                    raise KeyError
            start = random.integers(0, 3, 6).astype(np.int32).tobytes()
            for root in roots:
                for back in (False, True):
                    ids = [
                        [meta.id for meta in disk.children(root, start=start, back=back)]
                        for disk in (plain, sealed)
                    ]
                    assert ids[0] == ids[1]
