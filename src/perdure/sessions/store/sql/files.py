"""Files that turns name: the images of messages, a row each, by namespace and SHA-256.

A file is kept before a turn names it. It goes with the last turn that does, in the same transaction, unless a
record names it: a pending turn, a stored response. One that nothing came to name (its process was killed)
goes an hour later.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence

from perdure.errors import CorruptStateError
from perdure.sessions.store.sql.database import Database
from perdure.sessions.store.sql.usage import UsageTable
from perdure.sessions.turn import Turn

_UNNAMED_SECONDS = 3600.0
_DIGEST = re.compile("[0-9a-f]{64}")


class FileTable:
    """Files, and which turns name them. Every call but `read` belongs into a transaction of the namespace.

    Always holds: a file that a turn names is there as long as the turn is, once it was kept; its bytes count
    in the usage of its namespace, and no other namespace can find it.
    """

    def __init__(self, database: Database, usage: UsageTable) -> None:
        self._db = database
        self._usage = usage

    def read(self, namespace: str, digest: str) -> bytes | None:
        """A file's bytes as they were given; None where they are gone or damaged."""
        rows = self._db.rows(
            "SELECT data, checksum FROM file WHERE namespace = ? AND digest = ?", namespace, digest
        )
        for data, checksum in rows:
            if hashlib.sha256(data).digest() == bytes(checksum):
                return bytes(data)
        return None

    def keep(self, namespace: str, digest: str, data: bytes) -> None:
        """Write a file, in the place of a damaged one if there is one."""
        for number in self._numbers(namespace, [digest]):
            self._usage.remove(namespace, "file", number)
            self._db.run(
                "UPDATE file SET data = ?, checksum = ?, created = ? WHERE number = ?",
                *(data, hashlib.sha256(data).digest(), time.time(), number),
            )
            self._usage.add(namespace, "file", number)
            return
        self._db.run(
            "INSERT INTO file (namespace, digest, data, checksum, created) VALUES (?, ?, ?, ?, ?)",
            *(namespace, digest, data, hashlib.sha256(data).digest(), time.time()),
        )
        for number in self._numbers(namespace, [digest]):
            self._usage.add(namespace, "file", number)
        self.drop_unnamed(namespace, [])

    def name(self, namespace: str, turn: int, named: Turn) -> None:
        """Have a new turn name its files."""
        for number in self._numbers(namespace, named.files):
            self._db.run("INSERT INTO turn_file (turn, file) VALUES (?, ?)", turn, number)

    def unname(self, turn: int) -> Sequence[int]:
        """Have a turn that goes name no file; those that it named."""
        files = [
            int(number) for (number,) in self._db.rows("SELECT file FROM turn_file WHERE turn = ?", turn)
        ]
        if files:
            self._db.run("DELETE FROM turn_file WHERE turn = ?", turn)
        return files

    def unpend(self, namespace: str, record: str) -> None:
        """A record is deleted, which said this."""
        if "image" in record:
            self.drop_unnamed(namespace, self._numbers(namespace, sorted(set(_DIGEST.findall(record)))))

    def drop_unnamed(self, namespace: str, files: Sequence[int]) -> None:
        """Delete those of `files` that nothing names any more, and what has long been named by nothing."""
        marks = ", ".join("?" * len(files)) or "NULL"
        rows = self._db.rows(
            f"SELECT number FROM file WHERE namespace = ? AND (created < ? OR number IN ({marks}))"
            " AND NOT EXISTS (SELECT 1 FROM turn_file WHERE turn_file.file = file.number)"
            " AND NOT EXISTS (SELECT 1 FROM record WHERE record.namespace = ?"
            " AND replace(record.origin, file.digest, '') != record.origin)",
            *(namespace, time.time() - _UNNAMED_SECONDS, *files, namespace),
        )
        for (number,) in rows:
            self._usage.remove(namespace, "file", number)
            self._db.run("DELETE FROM file WHERE number = ?", number)

    def check(self) -> None:
        """Raise for a file whose bytes are not those that were given."""
        for (number,) in self._db.rows("SELECT number FROM file"):
            for namespace, digest, data, checksum in self._db.rows(
                "SELECT namespace, digest, data, checksum FROM file WHERE number = ?", number
            ):
                if hashlib.sha256(data).digest() != bytes(checksum):
                    whose = f" of namespace {namespace!r}" if namespace else ""
                    raise CorruptStateError(f"the image {digest[:12]}…{whose} is damaged")

    def _numbers(self, namespace: str, digests: Sequence[str]) -> list[int]:
        if not digests:
            return []
        marks = ", ".join("?" * len(digests))
        rows = self._db.rows(
            f"SELECT number FROM file WHERE namespace = ? AND digest IN ({marks})", namespace, *digests
        )
        return [int(number) for (number,) in rows]
