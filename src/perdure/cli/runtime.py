"""A runtime for a command: with a model that is loaded here, or through the process that has the store."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.cli.output import terminal
from perdure.config import settings
from perdure.engine_config import EngineConfig
from perdure.errors import StoreError, StoreLockedError

if TYPE_CHECKING:
    from perdure import Runtime
    from perdure.backend import Backend
    from perdure.engine.model import EngineModel
    from perdure.server.core.keys import KeyStore
    from perdure.sessions.sessions import Sessions
    from perdure.sessions.store.base import SessionStore


def opened(
    name: str | None,
    config: EngineConfig,
    *,
    store: Path | None = None,
    template: str | None = None,
    model: EngineModel | None = None,
) -> Runtime:
    """A runtime on the model of that name, or on `model`, which is loaded already.

    Without an `n_ctx` it has the usual room, or that of the process that has the store.
    """
    from perdure.backend import BlockStorage, LocalBackend
    from perdure.engine import registry
    from perdure.opening import Opening, open_runtime
    from perdure.sessions.store.registry import encryption_of

    storage = BlockStorage(folder=store, encryption=encryption_of(store))

    def build() -> Backend:
        resolved = config.resolved()
        own = model or terminal.load(name, cells=registry.cells(resolved), **resolved.loading)
        try:
            return LocalBackend(own, resolved, storage=storage, own_model=True)
        except BaseException:
            own.close()
            raise

    try:
        runtime = open_runtime(
            Opening(model=name, config=config, storage=storage), template=template, build=build
        )
    except StoreLockedError as error:
        raise StoreLockedError(_in_options(str(error))) from None
    holder = getattr(runtime.backend, "holder", None)
    if holder is not None:
        terminal.tell(f"Through {holder}, which has {store} open.")
    return runtime


def model_path(runtime: Runtime) -> Path:
    """The file of a runtime's model."""
    path = getattr(runtime.model, "path", None)
    return path if isinstance(path, Path) else Path("a model without a file")


_FETCHED_SOON = 3 * 10**9
"""Bytes of the model that is suggested first."""


def note_demo(runtime: Runtime) -> None:
    """After the first answer of the default model: that it is a demo, and which model is worth talking to.

    Once in a home: after that, the user knows what it is.
    """
    from perdure.models.finder import finder
    from perdure.models.registry import DEFAULT, MODELS

    marker = settings().home / "demo-told"
    if model_path(runtime).name != MODELS[DEFAULT].file or marker.exists():
        return
    small, best = finder().recommended(most=_FETCHED_SOON), finder().recommended()
    advice = "`perdure models` lists others"
    if small is not None:
        fetched = f"{small.size / 1e9:.1f} GB to fetch"
        advice = f"`perdure run -m {small.name} PROMPT` asks a good one ({fetched}), {advice}"
    if best is not None and best is not small:
        advice += f"; the best that fits here is {best.name} ({best.size / 1e9:.1f} GB)"
    terminal.note(f"this was the demo model, SmolLM2 135M: quick, small and often wrong. {advice}")
    with suppress(OSError):
        marker.touch()


def _in_options(text: str) -> str:
    """What the library says about a store in use, in the words of the command."""
    return text.replace(
        "choose another store, or open this one for reading", "choose another one by --store"
    ).replace("choose another store", "choose another store by --store")


# The folder in which the commands keep sessions.


def sessions_in(store: Path | None, *, readonly: bool, create: bool = False) -> Sessions:
    """The sessions in `store`, or in the one under `PERDURE_HOME`, without a model."""
    from perdure.sessions.sessions import Sessions

    return Sessions(session_folder(store, create=create), readonly=readonly)


@contextmanager
def session_store_in(store: Path | None) -> Iterator[SessionStore]:
    """Where those sessions are listed. To read it takes neither the engine nor the chat."""
    from perdure.sessions.store.registry import open_store

    session_store = open_store(session_folder(store), readonly=True)
    try:
        yield session_store
    finally:
        session_store.close()


def usual_store() -> Path:
    """The folder of the sessions where none is named, or the one that stands for the database of the config
    file."""
    from perdure.sessions.store.registry import store_folder

    now = settings()
    return now.store if now.database is None else store_folder(now.database)


def session_folder(store: Path | None, *, create: bool = False) -> Path:
    """The folder of the sessions. An error where there are none, unless they are to be created."""
    from perdure.sessions.store.registry import has_sessions

    folder = store or usual_store()
    if not create and not has_sessions(folder):
        there = f" --store {shlex.quote(str(store))}" if store is not None else ""
        raise StoreError(
            f"there are no sessions in {folder}: `perdure chat --session NAME{there}` starts one, "
            f"`perdure sessions import FILE{there}` brings one"
        )
    return folder


@contextmanager
def shared_keys(folder: Path | None) -> Iterator[KeyStore | None]:
    """The keys that are kept with the sessions of a server; None where a folder has its sessions in it."""
    from perdure.server.core.keys import KeyStore
    from perdure.sessions.store.remote import remote_of

    remote = remote_of(folder) if folder is not None else None
    if folder is None or remote is None:
        yield None
        return
    with remote.key_store(folder) as store:
        assert isinstance(store, KeyStore)
        yield store


def keys_in(folder: Path | None) -> int:
    """How many keys are kept with the sessions, for several servers."""
    with shared_keys(folder) as store:
        return 0 if store is None else len(store.keys())
