"""Several models of one process, loaded when they are asked for and let go when they are not."""

from perdure.server.pool.pool import Fit, ModelFacts, ModelPool, PooledModel, facts_of
from perdure.server.pool.spec import (
    ModelSpec,
    Selection,
    check_aliases,
    label_of,
    model_files,
    named_adapter,
    parse_duration,
    parse_size,
    read_selection,
    spec_of_file,
    with_adapters,
)

__all__ = [
    "Fit",
    "ModelFacts",
    "ModelPool",
    "ModelSpec",
    "PooledModel",
    "Selection",
    "check_aliases",
    "facts_of",
    "label_of",
    "model_files",
    "named_adapter",
    "parse_duration",
    "parse_size",
    "read_selection",
    "spec_of_file",
    "with_adapters",
]
