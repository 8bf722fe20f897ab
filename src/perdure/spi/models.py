"""For extensions that find, read or judge model files."""

from perdure import models
from perdure.engine import deadly_files
from perdure.models.card import Card, TypeShare
from perdure.models.catalogue import CatalogueModel, fit_of, names_of
from perdure.models.catalogue import find as find_by_name
from perdure.models.fetching.download import Remote, RemoteBytes, web
from perdure.models.fetching.hub import chosen, hub_cache, read_offers
from perdure.models.header import FILE_TYPES, TENSOR_TYPES, Header, parse_header
from perdure.models.local_models import locate, resolve
from perdure.models.parts import part_names, read_parts
from perdure.models.placement import (
    ASSISTANTS,
    LEAST_CONTEXT,
    Facts,
    FitLevel,
    ModelPlacement,
    Need,
    Sizes,
    TensorNames,
    judge,
)
from perdure.models.registry import DEFAULT, HubSource, UrlSource
from perdure.models.safetensors import FLOATS, SafetensorsHeader, read_safetensors, safetensors_header
from perdure.models.ways_to_open import FitConstraints, Room, placements

__all__ = [
    "ASSISTANTS",
    "DEFAULT",
    "FILE_TYPES",
    "FLOATS",
    "LEAST_CONTEXT",
    "TENSOR_TYPES",
    "Card",
    "CatalogueModel",
    "Facts",
    "FitConstraints",
    "FitLevel",
    "Header",
    "HubSource",
    "ModelPlacement",
    "Need",
    "Remote",
    "RemoteBytes",
    "Room",
    "SafetensorsHeader",
    "Sizes",
    "TensorNames",
    "TypeShare",
    "UrlSource",
    "chosen",
    "deadly_files",
    "find_by_name",
    "fit_of",
    "hub_cache",
    "judge",
    "locate",
    "models",
    "names_of",
    "parse_header",
    "part_names",
    "placements",
    "read_offers",
    "read_parts",
    "read_safetensors",
    "resolve",
    "safetensors_header",
    "web",
]
