"""Find, fetch and inspect models.

buffer, strings, quants, header   one GGUF file's header, checked
parts                             models in several files
card                              what a model is, in figures
registry                          names, and where each comes from
download, atomic                  bytes that arrive whole or go on later
pip, wheel, hub, address          the places that models come from
local_models                      the models of this machine
"""

from perdure.models.card import Card, TypeShare, card_of, read_card
from perdure.models.download import Progress
from perdure.models.header import Header, Tensor, read_header
from perdure.models.local_models import Entry, entries, is_here, path, pull, remove
from perdure.models.parts import read_parts
from perdure.models.registry import (
    FileSource,
    HubSource,
    Source,
    UrlSource,
    WheelSource,
    names_model,
    resolve,
)
from perdure.models.strings import Strings

__all__ = [
    "Card",
    "Entry",
    "FileSource",
    "Header",
    "HubSource",
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
