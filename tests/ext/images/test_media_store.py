"""Files and rows on the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from perdure import CorruptStateError, InvalidInputError
from perdure.ext.images.media import EncodedFile, Medium, digest_at, ids_of
from perdure.ext.images.media_store import FileDigest, MediaStore
from perdure.spi.cache import spans


def digest_of(data: bytes) -> FileDigest:
    return FileDigest(hashlib.sha256(data).digest())


FILE = digest_of(b"a file")


def medium(seed: int = 0, tokens: int = 12, width: int = 16, **fields: object) -> Medium:
    rows = np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)
    return Medium(**{"kind": "image", "rows": rows, "n_pos": tokens, **fields})  # type: ignore[arg-type]


def rows_of(store: Path) -> list[Path]:
    return sorted((store / "media" / "rows").glob("??/*"))


def test_ids_say_which_medium_it_is() -> None:
    first, second = medium(1), medium(2, 9)
    tokens = np.concatenate([np.array([1, 2], np.int32), first.ids, second.ids, np.array([3], np.int32)])
    assert (tokens[2:-1] < 0).all()
    assert digest_at(tokens, 2) == first.digest
    assert digest_at(tokens, 14) == second.digest
    assert spans(tokens) == [(2, 14), (14, 23)]
    for start in (0, 3, 21):
        with pytest.raises(InvalidInputError):
            digest_at(tokens, start)


def test_e3_all_that_a_decoder_gets_is_in_the_digest() -> None:
    base = medium()
    other_rows = base.rows.copy()
    other_rows[3, 5] = np.nextafter(other_rows[3, 5], 9)
    others = [
        Medium(kind="image", rows=other_rows, n_pos=12),
        Medium(kind="image", rows=base.rows.reshape(16, 12), n_pos=12),
        medium(n_pos=4),
        medium(grid=(3, 4)),
        medium(grid=(4, 3)),
        medium(causal=False),
        medium(kind="audio"),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 8
    assert ids_of(base.digest, 12).tolist() == base.ids.tolist()


def test_a_medium_is_found_by_a_new_process(tmp_path: Path) -> None:
    encoded = EncodedFile(([1, 260], medium(1), [13], medium(2, 30), [259]))
    store = MediaStore(tmp_path)
    digest = FILE
    assert store.find("", "encoder", digest) is None
    known = store.keep("", "encoder", digest, encoded)
    for each in (store, MediaStore(tmp_path)):
        assert each.find("", "encoder", digest) == known
        assert known.tokens == encoded.tokens
        for one, name in zip(encoded.media, known.media, strict=True):
            again = each.medium(name)
            assert again.digest == one.digest
            assert (again.rows == one.rows).all()
            assert (again.n_pos, again.grid, again.causal) == (one.n_pos, one.grid, one.causal)
    # Of another namespace, encoder or file there is nothing.
    assert store.find("other", "encoder", digest) is None
    assert store.find("", "newer encoder", digest) is None
    assert store.find("", "encoder", FileDigest(bytes(32))) is None


@pytest.mark.parametrize("harm", ["delete", "flip", "truncate", "lengthen", "swap", "entry"])
def test_e5_what_is_missing_or_damaged_is_not_believed(tmp_path: Path, harm: str) -> None:
    store = MediaStore(tmp_path)
    digest = FILE
    known = store.keep("", "encoder", digest, EncodedFile((medium(1), medium(2))))
    path, other = rows_of(tmp_path)
    data = path.read_bytes()
    if harm == "delete":
        path.unlink()
    elif harm == "flip":
        path.write_bytes(data[:90] + bytes([data[90] ^ 1]) + data[91:])
    elif harm == "truncate":
        path.write_bytes(data[:-5])
    elif harm == "lengthen":
        path.write_bytes(data + b"x")
    elif harm == "swap":
        path.write_bytes(other.read_bytes())
    else:
        [entry] = (tmp_path / "media" / "encoded").glob("??/*")
        entry.write_bytes(b'{"pieces": [{"medium": "zz"}')
    fresh = MediaStore(tmp_path)
    assert fresh.find("", "encoder", digest) is None
    if harm != "entry":
        [gone] = [name for name in known.media if name.hex() == path.name]
        with pytest.raises(CorruptStateError, match="encoded again"):
            fresh.medium(gone)
    assert fresh.keep("", "encoder", digest, EncodedFile((medium(1), medium(2)))) == known
    assert MediaStore(tmp_path).find("", "encoder", digest) == known


def test_rows_keep_to_their_budget(tmp_path: Path) -> None:
    """40 images where about ten fit: the last ones are there."""
    one = sum(map(len, medium().pack()))
    store = MediaStore(tmp_path, budget=10 * one + 64)
    files = []
    for seed in range(40):
        files.append(digest_of(b"%d" % seed))
        store.keep("", "encoder", files[-1], EncodedFile((medium(seed),)))
        usage = store.usage()
        assert usage.row_bytes <= 10 * one + 64
        assert store.find("", "encoder", files[-1]) is not None
    assert usage.media >= 8
    assert store.forget_rows() == usage.media
    assert store.usage().media == 0
    assert store.find("", "encoder", files[-1]) is None


def test_z1_encrypted_media_show_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from perdure.ext.encryption.codec import EncryptedCodec

    rows = np.frombuffer(b"a planted mark! " * 48, np.float32).reshape(12, 16)
    content = Medium(kind="image", rows=rows, n_pos=12)
    codec = EncryptedCodec(bytes(range(32)))
    store = MediaStore(tmp_path, codec)
    digest = digest_of(b"a planted mark in a file")
    packed = store.pack_file(digest, b"a planted mark in a file")
    assert b"planted" not in packed
    known = store.keep("", "encoder", digest, EncodedFile(([7], content)))
    names = {digest.hex(), *(name.hex() for name in known.media)}
    paths = [path for path in (tmp_path / "media").rglob("*") if path.is_file()]
    assert len(paths) == 2
    for path in paths:
        assert b"planted" not in path.read_bytes()
        assert path.name not in names
    assert MediaStore(tmp_path, codec).find("", "encoder", digest) == known
    assert MediaStore(tmp_path, codec).unpack_file(digest, packed) == b"a planted mark in a file"
    other = MediaStore(tmp_path, EncryptedCodec(bytes(32)))
    assert other.find("", "encoder", digest) is None
    assert other.unpack_file(digest, packed) is None
