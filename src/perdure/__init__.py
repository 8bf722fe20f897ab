"""perdure: a runtime for local language models whose sessions last."""

from perdure.decode.grammar import Grammar
from perdure.decode.job import Job
from perdure.decode.request import Delta, Reply, Timings, TokenLogprob, Usage
from perdure.decode.sampling import Sampling
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Capabilities, Memory, MemoryKind
from perdure.engine.llama.model import Model
from perdure.engine.logits import Candidate, LogitsView
from perdure.engine.state import Checkpoint
from perdure.errors import (
    BusyError,
    CannotRewindError,
    ClosedError,
    ContextOverflow,
    CorruptStateError,
    DecodeCancelled,
    DecodeError,
    EngineError,
    FetchError,
    GrammarError,
    IncompatibleStateError,
    InvalidInputError,
    ModelError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    PerdureError,
    PinnedError,
    RowError,
    SamplingError,
    SequenceError,
    StaleViewError,
    StateError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
    TokenError,
)
from perdure.identity import Identity
from perdure.runtime import Runtime, open  # noqa: A004

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "Candidate",
    "CannotRewindError",
    "Capabilities",
    "Checkpoint",
    "ClosedError",
    "Context",
    "ContextOverflow",
    "CorruptStateError",
    "DecodeCancelled",
    "DecodeError",
    "Delta",
    "EngineError",
    "Feed",
    "FetchError",
    "Grammar",
    "GrammarError",
    "Identity",
    "IncompatibleStateError",
    "InvalidInputError",
    "Job",
    "LogitsView",
    "Memory",
    "MemoryKind",
    "Model",
    "ModelError",
    "ModelFileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PerdureError",
    "PinnedError",
    "Reply",
    "RowError",
    "Runtime",
    "Sampling",
    "SamplingError",
    "SequenceError",
    "StaleViewError",
    "StateError",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoreVersionError",
    "Timings",
    "TokenError",
    "TokenLogprob",
    "Usage",
    "__version__",
    "open",
]
