"""Encrypted folders: the key, the mark that a folder has, and how a plain folder becomes encrypted.

    encrypted.json   {"key": "/etc/perdure/disk.key", "check": "…64 hex digits…"}

There is no secret in it. `key` is where the key is, or "cluster" for the one that is in the database of the
sessions; `check` proves whether a key is the right one. While a folder is being encrypted, the mark also has
`"plain_left": true`, and the next start with the key goes on.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure import InvalidInputError, StoreDamagedError, StoreError, StoreKeyError, StoreLockedError
from perdure.ext.encryption.codec import EncryptedCodec
from perdure.spi.base import (
    TABLE_BYTES,
    read_file,
    sync_folder,
    translate_os_errors,
    write_file,
)
from perdure.spi.cache import (
    BEGINNINGS,
    MARK,
    PLAIN,
    BlockFolder,
    BlockTable,
    Encryption,
    Index,
    PrefixTable,
    StateCodec,
    block_folders,
    is_encrypted,
    lock_folder,
)

log = logging.getLogger("perdure.store")

CLUSTER = "cluster"
"""What stands for the key of the sessions' database."""
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class DiskKey(Encryption):
    """A key for the blocks of a disk, and where it is."""

    key: bytes = field(repr=False)
    origin: str
    """The path of its file, or `CLUSTER`."""

    def codec(self) -> EncryptedCodec:
        return EncryptedCodec(self.key)

    def codec_of(self, folder: Path) -> StateCodec:
        mark = _read_mark(folder)
        return PLAIN if mark is None else self._check(folder, mark)

    def prepare(self, folder: Path, *, rebuild: bool) -> None:
        mark = _read_mark(folder)
        if mark is None or "plain_left" in mark:
            codec = self.codec() if mark is None else self._check(folder, mark)
            self._encrypt(folder, codec, rebuild)
        elif self._check(folder, mark) and mark.get("key") != self.origin:
            # The same key at another place, where the next opening looks for it.
            self._write_mark(folder, plain_left=False)

    def prepare_store(self, store: Path) -> None:
        """A folder that another engine has is left to that one's next start with a key."""
        try:
            _delete_plain_beginnings(store)
        except StoreError as error:
            log.error("beginnings of prompts are still unencrypted in the store: %s", error)
        for folder in block_folders(store):
            try:
                self.prepare(folder, rebuild=True)
            except StoreLockedError:
                log.info("%s is in use: it is encrypted when its engine is next started with a key", folder)
            except StoreError as error:
                log.error("%s could not be encrypted, and holds plain state: %s", folder, error)

    def _check(self, folder: Path, mark: dict[str, Any]) -> EncryptedCodec:
        """The codec of an encrypted folder; `StoreKeyError` for the key of another."""
        codec = self.codec()
        if not hmac.compare_digest(codec.name(b"check").hex(), mark["check"]):
            raise StoreKeyError(
                f"the blocks in {folder} are encrypted with another key than {self.origin}: theirs was "
                f"{mark.get('key')}. Give that one; `perdure cache clear --all` deletes them without it"
            )
        return codec

    def _write_mark(self, folder: Path, *, plain_left: bool) -> None:
        mark = {"key": self.origin, "check": self.codec().name(b"check").hex()}
        write_file(folder / MARK, [json.dumps(mark | ({"plain_left": True} if plain_left else {})).encode()])
        sync_folder(folder)

    def _encrypt(self, folder: Path, codec: StateCodec, rebuild: bool) -> None:
        """Have nothing plain in a folder, nor what SQLite leaves of a plain row.

        Files are written anew one by one, and the index lists them only at the end. The mark says first that
        this was begun and last that it is done: after a kill all of it is done again.
        """
        files, lock = BlockFolder(folder, codec), lock_folder(folder)
        try:
            self._write_mark(folder, plain_left=True)
            if next(files.files(), None) is not None:
                log.info("the blocks in %s are encrypted from now on: they are written anew", folder)
            with closing(_open_index(folder, rebuild)) as index:
                table = BlockTable(index, "disk", codec)
                with table.writing():
                    index.run("PRAGMA secure_delete = ON")
                    table.clear()
                _encrypt_prefixes(index, table, codec)
                blocks = {}
                for path in sorted(files.files()):
                    encrypted = files.encode_plain(path)
                    if (meta := files.inspect(encrypted, "disk")) is not None:
                        blocks[meta.id] = meta
                    else:
                        # A damaged block, which cannot be encrypted, or the file of a writer that is gone.
                        files.delete([encrypted])
                table.correct({}, blocks)
                files.delete([path for path in files.quarantined.rglob("*") if not path.is_dir()])
                index.vacuum()
            self._write_mark(folder, plain_left=False)
        finally:
            lock.release()


def choose(store: Path, chosen: str | None, folders: Sequence[Path], cluster: Callable[[], bytes]) -> DiskKey:
    """How the blocks of a store are encrypted: as is asked for, else as they are already."""
    if chosen is None:
        mark = next(mark for folder in folders if (mark := _read_mark(folder)) is not None)
        chosen = str(mark.get("key"))
    if chosen == CLUSTER:
        return DiskKey(cluster(), CLUSTER)
    path = Path(chosen).expanduser().absolute()
    if path.resolve().is_relative_to(store.resolve()):
        raise InvalidInputError(
            f"the key {path} lies in the store that it encrypts: a copy of the store has both. Move the key"
        )
    return DiskKey(read_key(path), str(path))


def read_key(path: Path) -> bytes:
    """The key in a file: 32 bytes, or 64 hex digits."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise StoreKeyError(
            f"the key {path} cannot be read ({error.strerror}): bring it back, or make a new one with "
            f"`openssl rand -hex 32 > {path}`, which reads nothing that was encrypted before"
        ) from None
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StoreKeyError(
            f"{path} holds no key: {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits are wanted, as "
            "`openssl rand -hex 32` writes them"
        )
    return key


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its encryption; None where its blocks are plain."""
    path = folder / MARK
    if not is_encrypted(folder):
        return None
    with translate_os_errors(path):
        data = read_file(path, TABLE_BYTES)
    try:
        mark = json.loads(data)
    except ValueError:
        mark = None
    if not isinstance(mark, dict) or not isinstance(mark.get("check"), str) or not mark["check"].isascii():
        raise StoreKeyError(
            f"{path} is damaged: it must say which key encrypts the blocks beside it. Bring it back, "
            f"or delete {folder / 'blocks'} and {folder / 'index.sqlite'} with it"
        )
    return mark


def _delete_plain_beginnings(store: Path) -> None:
    """Delete what a store still has in plain of how prompts begin. It is learned again."""
    folder = store / BEGINNINGS
    with translate_os_errors(folder):
        for path in folder.glob("*"):
            if path.suffix != EncryptedCodec.suffix:
                path.unlink(missing_ok=True)


def _open_index(folder: Path, rebuild: bool) -> Index:
    """The index of a folder. With `rebuild`, one that cannot be read is deleted: it lists what files say."""
    path = folder / "index.sqlite"
    try:
        return Index(path, readonly=False)
    except StoreDamagedError:
        if not rebuild:
            raise
    BlockFolder(folder).delete(path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm"))
    return Index(path, readonly=False)


def _encrypt_prefixes(index: Index, table: BlockTable, codec: StateCodec) -> None:
    """Write kept prefixes that are plain anew, and delete what is no prefix then."""
    encrypted = PrefixTable(index, table, codec)
    done = {number for number, _ in encrypted.page()}
    for number, prefix in PrefixTable(index, table).page():
        if number not in done:
            encrypted.add(prefix)
    done = {number for number, _ in encrypted.page()}
    with index.writing():
        for (number,) in index.rows("SELECT number FROM record"):
            if number not in done:
                index.run("DELETE FROM record WHERE number = ?", number)
