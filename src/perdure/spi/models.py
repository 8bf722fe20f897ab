"""For extensions that find, read or judge model files."""

from perdure import models
from perdure.engine import deadly_files
from perdure.models.card import Card, TypeShare
from perdure.models.finder import LocalModel, ModelFinder, finder
from perdure.models.header import FILE_TYPES, TENSOR_TYPES, Header, parse_header
from perdure.models.local_models import locate, resolve
from perdure.models.parts import is_projector, part_names, read_parts
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
from perdure.models.registry import (
    ALIASES,
    DEFAULT,
    MODELS,
    MUCH,
    FileSource,
    HubSource,
    Progress,
    Source,
    UrlSource,
    WheelSource,
    stays_inside,
)
from perdure.models.safetensors import FLOATS, SafetensorsHeader, read_safetensors, safetensors_header
from perdure.models.ways_to_open import FitConstraints, Room, placements

__all__ = [
    "ALIASES",
    "ASSISTANTS",
    "DEFAULT",
    "FILE_TYPES",
    "FLOATS",
    "LEAST_CONTEXT",
    "MODELS",
    "MUCH",
    "TENSOR_TYPES",
    "Card",
    "Facts",
    "FileSource",
    "FitConstraints",
    "FitLevel",
    "Header",
    "HubSource",
    "LocalModel",
    "ModelFinder",
    "ModelPlacement",
    "Need",
    "Progress",
    "Room",
    "SafetensorsHeader",
    "Sizes",
    "Source",
    "TensorNames",
    "TypeShare",
    "UrlSource",
    "WheelSource",
    "deadly_files",
    "finder",
    "is_projector",
    "judge",
    "locate",
    "models",
    "parse_header",
    "part_names",
    "placements",
    "read_parts",
    "read_safetensors",
    "resolve",
    "safetensors_header",
    "stays_inside",
]
