"""Files beside the stores, on a disk that is full from any one write on: run with the shim preloaded.

Keys, backups, restores, exports and the folder of llama.cpp's libraries: what was there stays whole, what is
new is whole or absent, nothing unfinished is left, and once there is room all goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import perdure
import perdure.ext.builds as libraries
from ext.builds.conftest import FILES, KEPT, package_of
from perdure.cli.runtime import session_folder
from perdure.config import settings
from perdure.errors import PerdureError
from perdure.ext.builds import package as packages
from perdure.ext.keys import command as keys_command
from perdure.ext.upkeep.backup import back_up, restore
from perdure.ext.upkeep.export import read_export
from perdure.server.core.keys import Keys, new_key
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.testing.toy import ToyModel
from serving import npm_archive
from store.faults import Shim

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SAID = ["Hello", "And then?"]
LINES = [new_key(name)[1].line for name in ("ada", "bob")]


@dataclass(frozen=True)
class Place:
    """A folder that is written to, beside others that are not."""

    base: Path

    @property
    def folder(self) -> Path:
        return self.base / "here"

    @property
    def files(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))


@contextmanager
def opened(place: Place) -> Iterator[perdure.Runtime]:
    with perdure.open(ToyModel(), n_ctx=512, template=place.base / "chat.jinja") as runtime:
        yield runtime


# Each makes its file, and is called again once there is room; then it is looked at what is there.


def keys(place: Place) -> None:
    keys_command.write_lines(place.folder / "keys", LINES)


def check_keys(place: Place, done: bool) -> None:
    there = [key.namespace for key in Keys.read(place.folder / "keys")]
    assert there in ([["ada", "bob"]] if done else [["ada"], ["ada", "bob"]])
    assert place.files == ["keys"]


def backup(place: Place) -> None:
    back_up(session_folder(place.base / "store"), place.folder / "backup", state=True)


def check_backup(place: Place, done: bool) -> None:
    assert place.files in ([["backup"]] if done else [[], ["backup"]])
    if place.files:
        restore(place.folder / "backup", place.base / "whole")
        check_sessions(place.base / "whole")
        shutil.rmtree(place.base / "whole")
        (place.folder / "backup").unlink()


def restoring(place: Place) -> None:
    restore(place.base / "backup", place.folder / "store")


def check_restored(place: Place, done: bool) -> None:
    there = (place.folder / "store").exists()
    assert there or not done
    assert not [name for name in place.files if "restoring" in name]
    if there:
        check_sessions(place.folder / "store")
        shutil.rmtree(place.folder / "store")


def export(place: Place) -> None:
    with opened(place) as runtime:
        session = runtime.session("alice")
        session.append(SAID[0])
        session.export(place.folder / "alice.perdure", state=False)


def check_export(place: Place, done: bool) -> None:
    assert place.files in ([["alice.perdure"]] if done else [[], ["alice.perdure"]])
    if place.files:
        assert read_export(place.folder / "alice.perdure").turns[-1].messages[0].content == SAID[0]
        (place.folder / "alice.perdure").unlink()


def library(place: Place) -> None:
    libraries.install_file(place.base / "library.tgz")


def check_library(place: Place, done: bool) -> None:
    entries = libraries.installed()
    assert len(entries) in ((1,) if done else (0, 1))
    for entry in entries:
        assert libraries.damaged(entry) == []
        assert sorted(entry.files) == sorted(KEPT)
    # What a process that was killed leaves is named so that it is found: here nothing was killed.
    assert not [path.name for path in settings().engines.glob("*") if path.name.startswith(".tmp")]


def check_sessions(folder: Path) -> None:
    store = SqliteStore(folder, readonly=True)
    try:
        assert [info.name for info in store.list("")] == ["alice"]
    finally:
        store.close()


KINDS: dict[str, tuple[Callable[[Place], None], Callable[[Place, bool], None]]] = {
    "keys": (keys, check_keys),
    "backup": (backup, check_backup),
    "restore": (restoring, check_restored),
    "export": (export, check_export),
    "library": (library, check_library),
}


def prepare(base: Path) -> Place:
    place = Place(base)
    base.mkdir()
    (base / "chat.jinja").write_text(TEMPLATE)
    with perdure.open(ToyModel(), n_ctx=512, template=base / "chat.jinja", store=base / "store") as runtime:
        for text in SAID:
            runtime.session("alice").append(text)
    back_up(session_folder(base / "store"), base / "backup")
    (base / "library.tgz").write_bytes(npm_archive(FILES))
    packages.PACKAGES = (package_of((base / "library.tgz").read_bytes()),)
    return place


def fail_at(shim: Shim, kind: str, place: Place, at: int, condition: str) -> tuple[int, str]:
    make, check = KINDS[kind]
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir()
    (place.folder / "keys").write_text(LINES[0] + "\n") if kind == "keys" else None
    said = ""
    shim.refuse(place.folder, at, condition)
    try:
        make(place)
    except PerdureError as error:
        said = type(error).__name__
    finally:
        count = shim.disarm()
    try:
        check(place, not said)
        if said:
            make(place)
            check(place, True)
    except BaseException:
        print(f"{kind}: {condition} from call {at} on, said {said!r}", file=sys.stderr)
        raise
    return count, said


def main() -> None:
    condition, base, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["PERDURE_HOME"] = str(base / "place" / "here")
    shim, place = Shim(), prepare(base / "place")
    found: dict[str, Any] = {}
    for kind in KINDS:
        calls, _ = fail_at(shim, kind, place, 0, condition)
        errors = [fail_at(shim, kind, place, at, condition)[1] for at in range(1, calls + 1, step)]
        found[kind] = {"calls": calls, "tried": len(errors), "errors": sorted(set(errors))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
