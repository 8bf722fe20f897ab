"""A store on a disk that is full, or is unmounted while it is used: real mounts, where they are allowed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import perdure
from perdure.errors import StoreError, StoreFullError
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.testing.toy import ToyModel

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def mount(*arguments: str | Path) -> None:
    if shutil.which("mount") is None:
        pytest.skip("there is no `mount` here")
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where something can be mounted; nothing is after the test."""
    place = tmp_path / "disk"
    place.mkdir()
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    yield place
    # Until it says that nothing is mounted there.
    while subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False).returncode == 0:
        pass


def opened(disk: Path) -> perdure.Runtime:
    template = disk.parent / "chat.jinja"
    return perdure.open(ToyModel(), n_ctx=2048, slots=1, store=disk / "store", template=template)


def said(disk: Path) -> list[str]:
    with opened(disk) as runtime:
        return [str(turn.messages[0].content) for turn in runtime.session("alice").history()]


def test_class_4_a_disk_that_is_really_full_loses_nothing_that_was_acknowledged(disk: Path) -> None:
    mount("-t", "tmpfs", "-o", "size=8m", "none", disk)
    kept: list[str] = []
    with opened(disk) as runtime:
        session = runtime.session("alice")

        def say(text: str) -> bool:
            with suppress(StoreFullError):
                if session.say(text, max_tokens=2).kept:
                    kept.append(text)
                    return True
            return False

        assert say("first")
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        assert not all(say(f"{number} " + "y" * 600) for number in range(3))
        filler.unlink()
        assert say("last")
    assert said(disk) == kept


@pytest.mark.parametrize("readonly", [False, True])
def test_y24_a_store_on_a_full_disk_says_that_the_disk_is_full(disk: Path, readonly: bool) -> None:
    """Y24: not that it failed, where what SQLite maps into memory has no room."""
    mount("-t", "tmpfs", "-o", "size=8m", "none", disk)
    with opened(disk) as runtime:
        assert runtime.session("alice").say("first", max_tokens=2).kept
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(StoreFullError, match="the disk is full"):
        SqliteStore(disk / "store", readonly=readonly).close()
    filler.unlink()
    assert said(disk) == ["first"]


def test_class_4_a_disk_that_becomes_read_only_loses_nothing_and_is_used_again(disk: Path) -> None:
    """As systems do where a disk fails: what is there is read, what is new is refused in words."""
    mount("-t", "tmpfs", "-o", "size=64m", "none", disk)
    with opened(disk) as runtime:
        assert runtime.session("alice").say("first", max_tokens=2).kept
    mount("-o", "remount,ro", disk)
    with pytest.raises(StoreError, match="read-only"):
        opened(disk).close()
    with closing(SqliteStore(disk / "store", readonly=True)) as store:
        assert [each.name for each in store.list("")] == ["alice"]
    mount("-o", "remount,rw", disk)
    with opened(disk) as runtime:
        assert runtime.session("alice").say("last", max_tokens=2).kept
    assert said(disk) == ["first", "last"]


def test_class_4_a_disk_that_is_unmounted_while_it_is_used_loses_nothing(disk: Path, tmp_path: Path) -> None:
    """Lazily, as a network that went away: what is open stays open, and paths lead to the folder below."""
    real = tmp_path / "real"
    real.mkdir()
    mount("--bind", real, disk)
    kept: list[str] = []
    with opened(disk) as runtime:
        session = runtime.session("alice")
        assert session.say("first", max_tokens=2).kept
        subprocess.run(["umount", "-l", str(disk)], check=True)
        with suppress(StoreError):
            if session.say("second", max_tokens=2).kept:
                kept.append("second")
        # Nothing is written below the mount, where nobody would find it.
        assert list(disk.iterdir()) == []
        mount("--bind", real, disk)
        assert session.say("third", max_tokens=2).kept
    assert said(disk) == ["first", *kept, "third"]
