"""Several models of one process, loaded when they are asked for and let go when they are not."""

from perdure.pool.pool import ModelPool, PooledModel
from perdure.pool.spec import ModelSpec, Selection, parse_duration, parse_size, read_selection

__all__ = [
    "ModelPool",
    "ModelSpec",
    "PooledModel",
    "Selection",
    "parse_duration",
    "parse_size",
    "read_selection",
]
