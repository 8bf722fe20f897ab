"""Which process writes to a store."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = "sessions.holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has opened a store for writing."""

    pid: int
    command: str
    since: float

    @property
    def own(self) -> bool:
        return self.pid == os.getpid()

    def __str__(self) -> str:
        if self.own:
            return "another runtime of this process"
        began = time.strftime("%H:%M", time.localtime(self.since))
        return f"`{self.command}` (process {self.pid}, since {began})"


def write_holder(folder: Path) -> None:
    """Say that this process has the store. For the messages of others: nothing depends on it."""
    holder = Holder(pid=os.getpid(), command=_command(sys.argv), since=time.time())
    path = folder / _FILE
    with suppress(OSError):
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(holder)), encoding="utf-8")


def read_holder(folder: Path) -> Holder | None:
    """Who said last that it has the store, if anybody did. Only of use where the store is locked."""
    try:
        found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return Holder(pid=int(found["pid"]), command=str(found["command"]), since=float(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def described(folder: Path) -> str:
    """Who has a store that is locked, in words."""
    holder = read_holder(folder)
    return str(holder) if holder is not None else "another process or another runtime of this one"


def _command(arguments: list[str]) -> str:
    """The program and its command, without what was said to it."""
    program = Path(arguments[0]) if arguments and arguments[0] else Path(sys.executable)
    ours = program.stem == "perdure" or program.parts[-3:] == ("perdure", "cli", "__main__.py")
    if not ours:
        return program.name
    return " ".join(["perdure", *(word for word in arguments[1:2] if word.isidentifier())])
