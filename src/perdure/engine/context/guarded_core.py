"""Guarded core: one native context whose calls happen one at a time, and whole or not at all."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from perdure import system
from perdure.checks import is_integer
from perdure.closing import Closing
from perdure.engine.adapters import PLAIN, AdapterSet
from perdure.engine.context.ledger import Ledger, Mark, StepRows, Undo
from perdure.engine.contract import Batch, BatchPart, Capabilities, Outcome, Tokens, token_array
from perdure.errors import (
    ClosedError,
    ContextOverflow,
    DecodeCancelled,
    DecodeError,
    EngineError,
    InvalidInputError,
    RowError,
    SequenceError,
    TokenError,
)
from perdure.events.background import BackgroundThread
from perdure.identity import Identity
from perdure.memory import MemorySpec

if TYPE_CHECKING:
    from perdure.engine.core import Core
    from perdure.engine.media import MediaCore, MediaSource, MediumRows

_IDENTITIES = 256
"""Identities that are remembered."""
_LONGEST = 1 << 16
"""Tokens of the longest medium that is read in several steps."""
_DIRECT = 8
"""Steps up to this size are short enough to wait for; a longer one can be interrupted by Ctrl-C."""


class Failure(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class GuardedCore(Closing):
    """A core with its ledger, a lock, and the way back.

    Always holds: the ledger says what is in the cache, whatever a call ended by; calls from several threads
    queue; after `close` nothing reaches the engine.
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
        trace_pass: object = None,
    ) -> None:
        """`trace_pass` is what it takes to read tokens once more and look at what layers compute."""
        self._trace_pass = trace_pass
        self.memory = memory
        self.capabilities = capabilities
        self.n_vocab = core.n_vocab
        self.n_ctx = n_ctx
        self.n_seq = n_seq
        self.n_batch = n_batch
        self._core = core
        self._make_identity = identity
        self._identities: dict[str, Identity] = {}
        """By the key of a set of adapters."""
        self._default = PLAIN
        self._sets = [PLAIN] * n_seq
        """What each sequence is computed with."""
        self._applied = PLAIN
        """What the engine would compute with now."""
        self._accepted: dict[str, AdapterSet] = {}
        """Sets that the engine took before."""
        self.mixed = False
        """Whether sequences may be computed with different adapters: a step takes those of one set."""
        self.media: MediaSource | None = None
        """Where the rows of images and sounds are; None: no sequence may have any."""
        self._row_bytes: tuple[int | None] | None = None
        self._batch = Batch(n_batch)
        self._ledger = Ledger(n_seq)
        self._lock = threading.RLock()
        self._rows = StepRows(core, self._lock)
        self._undo = Undo(core, memory, self._ledger, self._rows)
        self._stopping = False
        self._halted = False
        self._stoppable = True
        self._unclear = False
        """Whether a native step has begun of which nobody knows that it ended well."""
        self._closing = False
        self._busy = False
        self._closed = False

    # What it is.

    @property
    def identity(self) -> Identity:
        """What state depends on besides the tokens, where it is computed with the context's own adapters."""
        return self.identity_of(self._default)

    def identity_of(self, adapters: AdapterSet, length: float = math.inf) -> Identity:
        """What the state of the first `length` tokens depends on, computed with `adapters`."""
        key = (adapters if adapters.before is None else adapters.held(length)).key
        if (identity := self._identities.get(key)) is None:
            if len(self._identities) >= _IDENTITIES:
                self._identities.clear()
            identity = self._identities[key] = self._make_identity(key)
        return identity

    @property
    def adapters(self) -> AdapterSet:
        """The context's own set: that of every sequence that was given no other."""
        return self._default

    def adapters_of(self, seq: int) -> AdapterSet:
        """What `seq` is computed with."""
        if type(seq) is not int or not 0 <= seq < self.n_seq:
            self._check_seqs((seq,))
        return self._sets[seq]

    def same_state_until(self, seq: int, adapters: AdapterSet) -> float:
        """How many tokens of state `seq` has as `adapters` would make it, if the tokens are the same."""
        own = self.adapters_of(seq)
        return math.inf if own is adapters else own.shared_until(adapters)

    def same_adapters(self, seq: int, start: int, count: int) -> int:
        """How many of the `count` tokens behind the first `start` of `seq` one step can take."""
        switch = self._sets[seq].start
        return int(switch) - start if start < switch < start + count else count

    @property
    def closed(self) -> bool:
        return self._closed

    def cancel(self) -> None:
        """Stop the decode in flight in another thread, if there is one: it raises `DecodeCancelled`.

        A step of several sequences on a recurrent memory is not stopped once it has begun.
        """
        if self._busy:
            self._stopping = True
            self._halt()

    def close(self) -> None:
        """Stop what is in flight and give everything back. Closing twice is fine."""
        self._closing = True
        self._core.stop()
        with self._lock:
            if self._closed:
                # What is being stopped is not heard.
                self._core.rearm()
                return
            try:
                self._rows.retire()
            except BufferError:
                self._closing = False
                self._core.rearm()
                raise
            self._closed = True
            self._core.close()

    def __del__(self) -> None:
        # The core goes with its last owner: this context, or an array borrowed from it.
        if rows := getattr(self, "_rows", None):
            rows.abandon()

    # Inside: checks.

    def _ready(self) -> None:
        if self._closing:
            raise ClosedError("this context is closed")
        if self._undo.marks:
            self._roll_back()

    def _check(self, *seqs: int) -> None:
        """What every call begins with, once it has the lock. A context manager for both would be three times
        as dear, and a session's turn makes some twenty such calls."""
        if self._closing or self._undo.marks:
            self._ready()
        for seq in seqs:
            if type(seq) is not int or not 0 <= seq < self.n_seq:
                self._check_seqs((seq,))

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
                raise overflow(len(tokens), self.n_ctx, "too many tokens for any sequence")
        except TypeError as error:
            raise TokenError(f"a list of tokens is a flat list of token ids: {error}") from None
        return token_array(tokens, self.n_vocab, media=self.media is not None)

    def _check_room(self, seq: int, count: int) -> int:
        length = self._ledger.length(seq)
        if length + count > self.n_ctx:
            raise overflow(length + count, self.n_ctx, f"sequence {seq} holds {length} and got {count} more")
        return length

    def _held(self, seq: int) -> NDArray[np.int32]:
        if not self._ledger.length(seq):
            raise InvalidInputError(f"sequence {seq} is empty: there is nothing to keep")
        return self._ledger.array(seq)

    def _confirm(self, seq: int) -> None:
        """Read back that `seq` holds what the ledger says; if not, empty it rather than guess."""
        expected = self._ledger.newest(seq, self._ledger.length(seq))
        if self._core.newest(seq) != expected:
            newest = self._core.newest(seq)
            self._core.remove(seq, 0)
            self._ledger.cut(seq, 0)
            raise EngineError(
                f"the engine holds positions up to {newest} of sequence {seq} where {expected} was "
                "expected; the sequence was emptied"
            )

    # Inside: decoding.

    def _chunks(self, outputs: NDArray[np.int8], switch: int = 0) -> Iterator[tuple[int, int]]:
        """Cut a decode into native steps, none with more tokens or rows than one can hold, and none across
        the place `switch`, where other adapters begin."""
        count = len(outputs)
        if not switch and count <= self.n_batch and count <= self.capabilities.max_outputs:
            yield 0, count
            return
        rows = np.cumsum(outputs, dtype=np.int64)
        at, done = 0, 0
        while at < count:
            fits = int(np.searchsorted(rows, done + self.capabilities.max_outputs, side="right"))
            end = min(count, at + self.n_batch, fits)
            if at < switch < end:
                end = switch
            yield at, end
            at, done = end, int(rows[end - 1])

    def _media_chunks(
        self, ids: NDArray[np.int32], outputs: NDArray[np.int8], switch: int
    ) -> Iterator[tuple[int, int]]:
        """The same for tokens with media among them: each has separate steps."""
        from perdure.engine.media import spans, step_within

        media = spans(ids)
        for start, end in media:
            if len(self._medium(ids[start:end]).rows) != end - start:
                raise InvalidInputError("ids below zero stand for images, and these are of no whole one")
            if outputs[start:end].any():
                raise RowError("an image has no rows of logits: ask for those of tokens")
        at = 0
        while at < len(ids):
            end = at + step_within(media, at, len(ids) - at, self.n_batch)
            if ids[at] < 0:
                yield at, end
            else:
                for start, stop in self._chunks(outputs[at:end], max(0, switch - at)):
                    yield at + start, at + stop
            at = end

    def _medium(self, ids: NDArray[np.int32]) -> MediumRows:
        """The medium whose ids `ids` begin with, if this context can read it."""
        from perdure.engine.media import MediaCore, positions_of

        if self.media is None or not isinstance(self._core, MediaCore) or not self._core.row_width:
            raise InvalidInputError("this context reads no images: its engine cannot, or what guesses for it")
        medium = self.media.medium(ids)
        count, width = medium.rows.shape
        if width != self._core.row_width:
            raise InvalidInputError(
                f"rows of an image have {width} numbers, and this model takes {self._core.row_width}: they "
                "are of another model"
            )
        across, down = medium.grid
        if across and (not self._core.two_dimensions or positions_of(int(ids[0])) != medium.n_pos):
            raise InvalidInputError(
                "the positions of this image have two dimensions, and those of this model have not: it is of "
                "another model"
            )
        if across * down != (count if across else 0) or (not across and medium.n_pos != count):
            raise InvalidInputError(
                f"an image of {count} tokens with {medium.n_pos} positions, {across} across and {down} down, "
                "cannot be read"
            )
        if not medium.causal and count > self.n_batch:
            raise InvalidInputError(
                f"an image of this model is read in one step, and has {count} tokens where {self.n_batch} "
                f"fit: open the model with n_batch={count}"
            )
        return medium

    def _run(self, parts: Sequence[BatchPart]) -> None:
        if self._ledger.spans:
            place = self._ledger.position
            parts = [replace(part, start=place(part.seq, part.start)) for part in parts]
        self._batch.fill(parts)
        ends = [part.start + len(part.tokens) - 1 for part in parts]
        self._run_batch([part.seq for part in parts], ends, alone=len(parts) == 1)

    def _use(self, adapters: AdapterSet) -> None:
        """Have the engine compute with these from now on."""
        if adapters is self._applied or adapters.key == self._applied.key:
            return
        if not self._core.adapt(dict(adapters.scales)):
            raise EngineError("the engine refused these adapters; the context is as before")
        self._applied = adapters

    def _step_set(self, seqs: Sequence[int], starts: Sequence[int]) -> AdapterSet:
        """What a step computes that takes these sequences from these lengths on."""
        sets = [self._sets[seq].at(start) for seq, start in zip(seqs, starts, strict=True)]
        for seq, other in zip(seqs, sets, strict=True):
            if other != sets[0]:
                raise SequenceError(
                    f"a step computes with one set of adapters; sequences {seqs[0]} and {seq} have "
                    "different ones"
                )
        return sets[0]

    def _run_medium(self, seq: int, ids: NDArray[np.int32]) -> None:
        """Read `ids`, which follow what `seq` has, and note them: a medium, or a part of one."""
        from perdure.engine.media import first_of, positions_in

        ledger, start = self._ledger, self._ledger.length(seq)
        before = ledger.array(seq, max(0, start - _LONGEST))
        tokens = np.concatenate([before, ids])
        first = first_of(tokens, len(before))
        medium = self._medium(tokens[first:])
        done, whole = len(before) - first, len(medium.rows)
        reached = done + len(ids)
        if reached > whole or (reached < whole and reached % self.n_batch):
            raise InvalidInputError("ids below zero stand for images, and these are of no whole one")
        positions = positions_in(medium, ledger.position(seq, start - done), done, reached)
        rows, core = medium.rows[done:reached], cast("MediaCore", self._core)

        def read() -> Outcome:
            return core.decode_rows(seq, positions, rows, causal=medium.causal)

        newest = int(positions.reshape(-1, len(ids))[0, -1])
        self._run_batch([seq], [newest], alone=True, read=read)
        ledger.append_medium(seq, ids)

    def _run_batch(
        self,
        seqs: Sequence[int],
        ends: Sequence[int],
        *,
        alone: bool,
        read: Callable[[], Outcome] | None = None,
    ) -> None:
        """Decode what the batch holds, or what `read` does, and read back that each sequence ends where it
        should."""
        # For a step of several sequences a recurrent memory moves states about, also those of others.
        # Cut short, it loses them.
        self._stoppable = alone or self.memory.cuts
        if self._stopping or self._closing:
            raise Failure(Outcome.ABORTED)
        # A Ctrl-C can hide how the step ended.
        self._unclear = True
        if read is not None:
            with stopped_by_ctrl_c(self._halt):
                outcome = read()
        elif self._batch.size <= _DIRECT:
            outcome = self._core.decode(self._batch)
        else:
            with stopped_by_ctrl_c(self._halt):
                outcome = self._core.decode(self._batch)
        if outcome is not Outcome.DONE:
            raise self._failure(outcome)
        if list(map(self._core.newest, seqs)) != list(ends):
            raise self._failure(Outcome.FAILED)
        self._unclear = False

    def _failure(self, outcome: Outcome) -> Failure:
        """The failure of a native step; where it can have spoiled something, that stays unclear."""
        if outcome not in (Outcome.ABORTED, Outcome.FAILED):
            self._unclear = False
        return Failure(outcome)

    def _fail(self, error: BaseException) -> None:
        """Undo what is unfinished; a failure of the engine is raised with what was kept."""
        before = self._undo.lengths()
        lengths = self._roll_back()
        if isinstance(error, Failure):
            raise self._explain(error.outcome, before, lengths) from None

    def _roll_back(self) -> dict[int, int]:
        """Undo what is unfinished: the tokens that each sequence has kept. What a step can have spoiled is
        not believed."""
        if self._unclear:
            self._undo.doubt(others=not self._stoppable)
        lengths = self._undo.carry_out()
        self._unclear = False
        return lengths

    def _halt(self) -> None:
        """Stop the native step in flight, where that harms no sequence but its own."""
        if self._stoppable:
            self._halted = True
            self._core.stop()

    def _explain(self, outcome: Outcome, before: Mapping[int, int], lengths: dict[int, int]) -> Exception:
        left = "nothing was changed" if lengths == before else f"tokens kept by sequence: {lengths}"
        if outcome is Outcome.ABORTED:
            if self._closing:
                return ClosedError("this context was closed during the decode")
            return DecodeCancelled(f"the decode was cancelled; {left}", kept=lengths)
        if outcome is Outcome.FULL:
            total = sum(self._ledger.length(seq) for seq in range(self.n_seq))
            return ContextOverflow(
                f"the engine found no room: {total} tokens are held over all sequences; {left}",
                needed=total + 1,
                fits=total,
            )
        return DecodeError(f"the engine failed to decode ({outcome.value}); {left}", kept=lengths)


class Undoing:
    """One change of the cache and the ledger. On any failure every sequence is taken to its mark, and the
    error says so.

    Ctrl-C can strike anywhere, even here. What it leaves unfinished, the next call undoes. There is one at
    every token, where a generator, or a call more, would be felt (`python -m bench.decode`).
    """

    __slots__ = ("_guarded", "_marks")

    def __init__(self, guarded: GuardedCore, marks: Mapping[int, Mark]) -> None:
        self._guarded = guarded
        self._marks = marks

    def __enter__(self) -> None:
        guarded = self._guarded
        # A cancel that came late was not meant for this call.
        guarded._stopping = guarded._halted = False
        if not guarded._closing:
            guarded._core.rearm()
        guarded._undo.marks = self._marks
        guarded._busy = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guarded = self._guarded
        try:
            if error is None:
                guarded._undo.marks = {}
            else:
                guarded._fail(error)
        finally:
            guarded._busy = guarded._stopping = False
            if guarded._halted and not guarded._closing:
                guarded._core.rearm()


def overflow(needed: int, fits: int, why: str) -> ContextOverflow:
    return ContextOverflow(
        f"needed {needed} tokens, {fits} fit: {why}. Open the context with a larger n_ctx, or drop some",
        needed=needed,
        fits=fits,
    )


# Ctrl-C during native code.
#
# Python notes a signal at once but acts on it only between its own instructions, so native code in the main
# thread holds Ctrl-C back until it returns. Running it in another thread would free the main one, but OpenMP
# keeps a team of threads for each thread that ever used it, and two teams on the same cores cost a quarter
# of the speed. So the native code stays where it was called, and a thread that only watches stops it.


class _Watcher:
    """Reads the signals that Python notes, and stops what runs when one is Ctrl-C."""

    def __init__(self) -> None:
        self._inlet, self._outlet = os.pipe()
        os.set_blocking(self._outlet, False)
        self._stop: Callable[[], None] | None = None
        BackgroundThread(self._watch, name="perdure-ctrl-c", restart=True).start()

    @contextmanager
    def watching(self, stop: Callable[[], None]) -> Iterator[None]:
        self._stop = stop
        before = signal.set_wakeup_fd(self._outlet, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1 if before == self._outlet else before)
            self._stop = None

    def _watch(self) -> None:
        while numbers := os.read(self._inlet, 64):
            stop = self._stop
            if stop is not None and signal.SIGINT in numbers:
                stop()


_watcher: _Watcher | None = None


def _forget() -> None:
    global _watcher
    _watcher = None


if hasattr(os, "register_at_fork"):
    # The thread does not come along into a child.
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def stopped_by_ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """While this is open in the main thread, Ctrl-C calls `stop` from another thread.

    Only where Ctrl-C means KeyboardInterrupt: a program with another handler decides for itself.
    """
    global _watcher
    if (
        not system.POSIX
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    if _watcher is None:
        _watcher = _Watcher()
    with _watcher.watching(stop):
        yield
