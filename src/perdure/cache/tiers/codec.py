"""Codec: how state stands on the disk. Plain here; an extension encrypts it (`Extension.encryption`).

    plain        blocks/1f/1f3a…      the block's file        index.sqlite    ids, tokens, labels
    encrypted    blocks/NA/NAME       `encode` of that file   index.sqlite    names, and columns of `pack`

A folder whose state is not plain has the file `encrypted.json`. It is refused without the extension that
reads it, and never taken for a plain or an empty one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from perdure.atomic import translate_os_errors
from perdure.cache.block import BlockId, BlockMeta, block_id_of
from perdure.errors import InvalidInputError, StoreKeyError
from perdure.extension import extensions, imported

MARK = "encrypted.json"
BEGINNINGS = "beginnings"
"""The folder of a store with what prompts begin with."""


class ChildLookup(Protocol):
    """What follows blocks, by its tokens, for rows that are in no order. It follows every change of a
    table."""

    def of(
        self, parent: BlockId, start: bytes, back: bool, read: Callable[[BlockId], Iterable[BlockMeta]]
    ) -> Iterator[BlockMeta]:
        """The children of `parent` from `start` on, or back from it; `read` reads all of them."""
        ...

    def changing(self) -> AbstractContextManager[None]:
        """A transaction, which may fail."""
        ...

    def add(self, meta: BlockMeta) -> None: ...
    def remove(self, block: BlockId) -> None: ...
    def forget(self) -> None: ...


class StateCodec:
    """State as it is. A codec that hides it overrides every method.

    Always holds: what `decode` and the `open_` calls return was made by the same codec under the same name,
    and is whole; anything else is None. `pack`, `prefix` and `text` give equal results for equal arguments,
    since rows are found by them.
    """

    overhead = 0
    """Bytes that `encode` adds."""
    suffix = ".json"
    """How the names of files besides blocks end."""

    def name(self, what: bytes) -> bytes:
        """What stands for an id: 32 bytes for 32."""
        return what

    def encode(self, name: str, parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """The bytes of the file `name`."""
        return parts

    def decode(self, name: str, data: bytes) -> bytes | None:
        return data

    # Rows of an index.

    def pack(self, block: bytes, parent: bytes, tokens: bytes) -> bytes:
        """What stands in the column of tokens."""
        return tokens

    def unpack(self, name: bytes, parent: bytes, packed: bytes) -> tuple[BlockId, BlockId, bytes] | None:
        """The id, the parent and the tokens of a row."""
        if len(packed) % 4 or block_id_of(parent, packed) != name:
            return None
        return BlockId(name), BlockId(parent), packed

    def prefix(self, root: bytes, tokens: bytes) -> tuple[bytes, bytes]:
        """What stands for a kept prefix, and in its column of tokens."""
        return root, tokens

    def open_prefix(self, name: bytes, packed: bytes) -> tuple[bytes, bytes] | None:
        """The root and the tokens of a kept prefix."""
        return None if len(packed) % 4 else (name, packed)

    def text(self, text: str) -> str:
        """What stands for a namespace or a label."""
        return text

    def open_text(self, packed: str) -> str | None:
        return packed

    def children(self, *, readonly: bool) -> ChildLookup | None:
        """Where rows are not in the order of their tokens: what finds those that follow a block."""
        return None


PLAIN = StateCodec()


class Encryption(ABC):
    """A key for the state of a store. It crosses to the engine's process."""

    @abstractmethod
    def codec(self) -> StateCodec: ...

    @abstractmethod
    def codec_of(self, folder: Path) -> StateCodec:
        """How a folder is read: plain where it was never prepared; `StoreKeyError` for another key."""

    @abstractmethod
    def prepare(self, folder: Path, *, rebuild: bool) -> None:
        """Encrypt a folder that is plain, before it is opened for writing. With `rebuild`, one whose index
        cannot be read, too."""

    @abstractmethod
    def prepare_store(self, store: Path) -> None:
        """Leave nothing plain of prompts in a store, also in folders of models that are not served now."""


class EncryptionChoice(Protocol):
    """A function that finds the key: `Extension.encryption` names it."""

    def __call__(
        self, store: Path, chosen: str | None, folders: Sequence[Path], cluster: Callable[[], bytes]
    ) -> Encryption:
        """`chosen` is what `encrypt` says; None: one of `folders` has a mark, which says it. `cluster` gives
        the key of the sessions' database."""
        ...


def choose_encryption(
    store: Path, chosen: str | None, folders: Sequence[Path], cluster: Callable[[], bytes]
) -> Encryption | None:
    """How the blocks of a store are encrypted: as is chosen, else as they are already."""
    marked = next((folder for folder in folders if is_encrypted(folder)), None)
    if chosen is None and marked is None:
        return None
    reference = next((each.encryption for each in extensions().values() if each.encryption), None)
    if reference is not None:
        return cast(EncryptionChoice, imported(reference))(store, chosen, folders, cluster)
    if marked is None:
        raise InvalidInputError(
            "encrypt needs the extension `encryption`, which is not installed: install it, or leave encrypt "
            "out"
        )
    raise StoreKeyError(
        f"the blocks in {marked} are encrypted, and the extension `encryption`, which reads them, is not "
        "installed: install it, or `perdure cache clear --all` deletes them: sessions stay"
    )


def is_encrypted(folder: Path) -> bool:
    with translate_os_errors(folder):
        return (folder / MARK).exists()


def codec_of(folder: Path, encryption: Encryption | None) -> StateCodec:
    """How the state in a folder stands there; `StoreKeyError` without its key."""
    if encryption is not None:
        return encryption.codec_of(folder)
    if is_encrypted(folder):
        raise StoreKeyError(
            f"the blocks in {folder} are encrypted, and no key was given: {folder / MARK} names theirs. "
            "`perdure cache clear --all` deletes them without it"
        )
    return PLAIN
