"""Prompt heads, which the extension agents writes, in an encrypted store."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.observed import open_toy
from perdure.cache.tiers.codec import BEGINNINGS
from perdure.ext.encryption.folder import DiskKey

pytest.importorskip("perdure.ext.agents", exc_type=ImportError)

from ext.agents.test_prompt_heads import count, lived, serving
from perdure.ext.agents.prompt_heads import PromptHeads


def test_where_state_is_encrypted_so_are_prompt_heads(tmp_path: Path) -> None:
    """Of a server with `--encrypt`: what its clients say is not to be read off the disk."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    store = tmp_path / "store"
    with open_toy(n_ctx=2048, slots=2, store=store, encrypt=key) as rt:
        lived(rt)
        digest = rt.model.digest
    [file] = (store / BEGINNINGS).iterdir()
    assert b"tokens" not in file.read_bytes()
    assert file.suffix == ".sealed"
    codec = DiskKey(bytes.fromhex("ab" * 32), "").codec()
    assert len(PromptHeads(store, digest, codec=codec).by_value()) == 1
    other = DiskKey(bytes.fromhex("cd" * 32), "").codec()
    assert PromptHeads(store, digest, codec=other).by_value() == []
    with open_toy(n_ctx=2048, slots=2, store=store) as rt, serving(rt, warm=4096) as (_, client):
        assert count(client, "woken") > 500
