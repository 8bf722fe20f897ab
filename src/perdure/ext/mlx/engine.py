"""MLX as one of the engines: folders with safetensors, as mlx-lm and Hugging Face have them.

Nothing of MLX is imported here: this module is asked about every source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from perdure import InvalidInputError, PerdureError
from perdure.spi.base import settings
from perdure.spi.engine import Agree, Bars, Engine, Finding, LoadingKeywords, Source, no_bars

if TYPE_CHECKING:
    from perdure.spi.engine import EngineModel
    from perdure.spi.models import Card, Sizes


_REPO = re.compile(r"(?:hf:)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.-]+)?")
"""A repository of a hub."""


class MlxEngine(Engine):
    """Runs models in the format of mlx-lm."""

    name = "MLX"

    def opens(self, source: Source) -> bool:
        return source is not None and _place(source) is not None

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        from perdure.ext.mlx.packages import check_here

        check_here()
        # Absolute: this process may go elsewhere.
        return str(_found(source).absolute())

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> EngineModel:
        from perdure.ext.mlx.packages import load

        for name, value in loading.items():
            if value not in (None, "auto", 0) and not (name == "kv_offload" and value is True):
                raise InvalidInputError(
                    f"{name} is for llama.cpp; MLX computes where it chooses: leave it out"
                )
        load()
        from perdure.ext.mlx.model import MlxModel

        return MlxModel(source, progress=progress)

    def label(self, source: str) -> str:
        return Path(source).name

    def is_same(self, source: Source, path: str | None, digest: str) -> bool:
        if path is None or source is None:
            return False
        try:
            return _found(source).samefile(path)
        except OSError:
            return False

    def is_copy(self, source: str, other: str) -> bool:
        from perdure.ext.mlx.folder import read_folder

        try:
            first, second = read_folder(Path(source)), read_folder(Path(other))
            return first.nbytes == second.nbytes and first.digest() == second.digest()
        except (OSError, PerdureError):
            return source == other

    def sizes(self, source: Source) -> Sizes:
        from perdure.ext.mlx.figures import sizes_of
        from perdure.ext.mlx.folder import read_folder

        return sizes_of(read_folder(_found(source).absolute()))

    def card(self, source: Source, bars: Bars = no_bars) -> tuple[Card, Mapping[str, Any]]:
        """From the files alone; only the kind of memory is asked of mlx-lm."""
        from perdure.ext.mlx.folder import read_folder
        from perdure.ext.mlx.packages import load

        folder = read_folder(_found(source).absolute())
        load()
        from perdure.ext.mlx.figures import card_of

        return card_of(folder), dict(folder.config)

    def findings(self) -> Iterator[Finding]:
        from perdure.ext.mlx.packages import check_here, versions

        installed = versions()
        if not any(installed.values()):
            return
        try:
            check_here()
        except PerdureError as error:
            yield Finding("MLX", "warn", str(error), "pip install -U 'perdure[mlx]'")
            return
        yield Finding("MLX", "ok", ", ".join(f"{name} {each}" for name, each in installed.items()))


def _place(source: Source) -> Path | None:
    """The folder that is meant: one on this machine, or one that `perdure pull owner/repo` fetched."""
    from perdure.ext.mlx.folder import is_folder

    try:
        path = Path(os.fspath(source or "")).expanduser()
        # Most sources are names and files: one look at the disk.
        if not path.is_dir():
            if not isinstance(source, str) or _REPO.fullmatch(source) is None:
                return None
            path = settings().models / "hub" / source.removeprefix("hf:")
    except (OSError, ValueError, RuntimeError, TypeError):
        return None
    return path if is_folder(path) else None


def _found(source: Source) -> Path:
    """The same; what is no folder keeps its name, so that an error can name it."""
    return _place(source) or Path(str(source)).expanduser()


ENGINE = MlxEngine()
