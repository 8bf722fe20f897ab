"""A replica for tests: it takes a session, says so, waits for a word, and commits a turn."""

from __future__ import annotations

import sys
from pathlib import Path

from perdure import Message, PerdureError, Turn
from perdure.sessions.store.registry import open_store


def main() -> None:
    store = open_store(Path(sys.argv[1]))
    session = store.find("a", "s")
    assert store.take(session)
    print("taken", flush=True)
    sys.stdin.readline()
    turn = Turn(kind="turn", messages=(Message(role="user", content="of the holder"),), before=session.digest)
    try:
        store.add(session, [turn], parent=session.head, expected=session.head)
        print("kept", flush=True)
    except PerdureError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    # And it has the session no more: whatever it tries next is refused too.
    try:
        store.delete(session)
        print("deleted", flush=True)
    except PerdureError as error:
        print(type(error).__name__, flush=True)


main()
