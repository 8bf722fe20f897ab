"""Opens sources such as `stranger:bird`, with the toy model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from perdure.spi.engine import Engine, EngineModel, LoadingKeywords, Source
from perdure.spi.testing import ToyModel


class StrangerEngine(Engine):
    name = "stranger"

    def opens(self, source: Source) -> bool:
        return str(source).startswith("stranger:")

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> EngineModel:
        return ToyModel(seed=len(source), reply_tokens=8)

    def label(self, source: str) -> str:
        return source.partition(":")[2]


ENGINE = StrangerEngine()
