"""Which tokens are in the cache, and the way back for when a call fails in its middle."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.checks import is_integer
from perdure.engine.contract import Rows, Step
from perdure.errors import RowError
from perdure.memory import MemorySpec

if TYPE_CHECKING:
    from perdure.engine.core import Core
    from perdure.engine.logits import LogitsView


class Span(NamedTuple):
    """An image whose tokens have two dimensions: where it begins and ends among the tokens, its position, and
    how many positions it takes up."""

    start: int
    end: int
    position: int
    n_pos: int


class Ledger:
    """For each sequence, the tokens that are truly in the cache, nothing more.

    It is written after the engine was asked and has answered, never before.
    """

    def __init__(self, n_seq: int) -> None:
        self._tokens = [array("i") for _ in range(n_seq)]
        self.spans: dict[int, list[Span]] = {}
        """By sequence, its images whose positions have two dimensions. Where there are none, the position of
        a token is its index."""

    def __len__(self) -> int:
        return len(self._tokens)

    def length(self, seq: int) -> int:
        return len(self._tokens[seq])

    def lengths(self) -> list[int]:
        return list(map(len, self._tokens))

    def lengths_of(self, seqs: Iterable[int]) -> list[int]:
        return list(map(len, map(self._tokens.__getitem__, seqs)))

    def tokens(self, seq: int) -> list[int]:
        return self._tokens[seq].tolist()

    def beginning(self, seq: int, count: int) -> tuple[int, list[int]]:
        """The length of a sequence and its first tokens, in any thread: of one moment, or a step apart."""
        tokens = self._tokens[seq]
        return len(tokens), tokens[:count].tolist()

    def array(self, seq: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        return np.array(self._tokens[seq][start:stop], dtype=np.int32)

    def starts_with(self, seq: int, prefix: NDArray[np.int32]) -> bool:
        tokens = self._tokens[seq]
        return len(prefix) <= len(tokens) and tokens[: len(prefix)].tobytes() == prefix.tobytes()

    def common_prefix(self, seq: int, tokens: NDArray[np.int32]) -> int:
        count = min(len(tokens), len(self._tokens[seq]))
        own = np.frombuffer(self._tokens[seq][:count], np.int32) if count else tokens[:0]
        differ = own != tokens[:count]
        at = int(differ.argmax()) if count else 0
        return at if count and differ[at] else count

    def append(self, seq: int, tokens: NDArray[np.int32]) -> None:
        self._tokens[seq].frombytes(tokens.tobytes())

    def append_medium(self, seq: int, tokens: NDArray[np.int32]) -> None:
        """Append ids of one medium: the first ones, or those that follow."""
        self._note(seq, self.length(seq), tokens)
        self.append(seq, tokens)

    def append_each(self, seqs: Iterable[int], tokens: Iterable[int]) -> None:
        """Append one token to each of several sequences."""
        by_seq = self._tokens
        for seq, token in zip(seqs, tokens, strict=True):
            by_seq[seq].append(token)

    def cut(self, seq: int, length: int) -> None:
        del self._tokens[seq][length:]
        if spans := self.spans.pop(seq, None):
            # A cut inside of one is of an image that was read in part.
            kept = [span._replace(end=min(span.end, length)) for span in spans if span.start < length]
            if kept:
                self.spans[seq] = kept

    def replace(self, seq: int, tokens: NDArray[np.int32]) -> None:
        self._tokens[seq] = array("i", tokens.tobytes())
        self.spans.pop(seq, None)
        if len(tokens) and tokens.min() < 0:
            self._note(seq, 0, tokens)

    def copy(self, src: int, dst: int) -> None:
        self._tokens[dst] = self._tokens[src][:]
        self.spans.pop(dst, None)
        if spans := self.spans.get(src):
            self.spans[dst] = spans[:]

    # Positions.

    def position(self, seq: int, index: int) -> int:
        """The position of the token that is, or would be, at `index`; inside of an image, where that is."""
        for start, end, first, n_pos in reversed(self.spans.get(seq, ())):
            if index >= end:
                return first + n_pos + index - end
            if index >= start:
                return first
        return index

    def newest(self, seq: int, length: int) -> int:
        """The newest position in time of the first `length` tokens; -1 for none."""
        return self.position(seq, length - 1)

    def index_of(self, seq: int, position: int) -> int:
        """The index of the first token at `position`, or behind it."""
        for start, end, first, n_pos in reversed(self.spans.get(seq, ())):
            if position >= first + n_pos:
                return end + position - first - n_pos
            if position >= first:
                return start if position == first else end
        return position

    def cut_point(self, seq: int, length: int) -> int:
        """The longest length up to `length` that ends inside of no image whose tokens have one position: it
        is cut as a whole."""
        for start, end, _, _ in reversed(self.spans.get(seq, ())):
            if length >= end:
                return length
            if length > start:
                return start
        return length

    def _note(self, seq: int, at: int, tokens: NDArray[np.int32]) -> None:
        """Note the spans in `tokens`, which stand from `at` on."""
        from perdure.engine.media import are_first, positions_of

        spans = self.spans.get(seq, [])
        first = are_first(tokens)
        # Each ends where text or the next one begins.
        edges = [*np.flatnonzero(first | (tokens >= 0)).tolist(), len(tokens)]
        if edges[0] and spans and spans[-1].end == at:
            spans[-1] = spans[-1]._replace(end=at + edges[0])
        for start in np.flatnonzero(first).tolist():
            if n_pos := positions_of(int(tokens[start])):
                position, end = self.position(seq, at + start), edges[bisect_right(edges, start)]
                spans.append(Span(at + start, at + end, position, n_pos))
                self.spans[seq] = spans


Mark: TypeAlias = tuple[int, "NDArray[np.uint8] | None"]
"""Where to take a sequence if a call fails: its length, and the state for it where it cannot be cut."""

EMPTY: Mark = (0, None)


class Undo:
    """What a call has begun to change, until it is done.

    Always holds: after `carry_out` the ledger says what is in the cache, whatever happened before it.
    """

    def __init__(self, core: Core, memory: MemorySpec, ledger: Ledger, rows: StepRows) -> None:
        self._core = core
        self._memory = memory
        self._ledger = ledger
        self._rows = rows
        self.marks: Mapping[int, Mark] = {}
        """By sequence, for those whose change is not done."""

    def mark(self, seq: int, count: int, *, steps: int = 1) -> Mark:
        """Where `seq` stands, with what it takes to come back after `count` tokens went wrong."""
        length, memory = self._ledger.length(seq), self._memory
        if not length or not memory.overwrites or not memory.loses(count, steps):
            return length, None
        return length, self._core.read(seq, partial=True)

    def doubt(self, *, others: bool) -> None:
        """After a step that was cut short, or ended elsewhere than it should: plan to empty what it may have
        spoiled, but for what can be cut back and what was kept before the step.

        Where the engine stands is not asked: it has just been wrong, and a state that was half computed can
        have any position. `others`: the step can have hit sequences that were not in it.
        """
        if not self._memory.cuts:
            sure = {seq: mark for seq, mark in self.marks.items() if mark[1] is not None}
            seqs = range(len(self._ledger)) if others else self.marks
            self.marks = {**dict.fromkeys(seqs, EMPTY), **sure}

    def lengths(self) -> dict[int, int]:
        """What the ledger says of the sequences that are not done."""
        return {seq: self._ledger.length(seq) for seq in self.marks}

    def carry_out(self) -> dict[int, int]:
        """Take every sequence that is not done to its mark: the tokens that each has kept."""
        lengths: dict[int, int] = {}
        while self.marks:
            try:
                self._rows.publish({}, {})
                for seq, mark in self.marks.items():
                    length = self.return_to(seq, mark)
                    self._ledger.cut(seq, length)
                    lengths[seq] = length
                self.marks = {}
            except KeyboardInterrupt:
                # A second Ctrl-C must not leave the ledger and the cache apart.
                continue
        return lengths

    def return_to(self, seq: int, mark: Mark) -> int:
        """Bring the cache of `seq` to `mark`, or empty it where that is impossible. The length kept."""
        core, ledger, (length, state) = self._core, self._ledger, mark
        if state is not None:
            # First the part that cannot be cut: the engine refuses to cut the rest before it.
            good = ledger.cut_point(seq, length) == length and core.write(seq, state, partial=True)
            core.remove(seq, ledger.position(seq, length))
        else:
            untouched = core.newest(seq) == ledger.newest(seq, length)
            if (whole := ledger.cut_point(seq, length)) < length:
                # Of an image that was read in part nothing says how far.
                untouched, length = False, whole
            good = untouched or self._memory.can_cut(ledger.position(seq, length), core.oldest(seq))
            core.remove(seq, ledger.position(seq, length))
        if length and good and core.newest(seq) == ledger.newest(seq, length):
            return length
        core.remove(seq, 0)
        return 0


# The rows of logits that the last step gave, and the views taken of them.

Source: TypeAlias = "int | NDArray[np.float32]"
"""A row's entry in the last batch, where its memory is live; or a copy, of a native step before that."""


def marked(marks: NDArray[np.int8]) -> list[int]:
    """The places of the rows that are wanted."""
    if marks is _ONE:
        return [0]
    return marks.nonzero()[0].tolist()


class StepRows:
    """Rows by (sequence, place among the tokens that it was fed), good until the next change.

    Code that changes the cache calls `end` first, so no view can outlive its row.
    """

    def __init__(self, core: Core, lock: AbstractContextManager[object]) -> None:
        self._core = core
        self._lock = lock
        self._step = Step(lock, core)
        self._sources: dict[tuple[int, int], Source] = {}
        self._lengths: dict[int, int] = {}

    def publish(self, sources: dict[tuple[int, int], Source], lengths: dict[int, int]) -> None:
        """Offer the rows of a step that fed `lengths` tokens to each sequence."""
        self._sources = sources
        self._lengths = lengths

    def end(self) -> None:
        """Offer nothing more, unless memory is borrowed: then PinnedError, and all is as before."""
        self.renew()
        self._sources = {}
        self._lengths = {}

    def renew(self) -> None:
        """End the views alone: the rows are about to change in place."""
        # A step of which no view was taken can be the next one's too, unless a Ctrl-C came while it ended.
        if self._step.views or not self._step.alive:
            self._step.retire()
            self._step = Step(self._lock, self._core)

    def retire(self) -> None:
        """End the views for good, unless memory is borrowed."""
        self._step.retire()

    def abandon(self) -> None:
        """End the views, also those that are borrowed: their owner is gone."""
        self._step.end()

    def view(self, row: int, seq: int | None) -> LogitsView:
        key = self._key(row, seq)
        view: LogitsView | None = self._step.views.get(key)
        if view is None:
            # Replies draw from rows without a view of them.
            from perdure.engine.logits import LogitsView

            source = self._sources[key]
            array = self._core.row(source) if isinstance(source, int) else source.view()
            view = self._step.views[key] = LogitsView(array, self._step)
        return view

    def live(self, row: int, seq: int | None) -> int:
        """The entry of a row in the last batch."""
        source = self._sources[self._key(row, seq)]
        if not isinstance(source, int):
            raise RowError(f"row {row} lies before the last native step; decode less at once to draw from it")
        return source

    def all_live(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """The entries of several rows, each named by (row, sequence)."""
        entries: list[int] = []
        for row, seq in places:
            source = self._sources.get((seq, row))
            # What is refused, and rows that are counted from the end, are for the long way.
            entries.append(source if type(source) is int else self.live(row, seq))
        return entries

    def behind(self, row: int, seq: int | None) -> tuple[int, int]:
        """The sequence of a row, and how many tokens it has behind that."""
        seq, row = self._key(row, seq)
        return seq, self._lengths[seq] - 1 - row

    def _key(self, row: int, seq: int | None) -> tuple[int, int]:
        if not self._lengths:
            raise RowError(
                "there are no logits yet: a decode makes them, and every other change (truncate, "
                "fork, load, clear) ends them. Decode at least one token first"
            )
        if seq is None:
            if len(self._lengths) > 1:
                raise RowError(f"the last step had sequences {sorted(self._lengths)}; name one")
            seq = next(iter(self._lengths))
        elif seq not in self._lengths:
            raise RowError(f"the last step had sequences {sorted(self._lengths)}, not {seq}")
        length = self._lengths[seq]
        key = (seq, row + length if row < 0 else row)
        if not 0 <= key[1] < length:
            raise RowError(
                f"there is no row {row}: the last decode had {length} tokens, so rows run from 0 to "
                f"{length - 1}, or from -{length} to -1 counted from the end"
            )
        if key not in self._sources:
            had = sorted(index for owner, index in self._sources if owner == seq)
            raise RowError(f"row {row} of {length} was not asked for; decode gave rows {had[:8]}")
        return key


_ONE: NDArray[np.int8] = np.ones(1, np.int8)
_ONE.flags.writeable = False


def outputs(rows: Rows, count: int) -> NDArray[np.int8]:
    """A mark for each of `count` tokens: whether its row is wanted."""
    if count == 1 and rows == "last":
        return _ONE
    marks = np.zeros(count, np.int8)
    if isinstance(rows, str):
        if rows == "last":
            marks[-1] = 1
        elif rows == "all":
            marks[:] = 1
        elif rows != "none":
            raise RowError(f"rows is 'last', 'all', 'none' or places in the tokens, got {rows!r}")
        return marks
    for row in rows:
        whole = is_integer(row)
        if not whole or not -count <= row < count:
            raise RowError(f"rows of {count} tokens run from 0 to {count - 1}, got {row!r}")
        marks[row] = 1
    return marks
