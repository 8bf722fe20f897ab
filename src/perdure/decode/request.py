"""What is asked for, and what comes back."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_number, is_whole
from perdure.engine.adapters import absolute_scales
from perdure.engine.contract import Candidate, Tokenizer
from perdure.errors import ContextOverflow, GrammarError, InvalidInputError, TokenError
from perdure.options import check_options, unknown_options
from perdure.request_options import Priority, RequestOptions, Sampling

if TYPE_CHECKING:
    from perdure.decode.sampling.grammar import Grammar
    from perdure.engine.inspection import StepLogits
    from perdure.events.event import Observer
    from perdure.events.subscription import Subscription

_USUAL = 32
"""Characters a token that no ordinary text has: shorter ones are tokenised to find out."""
_longest: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()
_measuring = threading.Lock()

FinishReason = Literal["stop", "length", "tool_calls", "repetition", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(RequestOptions):
    """A prompt of tokens and how to go on from it. Checked when it is made; it never changes."""

    prompt: Sequence[int]
    grammar: Grammar | None = None
    reply_prefix: Sequence[int] = ()
    """Tokens of the reply that earlier requests wrote: grammar, stops and text go on behind them."""
    emitted: int = 0
    """How many of them had their text emitted: stops and text go on behind the others only."""
    continued: bool = False
    """Whether another request goes on where this one reaches `max_tokens`: it has this one's tokens as its
    `reply_prefix`, and tells the text that this one holds back then."""
    resumed: int = 0
    """How many tokens at the end of the prompt are a reply that was interrupted: an exact engine computes
    them as it has written them, a token a step."""
    processors: Sequence[Processor] = ()
    namespace: str = ""
    """Whose prompt it is: kept state is never shared between namespaces."""
    weight: float = 1.0
    """Of its namespace, where several share the engine (`Backend.weights`)."""
    conversation: str = ""
    """What tells its conversation from others of the namespace: what it leaves behind is evicted first. Empty
    where that is not known."""
    checkpoint_at: Sequence[int] = ()
    """Lengths of the prompt that a later one is likely to go on from: their state is kept too."""
    pins: Sequence[KeptPrefix] = ()
    """Beginnings of the prompt that are to be kept for a time."""
    visible_tokens: frozenset[int] = frozenset()
    """Control tokens whose text belongs to the reply; that of others is dropped."""
    idle: bool = False
    """Whether nobody waits for it: it is served while there is no other request, and gives way to each."""
    timeout: float | None = None
    """Seconds from submission after which the request ends, wherever it is."""
    deadline: float | None = None
    """The same as an instant of `time.monotonic()`: a request that goes on from this one has no more time."""
    observe: Observer | Subscription | None = None
    """Called with each of its events, in a separate thread; or the subscription that gets them."""
    event_id: str = ""
    """What its events name it by; empty for a new name."""

    def __post_init__(self) -> None:
        if not hasattr(self.prompt, "__len__"):
            raise TokenError(f"a prompt is a list of token ids, got {type(self.prompt).__name__}")
        if not len(self.prompt):
            raise TokenError("a prompt needs at least one token")
        check_options(self)
        if self.adapters is not None:
            # What was checked is what is kept, whatever the caller does to theirs; and the engine may be in a
            # process that is in another folder.
            object.__setattr__(self, "adapters", absolute_scales(self.adapters))
        _check_times(self.timeout, self.deadline)
        if not isinstance(self.sampling, Sampling):
            raise InvalidInputError(f"sampling is a Sampling, got {type(self.sampling).__name__}")
        if self.grammar is not None:
            from perdure.decode.sampling.grammar import Grammar

            if not isinstance(self.grammar, Grammar):
                raise InvalidInputError(f"grammar is a Grammar, got {type(self.grammar).__name__}")
        if not all(callable(processor) for processor in self.processors):
            raise InvalidInputError("processors are functions of the tokens and the logits")
        observer: object = self.observe
        if observer is not None and not callable(observer):
            from perdure.events.subscription import Subscription

            if not isinstance(observer, Subscription):
                got = type(observer).__name__
                raise InvalidInputError(f"observe is a function of an event, got {got}")
        if not all(is_whole(length) and length >= 0 for length in self.checkpoint_at):
            raise InvalidInputError(f"checkpoint_at are lengths of the prompt, got {self.checkpoint_at!r}")
        if not all(isinstance(pin, KeptPrefix) and pin.seconds is not None for pin in self.pins):
            raise InvalidInputError(f"pins are of type KeptPrefix and have an end, got {self.pins!r}")

    def ends_at(self, now: float) -> float | None:
        """The instant at which it ends if it is submitted `now`."""
        return earlier(self.deadline, None if self.timeout is None else now + self.timeout)

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        **keywords: Unpack[RequestKeywords],
    ) -> Request:
        """A request in a caller's words: fields of `Sampling` by themselves, a schema, a single stop.

        The one parser of options: of the library's keywords, the command's and the server's.
        """
        if unknown := unknown_options(keywords, KEYWORDS):
            raise unknown
        drawing = {name: value for name, value in keywords.items() if name in Sampling.__dataclass_fields__}
        own: dict[str, Any] = {name: value for name, value in keywords.items() if name in _OWN}
        sampling, stop = keywords.get("sampling"), keywords.get("stop")
        if sampling is not None and drawing:
            raise InvalidInputError(f"give sampling or its fields, not both: {', '.join(drawing)}")
        grammar, schema, regex = keywords.get("grammar"), keywords.get("schema"), keywords.get("regex")
        if sum(each is not None for each in (grammar, schema, regex)) > 1:
            raise InvalidInputError("give one of grammar, schema and regex")
        if schema is not None:
            from perdure.decode.sampling.grammar import Grammar

            grammar = Grammar.json_schema(schema)
        elif regex is not None:
            from perdure.decode.sampling.grammar import Grammar

            grammar = Grammar.regex(regex)
        return cls(
            prompt=prompt,
            sampling=sampling or Sampling(**drawing),  # type: ignore[arg-type]
            stops=_stops(stop),
            grammar=grammar,
            **own,
        )


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable):
        raise InvalidInputError(f"stop is a text, or several, got {stop!r}")
    return tuple(stop)


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two deadlines, where None is none."""
    return min((each for each in (one, other) if each is not None), default=None)


def take_deadline(settings: dict[str, Any]) -> float | None:
    """The deadline among a caller's keywords, from now on; `timeout` and `deadline` are taken out."""
    timeout, deadline = settings.pop("timeout", None), settings.pop("deadline", None)
    if timeout is None:
        return deadline  # type: ignore[no-any-return]
    _check_times(timeout, deadline)
    return earlier(deadline, time.monotonic() + timeout)


def _check_times(timeout: object, deadline: object) -> None:
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise InvalidInputError(f"timeout is a number of seconds above 0, got {timeout!r}")
    if deadline is not None and not isinstance(deadline, (int, float)):
        raise InvalidInputError(f"deadline is an instant of time.monotonic(), got {deadline!r}")


_OWN = Request.__dataclass_fields__.keys() - {
    "prompt",
    "sampling",
    "stops",
    "grammar",
    "reply_prefix",
    "emitted",
    "continued",
    "resumed",
    "idle",
    "weight",
    "event_id",
}
KEYWORDS = _OWN | Sampling.__dataclass_fields__.keys() | {"sampling", "stop", "grammar", "schema", "regex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """A prefix whose state is to be kept: for `seconds`, or without an end under its labels.

    A request names one by its `length`, or by the messages that come `after` it, and says for how long. Its
    blocks are not evicted until then. One without an end is made by `rt.cache.warm`, listed with its
    `tokens`, and outlives the process; its blocks may be evicted like any others.
    """

    length: int = 0
    """Of the beginning of a prompt, in tokens."""
    after: int | None = None
    """Instead of a length, in a chat: the messages that come after it."""
    seconds: float | None = None
    """None: without an end."""
    key: str = ""
    """The next one with the same key takes its place; without a key, each beginning has a separate place."""
    tokens: tuple[int, ...] = ()
    kept: int = 0
    """How many of `tokens` are kept."""
    labels: frozenset[str] = frozenset()
    namespace: str = ""
    root: bytes = b""
    """Where its chain of blocks starts: what its state depends on besides the tokens."""

    def __post_init__(self) -> None:
        if self.after is not None and (not is_whole(self.after) or self.after < 0):
            raise InvalidInputError(f"a cache mark's after is a number of messages, got {self.after!r}")
        if self.after is None and self.seconds is None:
            return
        if not is_number(self.seconds) or not 0 < self.seconds <= 86400:
            raise InvalidInputError(
                f"a cache mark's seconds are above 0 and at most 86400, got {self.seconds!r}"
            )

    @property
    def id(self) -> str:
        """Its id, also after a restart."""
        return hashlib.sha256(self.root + self.ids.astype("<i4").tobytes()).hexdigest()

    @property
    def ids(self) -> NDArray[np.int32]:
        return np.array(self.tokens, np.int32)

    @property
    def nbytes(self) -> int:
        """What listing it in memory costs, about: a token is a number of Python's own."""
        return prefix_cost(len(self.tokens)) + sum(64 + len(label) for label in self.labels)

    def carries(self, labels: frozenset[str] | None, namespace: str) -> bool:
        """Whether it is of that namespace and has one of `labels`, if there are any to have."""
        return self.namespace == namespace and (labels is None or bool(labels & self.labels))


def prefix_cost(tokens: int) -> int:
    """What listing a prefix of so many tokens costs in memory, without its labels."""
    return 1024 + 44 * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """Where the state of a prompt came from: tokens by tier, tokens computed, and why not fewer."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """How long each tier took, as far as state was read out of one. What a slot has takes none."""
    computed: int
    why: str
    pins: tuple[KeptPrefix, ...] = ()
    """The beginnings that are kept for a time, of those that were to be."""

    @property
    def reused(self) -> int:
        return sum(self.tiers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What bringing back the state of a prompt would take: tokens by tier, what is read, what is computed."""

    tiers: Mapping[str, int]
    blocks: int
    nbytes: int
    computed: int

    @property
    def tokens(self) -> int:
        return sum(self.tiers.values()) + self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """How much of a prompt's state one tier has."""

    tokens: int
    nbytes: int = 0
    """In blocks; a slot has none."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log probability, and the likeliest ones in its place."""

    token: int
    logprob: float
    top: tuple[Candidate, ...] = ()
    text: str = ""
    """The token's own; that of a part of a character is a replacement mark."""


@dataclass(slots=True)
class Delta:
    """What is new in a reply. Text may come later than its tokens, never earlier.

    Every token brings one, so it is not frozen: that would make it thrice as dear.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted as the engine saw them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the completion, before the answer."""
    media_tokens: int = 0
    """Of the prompt, those of images and sounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds: waiting for a place, reading the prompt to the first token, writing the rest."""

    queued: float
    prefill: float
    decode: float
    prefilled_tokens: int
    decoded_tokens: int
    forced_tokens: int = 0
    """Tokens that a grammar left no choice about: they are written without a draw, several in one step."""
    drafted_tokens: int = 0
    """Tokens that were guessed ahead."""
    accepted_tokens: int = 0
    """Those of them that were then drawn: a step less each."""
    saved: float = 0.0
    """Seconds that this saved, by how long steps with and without guesses took; below 0: lost."""

    @property
    def gain(self) -> float:
        """How many times as fast the reply was written as without guesses, by the same measure."""
        return (self.decode + self.saved) / self.decode if self.decode > 0 else 1.0

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens a second."""
        return self.prefilled_tokens / self.prefill if self.prefill > 0 else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first."""
        return (self.decoded_tokens - 1) / self.decode if self.decode > 0 and self.decoded_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished reply. `tokens` are those of the text; `end` is the one that ended it, if one did."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    reuse: ReuseReport
    seed: int
    index: int = 0
    end: int | None = None
    stop: str | None = None
    """The stop string that was met."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """For each prompt token; None for the first, which nothing comes before."""
    error: Exception | None = None
    schema: Any = None
    """What its text was held to, where that was asked for as a schema."""

    @property
    def parsed(self) -> Any:
        """Its JSON under a `schema`: an object of the class that was given as one, else as Python has it.
        None for a reply without one."""
        return read_json(self.schema, self.text, self.finish_reason)

    @property
    def perplexity(self) -> float | None:
        """Of the prompt, where its log probabilities were asked for."""
        known = [entry.logprob for entry in self.prompt_logprobs or () if entry is not None]
        return float(np.exp(-np.mean(known))) if known else None


def read_json(schema: Any, text: str, finish_reason: str) -> Any:
    """A reply under a schema, read."""
    if schema is None:
        return None
    if finish_reason != "stop":
        raise GrammarError(
            f"this reply ended by {finish_reason} before its JSON was whole: allow more max_tokens"
        )
    for name in ("model_validate_json", "validate_json"):
        if callable(read := getattr(schema, name, None)):
            return read(text)
    return json.loads(text)


def check_prompt_size(text: str, model: Tokenizer, n_ctx: int) -> None:
    """Raise ContextOverflow where even the longest tokens are too short for `text` to fit."""
    if len(text) <= _USUAL * n_ctx or not model.info.covers_text:
        return
    with _measuring:
        if (longest := _longest.get(model)) is None:
            pieces = (model.piece(token, special=True) for token in range(model.n_vocab))
            longest = _longest[model] = max(map(len, pieces))
    needed = -(-len(text) // longest)
    if needed > n_ctx:
        raise ContextOverflow(
            f"a text of {len(text)} characters has at least {needed} tokens; {n_ctx} fit",
            needed=needed,
            fits=n_ctx,
            at_least=True,
        )


# The keywords of a request, typed: an editor completes them, and a type checker finds a misspelt one.

Processor: TypeAlias = Callable[[Sequence[int], "StepLogits"], NDArray[np.float32]]
"""Called with the tokens so far and the live logits; returns the logits to draw from. `logits.trace()` has
what the layers computed."""


class SamplingKeywords(TypedDict, total=False):
    """The fields of `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int
    dry_breakers: tuple[str, ...]
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    seed: int | None
    logit_bias: Mapping[int, float]


class ReplyKeywords(SamplingKeywords, total=False):
    """How a reply is made: the options of every call that makes one."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    sampling: Sampling | None
    grammar: Grammar | None
    schema: Any
    regex: str | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    speculate: int
    priority: Priority
    loop_guard: int
    side: bool
    adapters: Mapping[str, float] | None
    processors: Sequence[Processor]
    checkpoint_at: Sequence[int]
    pins: Sequence[KeptPrefix]
    visible_tokens: frozenset[int]
    timeout: float | None
    deadline: float | None
    observe: Observer | None


class RequestKeywords(ReplyKeywords, total=False):
    """What `generate` and its like take besides the prompt."""

    namespace: str
    conversation: str
