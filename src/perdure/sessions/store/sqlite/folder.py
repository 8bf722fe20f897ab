"""The folder of a session store: its files, and whose database it is."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import StoreDamagedError
from perdure.store.durable import make_folder, sync_folder, translate_os_errors, write_file

FILE, MARK, MENDED, KEY = "sessions.sqlite", "sessions.id", "sessions.mended", "sessions.key"
"""The database; whose it is; what a repair that was interrupted has left; what signs exports."""
TRANSFERS = "transfers"
"""The folder of files that are on their way in or out."""


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """Where a session store lies. A database of another store is not taken for this one's."""

    path: Path

    @property
    def database(self) -> Path:
        return self.path / FILE

    def transfers(self) -> Path:
        """The folder for files on their way in or out."""
        folder = self.path / TRANSFERS
        make_folder(folder, ours=True)
        return folder

    def clear_transfers(self) -> None:
        shutil.rmtree(self.path / TRANSFERS, ignore_errors=True)

    def mark(self) -> str:
        """Whose the database must be; nothing is known of one that is new."""
        with translate_os_errors(self.path / MARK):
            try:
                return (self.path / MARK).read_text("utf-8", "replace").strip()
            except FileNotFoundError:
                return ""

    def check_there(self, known: str) -> None:
        """Raise where a database that was here is gone, or is being repaired."""
        if (self.path / MENDED).exists():
            raise StoreDamagedError(
                f"a repair of the sessions in {self.path} was interrupted: `perdure sessions verify` ends it"
            )
        with translate_os_errors(self.database):
            gone = known and not (self.database.exists() and self.database.stat().st_size)
        if gone:
            raise StoreDamagedError(
                f"{self.database} is gone: restore it from a copy, or delete {MARK} beside it to begin "
                "without any session"
            )

    def check_own(self, own: object, known: str, *, readonly: bool) -> None:
        """Raise where the database with the id `own` is another store's; one that is new is marked."""
        if not isinstance(own, str) or not own or (known and own != known):
            raise StoreDamagedError(
                f"{self.database} is not the one that was here: restore it from a copy, or if it is to take "
                f"its place, delete {MARK} beside it"
            )
        if not known and not readonly:
            self._write(MARK, own.encode())

    def key(self, *, readonly: bool) -> bytes | None:
        """The store's own secret: it never leaves the folder."""
        path = self.path / KEY
        with translate_os_errors(path):
            try:
                found = path.read_bytes()
            except FileNotFoundError:
                found = b""
        if len(found) == 32:
            return found
        if readonly:
            return None
        # Without it, or if it was damaged, older exports are still read, but their state is not known again.
        made = secrets.token_bytes(32)
        self._write(KEY, made)
        return made

    def _write(self, name: str, content: bytes) -> None:
        write_file(self.path / name, [content])
        sync_folder(self.path)
