"""llama.cpp as one of the engines: GGUF files, by path, name or address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from perdure import models
from perdure.config import settings
from perdure.engine import advice
from perdure.engine.contract import LoadingKeywords
from perdure.engine.model import EngineModel
from perdure.engine.registry import Agree, Bars, Engine, Finding, Source, is_gguf, no_bars
from perdure.errors import ModelError
from perdure.extension import optional_part
from perdure.identity import content_digest
from perdure.models.local_models import locate
from perdure.models.placement import Sizes
from perdure.models.registry import DEFAULT

if TYPE_CHECKING:
    from perdure.models.card import Card


class LlamaEngine(Engine):
    """Runs GGUF models on llama.cpp. The library is fetched with the first of them."""

    name = "llama.cpp"

    def opens(self, source: Source) -> bool:
        return source is None or is_gguf(source) or models.names_model(str(source))

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        from perdure.engine.llama.native.choice import find_library

        if models.is_here(source):
            # Errors in a model file are reported before a library is fetched for it.
            models.path(source)
        with bars("the engine") as progress:
            find_library(progress, agree)
        with bars(str(source or "the default model")) as progress:
            # Absolute: this process may go elsewhere.
            return str(models.path(source, progress).absolute())

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> EngineModel:
        from perdure.engine.llama.model import Model as LlamaModel

        chosen = settings()
        if (
            loading.get("gpu_layers") is None
            and loading.get("cpu_experts") is None
            and chosen.gpu_layers == chosen.cpu_experts == "auto"
        ):
            loading |= advice.loading(lambda: _digest(Path(source)))
        return LlamaModel(source, cells=cells, progress=progress, **loading)

    def label(self, source: str) -> str:
        path, chosen = Path(source), settings()
        theirs = (*chosen.ollama_models, *chosen.lm_studio_models)
        if path.is_absolute() and any(map(path.is_relative_to, theirs)):
            from perdure.models.finder import finder

            # A blob of Ollama's has its digest for a name.
            return finder().name_of(path) or path.stem
        return path.stem

    def is_same(self, source: Source, path: str | None, digest: str) -> bool:
        name = source or settings().model
        if name is None:
            return True
        if path is None:
            return False
        try:
            here = locate(models.resolve(name))
            files = [part.path for part in models.read_parts(here)] if here is not None else []
        except ModelError:
            return False
        if not files or files[0].samefile(path):
            return bool(files)
        # The same bytes in another place. Hashing takes a while, so only where the size agrees.
        if files[0].stat().st_size != Path(path).stat().st_size:
            return False
        return _digest(files[0]) == digest

    def is_copy(self, source: str, other: str) -> bool:
        first, second = Path(source), Path(other)
        try:
            # Hashing takes a while, so only where the size agrees.
            return first.stat().st_size == second.stat().st_size and _digest(first) == _digest(second)
        except (OSError, ModelError):
            return source == other

    def build(self) -> str:
        from perdure.engine.llama.native.choice import choose
        from perdure.engine.llama.native.probe_results import key_of

        return key_of(choose().source)

    def sizes(self, source: Source) -> Sizes | None:
        here = locate(models.resolve(source or settings().model or DEFAULT))
        return None if here is None else Sizes.of(models.read_parts(here))

    def card(self, source: Source, bars: Bars = no_bars) -> tuple[Card, Mapping[str, Any]]:
        with bars(str(source or "the default model")) as progress:
            headers = models.read_parts(models.path(source, progress))
        return models.card_of(headers), headers[0].metadata

    def findings(self) -> Iterator[Finding]:
        findings = optional_part("findings of llama.cpp")
        return iter(()) if findings is None else cast(Iterator[Finding], findings())


def _digest(path: Path) -> str:
    """The identity of a model, over all of its files."""
    return "+".join(content_digest(part.path) for part in models.read_parts(path))


ENGINE = LlamaEngine()
