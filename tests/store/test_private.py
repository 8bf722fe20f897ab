"""S9: what a store holds is for its owner alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from perdure.atomic import make_folder, make_private, write_file
from perdure.testing.toy import ToyModel


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """As most people have it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in [folder, *folder.rglob("*")]
        if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]


@pytest.mark.extension("upkeep")
def test_s9_everything_in_a_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    """0700 and 0600: databases with their logs, blocks, locks, keys, exports, and what a repair leaves."""
    home = tmp_path / "home"
    store = home / "deep" / "store"
    with perdure.open(ToyModel(), store=store) as rt:
        s = rt.session("alice")
        s.say("A message of some length, so that there is a block of it " * 3, max_tokens=4)
        s.sleep()
        s.export(store / "alice.perdure")
        assert open_to_others(home) == []
        assert (store / "sessions.sqlite-wal").exists()
    assert any(path.is_file() for path in (store / "blocks").rglob("*"))
    assert open_to_others(home) == []


def test_s9_a_store_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with perdure.open(ToyModel(), store=store) as rt:
        rt.session("alice").say("A message of some length, to have a block of it " * 3, max_tokens=4)
    for path in store.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with perdure.open(ToyModel(), store=store):
        for path in (store / "sessions.sqlite", store / "index.sqlite", store / "blocks"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_s9_files_are_never_open_to_others_not_even_at_first(tmp_path: Path) -> None:
    write_file(tmp_path / "file", [b"x"])
    make_private(tmp_path / "other")
    make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "other").write_bytes(b"stays")
    make_private(tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == b"stays"
