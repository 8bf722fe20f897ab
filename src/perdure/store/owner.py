"""Which process runs the engine of a store, and where it serves the others."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from perdure import system
from perdure.atomic import atomic_write, make_folder, read_text, translate_os_errors
from perdure.errors import StoreLockedError

_FILE, _LOCK, _SOCKET = "sessions.holder", "sessions.lock", "sessions.socket"
_TEMPORARY = "perdure-socket-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """A process that runs the engine of a store."""

    pid: int
    command: str
    since: float
    socket: str = ""
    """Where it serves other processes of its user; empty where it does not."""

    @property
    def own(self) -> bool:
        return self.pid == os.getpid()

    def __str__(self) -> str:
        if self.own:
            return "another runtime of this process"
        began = time.strftime("%H:%M", time.localtime(self.since))
        return f"`{self.command}` (process {self.pid}, since {began})"


class StoreLock:
    """The right to run the engine of a store. One process has it; the system drops it with that process."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder = folder
        self._lock = FileLock(folder / _LOCK, thread_local=False, mode=0o600)
        with translate_os_errors(folder):
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise StoreLockedError(
                    f"the store {folder} is in use by {described(folder)}: close that one, choose another "
                    "store, or open this one for reading"
                ) from None
        try:
            _forget_socket(read_owner(folder))
            self.holder = write_owner(folder, socket=_address(folder))
        except BaseException:
            self._lock.release()
            raise

    def release(self) -> None:
        # Not twice: by then the socket may be another one's.
        if self._lock.is_locked:
            _forget_socket(self.holder)
            self._lock.release()


def write_owner(folder: Path, *, socket: str = "") -> StoreOwner:
    """Say that this process has the store. What others read of it they check for themselves."""
    holder = StoreOwner(pid=os.getpid(), command=_command(sys.argv), since=time.time(), socket=socket)
    path = folder / _FILE
    with suppress(OSError), atomic_write(path, private=True, durable=False) as file:
        file.write(json.dumps(asdict(holder)).encode())
    return holder


def read_owner(folder: Path) -> StoreOwner | None:
    """The process that wrote last that it has the store, if any. Only of use where the store is locked."""
    try:
        record = json.loads(read_text(folder / _FILE))
        return StoreOwner(
            pid=int(record["pid"]),
            command=str(record["command"]),
            since=float(record["since"]),
            socket=str(record.get("socket", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def described(folder: Path) -> str:
    """The process that has a locked store, in words."""
    holder = read_owner(folder)
    return str(holder) if holder is not None else "another process or another runtime of this one"


def _address(folder: Path) -> str:
    """Where to serve others: beside the store, or where that path is too long for a socket, in a private
    folder."""
    if not system.LOCAL_SOCKETS:
        return ""
    beside = str((folder / _SOCKET).absolute())
    if len(os.fsencode(beside)) <= system.ADDRESS_BYTES:
        return beside
    elsewhere = os.path.join(tempfile.mkdtemp(prefix=_TEMPORARY), _SOCKET)
    return elsewhere if len(os.fsencode(elsewhere)) <= system.ADDRESS_BYTES else ""


def _forget_socket(holder: StoreOwner | None) -> None:
    """Delete the socket of a holder that is gone, and nothing else that its file may name."""
    if holder is None or not holder.socket or (path := Path(holder.socket)).name != _SOCKET:
        return
    with suppress(OSError):
        if path.is_socket():
            path.unlink()
        if path.parent.name.startswith(_TEMPORARY):
            path.parent.rmdir()


def _command(arguments: list[str]) -> str:
    """The program and its command, without what was said to it."""
    program = Path(arguments[0]) if arguments and arguments[0] else Path(sys.executable)
    ours = program.stem == "perdure" or program.parts[-3:] == ("perdure", "cli", "__main__.py")
    if not ours:
        return program.name
    return " ".join(["perdure", *(word for word in arguments[1:2] if word.isidentifier())])
