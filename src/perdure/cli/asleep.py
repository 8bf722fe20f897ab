"""The sessions of a store, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from perdure.config import settings
from perdure.errors import SessionError, StoreError
from perdure.sessions.session_store import SessionStore
from perdure.sessions.sessions import Sessions

if TYPE_CHECKING:
    from perdure.backend import Backend
    from perdure.chat.chat_format import ChatFormat


class Asleep(Sessions):
    """Sessions to read, fork, rewind, label and delete. Whatever takes an engine is refused."""

    def __init__(self, folder: Path, *, readonly: bool) -> None:
        super().__init__(cast("Backend", _NoEngine()), _no_chat_format, None)
        self.store.close()
        self.store = SessionStore(folder, readonly=readonly)


@contextmanager
def asleep(store: Path | None, *, readonly: bool, create: bool = False) -> Iterator[Asleep]:
    """The sessions in `store`, or in the one under `PERDURE_HOME`."""
    folder = place(store, create=create)
    sessions = Asleep(folder, readonly=readonly)
    try:
        yield sessions
    finally:
        sessions.close()


def place(store: Path | None, *, create: bool = False) -> Path:
    """The folder of the sessions. An error where there are none, unless they are to be created."""
    folder = store or settings().store
    if not create and not (folder / "sessions.sqlite").is_file():
        raise StoreError(
            f"there are no sessions in {folder}: `perdure chat --session NAME` starts one, "
            "`perdure sessions import FILE` brings one"
        )
    return folder


class _NoEngine:
    """Stands where an engine would be, and its cache: whatever is asked of them is refused."""

    @property
    def cache(self) -> _NoEngine:
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal()


def _no_chat_format() -> ChatFormat:
    raise _refusal()


def _refusal() -> SessionError:
    return SessionError("this takes a model, and none was loaded")
