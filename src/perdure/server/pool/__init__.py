"""Several models of one process, loaded when they are asked for and let go when they are not."""

from perdure.server.pool.pool import ModelFacts, ModelPool, PooledModel, facts_of
from perdure.server.pool.spec import (
    ModelSpec,
    Selection,
    check_aliases,
    named_adapter,
    parse_duration,
    parse_size,
    read_selection,
    with_adapters,
)

__all__ = [
    "ModelFacts",
    "ModelPool",
    "ModelSpec",
    "PooledModel",
    "Selection",
    "check_aliases",
    "facts_of",
    "named_adapter",
    "parse_duration",
    "parse_size",
    "read_selection",
    "with_adapters",
]
