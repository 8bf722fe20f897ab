"""What an engine takes and gives: tokens in steps, rows, what it says of a model. `core.py` has its calls."""

from __future__ import annotations

import enum
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.engine_config.keywords import ContextKeywords as ContextKeywords
from perdure.engine_config.keywords import LoadingKeywords as LoadingKeywords
from perdure.errors import InvalidInputError, PinnedError, TokenError
from perdure.memory import MemorySpec

Floats: TypeAlias = NDArray[np.float32]
Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer]"
Rows: TypeAlias = "Literal['last', 'all', 'none'] | Sequence[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a context can do, for callers that plan ahead."""

    truncate: bool
    """A sequence can be cut short without a checkpoint (for a sliding window, while it is there)."""
    shift: bool
    """Positions can be moved, so that old tokens can be dropped from the front."""
    abort: bool
    """A decode can be stopped in the middle of a chunk, not only between chunks."""
    shared: bool
    """Forks share cells (one pool) instead of copying them (one stream a sequence)."""
    max_outputs: int
    """The most rows of logits that one native step can give."""
    threads: int = 1
    """Among how many threads a step is divided: another number sums in another order, in the last bits."""
    asynchronous: bool = False
    """A step may return before it is computed, as on a GPU: reading a row waits for it."""
    guesses: bool = False
    """The model has layers here that guess the next tokens."""


class Outcome(enum.Enum):
    """How a native decode ended."""

    DONE = "done"
    FULL = "no room; nothing changed"
    REJECTED = "the batch was refused; nothing changed"
    ABORTED = "stopped on request"
    FAILED = "the computation failed"


class TokenRows(Protocol):
    """The part of a state that has a row for each token. It is valid until the core is used again."""

    @property
    def row_bytes(self) -> int: ...
    def __len__(self) -> int: ...
    def cut(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The rows of tokens `start` to `stop`, one a token, in an array of their own."""
        ...


@dataclass(frozen=True, slots=True)
class Capture:
    """A sequence's state in its parts: rows by token, and the tail state, which belongs to its end.

    A memory that can be cut anywhere has no tail state; one that cannot be cut at all has no rows.
    """

    rows: TokenRows | None
    tail_state: NDArray[np.uint8] | None


@runtime_checkable
class GuessingCore(Protocol):
    """A core whose model has layers that guess the next tokens."""

    def guess(self, seq: int, token: int, draw: Callable[[Floats, int], int], count: int) -> list[int]:
        """At most `count` tokens that are expected behind `token`, the next one of `seq`. `draw` takes a row
        of logits and the position of the token that is drawn from it. Nothing is changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairForm:
    """How a query and a document become one text, for a model that scores such pairs.

    A template has `{query}` and `{document}` in it; without one, tokens stand before, between and after.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    template: str = ""

    def tokens(self, model: Tokenizer, query: str, document: str) -> list[int]:
        """A pair as tokens. What it is made of is text, also where it reads like a mark of the template."""
        if not self.template:
            first, second = (model.tokenize(text, bos=False) for text in (query, document))
            return [*self.before, *first, *self.between, *second, *self.after]
        tokens: list[int] = []
        for part in re.split(r"(\{query\}|\{document\})", self.template):
            text = {"{query}": query, "{document}": document}.get(part)
            tokens += model.tokenize(part if text is None else text, special=text is None, bos=False)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model says of itself, whichever engine and file format it is of. Empty or 0: it does not say."""

    architecture: str = ""
    name: str = ""
    size_label: str = ""
    """Parameters in words, such as 135M."""
    quantisation: str = ""
    file_format: str = ""
    nbytes: int = 0
    """Size of its files."""
    n_ctx_train: int = 0
    """Tokens of the longest texts that it was trained on."""
    template: str = ""
    """Its chat template."""
    tool_template: str = ""
    """A second one, for conversations with tools."""
    bos: str = ""
    """The text of the token that opens every prompt."""
    eos: str = ""
    pair: PairForm | None = None
    """Of a model that scores pairs of texts, and has no vector for one."""
    covers_text: bool = True
    """Every character of a text is in one of its tokens. Some tokenizers collapse or drop characters."""


class Tokenizer(Protocol):
    """What a model says about text and about itself, without its weights."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def memory(self) -> MemorySpec: ...
    @property
    def info(self) -> ModelInfo: ...
    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's own description, to be shown; nothing is decided by it."""
        ...

    @property
    def digest(self) -> str: ...
    @property
    def path(self) -> Path | None:
        """Its file or folder; None where there is none."""
        ...

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]: ...
    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...
    def is_end(self, token: int) -> bool: ...
    def is_control(self, token: int) -> bool: ...
    @property
    def ends(self) -> frozenset[int]:
        """The tokens with which the model says that it is done."""
        ...

    @property
    def controls(self) -> frozenset[int]:
        """The tokens that are marks for the model, never text."""
        ...


def check_token(token: object, n_vocab: int) -> int:
    """`token`, if it is an id of a vocabulary of `n_vocab`."""
    if not is_integer(token):
        raise TokenError(f"a token id is an integer, got {token!r}")
    if not 0 <= token < n_vocab:
        raise TokenError(f"token ids run from 0 to {n_vocab - 1}, got {token}")
    return int(token)


def token_array(
    tokens: object, n_vocab: int, *, what: str = "a list of tokens", media: bool = False
) -> NDArray[np.int32]:
    """`tokens` as an array of their own, if they are a flat list of at least one id; `what` they are is said
    where they are not. With `media`, ids below zero may be among them (`engine.media`)."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError) as error:
        raise TokenError(f"{what} is a flat list of token ids: {error}") from None
    if not ids.size:
        raise TokenError(f"{what} is empty; give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokenError(f"{what} is a flat list of token ids, which are integers; got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if high >= n_vocab or (low < 0 and not (media and low >= -(1 << 31))):
        raise TokenError(f"{what}: token ids run from 0 to {n_vocab - 1}, got {low if low < 0 else high}")
    return ids.astype(np.int32)


# The tokens of one native step, in arrays that NumPy owns.
#
# No batch is ever allocated or freed by the engine, so none can be freed twice, leaked, or borrowed.


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Tokens for one sequence, at the positions from `start` on; `outputs` marks wanted rows."""

    seq: int
    start: int
    tokens: NDArray[np.int32]
    outputs: NDArray[np.int8]


class Batch:
    """Arrays for up to `capacity` tokens, made once; the first `size` entries are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.tokens: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.positions: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.seqs: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.outputs: NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._ramp: NDArray[np.int32] = np.arange(capacity, dtype=np.int32)
        # The same memory: one number is written through these in half the time (`python -m bench.decode`).
        self._by_number = (self.tokens.data, self.positions.data, self.seqs.data, self.outputs.data)

    def fill_tokens(self, seqs: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Replace the contents by one token for each of some sequences, whose rows are all wanted."""
        at_tokens, at_positions, at_seqs, at_outputs = self._by_number
        for at, (token, position, seq) in enumerate(zip(tokens, positions, seqs, strict=True)):
            at_tokens[at], at_positions[at], at_seqs[at], at_outputs[at] = token, position, seq, 1
        self.size = len(tokens)

    def fill(self, parts: Sequence[BatchPart]) -> None:
        """Replace the contents by `parts`, one bulk write an array and part."""
        total = sum(len(part.tokens) for part in parts)
        if not 0 < total <= self.capacity:
            raise InvalidInputError(f"a step holds 1 to {self.capacity} tokens, got {total}")
        at = 0
        for part in parts:
            end = at + len(part.tokens)
            if end - at == 1:
                # Four numbers: cheaper one by one than as four arrays.
                self.tokens[at], self.positions[at] = part.tokens[0], part.start
                self.seqs[at], self.outputs[at] = part.seq, part.outputs[0]
                at = end
                continue
            self.tokens[at:end] = part.tokens
            np.add(self._ramp[: end - at], part.start, out=self.positions[at:end])
            self.seqs[at:end] = part.seq
            self.outputs[at:end] = part.outputs
            at = end
        self.size = total


class Candidate(NamedTuple):
    """A token with its logit and its natural log probability."""

    token: int
    logit: float
    logprob: float
    text: str = ""
    """In a reply: the token's own, where half a character is a question mark."""


def log_norm(row: Floats) -> float:
    """What to subtract from a logit of `row` for its natural log probability."""
    peak = row.max()
    return float(peak) + float(np.log(np.sum(np.exp(row - peak), dtype=np.float64)))


class Step:
    """The span between two changes of a context's state. Once over, it is never alive again.

    While it is alive, `keep` is the owner of the memory that its views read.
    """

    __slots__ = ("alive", "keep", "lock", "pins", "views")

    def __init__(self, lock: AbstractContextManager[object], keep: object) -> None:
        self.lock = lock
        self.keep = keep
        self.alive = True
        self.pins: list[weakref.ref[Floats]] = []
        self.views: dict[object, Any] = {}
        """Those that were taken of its rows, by the row."""

    def retire(self) -> None:
        """End the step, unless memory of it is borrowed."""
        if self.pins and any(pin() is not None for pin in self.pins):
            raise PinnedError(
                "logits of this step are borrowed: leave the borrow() block, and drop every array taken "
                "from it, before the context is used again"
            )
        self.end()

    def end(self) -> None:
        self.alive = False
        self.keep = None
        self.views.clear()
