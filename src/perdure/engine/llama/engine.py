"""llama.cpp as one of the engines: GGUF files, by path, name or address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from perdure import models
from perdure.config import settings
from perdure.engine.contract import LoadingKeywords
from perdure.engine.llama.offload import count_experts
from perdure.engine.model import Model
from perdure.engine.registry import Agree, Bars, Engine, Finding, Source, no_bars
from perdure.engine.tuning import recall_place
from perdure.errors import ModelError
from perdure.identity import content_digest
from perdure.models import other_programs
from perdure.models.card import ASSISTANTS, Card
from perdure.models.fit import FitConstraints, Room, Sizes, propose
from perdure.models.local_models import locate
from perdure.models.registry import DEFAULT


class LlamaEngine(Engine):
    """Runs GGUF models on llama.cpp. The library is fetched with the first of them."""

    name = "llama.cpp"

    def opens(self, source: Source) -> bool:
        if source is None or models.names_model(str(source)):
            return True
        try:
            with open(Path(source).expanduser(), "rb") as file:
                return file.read(4) == b"GGUF"
        except (OSError, ValueError, RuntimeError):
            return False

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        from perdure.engine.llama.native.source import find_library

        if models.is_here(source):
            # What is wrong with a file is told before a library is fetched for it.
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
    ) -> Model:
        from perdure.engine.llama.model import Model as LlamaModel

        chosen = settings()
        if (
            loading.get("gpu_layers") is None
            and loading.get("cpu_experts") is None
            and chosen.gpu_layers == chosen.cpu_experts == "auto"
        ):
            loading |= recall_place(lambda: _digest(Path(source)))
        return LlamaModel(source, cells=cells, progress=progress, **loading)

    def label(self, source: str) -> str:
        # A blob of Ollama's has its digest for a name.
        return other_programs.name_of(Path(source)) or Path(source).stem

    def is_assistant(self, source: str) -> bool:
        return models.read_header(source).text("general.architecture") in ASSISTANTS

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

    def memory_needed(
        self, source: Source, room: Room, settings: Mapping[str, Any], loading: Mapping[str, Any]
    ) -> tuple[int, int]:
        """From the header of its file, as `perdure.fit` predicts it."""
        here = locate(models.resolve(source or _default_model()))
        if here is None:
            return 0, 0
        sizes = Sizes.of(models.read_parts(here))
        layers, experts = loading.get("gpu_layers", "auto"), loading.get("cpu_experts", "auto")
        constraints = FitConstraints.of(
            settings,
            gpu_layers=None if layers == "auto" else layers,
            cpu_experts=None if experts == "auto" else count_experts(experts, sizes),
        )
        fit = propose(str(source), sizes, room, constraints)
        return fit.machine.total, room.device_bytes(sizes, fit.setup) if fit.setup.gpu_layers else 0

    def card(self, source: Source, bars: Bars = no_bars) -> tuple[Card, Mapping[str, Any]]:
        with bars(str(source or "the default model")) as progress:
            headers = models.read_parts(models.path(source, progress))
        return models.card_of(headers), headers[0].metadata

    def findings(self) -> Iterator[Finding]:
        from perdure.engine.llama.health import findings

        return findings()


def _digest(path: Path) -> str:
    """What tells a model from others: of all the files that it is made of."""
    return "+".join(content_digest(part.path) for part in models.read_parts(path))


def _default_model() -> str:
    """The model that is meant where none is named."""
    return settings().model or DEFAULT


ENGINE = LlamaEngine()
