"""A context: sequences of tokens, and the rules that keep them true.

The rules are written once, here, over any `Core`. Data flows tokens → batch → core; what the core
then reports, and nothing else, is written to the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.engine.batch import BatchPart
from perdure.engine.context.guarded_core import Undoing
from perdure.engine.context.ledger import EMPTY, Mark
from perdure.engine.context.rows import Source, marked, outputs
from perdure.engine.context.state_calls import StateCalls
from perdure.engine.contract import (
    Adapter,
    Floats,
    Rows,
    Tokens,
)
from perdure.engine.logits import LogitsView
from perdure.errors import (
    CannotRewindError,
    EngineError,
    InvalidInputError,
    RowError,
    SequenceError,
)

T = TypeVar("T")

_LARGEST_SCALE = float(np.finfo(np.float32).max)


class Feed(NamedTuple):
    """Tokens to append to one sequence in a step, and the rows wanted of them."""

    seq: int
    tokens: Tokens
    rows: Rows = "last"


class Context(StateCalls):
    """Sequences of tokens in one engine context.

    Always holds: `tokens(seq)` is what is in the cache; a call either does all that it says or raises
    and leaves things as they were (or says in the error what is left); calls from several threads
    queue; logits are live only until the next change.
    """

    # What is there.

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
            with Undoing(self, marks):
                for at, end in chunks:
                    self._run([BatchPart(seq, start + at, ids[at:end], wanted[at:end])])
                    for index in marked(wanted[at:end] if len(chunks) > 1 else wanted):
                        found[seq, at + index] = index if end == len(ids) else self._core.row(index).copy()
                self._ledger.append(seq, ids)
                self._rows.publish(found, {seq: len(ids)})

    def step(self, feeds: Sequence[Feed]) -> None:
        """Append to several sequences in one native step of at most `n_batch` tokens: all, or none."""
        if self._step_tokens(feeds):
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
                BatchPart(seq, self._check_room(seq, len(ids)), ids, marks)
                for (seq, ids, _), marks in zip(checked, wanted, strict=True)
            ]
            # The engine batches streams together only in rising order.
            parts.sort(key=lambda part: part.seq)
            self._rows.end()
            marks = {part.seq: self._undo.mark(part.seq, len(part.tokens)) for part in parts}
            found: dict[tuple[int, int], Source] = {}
            at = 0
            with Undoing(self, marks):
                self._run(parts)
                for part in parts:
                    self._ledger.append(part.seq, part.tokens)
                    for index in places[part.seq]:
                        found[part.seq, index] = at + index
                    at += len(part.tokens)
                self._rows.publish(found, {part.seq: len(part.tokens) for part in parts})

    def _step_tokens(self, feeds: Sequence[Feed]) -> bool:
        """A step of one token for each of some replies. False: it is not of that kind.

        The same as any other step, without what only longer feeds need: after a native step the caches are
        cold, and every call counts (`python -m bench.decode`).
        """
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
        seqs, tokens = zip(*sorted(by_seq.items()), strict=True)
        with self._lock:
            self._ready()
            starts = self._ledger.lengths_of(seqs)
            if max(starts) >= self.n_ctx:
                return False
            self._rows.end()
            marks: dict[int, Mark] = {}
            rows: dict[tuple[int, int], Source] = {}
            for at, (seq, start) in enumerate(zip(seqs, starts, strict=True)):
                # One token more costs no kind of memory what it would need to come back.
                marks[seq] = start, None
                rows[seq, 0] = at
            with Undoing(self, marks):
                self._batch.fill_tokens(seqs, starts, tokens)
                self._run_batch(seqs, starts, alone=len(seqs) == 1)
                self._ledger.append_each(seqs, tokens)
                self._rows.publish(rows, dict.fromkeys(seqs, 1))
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
            return function(self._core.rows(self._rows.all_live(places)))

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
                with Undoing(self, {seq: (length, None)}):
                    self._core.remove(seq, length)
                    self._confirm(seq, length)
                    self._ledger.cut(seq, length)

    def fork(self, src: int, dst: int) -> None:
        """Make `dst`, whatever it held, a copy of `src`."""
        with self._turn(src, dst):
            if src == dst:
                raise SequenceError(f"sequence {src} cannot be forked into itself")
            self._rows.end()
            with Undoing(self, {dst: EMPTY}):
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
            with Undoing(self, dict.fromkeys(seqs, EMPTY)):
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
            with Undoing(self, dict.fromkeys(range(self.n_seq), EMPTY)):
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
