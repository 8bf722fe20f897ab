"""For extensions that find, read or judge model files."""

from perdure import models as models
from perdure.models.card import Card as Card, TypeShare as TypeShare
from perdure.models.finder import (
    LocalModel as LocalModel,
    ModelFinder as ModelFinder,
    finder as finder,
)
from perdure.models.header import (
    FILE_TYPES as FILE_TYPES,
    TENSOR_TYPES as TENSOR_TYPES,
    Header as Header,
    parse_header as parse_header,
)
from perdure.models.local_models import locate as locate, resolve as resolve
from perdure.models.parts import (
    is_projector as is_projector,
    part_names as part_names,
    read_parts as read_parts,
)
from perdure.models.placement import (
    ASSISTANTS as ASSISTANTS,
    LEAST_CONTEXT as LEAST_CONTEXT,
    Facts as Facts,
    FitLevel as FitLevel,
    ModelPlacement as ModelPlacement,
    Need as Need,
    Sizes as Sizes,
    TensorNames as TensorNames,
    judge as judge,
)
from perdure.models.registry import (
    ALIASES as ALIASES,
    DEFAULT as DEFAULT,
    MODELS as MODELS,
    MUCH as MUCH,
    FileSource as FileSource,
    HubSource as HubSource,
    Progress as Progress,
    Source as Source,
    UrlSource as UrlSource,
    WheelSource as WheelSource,
    stays_inside as stays_inside,
)
from perdure.models.ways_to_open import (
    FitConstraints as FitConstraints,
    Room as Room,
    placements as placements,
)
