"""Files of one namespace, in the session store: what a client sent, and the answers of its batches.

    batches:file  file-7f…         what it is called, how large it is, whether it is whole
    batches:part  file-7f…-000003  a piece of its text

A file is written down before its parts, and deleted after them: one that is not whole, or is going, says so,
and `sweep` deletes it. A file of answers has no parts: it is read out of the answers of its batch.
"""

from __future__ import annotations

import codecs
import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from perdure import CorruptStateError, PerdureError, SessionNotFoundError
from perdure.spi.server import ApiError, invalid
from perdure.spi.sessions import Record, SessionStore

FILE, PART, ANSWER = "batches:file", "batches:part", "batches:answer"
KEPT = 30 * 86400
"""Seconds that a file and a batch stay, where nobody says otherwise."""
MOST_BYTES = 200 << 20
MOST_FILES = 10_000
"""Files, and batches, of one namespace."""
_PART = 256 << 10
"""Characters."""
_UPLOAD = 3600.0
"""Seconds after which a file that is not whole is no upload any more."""


def answer_name(batch_id: str, line: int) -> str:
    return f"{batch_id}-{line:06}"


class Files:
    """Every call may wait for the disk."""

    def __init__(self, store: SessionStore, namespace: str) -> None:
        self._store = store
        self._namespace = namespace

    def create(self, pieces: Iterable[bytes], *, filename: str, purpose: str, seconds: float) -> Record:
        """A new file of UTF-8 text."""
        now = int(time.time())
        about = {
            "filename": filename,
            "purpose": purpose,
            "created_at": now,
            "expires_at": now + int(seconds),
            "state": "uploading",
        }
        self._check_number()
        record = self._put(FILE, f"file-{uuid.uuid4().hex}", about)
        try:
            nbytes = parts = 0
            for text, size in _texts(pieces):
                self._put(PART, _part_name(record.name, parts), {"text": text})
                parts, nbytes = parts + 1, nbytes + size
            return self._store.note(record, {**about, "bytes": nbytes, "parts": parts, "state": "processed"})
        except BaseException:
            self._remove(record)
            raise

    def for_answers(self, batch_id: str, *, ok: bool, lines: int) -> Record:
        """The file of the answers of a batch that come out right, or of the others, which nobody sees before
        it is `finish`ed. Made twice, it is one."""
        name = f"file-{batch_id.removeprefix('batch_')}{'0' if ok else '1'}"
        with suppress(SessionNotFoundError):
            return self._store.record(self._namespace, FILE, name)
        about = {
            "filename": f"{batch_id}_{'output' if ok else 'error'}.jsonl",
            "purpose": "batch_output",
            "state": "to come",
            "of": batch_id,
            "ok": ok,
            "lines": lines,
            "expires_at": int(time.time()) + 2 * KEPT,
        }
        return self._put(FILE, name, about)

    def finish(self, record: Record) -> Record | None:
        """Have a file of answers be there from now on; None where it would be empty."""
        about = record.origin
        if about["state"] == "processed":
            return record
        now = int(time.time())
        nbytes = sum(len(line.encode()) for line in self._answers(about))
        if not nbytes:
            self._store.delete(record)
            return None
        done = {"state": "processed", "bytes": nbytes, "created_at": now, "expires_at": now + KEPT}
        return self._store.note(record, {**about, **done}, bounded=False)

    def get(self, file_id: str) -> Record:
        with suppress(SessionNotFoundError):
            record = self._store.record(self._namespace, FILE, file_id)
            if record.origin["state"] == "processed" and record.origin["expires_at"] > time.time():
                return record
        raise ApiError(404, f"there is no file {file_id[:100]!r}", code="file_not_found")

    def all(self) -> list[Record]:
        """The latest first."""
        found = []
        for name in names(self._store, FILE, self._namespace):
            with suppress(ApiError):
                found.append(self.get(name))
        return sorted(found, key=lambda each: each.number, reverse=True)

    def delete(self, record: Record) -> None:
        """Nobody sees it from the first moment on; what is left of it goes at the next start, if not now."""
        self._store.note(record, {**record.origin, "state": "deleted"}, bounded=False)
        self._remove(record)

    def text(self, record: Record) -> Iterator[str]:
        """What is in a file, in pieces."""
        about = record.origin
        if "of" in about:
            yield from self._answers(about)
            return
        count = 0
        for part in self._parts(record):
            yield str(part.origin["text"])
            count += 1
        if count != about["parts"]:
            raise CorruptStateError(f"of file {record.name}, {count} of {about['parts']} parts are there")

    def lines(self, record: Record, most: int) -> Iterator[str]:
        """The lines of a file that are not empty; 413 at one of more than `most` characters."""
        pieces: list[str] = []
        for text in self.text(record):
            *whole, last = text.split("\n")
            for piece in whole:
                line = "".join((*pieces, piece))
                pieces.clear()
                if line.strip():
                    yield line
            pieces.append(last)
            if sum(map(len, pieces)) > most:
                raise ApiError(
                    413, f"a line has more than {most} characters, which is the limit", code="line_too_long"
                )
        if (line := "".join(pieces)).strip():
            yield line

    def _answers(self, about: Mapping[str, Any]) -> Iterator[str]:
        for line in range(about["lines"]):
            with suppress(SessionNotFoundError):
                answer = self._store.record(self._namespace, ANSWER, answer_name(about["of"], line)).origin
                if answer["ok"] == about["ok"]:
                    yield f"{answer['line']}\n"

    def _parts(self, record: Record) -> Iterator[Record]:
        with suppress(SessionNotFoundError):
            for number in itertools.count():
                yield self._store.record(self._namespace, PART, _part_name(record.name, number))

    def _remove(self, record: Record) -> None:
        about = record.origin
        if "of" in about:
            for line in range(about["lines"]):
                with suppress(SessionNotFoundError):
                    answer = self._store.record(self._namespace, ANSWER, answer_name(about["of"], line))
                    if answer.origin["ok"] == about["ok"]:
                        self._store.delete(answer)
        else:
            # From the end: where this is cut short, the next look finds those that are left.
            for part in reversed(list(self._parts(record))):
                self._store.delete(part)
        self._store.delete(record)

    def _check_number(self) -> None:
        if len(names(self._store, FILE, self._namespace)) >= MOST_FILES:
            raise ApiError(
                507, f"{MOST_FILES} files are kept, which is the limit: delete some", code="too_many_files"
            )

    def _put(self, kind: str, name: str, body: Mapping[str, Any]) -> Record:
        return self._store.put(self._namespace, kind, name, body)


def sweep(store: SessionStore, now: float) -> None:
    """Delete the files that are going, that were never whole, or that have expired."""
    for namespace, name in store.expired(now, limit=2**31 - 1, kind=FILE):
        # One that is damaged must not be in the way of the others.
        with suppress(PerdureError):
            record = store.record(namespace, FILE, name)
            state = record.origin["state"]
            late = state == "uploading" and record.updated < now - _UPLOAD
            if late or state == "deleted" or record.origin["expires_at"] <= now:
                Files(store, namespace).delete(record)


def names(store: SessionStore, kind: str, namespace: str) -> list[str]:
    """Of all records of a kind in a namespace, the latest last."""
    return [
        name for _, name in store.expired(time.time() + 1, limit=MOST_FILES, kind=kind, namespace=namespace)
    ]


def _part_name(file_id: str, number: int) -> str:
    return f"{file_id}-{number:06}"


def _texts(pieces: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    """The text of pieces of UTF-8, in parts that are not too long, and the bytes of each."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    try:
        for piece in pieces:
            text += decoder.decode(piece)
            while len(text) >= _PART:
                yield text[:_PART], len(text[:_PART].encode())
                text = text[_PART:]
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise invalid("file", f"it is not UTF-8 text: {error}", code="invalid_file") from None
    if text:
        yield text, len(text.encode())
