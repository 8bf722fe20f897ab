"""The kinds of events, each a frozen class.

    TokenDrawn(time=1763391265.1, request="5f2a-7", index=0, position=12, token=260, text=" the",
               probability=0.61, entropy=1.4, surprisal=0.49, rank=1, alternatives=(Alternative(...), ...))

`request` is the id of the request that an event belongs to, empty for what belongs to none. Times are seconds
since 1970. Probabilities are of the model's own distribution, before penalties, grammars and temperature;
entropy and surprisal are in nats. On its way an event is a tuple: its kind, then its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

PlainEvent: TypeAlias = tuple[Any, ...]
"""An event as it travels: the name of its kind, its time, its request, and its other fields in order."""


class LateEvent(NamedTuple):
    """An event whose other fields are made when it is read: the thread that emits it does not wait."""

    kind: str
    time: float
    request: str
    fields: Callable[[], tuple[Any, ...]]

    def made(self) -> PlainEvent:
        return (self.kind, self.time, self.request, *self.fields())


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    time: float
    request: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Its fields as plain data, with its `kind` first."""
        record: dict[str, Any] = {"kind": self.kind}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            record[each.name] = dict(value) if isinstance(value, Mapping) else value
        return record


@dataclass(frozen=True, slots=True)
class Queued(Event):
    """A request was taken and waits for a slot."""

    prompt_tokens: int
    samples: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Placed(Event):
    """A request got a slot. `tiers` are the tokens of its prompt by where their state came from; `computed`
    are the others, and `why` says why there are not fewer."""

    slot: int
    tiers: Mapping[str, int]
    computed: int
    why: str
    waited: float
    """Seconds since it was queued."""


@dataclass(frozen=True, slots=True)
class ChunkRead(Event):
    """A step has computed `tokens` of a prompt, of which the first `read` are there now."""

    tokens: int
    read: int
    prompt_tokens: int
    seconds: float
    """Of the whole step."""


class Alternative(NamedTuple):
    """A token that could have been drawn."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class TokenDrawn(Event):
    """A token was drawn for sample `index`."""

    index: int
    position: int
    """In the sequence of prompt and reply, from 0."""
    token: int
    text: str
    """Of this token alone; part of a character is shown as U+FFFD."""
    probability: float
    entropy: float
    surprisal: float
    rank: int
    """1 for the likeliest token of all."""
    alternatives: tuple[Alternative, ...]
    """The likeliest tokens in its place, itself included where it is one of them."""

    def to_dict(self) -> dict[str, Any]:
        # Not by `super()`: a class with slots is made twice, and the first one is named here.
        return {**Event.to_dict(self), "alternatives": [each._asdict() for each in self.alternatives]}


@dataclass(frozen=True, slots=True)
class Masked(Event):
    """A grammar let `allowed` of `vocabulary` tokens be drawn next."""

    index: int
    position: int
    allowed: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class BlocksStored(Event):
    """State was copied into a tier."""

    tier: str
    blocks: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlocksLoaded(Event):
    """State was read out of tiers: how many tokens of each, and how long each took."""

    tiers: Mapping[str, int]
    blocks: int
    nbytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Swapped(Event):
    """The state of a conversation left a slot (`out`) or came back into one (`in`)."""

    direction: str
    slot: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Slept(Event):
    """The state of a conversation was put where it outlives the process."""

    tokens: int
    namespace: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Woken(Event):
    """The state of a conversation was brought back."""

    tiers: Mapping[str, int]
    computed: int
    why: str
    namespace: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ImageEncoded(Event):
    """A file that was not known was encoded: `tokens` of a prompt, out of so many bytes."""

    tokens: int
    nbytes: int
    namespace: str
    seconds: float
    """With the start of the encoder, where it was not there."""


@dataclass(frozen=True, slots=True)
class CachePressure(Event):
    """A tier had no room for new blocks and let go of `evicted` old ones."""

    tier: str
    evicted: int
    nbytes: int
    budget: int


@dataclass(frozen=True, slots=True)
class MemoryPressure(Event):
    """Less than a sixteenth of the machine's memory is available."""

    available: int
    total: int


@dataclass(frozen=True, slots=True)
class Restarted(Event):
    """The engine's process had ended, for this reason, and is there again."""

    reason: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """Sample `index` of a request is finished."""

    index: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queued: float
    prefill: float
    decode: float
    """Seconds, as in `Reply.timings`."""
    error: str | None
    last: bool
    """Whether all samples of the request are finished."""


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        Queued,
        Placed,
        ChunkRead,
        TokenDrawn,
        Masked,
        BlocksStored,
        BlocksLoaded,
        Swapped,
        Slept,
        Woken,
        ImageEncoded,
        CachePressure,
        MemoryPressure,
        Restarted,
        Ended,
    )
}
"""Every kind, by its name."""

Observer: TypeAlias = Callable[[Event], object]
"""Called with each event, in a separate thread."""


def event_of(plain: PlainEvent) -> Event:
    """The event that a tuple is."""
    if plain[0] == "TokenDrawn":
        return TokenDrawn(*plain[1:-1], tuple(map(Alternative._make, plain[-1])))  # type: ignore[call-arg]
    return KINDS[plain[0]](*plain[1:])
