"""What the layers of a model keep: rows by token, a window of them, or one state for all tokens so far.

mlx-lm's own caches are asked for once, to see of which kind each layer's is. In their place the model gets
these, which tell the truth about what they hold: `trim` of mlx-lm's goes wrong after a ring has wrapped, and
says nothing (mlx-lm 1494, 1776). Arrays of MLX are written in place where nobody else has them: a twin gets
separate handles, and is a copy from the first token that either of the two goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models import cache as theirs
from mlx_lm.models.base import create_causal_mask

from perdure import InvalidInputError, ModelLoadError

Array: TypeAlias = Any
"""An mx.array; the library has no types."""

_STEP = 256
"""Rows by which a cache grows."""


class RowCache:
    """Rows of one layer, in order; those from `base` to `offset` are there.

    `width` arrays of shape (1, heads, tokens, numbers): keys and values, or the parts of quantised ones.
    With a `window`, a token sees only the last `window` rows, itself among them. Unless all are kept, those
    that no later token sees are given up.
    """

    def __init__(self, *, window: int = 0, keeps: bool = True, bits: int = 0, group: int = 0) -> None:
        self.offset = 0
        self.base = 0
        self.window = window
        self.keeps = keeps
        self.parts: list[Array] = []
        if bits:
            # mlx-lm's attention asks for these to see whether rows are quantised.
            self.bits, self.group_size = bits, group

    # What mlx-lm's layers call.

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        count = keys.shape[2]
        self.append(self.packed(keys, values))
        first = max(0, self.offset - self.window - count + 1) if self.window else 0
        return self.fetched(
            [part[..., first - self.base : self.offset - self.base, :] for part in self.parts]
        )

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:  # noqa: N803
        return causal(N, self.offset, self.window, window_size, return_array=return_array)

    def state_arrays(self) -> list[Array]:
        return self.parts

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return not self.offset

    def is_trimmable(self) -> bool:
        return False

    # Rows.

    def packed(self, keys: Array, values: Array) -> list[Array]:
        """New rows as they are kept."""
        if not hasattr(self, "bits"):
            return [keys, values]
        packed = (mx.quantize(each, group_size=self.group_size, bits=self.bits) for each in (keys, values))
        return [part for parts in packed for part in parts]

    def fetched(self, parts: list[Array]) -> tuple[Any, Any]:
        """Kept rows as attention takes them."""
        if len(parts) == 2:
            return parts[0], parts[1]
        return tuple(parts[:3]), tuple(parts[3:])

    def append(self, parts: Sequence[Array]) -> None:
        count = parts[0].shape[2]
        at = self.offset - self.base
        if not self.keeps and at >= 2 * self.window + _STEP:
            # No more than a window less one is seen again; one more, so that the last token can be undone.
            at = self.window
            first = self.offset - at - self.base
            self.parts = [part[..., first : first + at, :] for part in self.parts]
            self.base = self.offset - at
        if not self.parts or at + count > self.parts[0].shape[2]:
            room = -(-count // _STEP) * _STEP
            empty = [mx.zeros((*part.shape[:2], room, part.shape[3]), part.dtype) for part in parts]
            if self.parts:
                rows = [part[..., :at, :] for part in self.parts]
                empty = [mx.concatenate([old, new], axis=2) for old, new in zip(rows, empty, strict=True)]
            self.parts = empty
        for mine, new in zip(self.parts, parts, strict=True):
            mine[..., at : at + count, :] = new
        self.offset += count

    def rows(self, start: int, stop: int) -> list[Array]:
        """The parts of the positions `start` to `stop`."""
        return [part[..., start - self.base : stop - self.base, :] for part in self.parts]

    def put(self, parts: Sequence[Array], base: int, offset: int) -> None:
        """Hold these rows, of the positions from `base` to `offset`, and nothing else."""
        self.parts, self.base, self.offset = list(parts), base, offset

    def cut(self, length: int) -> None:
        self.offset = min(self.offset, length)
        if self.offset <= self.base:
            self.parts, self.base = [], self.offset

    def twin(self) -> RowCache:
        new = self.fresh()
        # Slices are separate handles: writing through one does not change the other.
        new.put(self.rows(self.base, self.offset), self.base, self.offset)
        return new

    def handle(self) -> RowCache:
        """The same rows, to build on while this one does not change. Both may not be computed."""
        new = self.fresh()
        new.put([part[...] for part in self.parts], self.base, self.offset)
        return new

    def fresh(self) -> RowCache:
        return type(self)(
            window=self.window,
            keeps=self.keeps,
            bits=getattr(self, "bits", 0),
            group=getattr(self, "group_size", 0),
        )


class ChunkCache(RowCache):
    """Rows of a layer whose tokens see their own chunk alone, as llama4's.

    The model's class masks the other chunks, so that all rows can be kept, and the sequence be cut anywhere.
    """

    start_position = 0
    """The first row's position, for the class's mask."""

    def maybe_trim_front(self) -> None:
        """Nothing is given up."""


def causal(count: int, offset: int, limit: int, window: int | None, *, return_array: bool) -> Any:
    """The mask of `count` tokens behind `offset` others, of which at most `limit` less one are fetched."""
    if not limit:
        if window is not None:
            return create_causal_mask(count, offset, window_size=window)
        if count == 1:
            return None
        return create_causal_mask(count, offset) if return_array else "causal"
    window = window or limit
    seen = min(offset, limit - 1)
    if seen + count > window or (return_array and count > 1):
        return create_causal_mask(count, seen, window_size=window)
    return None if count == 1 else "causal"


class StateCache(theirs.ArraysCache):  # type: ignore[misc]
    """One state for all tokens so far. A step puts new arrays in its place, and so never changes old ones."""

    def state_arrays(self) -> list[Array]:
        return [part for part in self.cache if part is not None]

    def twin(self) -> StateCache:
        new = self.fresh()
        new.cache = list(self.cache)
        return new

    handle = twin

    def fresh(self) -> StateCache:
        return StateCache(len(self.cache))


Leaf: TypeAlias = "RowCache | StateCache"


def leaves(caches: Sequence[Any]) -> list[Leaf]:
    """All caches, also those that are in a list of one layer."""
    all_leaves: list[Leaf] = []
    for each in caches:
        all_leaves += leaves(each.caches) if isinstance(each, theirs.CacheList) else [each]
    return all_leaves


def mapped(caches: Sequence[Any], change: Any) -> list[Any]:
    """The same caches with each leaf changed."""
    return [
        theirs.CacheList(*mapped(each.caches, change)) if isinstance(each, theirs.CacheList) else change(each)
        for each in caches
    ]


def made_for(model: Any, *, keeps_window: bool = True, bits: int = 0, group: int = 0) -> list[Any]:
    """Empty caches for a model, of the kinds that it would make itself."""

    def ours(cache: Any) -> Leaf:
        if type(cache) is theirs.KVCache:
            return RowCache(bits=bits, group=group)
        if type(cache) is theirs.RotatingKVCache and not cache.keep:
            if bits:
                raise InvalidInputError("a window cannot be quantised on this engine; leave kv_type out")
            return RowCache(window=cache.max_size, keeps=keeps_window)
        if type(cache) is theirs.ChunkedKVCache:
            return ChunkCache(bits=bits, group=group)
        if type(cache) is theirs.ArraysCache:
            return StateCache(len(cache.cache))
        raise ModelLoadError(
            f"this model keeps its memory in a {type(cache).__name__}, which perdure cannot save and cut; "
            "use a model of another architecture, or its GGUF file"
        )

    return mapped(theirs.make_prompt_cache(model), ours)


# Several sequences in one step: the layers see one cache whose rows are those of all, each as long as the
# longest; what is behind the end of a shorter one is masked.


class RowBatch:
    """The rows of one layer of several sequences, for a step of one token each."""

    def __init__(self, caches: Sequence[RowCache]) -> None:
        self._caches = caches
        self._lengths = [cache.offset for cache in caches]
        self.offset = mx.array(self._lengths)
        self._limit = caches[0].window
        if hasattr(caches[0], "bits"):
            self.bits, self.group_size = caches[0].bits, caches[0].group_size

    @property
    def _seen(self) -> list[int]:
        """Rows that each sequence's token sees, itself among them."""
        limit = self._limit
        return [min(length + 1, limit) if limit else length + 1 for length in self._lengths]

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Any, Any]:
        first = self._caches[0]
        new = first.packed(keys, values)
        seen = self._seen
        longest = max(seen)
        parts: list[list[Array]] = [[] for _ in new]
        for place, cache in enumerate(self._caches):
            cache.append([part[place : place + 1] for part in new])
            start = cache.offset - seen[place] - cache.base
            for list_of, part in zip(parts, cache.parts, strict=True):
                rows = part[..., start : start + longest, :]
                if (short := longest - rows.shape[2]) > 0:
                    rows = mx.pad(rows, [(0, 0), (0, 0), (0, short), (0, 0)])
                list_of.append(rows)
        return first.fetched([mx.concatenate(each, axis=0) for each in parts])

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:  # noqa: N803
        seen = self._seen
        longest = max(seen)
        window = window_size or self._limit or longest
        if min(seen) == longest and longest <= window:
            return None
        ends = mx.array(seen)[:, None, None, None]
        places = mx.arange(longest)[None, None, None, :]
        return (places < ends) & (places >= ends - window)

    def size(self) -> int:
        return max(self._lengths)

    def empty(self) -> bool:
        return False


def batched(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """Caches for one step of one token for each of some sequences, which all hold something."""
    batches: list[Any] = []
    for layer in zip(*sequences, strict=True):
        if isinstance(layer[0], theirs.CacheList):
            batches.append(theirs.CacheList(*batched([each.caches for each in layer])))
        elif isinstance(layer[0], RowCache):
            batches.append(RowBatch(layer))
        else:
            joined = StateCache(len(layer[0].cache))
            joined.cache = [
                mx.concatenate(list(each), axis=0) for each in zip(*(c.cache for c in layer), strict=True)
            ]
            batches.append(joined)
    return batches


def give_back(joined: Sequence[Any], sequences: Sequence[Sequence[Any]]) -> None:
    """Put the states of a step of several sequences back to where they belong; rows are there already."""
    for cache, layer in zip(joined, zip(*sequences, strict=True), strict=True):
        if isinstance(cache, theirs.CacheList):
            give_back(cache.caches, [each.caches for each in layer])
        elif isinstance(cache, StateCache):
            for place, each in enumerate(layer):
                each.cache = [part[place : place + 1] for part in cache.cache]
