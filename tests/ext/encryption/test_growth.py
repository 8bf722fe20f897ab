"""What an encrypted index does for many blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from counting import sql_of
from perdure.cache.prefix_search import key_of
from perdure.ext.encryption.folder import DiskKey
from store.test_growth import ROOT, SIZES, block, filled


def test_an_encrypted_index_is_read_once_and_then_does_as_much_for_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in no order: what follows a block is decrypted once, not for each conversation."""
    costs = []
    for size in SIZES:
        disk = filled(tmp_path / str(size), size, DiskKey(b"k" * 32, "key"))
        key = key_of(block(77_777).tokens)
        next(disk.children(ROOT, start=key), None)
        with sql_of(monkeypatch) as sql:
            next(disk.children(ROOT, start=key), None)
            disk.store([block(88_888)])
            disk.drop([block(3).id])
            assert block(88_888).id in [meta.id for meta in disk.children(ROOT)]
        disk.close()
        costs.append(sql.rows)
    assert costs[0] <= costs[1] <= costs[0] + 1
