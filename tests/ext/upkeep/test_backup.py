"""A store is copied while programs use it, and what is restored is that store (S1)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cli.pty_user import piped
from ext.upkeep.test_import import HOSTILE
from ext.workers.programs import program
from perdure import system
from perdure.errors import CorruptStateError, InvalidInputError, StoreError
from perdure.ext.upkeep.backup import back_up, restore
from perdure.sessions.sessions import Sessions


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def said(folder: Path) -> dict[str, list[str | None]]:
    with Sessions(folder, readonly=True) as sessions:
        return {
            info.name: [turn.messages[0].content for turn in sessions.get(info.name).history()]
            for info in sessions.list()
        }


def test_a_store_in_use_is_backed_up_and_restored(store: Path, tmp_path: Path) -> None:
    """W≡C: the restored conversation goes on as the first one does."""
    with program(store) as first:
        first.ask("say", "s", "hello")
        made = back_up(store, tmp_path / "saved", state=True)
        after = first.ask("say", "s", "again")
    assert (made.sessions, made.turns) == (1, 1)
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o600
    found = restore(tmp_path / "saved", tmp_path / "new" / "store")
    assert (found.sessions, found.turns, found.blocks) == (1, 1, made.blocks)
    with program(tmp_path / "new" / "store") as second:
        assert second.ask("turns", "s") == ["hello"]
        assert second.ask("say", "s", "again")["text"] == after["text"]


def test_a_backup_is_of_one_moment_while_two_programs_write(store: Path, tmp_path: Path) -> None:
    with program(store) as first, program(store) as second:
        first.tell("talk", "one", 3.0)
        second.tell("talk", "two", 3.0)
        files = [tmp_path / f"saved-{number}" for number in range(4)]
        for file in files:
            back_up(store, file)
        kept = {"one": first.hear()["kept"], "two": second.hear()["kept"]}
    for number, file in enumerate(files):
        restore(file, tmp_path / f"new-{number}")
        for name, turns in said(tmp_path / f"new-{number}").items():
            assert turns == kept[name][: len(turns)]


SLOW = """
import os, signal, sys
from pathlib import Path
import perdure.ext.upkeep.backup as backup
steps = int(sys.argv[1])
def stop(*args, **keywords):
    global steps
    steps -= 1
    if not steps:
        os.kill(os.getpid(), signal.SIGKILL)
def trace(frame, event, argument):
    if frame.f_code.co_filename == backup.__file__:
        if event == "line":
            stop()
        return trace
sys.settrace(trace)
getattr(backup, sys.argv[2])(Path(sys.argv[3]), Path(sys.argv[4]))
"""


@pytest.mark.parametrize("step", [5, 40, 80, 120, 200])
@pytest.mark.parametrize("what", ["back_up", "restore"])
def test_whoever_is_killed_leaves_it_whole_or_not_there(
    store: Path, tmp_path: Path, what: str, step: int
) -> None:
    """Y15, Y24: and nothing beside it that the next one does not remove."""
    with Sessions(store) as sessions:
        sessions.create("a", system="be brief")
        sessions.create("b")
    back_up(store, tmp_path / "saved")
    source, target = (
        (store, tmp_path / "other") if what == "back_up" else (tmp_path / "saved", tmp_path / "other")
    )
    done = subprocess.run([sys.executable, "-c", SLOW, str(step), what, str(source), str(target)])
    assert done.returncode in (0, -signal.SIGKILL)
    if what == "back_up" and target.exists():
        restore(target, tmp_path / "again")
        assert said(tmp_path / "again") == {"a": [], "b": []}
    elif target.exists():
        assert said(target) == {"a": [], "b": []}
    # What was interrupted can be done again.
    elif what == "back_up":
        back_up(store, target)
    else:
        restore(source, target)
    assert said(store) == {"a": [], "b": []}
    databases = [path for path in tmp_path.glob("*sqlite*") if path.is_file()]
    assert databases == [], "a copy of all sessions lies where nobody removes it"
    back_up(store, tmp_path / "next")
    assert {path.name for path in tmp_path.iterdir()} <= {"store", "saved", "other", "again", "next"}
    with Sessions(store):
        assert not list((store / "transfers").glob("*"))


def test_y15_what_a_living_backup_or_restore_writes_is_left_alone(store: Path, tmp_path: Path) -> None:
    """Y15: only what nobody holds any more is removed."""
    with Sessions(store) as sessions:
        sessions.create("a")
    beside: list[Path] = []

    def again(done: int, total: int) -> None:
        if not beside:
            beside.append(tmp_path / "second")
            back_up(store, beside[0])

    back_up(store, tmp_path / "first", progress=again)
    assert (tmp_path / "first").exists()
    assert beside[0].exists()
    restoring = tmp_path / "new"

    def restore_again(done: int, total: int) -> None:
        if not restoring.exists() and len(beside) == 1:
            beside.append(restoring)
            assert len(list(tmp_path.glob("new.*.restoring"))) == 1
            code = (
                "import sys; from pathlib import Path;"
                "from perdure.ext.upkeep.backup import restore;"
                "restore(Path(sys.argv[1]), Path(sys.argv[2]))"
            )
            subprocess.run([sys.executable, "-c", code, str(tmp_path / "first"), str(restoring)], check=True)
            assert len(list(tmp_path.glob("new.*.restoring"))) == 1

    with pytest.raises(StoreError):
        restore(tmp_path / "first", restoring, progress=restore_again)
    assert said(restoring) == {"a": []}
    assert not list(tmp_path.glob("new.*.restoring"))


def test_a_damaged_or_foreign_file_makes_no_store(store: Path, tmp_path: Path) -> None:
    with Sessions(store) as sessions:
        sessions.create("a")
    file = tmp_path / "saved"
    back_up(store, file)
    whole = file.read_bytes()
    for place in range(600, len(whole), max(1, len(whole) // 40)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        try:
            restore(file, tmp_path / "new")
        except CorruptStateError:
            assert not (tmp_path / "new").exists()
        else:
            # A bit of the padding between files.
            assert said(tmp_path / "new") == {"a": []}
            subprocess.run(["rm", "-r", str(tmp_path / "new")], check=True)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptStateError):
        restore(file, tmp_path / "new")
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(store / "sessions.sqlite", "../outside")
    with pytest.raises(CorruptStateError, match="no file of a store"):
        restore(file, tmp_path / "new")
    assert not (tmp_path / "outside").exists()
    file.write_bytes(whole)
    with pytest.raises(InvalidInputError, match="is not empty"):
        restore(file, store)
    with pytest.raises(InvalidInputError, match="exists already"):
        back_up(store, file)
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name or "restoring" in path.name] == []


def test_s5_a_backup_with_a_hole_in_a_file_makes_no_store(store: Path, tmp_path: Path) -> None:
    for name in ("sparse", "sparse, by a header"):
        (tmp_path / "saved").write_bytes(HOSTILE[name])
        with pytest.raises(CorruptStateError, match="no plain file"):
            restore(tmp_path / "saved", tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_backup_and_restore_as_commands(store: Path, tmp_path: Path) -> None:
    with Sessions(store) as sessions:
        sessions.create("a")

    def command(*words: str) -> str:
        done = piped({**os.environ, "PERDURE_HOME": str(tmp_path / "home")}, None, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "has 1 session, 0 turns as of" in command("backup", str(store), str(tmp_path / "saved"))
    assert (
        json.loads(command("restore", str(tmp_path / "saved"), str(tmp_path / "new"), "--json"))["sessions"]
        == 1
    )
    assert said(tmp_path / "new") == {"a": []}


@pytest.mark.skipif(not system.is_root(), reason="only root makes folders that belong to root")
def test_a_restore_by_root_says_whose_the_folder_is(store: Path, tmp_path: Path) -> None:
    with Sessions(store) as sessions:
        sessions.create("a")
    for words in (("backup", str(store), "saved"), ("restore", "saved", "new")):
        home = {**os.environ, "PERDURE_HOME": str(tmp_path / "home")}
        done = piped(home, None, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "new belongs to root" in done.stderr
    assert "chown -R USER: new" in done.stderr
