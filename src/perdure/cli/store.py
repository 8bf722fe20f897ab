"""The folder in which the commands keep sessions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.config import settings
from perdure.errors import StoreError
from perdure.sessions.store.registry import has_sessions

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions
    from perdure.sessions.store.base import SessionStore


def sessions_in(store: Path | None, *, readonly: bool, create: bool = False) -> Sessions:
    """The sessions in `store`, or in the one under `PERDURE_HOME`, without a model."""
    from perdure.sessions.sessions import Sessions

    return Sessions(session_folder(store, create=create), readonly=readonly)


@contextmanager
def session_store_in(store: Path | None) -> Iterator[SessionStore]:
    """Where those sessions are listed. To read it takes neither the engine nor the chat."""
    from perdure.sessions.store.registry import open_store

    found = open_store(session_folder(store), readonly=True)
    try:
        yield found
    finally:
        found.close()


def session_folder(store: Path | None, *, create: bool = False) -> Path:
    """The folder of the sessions. An error where there are none, unless they are to be created."""
    folder = store or settings().store
    if not create and not has_sessions(folder):
        there = f" --store {shlex.quote(str(store))}" if store is not None else ""
        raise StoreError(
            f"there are no sessions in {folder}: `perdure chat --session NAME{there}` starts one, "
            f"`perdure sessions import FILE{there}` brings one"
        )
    return folder
