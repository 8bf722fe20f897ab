"""What the two processes say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Concatenate, Literal, NewType, ParamSpec, Protocol, TypeAlias, TypeVar

from perdure import MemorySpec, Reply, TokenLogprob
from perdure.spi.base import EngineConfig
from perdure.spi.decode import FinishReason
from perdure.spi.engine import ModelInfo
from perdure.spi.runtime import BlockStorage, Request

GREETING = ("perdure", version("perdure"))
"""What another process that uses the store hears first, in a form that every version reads: only equals go on
from there."""

RequestId = NewType("RequestId", int)
"""Names a request or a call. Never used twice, so that a late answer is nobody else's."""

Target = Literal["model", "cache", "tables", "backend"]

P = ParamSpec("P")
T = TypeVar("T")


class Ask(Protocol):
    """Calls a method of something in the engine's process, and waits for what it returns or raises. How the
    method is declared says what it takes and gives."""

    def __call__(
        self,
        target: Target,
        method: Callable[Concatenate[Any, P], T],
        /,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> T: ...


PlainDelta: TypeAlias = tuple[str, tuple[int, ...], tuple[TokenLogprob, ...], int, FinishReason | None]
"""A delta as it travels: every token brings one, and tuples are an order cheaper to send than objects."""

EVENTS = RequestId(0)
"""Stands in the place of a request in what a step brought: events follow, and how many found no room."""

StepOutput: TypeAlias = list[tuple[RequestId, Sequence[PlainDelta], Sequence[Reply] | None]]
"""What a step brought: new deltas by request, and the replies of those that are finished. The only message
that is a list: every step sends one, and half of reading an object is to find its class."""


# From the parent.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message: which engine opens which model."""

    engine: str
    """Where it can be imported from, as "module:attribute"."""
    model: str
    """What its `fetch` returned."""
    config: EngineConfig
    storage: BlockStorage
    paths: Sequence[str]
    """Where the parent finds its modules: an engine may be in any of them."""
    pulse: float
    """Seconds between two signs of life."""
    log_level: int
    tries_step: bool = False
    """Whether to compute a token before it is ready: a process died at the first step of a request."""


@dataclass(frozen=True, slots=True)
class Submit:
    id: RequestId
    request: Request


@dataclass(frozen=True, slots=True)
class Call:
    id: RequestId
    target: Target
    name: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    id: RequestId


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether this side wants to hear of all events."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class Close:
    """End what is running as cancelled, give everything back, and exit."""


# From the process that has a store, to others that use it too.


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The first message: which engine it is, and the settings that were chosen for it."""

    ready: Ready
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Nothing more is taken; what is running is finished first, then the connection ends."""


# From the child.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine is there. What it says about itself never changes while a backend is open."""

    n_ctx: int
    slots: int
    exact: bool
    n_vocab: int
    memory: MemorySpec
    info: ModelInfo
    metadata: Mapping[str, str]
    digest: str
    path: str | None = None
    """The model's file, where it has one."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built. The process ends."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Answer:
    """A call's result, or that a request was taken; or the error instead."""

    id: RequestId
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """The engine thread came by: whatever step it was in has ended. `rounds` counts these.

    `read` says how much of their prompts requests have read, of those that have read more since the last one.
    `failures` says how often threads of this process failed, by their names.
    """

    rounds: int
    read: Mapping[RequestId, int]
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the parent's log."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Tables:
    """The vocabulary, by token id."""

    pieces: Sequence[bytes]
    special_pieces: Sequence[bytes]
    """Control tokens written out."""
    ends: frozenset[int]
    controls: frozenset[int]
