"""A context: sequences of tokens, and the rules that keep them true.

The rules are written once, here, over any `Core`. Data flows tokens → batch → core; what the core
then reports, and nothing else, is written to the ledger.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perdure.checks import check_whole, is_integer
from perdure.engine.adapters import AdapterSet
from perdure.engine.context.guarded_core import GuardedCore, Undoing, overflow
from perdure.engine.context.ledger import EMPTY, Mark, Source, marked, outputs
from perdure.engine.contract import BatchPart, Capture, Floats, GuessingCore, Rows, Tokens, check_token
from perdure.errors import (
    CannotRewindError,
    EngineError,
    IncompatibleStateError,
    InvalidInputError,
    RowError,
    SequenceError,
)

if TYPE_CHECKING:
    from perdure.engine.core import Adapter
    from perdure.engine.inspection import KeyValues, Trace
    from perdure.engine.logits import LogitsView
    from perdure.engine.state import Checkpoint


# State calls: what a sequence holds, as bytes, checkpoints, and rows by token.


class StateCalls(GuardedCore):
    """Saving and putting back what sequences hold. A state that does not fit is refused, never half taken."""

    def save(self, seq: int = 0) -> bytes:
        """The state of `seq` as bytes that describe themselves (see `state.py`)."""
        from perdure.engine import state as saved

        with self._lock:
            self._check(seq)
            tokens = self._held(seq)
            identity = self.identity_of(self._sets[seq], len(tokens))
            return saved.pack(identity, tokens, self._core.read(seq, partial=False))

    def load(self, state: bytes | bytearray | memoryview, seq: int = 0) -> None:
        """Replace `seq` by saved state. Foreign or damaged bytes are refused before the engine sees them."""
        from perdure.engine import state as saved

        with self._lock:
            self._check(seq)
            content = saved.unpack(state, functools.partial(self.identity_of, self._sets[seq]))
            tokens = content.tokens
            if not 0 < len(tokens) <= self.n_ctx:
                raise overflow(len(tokens), self.n_ctx, "so the saved state says")
            self._check_tokens(tokens)
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                # Emptied first: the engine may refuse and keep a part of what was there.
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.write(seq, content.payload, partial=False):
                    raise EngineError(f"the engine refused a verified state; sequence {seq} is now empty")
                self._ledger.replace(seq, tokens)
                self._confirm(seq)

    def checkpoint(self, seq: int = 0) -> Checkpoint:
        """A point to `restore` later, small where the memory can be cut."""
        from perdure.engine.state import Checkpoint

        with self._lock:
            self._check(seq)
            tokens = self._held(seq)
            part = None
            if self.memory.needs_checkpoint:
                part = self._core.read(seq, partial=True)
            return Checkpoint(self.identity_of(self._sets[seq], len(tokens)).digest, tokens, part)

    def restore(self, checkpoint: Checkpoint, seq: int = 0) -> None:
        """Take `seq` back to `checkpoint`, whose tokens it must still start with.

        A recurrent memory is whole in its checkpoint, so there the sequence may hold anything.
        """
        from perdure.engine.state import Checkpoint

        if not isinstance(checkpoint, Checkpoint):
            raise InvalidInputError(f"restore takes a checkpoint, got {type(checkpoint).__name__}")
        with self._lock:
            self._check(seq)
            if checkpoint.identity != self.identity_of(self._sets[seq], checkpoint.length).digest:
                raise IncompatibleStateError("this checkpoint is of another model, adapter, build or layout")
            alone = not self.memory.has_rows
            if not alone and not self._ledger.starts_with(seq, checkpoint.tokens):
                raise IncompatibleStateError(
                    f"sequence {seq} no longer starts with the {checkpoint.length} tokens of the checkpoint; "
                    "load a saved state, or decode them again",
                    field="tokens",
                )
            self._check_tokens(checkpoint.tokens)
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                if alone:
                    self._ledger.replace(seq, checkpoint.tokens)
                if self._undo.return_to(seq, (checkpoint.length, checkpoint.state)) != checkpoint.length:
                    raise EngineError(f"the engine refused a checkpoint; sequence {seq} is now empty")
                self._ledger.replace(seq, checkpoint.tokens)

    def capture(self, seq: int = 0) -> Capture:
        """The state of `seq` in parts; cut its rows before the context is used again."""
        with self._lock:
            self._check(seq)
            length = len(self._held(seq))
            captured = self._core.capture(seq)
            if captured.rows is not None and len(captured.rows) != length:
                raise EngineError(f"{len(captured.rows)} rows of sequence {seq}, which has {length} tokens")
            return captured

    def row_bytes(self) -> int | None:
        """How wide the rows of a captured state are here; None where its states have no rows by token."""
        if self._row_bytes is None:
            with self._lock:
                self._check()
                lengths = [self._ledger.length(seq) for seq in range(self.n_seq)]
                if 0 in lengths:
                    # Finding out may take a step.
                    self._rows.end()
                self._row_bytes = (self._core.row_bytes(lengths.index(min(lengths))),)
        return self._row_bytes[0]

    def assemble(
        self,
        tokens: Tokens,
        pieces: Sequence[NDArray[np.uint8]],
        tail_state: NDArray[np.uint8] | None,
        seq: int = 0,
    ) -> None:
        """Replace `seq` by `tokens`, whose state is these rows and this tail state, captured here before.

        Nothing of them is verified: the cache that stored them does that.
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
        with self._lock:
            self._check(seq)
            self._rows.end()
            with Undoing(self, {seq: EMPTY}):
                self._core.remove(seq, 0)
                self._ledger.cut(seq, 0)
                if not self._core.assemble(seq, pieces, tail_state):
                    raise EngineError(f"the engine refused rows that it gave; sequence {seq} is now empty")
                self._ledger.replace(seq, ids)
                self._confirm(seq)

    def kv(
        self,
        seq: int = 0,
        layer: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        rope: bool = True,
    ) -> KeyValues:
        """Keys and values of the tokens `start` to `stop` of `seq` as numbers, of a layer or of all layers,
        whatever their type in the cache. Without `rope`, keys are as they were before their positions
        rotated them. Layers with a window have its tokens: without a start, the first one is that which all
        these layers still have."""
        from perdure.engine.inspection import inspector

        with self._lock:
            self._check(seq)
            length = len(self._held(seq))
            captured = self._core.capture(seq)
            kv: KeyValues = inspector("ctx.kv")(self._core, captured, length, layer, start, stop, rope=rope)
            return kv

    def trace(
        self,
        seq: int = 0,
        *,
        layers: Sequence[int] | None = None,
        what: str | Sequence[str] = ("hidden",),
        start: int = 0,
        stop: int | None = None,
    ) -> Trace:
        """What layers compute for the tokens of `seq`, or for those from `start` on and before `stop`: any of
        `hidden`, `attention`, `ffn` and `router`. They are computed again, in a context of their own that is
        given back afterwards: nothing here changes or becomes slower. For `attention` that is done without
        flash attention. Keys and values are f16 there."""
        from perdure.engine.inspection import inspector

        with self._lock:
            self._check(seq)
            tokens = self._held(seq)
            tokens = tokens[: len(tokens) if stop is None else check_whole("stop", stop, 1, len(tokens))]
            check_whole("start", start, 0, max(0, len(tokens) - 1))
            if tokens.min() < 0:
                raise InvalidInputError("a sequence with images cannot be traced: its text alone could be")
            adapters = self._sets[seq]
        if self._trace_pass is None:
            raise InvalidInputError("this engine has no layers that could be traced")
        if adapters.before is not None:
            raise InvalidInputError("a sequence whose adapters change on the way cannot be traced")
        scales = dict(adapters.at(math.inf).scales)
        trace: Trace = inspector("ctx.trace")(self._trace_pass, tokens, what, layers, scales, start)
        return trace

    def step_trace(self, row: int = -1, seq: int | None = None) -> Trace:
        """What layers computed for a row of the last native step, in that step, where the context was opened
        with `trace`. Where the engine does not say which row is whose, it is computed again."""
        from perdure.engine.inspection import Trace, TracingCore

        with self._lock:
            self._check()
            if not isinstance(self._core, TracingCore):
                raise InvalidInputError("steps are not traced here: open with trace=('hidden',)")
            trace = self._core.step_trace(self._rows.live(row, seq))
            if isinstance(trace, Trace):
                return trace
            seq, behind = self._rows.behind(row, seq)
            stop = self._ledger.length(seq) - behind
        return self.trace(seq, layers=trace.layers, what=trace.what, stop=stop).last()

    def kv_of(
        self, rows: NDArray[np.uint8], layer: int | None = None, *, start: int = 0, rope: bool = True
    ) -> KeyValues:
        """The same of rows that were captured here, such as those of a stored block whose first token is at
        position `start`."""
        from perdure.engine.inspection import inspector

        with self._lock:
            self._check()
            width = self.row_bytes()
            if rows.ndim != 2 or rows.shape[1] != width:
                raise InvalidInputError(f"rows have {width} bytes here, got an array of shape {rows.shape}")
            kv: KeyValues = inspector("ctx.kv_of")(self._core, rows, layer, start, rope=rope)
            return kv

    def limit_scratch(self, nbytes: int) -> int:
        """Keep at most `nbytes` between calls for states on their way in or out; how much that may come to.

        A larger state gets separate memory for as long as it is on its way.
        """
        with self._lock:
            self._check()
            return self._core.limit_scratch(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """What is kept for states on their way now."""
        return self._core.scratch_bytes

    def prepare(self) -> None:
        """Find out now how state is laid out, which the first capture or assembling does otherwise."""
        with self._lock:
            self._check()
            if not any(map(self._ledger.length, range(self.n_seq))):
                self._core.prepare()


T = TypeVar("T")

_ACCEPTED = 256
"""Sets of adapters that are known to fit."""


class Feed(NamedTuple):
    """Tokens to append to one sequence in a step, and the rows wanted of them."""

    seq: int
    tokens: Tokens
    rows: Rows = "last"


class Context(StateCalls):
    """Sequences of tokens in one engine context.

    Always holds: `tokens(seq)` is what is in the cache; a call either does all that it says or raises
    and leaves things as they were (or says in the error what is left); calls from several threads
    queue; logits are live only until the next change; what a sequence holds was computed with its own set of
    adapters (`adapters_of`).
    """

    # What is there.

    def tokens(self, seq: int = 0) -> list[int]:
        """The tokens of `seq` that are in the cache."""
        with self._lock:
            self._check(seq)
            return self._ledger.tokens(seq)

    def length(self, seq: int = 0) -> int:
        """How many tokens of `seq` are in the cache."""
        with self._lock:
            self._check(seq)
            return self._ledger.length(seq)

    def lengths(self) -> list[int]:
        """How many tokens of each sequence are in the cache."""
        with self._lock:
            self._check()
            return self._ledger.lengths()

    def beginning(self, seq: int, count: int) -> tuple[int, list[int]]:
        """How many tokens are in the cache of `seq`, and the first `count` of them. It waits for no step in
        flight: what that computes is not in it yet."""
        self._check_seqs((seq,))
        return self._ledger.beginning(seq, count)

    def token_array(self, seq: int = 0, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """The tokens of `seq` from `start` to `stop` that are in the cache, as an array of their own."""
        with self._lock:
            self._check(seq)
            return self._ledger.array(seq, start, stop)

    def common_prefix(self, tokens: NDArray[np.int32], seq: int = 0) -> int:
        """How many of `tokens` `seq` starts with."""
        with self._lock:
            self._check(seq)
            return self._ledger.common_prefix(seq, tokens)

    def shortest_cut(self, seq: int = 0) -> int:
        """The shortest length above 0 that `truncate` can reach now without a checkpoint."""
        with self._lock:
            self._check(seq)
            length = self._ledger.length(seq)
            return self._shortest_cut(seq, length, self._core.oldest(seq)) if length else 0

    @property
    def has_spans(self) -> bool:
        """Whether any sequence has an image that is cut as a whole (`cut_point`)."""
        return bool(self._ledger.spans)

    def cut_point(self, seq: int, length: int) -> int:
        """The longest length up to `length` that ends inside of no image whose positions have two dimensions:
        `truncate` cuts those as a whole."""
        return self._ledger.cut_point(seq, length) if self._ledger.spans else length

    def _shortest_cut(self, seq: int, length: int, oldest: int) -> int:
        newest = self._ledger.newest(seq, length)
        return self._ledger.index_of(seq, self.memory.shortest_cut(newest + 1, oldest))

    # Decoding.

    def decode(self, tokens: Tokens, seq: int = 0, *, rows: Rows = "last") -> None:
        """Append `tokens` to `seq`, however many: all of them, or none.

        `rows` says of which tokens `logits` can be asked afterwards: the last, all, none, or the
        given places in `tokens`. Rows are zero-copy in the last native step and copies before it.
        """
        ids = self._check_tokens(tokens)
        row_marks = outputs(rows, len(ids))
        with self._lock:
            self._check(seq)
            start = self._check_room(seq, len(ids))
            self._rows.end()
            adapters, same = self._sets[seq], self.same_adapters(seq, start, len(ids))
            switch = same if same < len(ids) else 0
            has_media = self.media is not None and ids.min() < 0
            cut = self._media_chunks(ids, row_marks, switch) if has_media else self._chunks(row_marks, switch)
            chunks = list(cut)
            marks = {seq: self._undo.mark(seq, len(ids), steps=len(chunks))}
            sources: dict[tuple[int, int], Source] = {}
            with Undoing(self, marks):
                for at, end in chunks:
                    self._use(adapters.at(start + at))
                    if has_media and ids[at] < 0:
                        self._run_medium(seq, ids[at:end])
                        continue
                    self._run([BatchPart(seq, start + at, ids[at:end], row_marks[at:end])])
                    for index in marked(row_marks[at:end] if len(chunks) > 1 else row_marks):
                        sources[seq, at + index] = index if end == len(ids) else self._core.row(index).copy()
                    if has_media:
                        self._ledger.append(seq, ids[at:end])
                if not has_media:
                    self._ledger.append(seq, ids)
                self._rows.publish(sources, {seq: len(ids)})

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
        marks_of = [outputs(rows, len(ids)) for _, ids, rows in checked]
        places = {seq: marked(marks) for (seq, _, _), marks in zip(checked, marks_of, strict=True)}
        has_media = self.media is not None and any(ids.min() < 0 for _, ids, _ in checked)
        if has_media and (len(checked) > 1 or checked[0][1].max() >= 0 or any(places.values())):
            raise InvalidInputError("a step takes an image alone, and gives no rows of it")
        if sum(map(len, places.values())) > self.capabilities.max_outputs:
            raise RowError(f"a step gives at most {self.capabilities.max_outputs} rows; ask for fewer")
        with self._lock:
            self._ready()
            self._check_seqs(places)
            parts = [
                BatchPart(seq, self._check_room(seq, len(ids)), ids, marks)
                for (seq, ids, _), marks in zip(checked, marks_of, strict=True)
            ]
            # The engine batches streams together only in rising order.
            parts.sort(key=lambda part: part.seq)
            adapters = self._default
            if self.mixed:
                adapters = self._step_set([part.seq for part in parts], [part.start for part in parts])
            for part in parts:
                if (count := self.same_adapters(part.seq, part.start, len(part.tokens))) < len(part.tokens):
                    raise SequenceError(
                        f"a step computes with one set of adapters; that of sequence {part.seq} changes "
                        f"after {count} of its {len(part.tokens)} tokens"
                    )
            self._rows.end()
            marks = {part.seq: self._undo.mark(part.seq, len(part.tokens)) for part in parts}
            sources: dict[tuple[int, int], Source] = {}
            at = 0
            with Undoing(self, marks):
                self._use(adapters)
                if has_media:
                    self._run_medium(parts[0].seq, parts[0].tokens)
                else:
                    self._run(parts)
                for part in parts:
                    if not has_media:
                        self._ledger.append(part.seq, part.tokens)
                    for index in places[part.seq]:
                        sources[part.seq, index] = at + index
                    at += len(part.tokens)
                self._rows.publish(sources, {part.seq: len(part.tokens) for part in parts})

    def _step_tokens(self, feeds: Sequence[Feed]) -> bool:
        """A step of one token for each of some replies. False: it is not of that kind.

        The same as any other step, without what only longer feeds need: after a native step the caches are
        cold, and every call counts (`python -m bench.decode`).
        """
        by_seq: dict[int, int] = {}
        for feed in feeds:
            if type(feed) is not Feed or type(feed.tokens) is not list or feed.rows != "last":
                return False
            seq, fed = feed.seq, feed.tokens
            if len(fed) != 1 or type(fed[0]) is not int or not 0 <= fed[0] < self.n_vocab:
                return False
            if type(seq) is not int or not 0 <= seq < self.n_seq:
                return False
            by_seq[seq] = fed[0]
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
            adapters = self._step_set(seqs, starts) if self.mixed else self._default
            self._rows.end()
            marks: dict[int, Mark] = {}
            rows: dict[tuple[int, int], Source] = {}
            for at, (seq, start) in enumerate(zip(seqs, starts, strict=True)):
                # One token more costs no kind of memory what it would need to come back.
                marks[seq] = start, None
                rows[seq, 0] = at
            with Undoing(self, marks):
                if adapters is not self._applied:
                    self._use(adapters)
                if self._ledger.spans:
                    starts = list(map(self._ledger.position, seqs, starts))
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

    def guess(
        self, token: int, draw: Callable[[Floats, int], int], seq: int = 0, *, count: int = 1
    ) -> list[int]:
        """At most `count` tokens that the model's next-token layers expect behind `token`, which comes next
        in `seq`. `draw` takes a row of logits and the position of the token that is drawn from it. The
        sequence stays as it is, and so do the rows of the last step."""
        with self._lock:
            self._check(seq)
            check_token(token, self.n_vocab)
            check_whole("count", count, 1)
            if not isinstance(self._core, GuessingCore):
                raise InvalidInputError("this context has no next-token layers: open it with mtp=True")
            room = self.n_ctx - self._ledger.length(seq)
            return self._core.guess(seq, token, draw, min(count, room)) if room > 0 else []

    def overwrite(self, logits: NDArray[np.float32], row: int = -1, seq: int | None = None) -> None:
        """Put other values into a row of the last native step. Its views end."""
        if np.shape(logits) != (self.n_vocab,):
            raise RowError(f"a row has {self.n_vocab} values, got {np.shape(logits)}")
        with self._lock:
            self._check()
            index = self._rows.live(row, seq)
            self._rows.renew()
            self._core.row(index)[:] = logits

    def rule_out(self, mask: NDArray[np.uint8], row: int = -1, seq: int | None = None) -> None:
        """Make tokens whose bit in `mask` is 0 impossible in a row of the last native step. Its views end."""
        with self._lock:
            self._check()
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
        with self._lock:
            self._check(seq)
            length_now = self._ledger.length(seq)
            if not is_integer(length) or not 0 <= length <= length_now:
                raise InvalidInputError(f"sequence {seq} holds {length_now} tokens, cannot keep {length}")
            if (start := self.cut_point(seq, length)) < length < length_now:
                raise CannotRewindError(
                    f"token {length} of sequence {seq} is inside of an image whose tokens have one position"
                    f" in time (M-RoPE): it can be cut at {start}, where that begins",
                    asked=length,
                    reachable=start,
                )
            position = self._ledger.position(seq, length)
            if 0 < length < length_now and not self.memory.can_cut(
                position, oldest := self._core.oldest(seq)
            ):
                reachable = self._shortest_cut(seq, length_now, oldest)
                raise CannotRewindError(
                    f"a {self.memory.name} memory cannot go from {length_now} tokens back to {length}; "
                    f"it can reach {reachable}. Restore a checkpoint, or clear and decode again",
                    asked=length,
                    reachable=reachable,
                )
            self._rows.end()
            if length < length_now:
                with Undoing(self, {seq: (length, None)}):
                    self._core.remove(seq, position)
                    self._ledger.cut(seq, length)
                    self._confirm(seq)

    def fork(self, src: int, dst: int) -> None:
        """Make `dst`, whatever it held, a copy of `src`."""
        with self._lock:
            self._check(src, dst)
            if src == dst:
                raise SequenceError(f"sequence {src} cannot be forked into itself")
            self._rows.end()
            with Undoing(self, {dst: EMPTY}):
                self._core.remove(dst, 0)
                self._ledger.cut(dst, 0)
                if self._ledger.length(src):
                    self._core.copy(src, dst)
                    self._ledger.copy(src, dst)
                    self._confirm(dst)
                if self._sets[dst] is not self._sets[src]:
                    self._set(dst, self._sets[src])

    def clear(self, seq: int | None = None) -> None:
        """Forget `seq`; with none named, everything, as if the context were new. Adapters stay."""
        with self._lock:
            self._check(*(() if seq is None else (seq,)))
            self._rows.end()
            seqs = range(self.n_seq) if seq is None else (seq,)
            with Undoing(self, dict.fromkeys(seqs, EMPTY)):
                if seq is None:
                    self._core.clear()
                else:
                    self._core.remove(seq, 0)
                for each in seqs:
                    self._ledger.cut(each, 0)
                    self._confirm(each)

    def adapt(self, adapters: Mapping[Adapter, float] | AdapterSet, seq: int | None = None) -> None:
        """Compute `seq` with these adapters at these scales from now on; with none named, every sequence,
        also those that other ones were chosen for. No adapters at all are the model alone.

        What a sequence holds was computed with others, and is cleared; a sequence that gets the set that it
        has keeps its tokens. With none named, all are cleared.
        """
        chosen = adapters if isinstance(adapters, AdapterSet) else AdapterSet.of(adapters)
        with self._lock:
            self._check(*(() if seq is None else (seq,)))
            if chosen is not self._default and chosen == self._default:
                chosen = self._default
            if seq is not None and self._sets[seq] is chosen:
                return
            self._rows.end()
            self._accept(chosen)
            if seq is None:
                self._default = chosen
                with Undoing(self, dict.fromkeys(range(self.n_seq), EMPTY)):
                    self._core.clear()
                    for each in range(self.n_seq):
                        self._ledger.cut(each, 0)
                        self._confirm(each)
                        self._set(each, chosen)
                return
            length = self._ledger.length(seq)
            if self._sets[seq].held(length) != chosen.held(length):
                with Undoing(self, {seq: EMPTY}):
                    self._core.remove(seq, 0)
                    self._ledger.cut(seq, 0)
                    self._confirm(seq)
            self._set(seq, chosen)

    def _set(self, seq: int, adapters: AdapterSet) -> None:
        self._sets[seq] = adapters
        first = self._default
        self.mixed = any(each is not first for each in self._sets) or first.before is not None

    def _accept(self, adapters: AdapterSet) -> None:
        """See that the engine takes a set, where it has not taken it before."""
        for each in (adapters.before, adapters.at(math.inf)):
            if each is None or not each.scales:
                continue
            known = self._accepted.get(each.key)
            if known is not None and all(
                a[0] is b[0] for a, b in zip(known.scales, each.scales, strict=True)
            ):
                continue
            if not self._core.adapt(dict(each.scales)):
                raise EngineError("the engine refused these adapters; the context is as before")
            self._applied = each
            if len(self._accepted) >= _ACCEPTED:
                self._accepted.clear()
            self._accepted[each.key] = each
