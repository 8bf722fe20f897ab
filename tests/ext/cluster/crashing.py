"""Kills processes at every statement that they send to PostgreSQL: `python crashing.py URL STEP [FAULT]`.

Every STEP-th statement, that is, BEGIN and COMMIT among them. Each point has a separate schema and a child
that is killed there. Another child then looks at what is left: all that was acknowledged, what was on its way
as a whole or not at all, and sessions that go on at once. `store/crashing.py` does the same to files.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg

from perdure import SessionError
from perdure.ext.cluster.postgres.place import stand_in
from perdure.sessions.sessions import Sessions

Seen = dict[str, list[str]]
"""What each session says, and where the memories are."""


def changes(sessions: Sessions) -> Iterator[str]:
    """One change after the other; a name for each when it is done."""
    alice = sessions.create("alice", system="Be terse.")
    yield "create"
    for text in ("one", "two", "three"):
        alice.append(text, read_ahead=False)
        yield text
    bob = alice.fork("bob", turn=1)
    yield "fork"
    bob.append("another way", read_ahead=False)
    yield "branch"
    alice.label("here", kind="fact", note="of some worth")
    yield "label"
    alice.rewind(1)
    yield "rewind"
    sessions.memories.wake("perdure://alice/3#here", "woken")
    yield "wake"
    sessions.delete("bob")
    yield "delete"


def seen(sessions: Sessions) -> Seen:
    found = {
        info.name: [str(each.content) for each in sessions.get(info.name).messages()]
        for info in sessions.list()
    }
    return {**found, "memories": [each.address for each in sessions.memories.search()]}


def in_child(work: Callable[[], None]) -> int:
    """How a child that does it ends: its status, or the signal as a negative number."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(point: int, fault: str) -> None:
    """Have this process killed before it sends statement number `point`."""
    execute, count = psycopg.Connection.execute, itertools.count()

    def counted(self: Any, query: Any, *values: Any, **options: Any) -> Any:
        if next(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "uncommitted" and query == "COMMIT":
            query = "ROLLBACK"
        return execute(self, query, *values, **options)

    psycopg.Connection.execute = counted  # type: ignore[method-assign]


def act(folder: Path, acknowledged: Path, point: int, fault: str) -> None:
    killed_at(point, fault)
    # Who is refused something has nothing more to tell.
    with (
        suppress(*([SessionError] if fault else [])),
        closing(Sessions(folder)) as sessions,
        acknowledged.open("ab", buffering=0) as out,
    ):
        for name in changes(sessions):
            out.write(f"{name}\n".encode())


def check(folder: Path, acknowledged: Path, states: list[Seen]) -> None:
    from perdure.ext.upkeep.store import verify

    done = len(acknowledged.read_text().splitlines()) if acknowledged.exists() else 0
    with closing(Sessions(folder)) as sessions:
        found = seen(sessions)
        assert found in states[done : done + 2], f"{done} were told, found {found}"
        for name in set(found) - {"memories"}:
            sessions.get(name).append("and on", read_ahead=False)
    assert verify(folder, lambda done, total: None).sound


def known_states() -> list[Seen]:
    """After each change, as SQLite has them in memory."""
    with closing(Sessions(None)) as sessions:
        return [seen(sessions), *(seen(sessions) for _ in changes(sessions))]


def crash(url: str, point: int, fault: str, states: list[Seen]) -> bool:
    """Whether a process was killed at that point, and what it left was looked at."""
    own = url.replace("schema=", f"schema=p{abs(point)}_").replace("%2Fown", f"%2F{abs(point)}")
    folder = stand_in(own)
    acknowledged = folder / "acknowledged"
    status = in_child(lambda: act(folder, acknowledged, point, fault))
    assert status in (0, -signal.SIGKILL), status
    assert not in_child(lambda: check(folder, acknowledged, states)), f"{point}: told, and not there"
    return bool(status)


def main() -> None:
    url, step, fault = sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:])
    states = known_states()
    points = range(3, 10_000, step) if not fault else [-1]
    print(sum(1 for _ in itertools.takewhile(lambda point: crash(url, point, fault, states), points)))


main()
