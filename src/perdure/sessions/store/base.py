"""The session store: the calls between sessions and the place where they are durable.

    create find has list                sessions, by namespace and name
    put record expired                  records, by namespace, kind and name
    pend pending                        the turn that a session is asked, until it is answered
    add move note delete head           a change of one session; where it stands
    read start page nbytes tree         its turns, each proved by its digest
    label memories locate forget        labelled turns
    keep_file file                      images that turns name
    take release                        one turn at a time, over all processes
    limit sizes                         what a namespace may store, and what it stores
    transfers close

Who may call: any thread, any number at once. What may wait: every call may wait for a disk or a network, so
none is made on an event loop; a change waits for the change before it; a search (`text`) waits for another
search of its namespace, and for nothing else; nothing waits for a model. What a failure means: a change that
raises did not happen, none of it. Errors are those of `perdure.errors`:

    SessionNotFoundError    it is not there, or it was deleted: a number never names anything else
    SessionExistsError      the name is taken
    SessionError            the session does not stand where the caller believes, or another has taken it over
    QuotaError              the namespace may not store that much
    InvalidInputError       what is given could not be read again, so it is not written
    CorruptStateError       what lies there is not what was written
    StoreError              the store cannot be reached, is full, or may not be written

Namespaces never see each other. Whatever is accepted reads back as it was. A turn is written once and never
changes; numbers of sessions, turns and memories are never given out again.

Leases: `take` has a session for one turn or change, `release` ends that. A store whose processes can lose
touch with it gives a lease that runs out, with a fencing token: it counts up with every `take`, the store
remembers the token of its lease, and `add`, `move` and `delete` compare it inside their transaction. A
holder that slept through its lease is refused with `SessionError`, and nothing is written. Where locks are
the system's and end with the process, no token is needed.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from perdure.sessions.history import TurnPage, TurnReference
from perdure.sessions.info import NamespaceSize, Noted, Quota, Record, SessionInfo, SessionMemory
from perdure.sessions.tree import Tree
from perdure.sessions.turn import FIRST, Turn


class SessionStore(Protocol):
    """Where sessions are durable."""

    readonly: bool
    is_shared: bool
    """Whether other processes may change what is in it."""
    key: bytes | None
    """What signs exports, so that the state in them is known again. None where it may not be made."""

    @property
    def key_store(self) -> object:
        """Where keys of clients are kept with the sessions, a `KeyStore` of the server; None for nowhere."""
        return None

    # Sessions.

    def create(
        self,
        namespace: str,
        name: str,
        turns: Sequence[Turn] = (),
        *,
        head: int | None = None,
        digest: bytes = FIRST,
        kind: str = "session",
        settings: Mapping[str, Any] | None = None,
        origin: Mapping[str, Any] | None = None,
        replaces: SessionInfo | None = None,
    ) -> SessionInfo:
        """A new session: at turn number `head`, which has that digest, followed by turns that are not there
        yet. With `replaces`, that session goes in the same moment."""
        ...

    def find(self, namespace: str, name: str) -> SessionInfo:
        """The session of that name as it is now, or else the stored response."""
        ...

    def has(self, namespace: str, name: str) -> bool: ...

    def list(
        self,
        namespace: str | None = None,
        *,
        limit: int | None = None,
        after: SessionInfo | None = None,
        text: str | None = None,
    ) -> list[SessionInfo]:
        """The latest first: those of a namespace or all, up to `limit`, of those that come behind `after`.
        With `text`, those that have it in their names or in what was said."""
        ...

    # Records. A stored response is made by `create`, and changed as a session is.

    def put(self, namespace: str, kind: str, name: str, body: Mapping[str, Any]) -> Record:
        """A new record that stands at no turn. `take`, `release` and `delete` are as for sessions."""
        ...

    def record(self, namespace: str, kind: str, name: str) -> Record:
        """The record of that name as it is now; of a stored response, a `SessionInfo`."""
        ...

    def expired(
        self, before: float, *, limit: int, kind: str, namespace: str | None = None
    ) -> builtins.list[tuple[str, str]]:
        """Namespaces and names of records of a kind, last changed before a time, the oldest first: of one
        namespace, or of all."""
        ...

    # Pending turns. A session that moves on, by `add` or `move`, or goes, has none any more.

    def pend(self, session: SessionInfo, body: Mapping[str, Any] | None) -> Record | None:
        """Write down the turn that a session is asked, in the place of the one that was; None forgets it. It
        counts, and no quota refuses it. Refused where the session was taken over."""
        ...

    def pending(self, session: SessionInfo) -> Record | None:
        """The turn that was asked of a session and is no part of it yet."""
        ...

    def add(
        self,
        session: SessionInfo,
        turns: Sequence[Turn],
        *,
        parent: int,
        expected: int,
        follower: SessionInfo | None = None,
    ) -> Sequence[int]:
        """Make turns the latest of a session, behind turn number `parent`; their numbers. Refused where the
        session does not stand at turn number `expected`. A `follower` that stands there too goes along."""
        ...

    def move(self, session: SessionInfo, head: int, *, digest: bytes, expected: int) -> None:
        """Let a session stand at another turn, which has that digest. Refused as `add` is."""
        ...

    def note(self, record: Noted, origin: Mapping[str, Any], *, bounded: bool = True) -> Noted:
        """Write down something else of where a session comes from, or of what a record says. What is not
        `bounded` counts, but no quota refuses it."""
        ...

    def delete(self, session: Record) -> None:
        """Forget a session or a record, and the turns to which nothing else leads."""
        ...

    def head(self, session: SessionInfo) -> tuple[int, bool]:
        """The number of the turn at which that very session stands now, also if another process moved it; and
        whether it has a pending turn."""
        ...

    # Turns.

    def read(self, reference: TurnReference, count: int, name: str) -> TurnPage:
        """That turn and those before it, up to `count`, each proved by the digest of the next. `name` is
        whose they are, for errors."""
        ...

    def start(self, head: int, name: str) -> Turn:
        """The first turn of the session that stands at `head`."""
        ...

    def page(
        self, head: int, name: str, *, after: int, limit: int | None = None, nbytes: int | None = None
    ) -> builtins.list[Turn]:
        """The turns that lead to `head`, from depth `after` + 1 on: up to `limit` of them, and as many as
        are in `nbytes` together, but one at least. No others are in memory meanwhile."""
        ...

    def nbytes(self, head: int) -> int:
        """What the turns that lead to `head` take."""
        ...

    def tree(self, session: SessionInfo, *, limit: int, after: str | None = None) -> Tree:
        """The tree that a session is a branch of: up to `limit` turns, behind the one with the id `after`.
        Sessions and memories come with the first of them."""
        ...

    # Files that turns name: the images of messages, as they were sent. One goes with the last turn that names
    # it, and counts in what its namespace stores.

    def keep_file(self, namespace: str, digest: str, data: bytes) -> None:
        """Have a file, before a turn names it by its SHA-256 in hex. `data` may be encrypted."""
        ...

    def file(self, namespace: str, digest: str) -> bytes | None:
        """What `keep_file` was given; None where it is gone or damaged."""
        ...

    # Memories.

    def label(
        self, session: SessionInfo, at: TurnReference, label: str, kind: str, note: str
    ) -> SessionMemory:
        """Remember a turn of a session, in the place of what had that label there."""
        ...

    def memories(
        self,
        namespace: str,
        *,
        label: str | None = None,
        kind: str | None = None,
        session: str | None = None,
        turn: int | None = None,
        text: str | None = None,
        limit: int | None = None,
        after: int = 0,
    ) -> builtins.list[SessionMemory]:
        """Those that fit everything given, the oldest first: up to `limit`, behind number `after`. `text` is
        looked for in notes and in what was said."""
        ...

    def locate(self, memory: SessionMemory) -> TurnReference:
        """The turn that was remembered, after proving all that led to it."""
        ...

    def forget(self, memory: SessionMemory) -> None: ...

    # One at a time.

    def take(self, session: Record) -> bool:
        """Have a session for a turn or a change; False where another process, or another runtime of this
        one, has it. Within a runtime, sessions see to that themselves."""
        ...

    def release(self, session: Record) -> None:
        """End what `take` began. One that was not taken, or was lost, is no error."""
        ...

    # The whole.

    def limit(self, namespace: str, quota: Quota | None) -> None:
        """What a namespace may store from now on, by this process; None lifts the bound."""
        ...

    def sizes(self) -> builtins.list[NamespaceSize]:
        """What every namespace that has sessions stores, by its name."""
        ...

    def own_folder(self) -> Path | None:
        """The folder that the store has on this machine; None where it has none, or may not be written."""
        ...

    def transfers(self) -> Path | None:
        """The folder for files on their way in or out; None where the store has none, or may not be
        written."""
        ...

    def close(self) -> None: ...
