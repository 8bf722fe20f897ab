"""Export file: the chats of a zip or of a JSON file, one after the other.

    export.zip      conversations.json, conversations-000.json, …       ChatGPT, Claude
    chats.json      [{…}, {…}]    or one chat: {…}                       Open WebUI, or one of those unpacked

Always holds: no more than one chat is in memory; what is read of a zip is counted as it comes out of it.
"""

from __future__ import annotations

import codecs
import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, Any

from perdure import InvalidInputError, TooLargeError
from perdure.ext.chat_imports import chatgpt, claude, open_webui
from perdure.ext.chat_imports.chat import Chat

MOST_CHARACTERS = 32 << 20
"""Of one chat."""
MOST_BYTES = 2 << 30
"""Of all of them, unpacked."""
_READ = 1 << 20
_NAMES = re.compile(r"conversations(-\d+)?\.json|chat-export[\w.-]*\.json")
_SPACE = re.compile(r"[\s,]*")
_decoder = json.JSONDecoder()


def chats(path: Path) -> Iterator[Chat | str]:
    """Each chat of a file, or why one cannot be read. InvalidInputError, TooLargeError: the file's fault."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            yield from _chats(_Bounded(file))
        return
    try:
        with zipfile.ZipFile(path) as packed:
            names = [each for each in packed.namelist() if _NAMES.fullmatch(PurePosixPath(each).name)]
            if not names:
                raise InvalidInputError(
                    "this zip has no conversations.json: give the file that ChatGPT or Claude sent"
                )
            left = MOST_BYTES
            for name in sorted(names):
                with closing(packed.open(name)) as file:
                    source = _Bounded(file, left)
                    yield from _chats(source)
                    left = source.left
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError) as error:
        raise InvalidInputError(f"this zip cannot be read: {error}") from None


class _Bounded:
    """The text of a file, of which no more than so many bytes are read."""

    def __init__(self, file: IO[bytes], left: int = MOST_BYTES) -> None:
        self._file = file
        self.left = left
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.ended = False

    def read(self, size: int) -> str:
        data = self._file.read(size)
        self.left -= len(data)
        self.ended = not data
        if self.left < 0:
            raise TooLargeError(f"the chats have more than {MOST_BYTES} bytes", limit=MOST_BYTES)
        try:
            return self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError:
            raise InvalidInputError("this file is no export of chats: it is not UTF-8") from None


def _chats(source: _Bounded) -> Iterator[Chat | str]:
    for value in _values(source):
        chat = _chat(value)
        yield chat if chat is not None else "it is no chat of ChatGPT, Claude or Open WebUI"


def _chat(value: object) -> Chat | None:
    if not isinstance(value, dict):
        return None
    for read in (chatgpt.read, claude.read, open_webui.read):
        if (chat := read(value)) is not None:
            return chat
    return None


def _values(source: _Bounded) -> Iterator[Any]:
    """The values of a list, or the one that a file is."""
    buffer, at = source.read(_READ), 0
    at = _SPACE.match(buffer).end()  # type: ignore[union-attr]
    while at == len(buffer) and not source.ended:
        buffer, at = source.read(_READ), 0
        at = _SPACE.match(buffer).end()  # type: ignore[union-attr]
    is_list = buffer[at : at + 1] == "["
    at += is_list
    while True:
        at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
        if at < len(buffer) and buffer[at] == "]" and is_list:
            return
        try:
            value, end = _decoder.raw_decode(buffer, at)
        except RecursionError:
            raise InvalidInputError(
                "this file is no export of chats: its JSON is nested too deeply"
            ) from None
        except ValueError as error:
            if len(buffer) - at > MOST_CHARACTERS:
                raise TooLargeError(
                    f"a chat has more than {MOST_CHARACTERS} characters", limit=MOST_CHARACTERS
                ) from None
            # As much again, so that a long chat is not parsed too often.
            more = "" if source.ended else source.read(max(_READ, len(buffer) - at))
            if source.ended and not more:
                raise InvalidInputError(f"this file is no export of chats: {error}") from None
            buffer, at = buffer[at:] + more, 0
            continue
        yield value
        if not is_list:
            return
        at = end
