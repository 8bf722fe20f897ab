"""Table check: whether rows of a store can be missed, found out while it is used."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from perdure.errors import StoreError
from perdure.events.background import BackgroundThread
from perdure.store.index import Index


class TableCheck:
    """Whether every row of some tables is found through each of their indexes.

    It takes longer the more rows there are, so opening a store does not wait for it. A caller that relies on
    a row not being there waits: what is found proves itself, what is missed does not.
    """

    def __init__(self, index: Index, tables: Sequence[str]) -> None:
        self._index = index
        self._tables = tables
        self._reader = index.connect_reader()
        self._done = threading.Event()
        self._error: StoreError | None = None
        self._thread: threading.Thread | None = None
        if self._reader is None or index.created:
            # What nobody wrote to a disk was not damaged there.
            self._done.set()
            return
        self._thread = BackgroundThread(self._run, name="perdure-check")
        self._thread.start()

    def wait(self) -> None:
        """Return once all tables were found sound; raise where one is damaged."""
        self._done.wait()
        self.refuse_damaged()

    def refuse_damaged(self) -> None:
        """Raise where damage is known already."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        if self._thread is not None and self._reader is not None:
            while self._thread.is_alive():
                self._reader.interrupt()
                self._thread.join(0.01)
        if self._reader is not None:
            self._reader.close()

    def _run(self) -> None:
        try:
            for table in self._tables:
                self._index.check(table, self._reader)
        except StoreError as error:
            self._error = error
        except BaseException as error:
            # What was not checked is not taken for sound.
            self._error = StoreError(f"the tables could not be checked: {error!r}")
            raise
        finally:
            self._done.set()
