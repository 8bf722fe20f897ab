"""Blocks of several models in one store: a folder, a lock and an index each, and all read where they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from perdure.backend import BlockStorage, LocalBackend
from perdure.cache.tiers.archive import block_folders, model_folder
from perdure.cache.tiers.disk import DiskTier
from perdure.decode.request import Request
from perdure.decode.stream import Stream, one_request
from perdure.engine_config import EngineConfig
from perdure.errors import StoreLockedError
from perdure.request_options import Sampling
from perdure.testing.toy import ToyModel

PROMPT = list(range(1, 200))


def opened(folder: Path, seed: int = 0, **settings: Any) -> LocalBackend:
    return LocalBackend(
        ToyModel(seed=seed),
        EngineConfig(n_ctx=512, slots=1, cache=1 << 24),
        storage=BlockStorage(folder=folder, **settings),
        own_model=True,
    )


def reused(backend: LocalBackend) -> dict[str, int]:
    request = Request(prompt=PROMPT, max_tokens=4, sampling=Sampling(temperature=0))
    with Stream(one_request(request), backend.submit) as stream:
        return dict(stream.reply().reuse.tiers)


def test_two_models_write_to_one_store_at_once(tmp_path: Path) -> None:
    with (
        closing(opened(tmp_path, 0, own_blocks=True)) as one,
        closing(opened(tmp_path, 1, own_blocks=True)) as two,
    ):
        assert not reused(one)
        assert not reused(two)
        assert one.model.digest != two.model.digest
    assert len(block_folders(tmp_path)) == 2
    for seed in (0, 1):
        with closing(opened(tmp_path, seed, own_blocks=True)) as backend:
            assert reused(backend) == {"disk": len(PROMPT) - 1}


def test_one_model_twice_at_once_is_refused(tmp_path: Path) -> None:
    with closing(opened(tmp_path, own_blocks=True)), pytest.raises(StoreLockedError):
        opened(tmp_path, own_blocks=True)


@pytest.mark.parametrize("first", [False, True])
def test_what_is_in_the_other_place_is_read_once(tmp_path: Path, first: bool) -> None:
    """An old store's blocks are found by a model that has a separate folder, and the other way round."""
    with closing(opened(tmp_path, own_blocks=first)) as backend:
        reused(backend)
    with closing(opened(tmp_path, own_blocks=not first)) as backend:
        assert reused(backend) == {"archive": len(PROMPT) - 1}
    with closing(opened(tmp_path, own_blocks=not first)) as backend:
        assert reused(backend) == {"disk": len(PROMPT) - 1}


def test_what_is_cleared_does_not_come_back_from_the_other_place(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as backend:
        reused(backend)
    with closing(opened(tmp_path, own_blocks=True)) as backend:
        assert reused(backend)
        backend.cache.clear()
        assert not reused(backend)
    with closing(DiskTier(tmp_path, budget=0, readonly=True)) as disk:
        assert not len(disk)


def test_damage_in_the_other_place_costs_a_computation(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as backend:
        reused(backend)
        digest = backend.model.digest
    for path in (tmp_path / "blocks").glob("*/*"):
        path.write_bytes(b"x" + path.read_bytes()[1:])
    with closing(opened(tmp_path, own_blocks=True)) as backend:
        assert not reused(backend)
    with closing(DiskTier(model_folder(tmp_path, digest), budget=0, readonly=True)) as disk:
        assert len(disk)
