"""Checkpoints of memories with a tail state: places in a sequence whose state is kept to go back to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import LoadedPrefix
from perdure.cache.prefix_search import key_of
from perdure.cache.slots.checkpoints import Counts, Point, SlotCheckpoints
from perdure.engine.context import Context

Ids = NDArray[np.int32]


class CheckpointList:
    """The points of one slot, the shortest first.

    They hold no tokens, only a length and a hash: which of them belong to what a slot holds is found in one
    pass over its tokens.
    """

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points = list(points)
        self.nbytes = sum(point.nbytes for point in self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @property
    def last(self) -> Point | None:
        return self._points[-1] if self._points else None

    def has(self, length: int) -> bool:
        return any(point.length == length for point in self._points)

    def on_path(self, identity: bytes, tokens: Ids) -> CheckpointList:
        """Those of them that a sequence of `tokens` has passed."""
        passed, on_path = PrefixHash(identity), []
        for point in self._points:
            if point.length > len(tokens):
                break
            if passed.advance(tokens[passed.length : point.length]) == point.digest:
                on_path.append(point)
        # Mostly all of them: it is asked at every step on the way to a slot.
        return self if len(on_path) == len(self._points) else CheckpointList(on_path)

    def until(self, length: int) -> CheckpointList:
        """Those of them that are no longer than `length`."""
        shorter = [point for point in self._points if point.length <= length]
        return self if len(shorter) == len(self._points) else CheckpointList(shorter)

    def add(self, point: Point) -> None:
        self._points = sorted([*self._points, point], key=lambda each: each.length)
        self.nbytes += point.nbytes

    def thin_out(self, pinned: Callable[[bytes], bool] = lambda digest: False) -> None:
        """Drop every second one, of those that are not `pinned` if there are others. The newest stays: it is
        where the next regeneration starts."""
        pinned_points = [point for point in self._points if pinned(point.digest)]
        free = [point for point in self._points if not pinned(point.digest)]
        if not free:
            pinned_points, free = [], self._points
        every_second = free[::-1][::2][::-1] if len(free) > 1 else []
        self._points = sorted([*pinned_points, *every_second], key=lambda each: each.length)
        self.nbytes = sum(point.nbytes for point in self._points)


class PrefixHash:
    """A running hash over the tokens of a sequence, from the first on."""

    def __init__(self, identity: bytes) -> None:
        self.length = 0
        self._hash = hashlib.sha256(identity)

    def advance(self, tokens: Ids) -> bytes:
        """The hash with these tokens behind those before them."""
        self._hash.update(key_of(tokens))
        self.length += len(tokens)
        return self._hash.digest()


class CheckpointStore(SlotCheckpoints):
    """Slots of a memory with a tail state: they go back to where one was kept, every `spacing` tokens and
    where a caller means to return to."""

    def __init__(
        self, context: Context, *, budget: int, spacing: int, pinned: Callable[[bytes], bool]
    ) -> None:
        super().__init__(context)
        self.budget = budget
        self._pinned = pinned
        self._spacing = spacing
        self._kept = [CheckpointList() for _ in range(context.n_seq)]
        self._passed: list[PrefixHash | None] = [None] * context.n_seq
        """By slot, the hash of its tokens as far as the last checkpoint."""

    @property
    def nbytes(self) -> int:
        return sum(points.nbytes for points in self._kept)

    def chunk(self, cached: int, count: int, checkpoint_at: Collection[int]) -> int:
        stops = [(cached // self._spacing + 1) * self._spacing, *checkpoint_at]
        return min([count, *(stop - cached for stop in stops if stop > cached)])

    def reached(self, seq: int, length: int, checkpoint_at: Collection[int]) -> None:
        if not length or (length % self._spacing and length not in checkpoint_at):
            return
        checkpoints = self._kept[seq]
        if checkpoints.has(length):
            return
        if self._context.has_spans and length not in checkpoint_at and self._ends_in_medium(seq, length):
            # Maybe inside of it, where nothing goes on from; at its end there is another call.
            return
        # Room first: the next one is about as large as the last.
        self._thin_out(checkpoints.last.nbytes if checkpoints.last else 0)
        state = self._context.checkpoint(seq).state
        passed = self._passed[seq]
        if passed is None or passed.length > length:
            passed = self._passed[seq] = PrefixHash(self._identity(seq))
        digest = passed.advance(self._context.token_array(seq, passed.length, length))
        if state is not None:
            checkpoints.add(Point(length, digest, state))
        self._thin_out()

    def start(self, seq: int) -> None:
        self._passed[seq] = None

    def forget(self, seq: int) -> None:
        self._kept[seq] = CheckpointList()

    def copy(self, source: int, seq: int) -> None:
        self._kept[seq] = CheckpointList(self.on_path(source))

    def swapped_in(self, seq: int, prefix: LoadedPrefix) -> None:
        points = CheckpointList()
        if prefix.pieces:
            passed = PrefixHash(self._identity(seq))
            for block in prefix.blocks:
                digest = passed.advance(block.tokens)
                if block.tail_state is not None:
                    points.add(Point(block.end, digest, block.tail_state))
        self._kept[seq] = points

    def on_path(self, seq: int) -> CheckpointList:
        checkpoints = self._kept[seq]
        if len(checkpoints):
            self._kept[seq] = checkpoints.on_path(self._identity(seq), self._context.token_array(seq))
        return self._kept[seq]

    def restorable_length(self, seq: int, shared: int, length: int) -> int:
        if shared in (0, length):
            return shared
        whole = self._context.cut_point(seq, shared)
        if self._context.memory.cuts and self._context.shortest_cut(seq) <= whole:
            return whole
        return max((point.length for point in self._kept[seq] if point.length <= shared), default=0)

    def restorable_when_computed(self, shared: Counts, lengths: Counts) -> Counts:
        # Only a whole prompt, or the places where it keeps a checkpoint.
        return np.where(shared < lengths, shared - shared % self._spacing, shared)

    def go_back(self, seq: int, length: int) -> None:
        from perdure.engine.state import Checkpoint

        context, points = self._context, self._kept[seq]
        if length == context.length(seq):
            return
        if length == 0 or context.shortest_cut(seq) <= length:
            context.truncate(length, seq)
        else:
            point = next(point for point in points if point.length == length)
            tokens = context.token_array(seq, 0, length)
            identity = context.identity_of(context.adapters_of(seq), length)
            context.restore(Checkpoint(identity.digest, tokens, point.state), seq)
        # What it has left it had before: those that belong to it do.
        self._kept[seq] = points.until(length)

    def thin_out(self) -> None:
        self._thin_out()

    def _ends_in_medium(self, seq: int, length: int) -> bool:
        return int(self._context.token_array(seq, length - 1, length)[0]) < 0

    def _identity(self, seq: int) -> bytes:
        """What the checkpoints of `seq` depend on besides its tokens."""
        return self._context.identity_of(self._context.adapters_of(seq)).digest

    def _thin_out(self, room: int = 0) -> None:
        """Every second one of the slot that keeps most goes, until `room` more bytes fit."""
        while self.nbytes + room > self.budget:
            largest = max(self._kept, key=lambda each: each.nbytes)
            if not len(largest):
                return
            largest.thin_out(self._pinned)
