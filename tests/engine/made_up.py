"""An engine that is made up: it opens sources that start with `made-up:`, and runs them on the toy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Unpack

from perdure.engine.contract import LoadingKeywords, ModelInfo
from perdure.engine.model import EngineModel
from perdure.engine.registry import Engine, Finding, Source
from perdure.testing.toy import ToyModel

NAME = f"{__name__}:ENGINE"


class MadeUpModel(ToyModel):
    @property
    def info(self) -> ModelInfo:
        return replace(super().info, architecture="made-up", size_label="1", quantisation="none", nbytes=7)


class MadeUpEngine(Engine):
    name = "made-up"

    def opens(self, source: Source) -> bool:
        return str(source).startswith("made-up:")

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> EngineModel:
        return MadeUpModel(seed=len(source))

    def label(self, source: str) -> str:
        return source.partition(":")[2]

    def findings(self) -> Iterator[Finding]:
        yield Finding("engine", "ok", "made-up is here")


ENGINE = MadeUpEngine()
