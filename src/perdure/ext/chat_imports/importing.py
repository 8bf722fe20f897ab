"""Importing: sessions made of chats, the branches of one chat in one tree.

Always holds: a chat that came before is not imported again; a session is made whole or not at all; a chat
that cannot be taken is named with the reason, and the others come all the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure import PerdureError, SessionExistsError, StoreError
from perdure.ext.chat_imports.chat import Chat
from perdure.ext.chat_imports.export_file import chats
from perdure.spi.sessions import Sessions, Turn

MOST_CHATS = 20_000
"""Of one file."""
_NAMED = 50
"""Chats that are left out and named; of more, their number."""
_TITLE = 200
_WORDS = re.compile(r"[^\W_]+")
_TRIES = 1000


@dataclass(slots=True)
class ImportedChats:
    """What came of a file."""

    names: list[str] = field(default_factory=list)
    """The sessions of the branches that were open."""
    branches: int = 0
    """Sessions of other branches."""
    turns: int = 0
    known: int = 0
    """Chats that had been imported before."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """Chats that were not taken, by their titles, with the reasons."""
    not_named: int = 0
    """Further ones."""

    def leave(self, title: str, why: str) -> None:
        if len(self.left_out) < _NAMED:
            self.left_out.append((title, why))
        else:
            self.not_named += 1


def import_chats(sessions: Sessions, path: Path, *, namespace: str = "") -> ImportedChats:
    """Make sessions of all chats in a file."""
    made = ImportedChats()
    known = {str(info.origin.get("chat")) for info in sessions.list(namespace) if info.origin.get("chat")}
    for count, chat in enumerate(chats(path)):
        if count >= MOST_CHATS:
            made.leave("further chats", f"{MOST_CHATS} are read of one file")
            break
        if isinstance(chat, str):
            made.leave(f"chat {count + 1}", chat)
            continue
        mark = f"{chat.source} {chat.id}"[:_TITLE]
        if chat.id and mark in known:
            made.known += 1
            continue
        try:
            _import(sessions, chat, mark, namespace, made)
        except StoreError:
            # No room: the next one would not fit either.
            raise
        except PerdureError as error:
            made.leave(chat.title[:_TITLE] or f"chat {count + 1}", str(error))
        known.add(mark)
    return made


def _import(sessions: Sessions, chat: Chat, mark: str, namespace: str, made: ImportedChats) -> None:
    branches = chat.branches()
    if not branches:
        made.leave(chat.title[:_TITLE] or "a chat", "nothing was said in it")
        return
    title = _title(chat.title, branches[0])
    origin: dict[str, object] = {
        "how": "import",
        "session": chat.source,
        "chat": mark,
        "title": title,
        "folder": chat.source,
    }
    names: list[str] = []
    for turns in branches:
        origin["turn"] = len(turns) - 1
        if not names:
            names.append(_create(sessions, namespace, _slug(title), "-", turns, origin))
            made.names.append(names[0])
            made.turns += len(turns) - 1
            continue
        shared, source = max((_shared(turns, other), at) for at, other in enumerate(branches[: len(names)]))
        place = sessions.get(names[source], namespace).standing(shared - 1).place
        branch = {**origin, "how": "fork", "session": names[source], "turn": shared - 1}
        rest = turns[shared:]
        names.append(
            _create(sessions, namespace, names[0], "~", rest, branch, head=place.head, digest=place.digest)
        )
        made.branches += 1
        made.turns += len(rest)


def _shared(turns: Sequence[Turn], other: Sequence[Turn]) -> int:
    """How many turns two branches begin with in common, what stands before the first among them."""
    for at, (one, two) in enumerate(zip(turns, other, strict=False)):
        if one.digest != two.digest:
            return at
    return min(len(turns), len(other))


def _create(
    sessions: Sessions,
    namespace: str,
    base: str,
    mark: str,
    turns: Sequence[Turn],
    origin: dict[str, object],
    **place: object,
) -> str:
    """A session under the first free name: the base itself, or with a number from 2 on behind it."""
    for at in range(1 if mark == "-" else 2, _TRIES):
        name = base if at == 1 else f"{base}{mark}{at}"
        try:
            sessions.store.create(namespace, name, turns, origin=origin, **place)  # type: ignore[arg-type]
            return name
        except SessionExistsError:
            continue
    raise SessionExistsError(f"{_TRIES} sessions are called {base!r} with a number: rename or delete some")


def _title(title: str, turns: Sequence[Turn]) -> str:
    said = [message.content or "" for turn in turns[1:] for message in turn.messages]
    text = title or (said[0] if said else "")
    line = " ".join(text.split())[:_TITLE]
    return line if title or len(line) <= 60 else f"{line[:59]}…"


def _slug(title: str) -> str:
    return "-".join(_WORDS.findall(title.lower())[:6])[:48] or "chat"
