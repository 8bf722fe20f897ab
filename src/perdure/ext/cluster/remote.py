"""How the kernel reaches sessions in PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from perdure import StoreError
from perdure.ext.cluster.postgres.place import PostgresPlace, place_in, stand_in
from perdure.spi.sessions import RemoteStore

if TYPE_CHECKING:
    from perdure.ext.cluster.postgres.store import PostgresStore


class PostgresRemote(RemoteStore):
    """Sessions in schemas of PostgreSQL databases."""

    def folder(self, url: str) -> Path:
        return stand_in(url)

    def open(self, folder: Path, *, readonly: bool) -> PostgresStore:
        try:
            from perdure.ext.cluster.postgres.store import PostgresStore
        except ModuleNotFoundError as error:
            raise StoreError(
                f"sessions in PostgreSQL need {error.name}: pip install 'perdure[cluster]'"
            ) from None
        return PostgresStore(_place(folder), readonly=readonly)

    def shown(self, folder: Path) -> str:
        return _place(folder).shown

    def key(self, folder: Path) -> bytes:
        with closing(self.open(folder, readonly=False)) as store:
            assert store.key is not None
            return store.key

    @contextmanager
    def key_store(self, folder: Path) -> Iterator[object]:
        with closing(self.open(folder, readonly=False)) as store:
            yield store.key_store

    def backup_advice(self, folder: Path) -> str:
        return f"`pg_dump --schema={_place(folder).schema}` copies it there"


def _place(folder: Path) -> PostgresPlace:
    place = place_in(folder)
    if place is None:
        raise StoreError(f"{folder} stands for no database")
    return place


STORE = PostgresRemote()
