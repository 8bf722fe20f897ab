"""Folder watch: looks into the folders of `serve --model FOLDER` every two seconds.

a file came, and is as large as two seconds before   it is served
it cannot be read as a model, or its name is taken   the log says why, once; the others are served
a file went, or there is another one in its place    its model is let go once nobody uses it
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from perdure import PerdureError
from perdure.spi.runtime import BackgroundThread
from perdure.spi.server import PooledModel, ServerState, model_files, spec_of_file

log = logging.getLogger("perdure.pool")


class _Stamp(NamedTuple):
    """What tells one file from another at its place."""

    size: int
    modified: int
    number: int


class FolderWatch:
    """Keeps the models of a server as the files of its folders are.

    Always holds: what is wrong with one file costs the others nothing, and is logged once for that file. A
    model goes between two requests. The first one stays, as requests that name none mean it.
    """

    EVERY = 2.0

    def __init__(self, server: ServerState, folders: Sequence[Path], *, template: str | None = None) -> None:
        """`template` is for models that are added."""
        self._server = server
        self._folders = [folder.absolute() for folder in folders]
        self._template = template
        self._before = self._stamps()
        served = {Path(model.source).absolute(): model for model in server.models.pooled}
        self._models: dict[Path, tuple[PooledModel, _Stamp]] = {
            path: (served[path], stamp) for path, stamp in self._before.items() if path in served
        }
        """The models that are served from here, each with its file as it was then."""
        self._told: dict[Path, str] = {}
        self._ended = threading.Event()
        self._thread = BackgroundThread(self._run, name="perdure-folders", restart=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Take in what has come since the last look, and let go what is not there any more."""
        before, now = self._before, self._stamps()
        self._before = now
        for path, (model, stamp) in list(self._models.items()):
            if now.get(path) != stamp:
                self._let_go(path, model, gone=path not in now)
        for path in self._told.keys() - now.keys():
            del self._told[path]
        for path, stamp in now.items():
            # One that grows is still being written.
            if path not in self._models and before.get(path) == stamp:
                self._take_in(path, stamp)

    def _run(self) -> None:
        while not self._ended.wait(self.EVERY):
            self.look()

    def _stamps(self) -> dict[Path, _Stamp]:
        """The first file of each model that is there."""
        found: dict[Path, _Stamp] = {}
        for folder in self._folders:
            for path in model_files(folder):
                # A file may go while it is looked at.
                with suppress(OSError):
                    about = path.stat()
                    found[path] = _Stamp(about.st_size, about.st_mtime_ns, about.st_ino)
        return found

    def _take_in(self, path: Path, stamp: _Stamp) -> None:
        try:
            spec = replace(spec_of_file(path, path.parent), template=self._template)
            model = self._server.models.add(spec)
        except PerdureError as error:
            self._tell(path, f"is left out: {error}")
            return
        if any(each is model for each, _ in self._models.values()) or model.source != str(path):
            self._tell(path, f"is left out: it is a copy of {model.source}")
            return
        self._models[path] = (model, stamp)
        self._told.pop(path, None)
        log.info("model %s is served from now on, from %s", model.name, path)

    def _let_go(self, path: Path, model: PooledModel, *, gone: bool) -> None:
        pool = self._server.models.pool
        assert pool is not None
        if pool.remove(model):
            del self._models[path]
            log.info(
                "model %s is not served any more: %s",
                model.name,
                "its file is gone" if gone else "its file changed",
            )
        elif model is pool.default:
            self._tell(path, f"is gone or changed; {model.name} is the first model and stays until a restart")

    def _tell(self, path: Path, what: str) -> None:
        if self._told.get(path) != what:
            self._told[path] = what
            log.warning("%s %s", path, what)
