"""What `perdure doctor` looks at: the database of sessions, and places where machines share state."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from perdure import InvalidInputError, PerdureError
from perdure.ext.cluster.places import open_place
from perdure.ext.cluster.postgres.place import place_in
from perdure.ext.cluster.postgres.store import PostgresStore
from perdure.ext.cluster.shared import writers
from perdure.spi.engine import Finding


def findings(folder: Path, blocks: Sequence[str]) -> Iterator[Finding]:
    """What `perdure doctor` says of a store's folder and of places for blocks."""
    yield from _database(folder)
    for url in blocks:
        yield from _place(url)


def _database(folder: Path) -> Iterator[Finding]:
    """The database of sessions, where the folder stands for one."""
    place = place_in(folder)
    if place is None:
        return
    try:
        began = time.perf_counter()
        store = PostgresStore(place, readonly=True)
        try:
            opened = time.perf_counter()
            store.list(limit=1)
            summary = (
                f"{place.shown} opened in {1e3 * (opened - began):.0f} ms, "
                f"asked in {1e3 * (time.perf_counter() - opened):.1f} ms"
            )
        finally:
            store.close()
        yield Finding("sessions", "ok", summary)
    except PerdureError as error:
        yield Finding(
            "sessions", "bad", str(error), "start the database, or look at the URL and its password"
        )


def _place(url: str) -> Iterator[Finding]:
    """A place where machines share state: an object is written, read and deleted there."""
    shown, name = url.split("?")[0].rpartition("@")[2], f"list-doctor-{secrets.token_hex(8)}"
    try:
        place, size, _ = open_place(url)
        with closing(place):
            began = time.perf_counter()
            place.put(name, b"x" * (1 << 20))
            written = time.perf_counter()
            whole = place.get(name, 1 << 20) == b"x" * (1 << 20)
            read = time.perf_counter()
            place.delete([name])
            engines = writers(place)
    except InvalidInputError:
        raise
    except Exception as error:
        yield Finding(
            "blocks", "bad", f"{shown}: {error}", "replicas go on without it; start it, or look at the URL"
        )
        return
    summary = (
        f"{shown}: 1 MiB written in {1e3 * (written - began):.0f} ms and read in "
        f"{1e3 * (read - written):.0f} ms; {size / (1 << 30):.1f} GiB at most"
    )
    if not whole:
        yield Finding("blocks", "bad", f"{summary}; what was read is not what was written")
    elif len(engines) > 1:
        yield Finding(
            "blocks",
            "warn",
            f"{summary}; {len(engines)} kinds of engines write there",
            "only machines with the same CPU variant, library, model and layers share state; tokens are "
            "shared by all",
        )
    else:
        yield Finding("blocks", "ok", summary)
