"""MLX as one of the engines: folders with safetensors, as mlx-lm and Hugging Face have them.

Nothing of MLX is imported here: this module is asked about every source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from perdure.engine.contract import LoadingKeywords
from perdure.engine.registry import Agree, Bars, Engine, Finding, Source, no_bars
from perdure.errors import InvalidInputError, PerdureError

if TYPE_CHECKING:
    from perdure.engine.model import Model
    from perdure.models.card import Card


class MlxEngine(Engine):
    """Runs models in the format of mlx-lm."""

    name = "MLX"

    def opens(self, source: Source) -> bool:
        if source is None:
            return False
        try:
            path = Path(os.fspath(source)).expanduser()
            # Most sources are names and files: one look at the disk.
            if not path.is_dir():
                return False
        except (OSError, ValueError, RuntimeError, TypeError):
            return False
        from perdure.engine.mlx.folder import is_folder

        return is_folder(path)

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        from perdure.engine.mlx.packages import check_here

        check_here()
        # Absolute: this process may go elsewhere.
        return str(Path(str(source)).expanduser().absolute())

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> Model:
        from perdure.engine.mlx.packages import load

        for name, value in loading.items():
            if value not in (None, "auto") and not (name == "kv_offload" and value is True):
                raise InvalidInputError(
                    f"{name} is for llama.cpp; MLX computes where it chooses: leave it out"
                )
        load()
        from perdure.engine.mlx.model import MlxModel

        return MlxModel(source, progress=progress)

    def label(self, source: str) -> str:
        return Path(source).name

    def is_same(self, source: Source, path: str | None, digest: str) -> bool:
        if path is None or source is None:
            return False
        try:
            return Path(str(source)).expanduser().samefile(path)
        except OSError:
            return False

    def card(self, source: Source, bars: Bars = no_bars) -> tuple[Card, Mapping[str, Any]]:
        """From the files alone; only the kind of memory is asked of mlx-lm."""
        from perdure.engine.mlx.folder import read_folder
        from perdure.engine.mlx.packages import load

        folder = read_folder(Path(str(source)).expanduser().absolute())
        load()
        from perdure.engine.mlx.card import card_of

        return card_of(folder), dict(folder.config)

    def findings(self) -> Iterator[Finding]:
        from perdure.engine.mlx.packages import check_here, versions

        found = versions()
        if not any(found.values()):
            return
        try:
            check_here()
        except PerdureError as error:
            yield Finding("MLX", "warn", str(error), "pip install -U 'perdure[mlx]'")
            return
        yield Finding("MLX", "ok", ", ".join(f"{name} {each}" for name, each in found.items()))


ENGINE = MlxEngine()
