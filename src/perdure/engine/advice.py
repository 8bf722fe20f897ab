"""Advice: what an extension has measured and remembered of a model, for opening it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from perdure.config import settings
from perdure.engine_config import EXACT_TYPES, EngineConfig
from perdure.extension import by_name, imported

if TYPE_CHECKING:
    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import EngineModel


class Advisor(Protocol):
    """Knows how models are best opened on this machine. It is asked for what nobody chose."""

    def loading(self, digest: Callable[[], str]) -> LoadingKeywords:
        """Where layers and experts of a model compute fastest. To ask for the digest may take long."""
        ...

    def tuned(self, model: EngineModel, config: EngineConfig) -> EngineConfig:
        """What a model is opened with, completed."""
        ...

    def check_kv_type(self, model: EngineModel, config: EngineConfig) -> None:
        """Refuse types of K and V that cost a model much, unless they are forced. It may have to measure."""
        ...


def remembered() -> Path:
    """The file in which an advisor remembers settings. Where there is none, none is loaded."""
    return settings().home / "tuning.json"


def loading(digest: Callable[[], str]) -> LoadingKeywords:
    advisor = _advisor() if remembered().exists() else None
    return {} if advisor is None else advisor.loading(digest)


def tuned(model: EngineModel, config: EngineConfig) -> EngineConfig:
    advisor = _advisor() if remembered().exists() else None
    return config if advisor is None else advisor.tuned(model, config)


def check_kv_type(model: EngineModel, config: EngineConfig) -> None:
    advisor = None if {*config.kv} <= EXACT_TYPES else _advisor()
    if advisor is not None:
        advisor.check_kv_type(model, config)


def _advisor() -> Advisor | None:
    reference = by_name("parts").get("advice")
    return None if reference is None else cast("Advisor", imported(reference))
