"""Models that a function makes: the source is "module:function"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Unpack, cast

from perdure.engine.contract import LoadingKeywords
from perdure.engine.model import EngineModel
from perdure.engine.registry import Engine, Finding, Source
from perdure.extension import imported


class FactoryEngine(Engine):
    """Models that a function makes: the source is "module:function"."""

    name = "factory"
    _PATTERN = re.compile(r"(?!hf:|ollama:|lmstudio:)[A-Za-z_]\w*(\.\w+)*:(?!latest$)[A-Za-z_]\w*")

    def opens(self, source: Source) -> bool:
        if not isinstance(source, str) or self._PATTERN.fullmatch(source) is None:
            return False
        from perdure.models.finder import finder

        # `gemma4:e4b` is a model's name.
        return finder().listed(source) is None

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> EngineModel:
        return cast("EngineModel", imported(source, "function that makes a model")())

    def findings(self) -> Iterator[Finding]:
        return iter(())


FACTORY = FactoryEngine()
