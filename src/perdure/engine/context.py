"""A context: sequences of tokens, and the rules that keep them true.

The rules are written once, here, over any `Core`. Data flows tokens → batch → core; what the core
then reports, and nothing else, is written to the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.engine import state as saved
from perdure.engine.batch import Batch, Part
from perdure.engine.contract import (
    Adapter,
    Capabilities,
    Capture,
    Core,
    Floats,
    Outcome,
    Rows,
    Tokens,
)
from perdure.engine.interrupt import stopped_by_ctrl_c
from perdure.engine.ledger import Ledger
from perdure.engine.logits import LogitsView
from perdure.engine.rows import Source, StepRows, marked, outputs
from perdure.engine.state import Checkpoint
from perdure.engine.token_ids import token_array
from perdure.engine.undo import EMPTY, Mark, Undo
from perdure.errors import (
    CannotRewindError,
    ClosedError,
    ContextOverflow,
    DecodeCancelled,
    DecodeError,
    EngineError,
    IncompatibleStateError,
    InvalidInputError,
    RowError,
    SequenceError,
    TokenError,
)
from perdure.identity import Identity
from perdure.memory import MemorySpec

T = TypeVar("T")

_LARGEST_SCALE = float(np.finfo(np.float32).max)
_DIRECT = 8
"""Steps up to this size are short enough to wait for; a longer one can be interrupted by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to one sequence in a step, and the rows wanted of them."""

    seq: int
    tokens: Tokens
    rows: Rows = "last"


class _Failure(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class Context:
    """Sequences of tokens in one engine context.

    Always holds: `tokens(seq)` is what is in the cache; a call either does all that it says or raises
    and leaves things as they were (or says in the error what is left); calls from several threads
    queue; logits are live only until the next change.
    """

    def __init__(
        self,
        core: Core,
        *,
        memory: MemorySpec,
        capabilities: Capabilities,
        identity: Callable[[str], Identity],
        n_ctx: int,
        n_seq: int,
        n_batch: int,
    ) -> None:
        self.memory = memory
        self.capabilities = capabilities
        self.n_ctx = n_ctx
        self.n_seq = n_seq
        self.n_batch = n_batch
        self._core = core
        self._make_identity = identity
        self._adapters = "none"
        self._identity: Identity | None = None
        self._row_bytes: tuple[int | None] | None = None
        self._batch = Batch(n_batch)
        self._ledger = Ledger(n_seq)
        self._lock = threading.RLock()
        self._rows = StepRows(core, self._lock)
        self._undo = Undo(core, memory, self._ledger, self._rows)
        self._stopping = False
        self._stoppable = True
        self._closing = False
        self._busy = False
        self._closed = False

    # What is there.

    @property
    def identity(self) -> Identity:
        """What this context's state depends on besides the tokens."""
        if self._identity is None:
            self._identity = self._make_identity(self._adapters)
        return self._identity

    @property
    def n_vocab(self) -> int:
        return self._core.n_vocab

    @property
    def closed(self) -> bool:
        return self._closed

    def tokens(self, seq: int = 0) -> list[int]:
        """The tokens of `seq` that are in the cache."""
        with self._turn(seq):
            return self._ledger.tokens(seq)

    def length(self, seq: int = 0) -> int:
        """How many tokens of `seq` are in the cache."""
        with self._turn(seq):
            return self._ledger.length(seq)

    def lengths(self) -> list[int]:
        """How many tokens of each sequence are in the cache."""
        with self._turn():
            return self._ledger.lengths()

    def token_array(self, seq: int = 0, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """The tokens of `seq` from `start` to `stop` that are in the cache, as an array of their own."""
        with self._turn(seq):
            return self._ledger.array(seq, start, stop)

    def common_prefix(self, tokens: NDArray[np.int32], seq: int = 0) -> int:
        """How many of `tokens` `seq` starts with."""
        with self._turn(seq):
            return self._ledger.common_prefix(seq, tokens)

    def shortest_cut(self, seq: int = 0) -> int:
        """The shortest length above 0 that `truncate` can reach now without a checkpoint."""
        with self._turn(seq):
            length = self._ledger.length(seq)
            return self.memory.shortest_cut(length, self._core.oldest(seq)) if length else 0

    # Decoding.

    def decode(self, tokens: Tokens, seq: int = 0, *, rows: Rows = "last") -> None:
        """Append `tokens` to `seq`, however many: all of them, or none.

        `rows` says of which tokens `logits` can be asked afterwards: the last, all, none, or the
        given places in `tokens`. Rows are zero-copy in the last native step and copies before it.
        """
        ids = self._check_tokens(tokens)
        wanted = outputs(rows, len(ids))
        with self._turn(seq):
            start = self._check_room(seq, len(ids))
            self._rows.end()
            chunks = list(self._chunks(wanted))
            marks = {seq: self._undo.mark(seq, len(ids), steps=len(chunks))}
            found: dict[tuple[int, int], Source] = {}
            with self._undoing(marks):
                for at, end in chunks:
                    self._run([Part(seq, start + at, ids[at:end], wanted[at:end])])
                    for index in marked(wanted[at:end] if len(chunks) > 1 else wanted):
                        found[seq, at + index] = index if end == len(ids) else self._core.row(index).copy()
                self._ledger.append(seq, ids)
                self._rows.publish(found, {seq: len(ids)})

    def step(self, feeds: Sequence[Feed]) -> None:
        """Append to several sequences in one native step of at most `n_batch` tokens: all, or none."""
        if self._step_alone(feeds[0]) if len(feeds) == 1 else self._step_tokens(feeds):
            return
        if not all(isinstance(feed, Feed) for feed in feeds):
            raise InvalidInputError("a step takes Feed(seq, tokens) for each sequence")
        checked = [(feed.seq, self._check_tokens(feed.tokens), feed.rows) for feed in feeds]
        if len({seq for seq, _, _ in checked}) != len(checked):
            raise SequenceError("a step takes each sequence once")
        total = sum(len(ids) for _, ids, _ in checked)
        if not 0 < total <= self.n_batch:
            raise InvalidInputError(f"a step holds 1 to {self.n_batch} tokens, got {total}")
        wanted = [outputs(rows, len(ids)) for _, ids, rows in checked]
        places = {seq: marked(marks) for (seq, _, _), marks in zip(checked, wanted, strict=True)}
        if sum(map(len, places.values())) > self.capabilities.max_outputs:
            raise RowError(f"a step gives at most {self.capabilities.max_outputs} rows; ask for fewer")
        with self._lock:
            self._ready()
            self._check_seqs(places)
            parts = [
                Part(seq, self._check_room(seq, len(ids)), ids, marks)
                for (seq, ids, _), marks in zip(checked, wanted, strict=True)
            ]
            # The engine batches streams together only in rising order.
            parts.sort(key=lambda part: part.seq)
            self._rows.end()
            marks = {part.seq: self._undo.mark(part.seq, len(part.tokens)) for part in parts}
            found: dict[tuple[int, int], Source] = {}
            at = 0
            with self._undoing(marks):
                self._run(parts)
                for part in parts:
                    self._ledger.append(part.seq, part.tokens)
                    for index in places[part.seq]:
                        found[part.seq, index] = at + index
                    at += len(part.tokens)
                self._rows.publish(found, {part.seq: len(part.tokens) for part in parts})

    def _step_alone(self, feed: Feed) -> bool:
        """A step of one token, as every reply that is alone takes it. False: it is not of that kind.

        The same as any other step, without what only several tokens or sequences need: after a native step
        the caches are cold, and every line counts.
        """
        if type(feed) is not Feed or type(feed.tokens) is not list or feed.rows != "last":
            return False
        tokens, seq = feed.tokens, feed.seq
        if len(tokens) != 1 or type(tokens[0]) is not int or not 0 <= tokens[0] < self.n_vocab:
            return False
        with self._lock:
            self._ready()
            if type(seq) is not int or not 0 <= seq < self.n_seq:
                return False
            start = self._check_room(seq, 1)
            self._rows.end()
            self._begin({seq: self._undo.mark(seq, 1)})
            try:
                self._stoppable = True
                if self._stopping or self._closing:
                    raise _Failure(Outcome.ABORTED)
                self._batch.fill_one(seq, start, tokens[0])
                outcome = self._core.decode(self._batch)
                if outcome is not Outcome.DONE:
                    raise _Failure(outcome)
                if self._core.newest(seq) != start:
                    raise _Failure(Outcome.FAILED)
                self._ledger.append_one(seq, tokens[0])
                self._rows.publish({(seq, 0): 0}, {seq: 1})
                self._undo.marks = {}
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._end()
        return True

    def _step_tokens(self, feeds: Sequence[Feed]) -> bool:
        """A step of one token for each of several replies. False: it is not of that kind."""
        by_seq: dict[int, int] = {}
        for feed in feeds:
            if type(feed) is not Feed or type(feed.tokens) is not list or feed.rows != "last":
                return False
            seq, found = feed.seq, feed.tokens
            if len(found) != 1 or type(found[0]) is not int or not 0 <= found[0] < self.n_vocab:
                return False
            if type(seq) is not int or not 0 <= seq < self.n_seq:
                return False
            by_seq[seq] = found[0]
        if len(by_seq) != len(feeds) or not 0 < len(feeds) <= min(
            self.n_batch, self.capabilities.max_outputs
        ):
            return False
        # The engine batches streams together only in rising order.
        seqs = sorted(by_seq)
        tokens = [by_seq[seq] for seq in seqs]
        with self._lock:
            self._ready()
            starts = [self._ledger.length(seq) for seq in seqs]
            if max(starts) >= self.n_ctx:
                return False
            self._rows.end()
            # One token more costs no kind of memory what it would need to come back.
            with self._undoing({seq: Mark(start) for seq, start in zip(seqs, starts, strict=True)}):
                self._batch.fill_tokens(seqs, starts, tokens)
                self._run_batch(seqs, starts, alone=False)
                for seq, token in by_seq.items():
                    self._ledger.append_one(seq, token)
                self._rows.publish({(seq, 0): at for at, seq in enumerate(seqs)}, dict.fromkeys(seqs, 1))
        return True

    def logits(self, row: int = -1, seq: int | None = None) -> LogitsView:
        """The logits after token `row` of the last decode; below 0 counts from its end.

        `seq` is needed only after a `step` with several sequences.
        """
        # Asked for at every token: a lock costs a fifth of a generator's context manager.
        with self._lock:
            self._ready()
            return self._rows.view(row, seq)

    def read_row(self, function: Callable[[Floats], T], row: int = -1, seq: int | None = None) -> T:
        """What `function` makes of a row of the last native step. It gets the engine's own memory: it must
        neither change nor keep it."""
        with self._lock:
            self._ready()
            return function(self._core.row(self._rows.live(row, seq)))

    def read_rows(self, function: Callable[[Floats], T], places: Sequence[tuple[int, int]]) -> T:
        """What `function` makes of several rows of the last native step, as one table; `places` names each by
        (row, sequence). As with `read_row`, it must neither change nor keep it."""
        with self._lock:
            self._ready()
            return function(self._core.rows([self._rows.live(row, seq) for row, seq in places]))

    def overwrite(self, logits: NDArray[np.float32], row: int = -1, seq: int | None = None) -> None:
        """Put other values into a row of the last native step. Its views end."""
        if np.shape(logits) != (self.n_vocab,):
            raise RowError(f"a row has {self.n_vocab} values, got {np.shape(logits)}")
        with self._turn():
            index = self._rows.live(row, seq)
            self._rows.renew()
            self._core.row(index)[:] = logits

    def rule_out(self, mask: NDArray[np.uint8], row: int = -1, seq: int | None = None) -> None:
        """Make tokens whose bit in `mask` is 0 impossible in a row of the last native step. Its views end."""
        with self._turn():
            index = self._rows.live(row, seq)
            allowed = np.unpackbits(mask, count=self.n_vocab, bitorder="little")
            if not allowed.any():
                raise InvalidInputError("the mask rules out every token")
            self._rows.renew()
            np.copyto(self._core.row(index), -np.inf, where=allowed == 0)

    def synchronize(self) -> None:
        """Wait until the last step is computed, where a step returns before that."""
        with self._lock:
            self._ready()
            self._core.synchronize()

    def cancel(self) -> None:
        """Stop the decode in flight in another thread, if there is one: it raises `DecodeCancelled`.

        A step of several sequences on a recurrent memory is not stopped once it has begun.
        """
        if self._busy:
            self._stopping = True
            self._halt()

    # Going back, copying, clearing.

    def truncate(self, length: int, seq: int = 0) -> None:
        """Keep the first `length` tokens of `seq`."""
        with self._turn(seq):
            held = self._ledger.length(seq)
            if not is_integer(length) or not 0 <= length <= held:
                raise InvalidInputError(f"sequence {seq} holds {held} tokens, cannot keep {length}")
            if 0 < length < held and not self.memory.can_cut(length, oldest := self._core.oldest(seq)):
                reachable = self.memory.shortest_cut(held, oldest)
                raise CannotRewindError(
                    f"a {self.memory.name} memory cannot go from {held} tokens back to {length}; "
                    f"it can reach {reachable}. Restore a checkpoint, or clear and decode again",
                    asked=length,
                    reachable=reachable,
                )
            self._rows.end()
            if length < held:
                with self._undoing({seq: Mark(length)}):
                    self._core.remove(seq, length)
                    self._confirm(seq, length)
                    self._ledger.cut(seq, length)

    def fork(self, src: int, dst: int) -> None:
        """Make `dst`, whatever it held, a copy of `src`."""
        with self._turn(src, dst):
            if src == dst:
                raise SequenceError(f"sequence {src} cannot be forked into itself")
            self._rows.end()
            with self._undoing({dst: EMPTY}):
                self._core.remove(dst, 0)
                self._ledger.cut(dst, 0)
                if length := self._ledger.length(src):
                    self._core.copy(src, dst)
                    self._confirm(dst, length)
                    self._ledger.copy(src, dst)

    def clear(self, seq: int | None = None) -> None:
        """Forget `seq`; with none named, everything, as if the context were new."""
        with self._turn(*(() if seq is None else (seq,))):
            self._rows.end()
            seqs = range(self.n_seq) if seq is None else (seq,)
            with self._undoing(dict.fromkeys(seqs, EMPTY)):
                if seq is None:
                    self._core.clear()
                else:
                    self._core.remove(seq, 0)
                for each in seqs:
                    self._confirm(each, 0)
                    self._ledger.cut(each, 0)

    def adapt(self, adapters: Mapping[Adapter, float]) -> None:
        """Use these adapters at these scales from now on; none for the model as it is.

        What the sequences hold was computed with other weights, so all of them are cleared.
        """
        if not isinstance(adapters, Mapping):
            raise InvalidInputError(f"adapt takes adapters with their scales, got {adapters!r}")
        for adapter, scale in adapters.items():
            if not isinstance(scale, (int, float, np.number)) or not abs(scale) <= _LARGEST_SCALE:
                raise InvalidInputError(f"the scale of {adapter!r} must be a finite number, got {scale!r}")
        with self._turn():
            self._rows.end()
            with self._undoing(dict.fromkeys(range(self.n_seq), EMPTY)):
                if accepted := self._core.adapt(adapters):
                    named = sorted(f"{each.digest}*{float(scale)!r}" for each, scale in adapters.items())
                    self._adapters = ",".join(named) or "none"
                    self._identity = None
                    self._core.clear()
                    for seq in range(self.n_seq):
                        self._confirm(seq, 0)
                        self._ledger.cut(seq, 0)
            if not accepted:
                raise EngineError("the engine refused these adapters; the context is as before")

    # State.

    def save(self, seq: int = 0) -> bytes:
        """The state of `seq` as bytes that describe themselves (see `state.py`)."""
        with self._turn(seq):
            tokens = self._held(seq)
            return saved.pack(self.identity, tokens, self._core.read(seq, partial=False))

    def load(self, state: bytes | bytearray | memoryview, seq: int = 0) -> None:
        """Replace `seq` by saved state. Foreign or damaged bytes are refused before the engine sees them."""
        with self._turn(seq):
            found = saved.unpack(state, self.identity)
            tokens = found.tokens
            if not 0 < len(tokens) <= self.n_ctx:
                raise _overflow(len(tokens), self.n_ctx, "so the saved state says")
            self._check_tokens(tokens)
            self._rows.end()
            with self._undoing({seq: EMPTY}):
                # Emptied first: the engine may refuse and keep a part of what was there.
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.write(seq, found.payload, partial=False):
                    raise EngineError(f"the engine refused a verified state; sequence {seq} is now empty")
                self._confirm(seq, len(tokens))
                self._ledger.replace(seq, tokens)

    def checkpoint(self, seq: int = 0) -> Checkpoint:
        """A point to `restore` later, small where the memory can be cut."""
        with self._turn(seq):
            tokens = self._held(seq)
            part = None
            if self.memory.needs_checkpoint:
                part = self._core.read(seq, partial=True)
            return Checkpoint(self.identity.digest, tokens, part)

    def restore(self, checkpoint: Checkpoint, seq: int = 0) -> None:
        """Take `seq` back to `checkpoint`, whose tokens it must still start with.

        A recurrent memory is whole in its checkpoint, so there the sequence may hold anything.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidInputError(f"restore takes a checkpoint, got {type(checkpoint).__name__}")
        with self._turn(seq):
            if checkpoint.identity != self.identity.digest:
                raise IncompatibleStateError("this checkpoint is of another model, build or layout")
            alone = not self.memory.has_rows
            if not alone and not self._ledger.starts_with(seq, checkpoint.tokens):
                raise IncompatibleStateError(
                    f"sequence {seq} no longer starts with the {checkpoint.length} tokens of the checkpoint; "
                    "load a saved state, or decode them again",
                    field="tokens",
                )
            self._check_tokens(checkpoint.tokens)
            self._rows.end()
            with self._undoing({seq: EMPTY}):
                if not self._undo.return_to(seq, Mark(checkpoint.length, checkpoint.state)):
                    raise EngineError(f"the engine refused a checkpoint; sequence {seq} is now empty")
                self._ledger.replace(seq, checkpoint.tokens)

    def capture(self, seq: int = 0) -> Capture:
        """The state of `seq` in parts; cut its rows before the context is used again."""
        with self._turn(seq):
            self._held(seq)
            return self._core.capture(seq)

    def row_bytes(self) -> int | None:
        """How wide the rows of a captured state are here; None where its states have no rows by token."""
        if self._row_bytes is None:
            with self._turn():
                lengths = [self._ledger.length(seq) for seq in range(self.n_seq)]
                if 0 in lengths:
                    # It may take a step of its own to find out.
                    self._rows.end()
                self._row_bytes = (self._core.row_bytes(lengths.index(min(lengths))),)
        return self._row_bytes[0]

    def assemble(
        self,
        tokens: Tokens,
        pieces: Sequence[NDArray[np.uint8]],
        rest: NDArray[np.uint8] | None,
        seq: int = 0,
    ) -> None:
        """Replace `seq` by `tokens`, whose state is these rows and this rest, captured here before.

        Nothing of them is verified: that is for whoever kept them.
        """
        ids = self._check_tokens(tokens)
        rows = sum(len(piece) for piece in pieces)
        if len(ids) > self.n_ctx or (pieces and rows != len(ids)):
            raise InvalidInputError(f"{rows} rows for {len(ids)} tokens, where {self.n_ctx} fit")
        width = self.row_bytes()
        for piece in pieces:
            if piece.ndim != 2 or piece.shape[1] != width:
                raise IncompatibleStateError(
                    f"rows of {piece.shape[1:]} bytes, where this context has {width or 'none'}; compute the "
                    "tokens anew",
                    field="row width",
                )
        with self._turn(seq):
            self._rows.end()
            with self._undoing({seq: EMPTY}):
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.assemble(seq, pieces, rest):
                    raise EngineError(f"the engine refused rows that it gave; sequence {seq} is now empty")
                self._confirm(seq, len(ids))
                self._ledger.replace(seq, ids)

    # Its own life.

    def limit_scratch(self, nbytes: int) -> int:
        """Keep at most `nbytes` between calls for states on their way in or out; how much that may come to.

        A larger state gets memory of its own for as long as it is on its way.
        """
        with self._turn():
            return self._core.limit_scratch(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """What is kept for states on their way now."""
        return self._core.scratch_bytes

    def prepare(self) -> None:
        """Find out now how state is laid out, which the first capture or assembling does otherwise."""
        with self._turn():
            if not any(map(self._ledger.length, range(self.n_seq))):
                self._core.prepare()

    def close(self) -> None:
        """Stop what is in flight and give everything back. Closing twice is fine."""
        self._closing = True
        self._core.stop()
        with self._lock:
            if self._closed:
                return
            try:
                self._rows.retire()
            except BufferError:
                self._closing = False
                self._core.rearm()
                raise
            self._closed = True
            self._core.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The core goes with its last owner: this context, or an array borrowed from it.
        if rows := getattr(self, "_rows", None):
            rows.abandon()

    # Inside: checks.

    def _ready(self) -> None:
        if self._closing:
            raise ClosedError("this context is closed")
        if self._undo.marks:
            self._undo.carry_out()

    @contextmanager
    def _turn(self, *seqs: int) -> Iterator[None]:
        with self._lock:
            self._ready()
            self._check_seqs(seqs)
            yield

    def _check_seqs(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if not is_integer(seq) or not 0 <= seq < self.n_seq:
                raise SequenceError(f"sequences run from 0 to {self.n_seq - 1}, got {seq!r}")

    def _check_tokens(self, tokens: Tokens) -> NDArray[np.int32]:
        # The usual case, at every token: NumPy would take ten times as long over one number (`bench.engine`).
        if type(tokens) is list and len(tokens) == 1:
            token = tokens[0]
            if type(token) is int and 0 <= token < self.n_vocab:
                return np.array(tokens, np.int32)
        try:
            if len(tokens) > self.n_ctx:
                raise _overflow(len(tokens), self.n_ctx, "too many tokens for any sequence")
        except TypeError as error:
            raise TokenError(f"a list of tokens is a flat list of token ids: {error}") from None
        return token_array(tokens, self.n_vocab)

    def _check_room(self, seq: int, count: int) -> int:
        held = self._ledger.length(seq)
        if held + count > self.n_ctx:
            raise _overflow(held + count, self.n_ctx, f"sequence {seq} holds {held} and got {count} more")
        return held

    def _held(self, seq: int) -> NDArray[np.int32]:
        if not self._ledger.length(seq):
            raise InvalidInputError(f"sequence {seq} is empty: there is nothing to keep")
        return self._ledger.array(seq)

    def _confirm(self, seq: int, length: int) -> None:
        """Read back that `seq` holds `length` tokens; if not, empty it rather than guess."""
        if self._core.newest(seq) != length - 1:
            newest = self._core.newest(seq)
            self._core.remove(seq, 0)
            self._ledger.cut(seq, 0)
            raise EngineError(
                f"the engine holds positions up to {newest} of sequence {seq} where {length - 1} was "
                "expected; the sequence was emptied"
            )

    # Inside: decoding.

    def _chunks(self, outputs: NDArray[np.int8]) -> Iterator[tuple[int, int]]:
        """Cut a decode into native steps, none with more tokens or rows than one can hold."""
        count = len(outputs)
        if count <= self.n_batch and count <= self.capabilities.max_outputs:
            yield 0, count
            return
        rows = np.cumsum(outputs, dtype=np.int64)
        at, done = 0, 0
        while at < count:
            fits = int(np.searchsorted(rows, done + self.capabilities.max_outputs, side="right"))
            end = min(count, at + self.n_batch, fits)
            yield at, end
            at, done = end, int(rows[end - 1])

    def _run(self, parts: Sequence[Part]) -> None:
        self._batch.fill(parts)
        ends = [part.start + len(part.tokens) - 1 for part in parts]
        self._run_batch([part.seq for part in parts], ends, alone=len(parts) == 1)

    def _run_batch(self, seqs: Sequence[int], ends: Sequence[int], *, alone: bool) -> None:
        """Decode what the batch holds, and read back that each sequence ends where it should."""
        # For a step of several sequences a recurrent memory moves states about, also those of others.
        # Cut short, it loses them.
        self._stoppable = self.memory.cuts or alone
        if self._stopping or self._closing:
            raise _Failure(Outcome.ABORTED)
        outcome = self._decode_batch()
        if outcome is not Outcome.DONE:
            if outcome in (Outcome.ABORTED, Outcome.FAILED) and not self._stoppable:
                self._undo.doubt_all()
            raise _Failure(outcome)
        if any(self._core.newest(seq) != end for seq, end in zip(seqs, ends, strict=True)):
            raise _Failure(Outcome.FAILED)

    def _decode_batch(self) -> Outcome:
        if self._batch.size <= _DIRECT:
            return self._core.decode(self._batch)
        with stopped_by_ctrl_c(self._halt):
            return self._core.decode(self._batch)

    @contextmanager
    def _undoing(self, marks: Mapping[int, Mark]) -> Iterator[None]:
        """Change the cache and the ledger; on any failure take every sequence to its mark, and say so.

        Ctrl-C can strike anywhere, even here. What it leaves unfinished, the next call undoes.
        """
        self._begin(marks)
        try:
            yield
            self._undo.marks = {}
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()

    def _begin(self, marks: Mapping[int, Mark]) -> None:
        # A cancel that came late was not meant for this call.
        self._stopping = False
        if not self._closing:
            self._core.rearm()
        self._undo.marks = marks
        self._busy = True

    def _fail(self, error: BaseException) -> None:
        """Undo what is unfinished; a failure of the engine is raised with what was kept."""
        before = self._undo.lengths()
        kept = self._undo.carry_out()
        if isinstance(error, _Failure):
            raise self._explain(error.outcome, before, kept) from None

    def _end(self) -> None:
        self._busy = self._stopping = False
        if not self._closing:
            self._core.rearm()

    def _halt(self) -> None:
        """Stop the native step in flight, where that harms no sequence but its own."""
        if self._stoppable:
            self._core.stop()

    def _explain(self, outcome: Outcome, before: Mapping[int, int], kept: dict[int, int]) -> Exception:
        left = "nothing was changed" if kept == before else f"tokens kept by sequence: {kept}"
        if outcome is Outcome.ABORTED:
            if self._closing:
                return ClosedError("this context was closed during the decode")
            return DecodeCancelled(f"the decode was cancelled; {left}", kept=kept)
        if outcome is Outcome.FULL:
            held = sum(self._ledger.length(seq) for seq in range(self.n_seq))
            return ContextOverflow(
                f"the engine found no room: {held} tokens are held over all sequences; {left}",
                needed=held + 1,
                fits=held,
            )
        return DecodeError(f"the engine failed to decode ({outcome.value}); {left}", kept=kept)


def _overflow(needed: int, fits: int, why: str) -> ContextOverflow:
    return ContextOverflow(
        f"needed {needed} tokens, {fits} fit: {why}. Open the context with a larger n_ctx, or drop some",
        needed=needed,
        fits=fits,
    )
