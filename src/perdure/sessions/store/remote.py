"""Session stores on a server, which extensions bring: a folder of this machine stands for each.

    sessions.url      postgresql://user@host/database?schema=perdure

The folder has the URL, without secrets, in that file, besides blocks of state and locks of this machine: it
is a store like any other, and every process that opens it finds the sessions on the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

from perdure.atomic import read_text, translate_os_errors
from perdure.errors import StoreError
from perdure.extension import by_name, imported
from perdure.sessions.store.base import SessionStore

FILE = "sessions.url"
"""In a folder that stands for a server's store: its URL, without secrets."""


class RemoteStore(ABC):
    """One kind of server. Every call may wait for it, and raise `StoreError`."""

    @abstractmethod
    def folder(self, url: str) -> Path:
        """The folder that stands for a URL on this machine, made where there is none."""

    @abstractmethod
    def open(self, folder: Path, *, readonly: bool) -> SessionStore: ...

    @abstractmethod
    def shown(self, folder: Path) -> str:
        """The URL without secrets."""

    @abstractmethod
    def key(self, folder: Path) -> bytes:
        """What encrypts the state that machines share: it is kept with the sessions."""

    @abstractmethod
    def key_store(self, folder: Path) -> AbstractContextManager[object]:
        """Keys of clients that are kept with the sessions: a `KeyStore` of the server."""

    @abstractmethod
    def backup_advice(self, folder: Path) -> str:
        """How an operator copies it."""


def remote_of_url(text: str) -> RemoteStore | None:
    """What opens a URL; None for what is no URL of a server."""
    scheme, colon, _ = text.partition("://")
    if not colon:
        return None
    reference = by_name("stores").get(scheme.lower())
    return None if reference is None else cast(RemoteStore, imported(reference))


def remote_of(folder: Path) -> RemoteStore | None:
    """What opens the store that a folder stands for; None for a folder that has its sessions in it."""
    url = url_in(folder)
    if url is None:
        return None
    remote = remote_of_url(url)
    if remote is None:
        raise StoreError(
            f"{folder} stands for {url.partition('?')[0]}, and no extension opens that: install the one that "
            "does, or choose another store"
        )
    return remote


def url_in(folder: Path) -> str | None:
    """The URL that a folder stands for, without secrets."""
    path = folder / FILE
    with translate_os_errors(path):
        try:
            return read_text(path, errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
