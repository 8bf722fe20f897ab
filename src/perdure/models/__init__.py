"""Find, fetch and inspect models.

header        one GGUF file's header, checked: its strings, tensor types and sizes
adapter_file  LoRAs and control vectors as GGUF, judged before the engine sees them
card          what a model is, in figures
parts         models in several files
placement     facts of a header, and how many bytes of a model lie where
registry      where models come from, by name
ways_to_open  which layers, experts and caches of a model go where
local_models  the models of this machine: find one, or fetch it
finder        models by name: what an extension answers, and what holds without it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.models.card import Card, TypeShare, card_of, read_card
    from perdure.models.finder import LocalModel
    from perdure.models.header import Header, Strings, Tensor, read_header
    from perdure.models.local_models import entries, is_here, names_model, path, pull, remove, resolve
    from perdure.models.parts import read_parts
    from perdure.models.registry import FileSource, HubSource, Progress, Source, UrlSource, WheelSource

__all__ = [
    "Card",
    "FileSource",
    "Header",
    "HubSource",
    "LocalModel",
    "Progress",
    "Source",
    "Strings",
    "Tensor",
    "TypeShare",
    "UrlSource",
    "WheelSource",
    "card_of",
    "entries",
    "is_here",
    "names_model",
    "path",
    "pull",
    "read_card",
    "read_header",
    "read_parts",
    "remove",
    "resolve",
]

_MODULES = {
    "card": ("Card", "TypeShare", "card_of", "read_card"),
    "finder": ("LocalModel",),
    "header": ("Header", "Strings", "Tensor", "read_header"),
    "local_models": ("entries", "is_here", "names_model", "path", "pull", "remove", "resolve"),
    "parts": ("read_parts",),
}


def __getattr__(name: str) -> Any:
    """Each name with its module: most processes need few of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((each for each, names in _MODULES.items() if name in names), "registry")
    return getattr(import_module(f"{__name__}.{module}"), name)
