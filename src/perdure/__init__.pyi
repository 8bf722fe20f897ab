"""Every public name, from where it is defined: read by type checkers, and by `__init__.py` at run time."""

from perdure.chat.difference import Difference, Miss
from perdure.chat.media.sound import Sound
from perdure.chat.message import Image, Message, Tool, ToolCall
from perdure.chat.reply import CallDelta, ChatDelta, ChatReply
from perdure.chat.template.template import Template
from perdure.decode.choice import Choice
from perdure.decode.embedding import Embeddings, RankedText
from perdure.decode.request import Delta, KeptPrefix, Plan, Reply, ReuseReport, Timings, TokenLogprob, Usage
from perdure.decode.sampling.grammar import Grammar
from perdure.decode.stream import Stream
from perdure.engine.context import Context, Feed
from perdure.engine.contract import Candidate, Capabilities
from perdure.engine.embedder import Embedder, Pooling
from perdure.engine.inspection import KeyValues, StepLogits, Trace
from perdure.engine.llama.model import Model
from perdure.engine.logits import LogitsView
from perdure.engine.state import Checkpoint
from perdure.errors import (
    AmbiguousError,
    BusyError,
    CannotRewindError,
    ClosedError,
    ContextOverflow,
    CorruptStateError,
    DeadlyFileError,
    DecodeCancelled,
    DecodeError,
    EngineDiedError,
    EngineError,
    EngineLibraryError,
    FetchError,
    GrammarError,
    IncompatibleStateError,
    InvalidInputError,
    LibraryFetchError,
    ModelError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    PerdureError,
    PinnedError,
    QuotaError,
    RowError,
    SamplingError,
    SequenceError,
    SessionBusyError,
    SessionError,
    SessionExistsError,
    SessionNotFoundError,
    StaleViewError,
    StateError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreKeyError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
    TemplateError,
    TokenError,
    TooLargeError,
    TurnKeptError,
    UnsupportedSystemError,
)
from perdure.events.event import Event
from perdure.events.subscription import Subscription
from perdure.ext.evaluation.evaluate import Evaluation, evaluate
from perdure.ext.fit.fit import Fit, fit, fit_all
from perdure.identity import Identity
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.opening import open  # noqa: A004
from perdure.request_options import Sampling
from perdure.runtime import Runtime
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.session import Session
from perdure.sessions.sessions import ImportResult
from perdure.sessions.turn import Turn

__version__: str

__all__ = [
    "AmbiguousError",
    "BusyError",
    "CallDelta",
    "Candidate",
    "CannotRewindError",
    "Capabilities",
    "ChatDelta",
    "ChatReply",
    "Checkpoint",
    "Choice",
    "ClosedError",
    "Context",
    "ContextOverflow",
    "CorruptStateError",
    "DeadlyFileError",
    "DecodeCancelled",
    "DecodeError",
    "Delta",
    "Difference",
    "Embedder",
    "Embeddings",
    "EngineDiedError",
    "EngineError",
    "EngineLibraryError",
    "Evaluation",
    "Event",
    "Feed",
    "FetchError",
    "Fit",
    "FullAttention",
    "Grammar",
    "GrammarError",
    "Hybrid",
    "Identity",
    "Image",
    "ImportResult",
    "IncompatibleStateError",
    "InvalidInputError",
    "KeptPrefix",
    "KeyValues",
    "LibraryFetchError",
    "LogitsView",
    "MemorySpec",
    "Message",
    "Miss",
    "Model",
    "ModelError",
    "ModelFileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PerdureError",
    "PinnedError",
    "Plan",
    "Pooling",
    "QuotaError",
    "RankedText",
    "Recurrent",
    "Reply",
    "ReuseReport",
    "RowError",
    "Runtime",
    "Sampling",
    "SamplingError",
    "SequenceError",
    "Session",
    "SessionBusyError",
    "SessionError",
    "SessionExistsError",
    "SessionInfo",
    "SessionMemory",
    "SessionNotFoundError",
    "SlidingWindow",
    "Sound",
    "StaleViewError",
    "StateError",
    "StepLogits",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreKeyError",
    "StoreLockedError",
    "StoreReadOnlyError",
    "StoreVersionError",
    "Stream",
    "Subscription",
    "Template",
    "TemplateError",
    "Timings",
    "TokenError",
    "TokenLogprob",
    "TooLargeError",
    "Tool",
    "ToolCall",
    "Trace",
    "Turn",
    "TurnKeptError",
    "UnsupportedSystemError",
    "Usage",
    "__version__",
    "evaluate",
    "fit",
    "fit_all",
    "open",
]
