"""Prefix cache: labelled prefixes that somebody asked to keep, and what is held, shown and cleared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.cache.block_list import BlockInfo
from perdure.cache.prefix_tree import PrefixRun, SlotState
from perdure.cache.record import Record, RecordIndex, check_labels
from perdure.cache.slots.slot_cache import SlotCache
from perdure.decode.slots import Held, Plan, ReuseReport
from perdure.engine.token_ids import token_array
from perdure.errors import InvalidInputError
from perdure.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What is held now, and what has come of it so far."""

    blocks: int
    nbytes: int
    state_bytes: int
    budget: int
    disk_bytes: int | None
    """What is on the disk; None where nothing is kept there."""
    evicted: int
    records: int
    record_bytes: int
    reused_tokens: dict[str, int]
    computed_tokens: int


class PrefixCacheCalls(Protocol):
    """`rt.cache`, whichever process the engine is in."""

    def warm(
        self, prompt: str | Iterable[int], *, labels: Iterable[str] = (), namespace: str = ""
    ) -> Record: ...
    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Record]: ...
    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]: ...
    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int: ...
    def plan(self, tokens: Iterable[int], *, namespace: str = "") -> Plan: ...
    def held(self, tokens: Iterable[int], *, namespace: str = "") -> dict[str, Held]: ...
    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None: ...
    def slots(self) -> list[SlotState]: ...
    def identity(self) -> Identity: ...
    def wake(self, tokens: Iterable[int], *, namespace: str = "") -> ReuseReport: ...
    def sleep(self, tokens: Iterable[int], *, namespace: str = "") -> None: ...
    def save(self, tokens: Iterable[int], *, namespace: str = "") -> None: ...
    def pack(self, tokens: Iterable[int], *, namespace: str = "") -> tuple[Identity, list[Block]]: ...
    def unpack(self, identity: Identity, blocks: Sequence[Block], *, namespace: str = "") -> int: ...
    def stats(self) -> CacheStats: ...


class RecordStore(Protocol):
    """Where records outlive the process."""

    def flush(self) -> None:
        """Return when all that was stored is on the disk; raise where it could not be put there."""
        ...

    def all(self) -> list[Record]: ...
    def store(self, record: Record) -> None:
        """Return when the record and its state will outlive the process."""
        ...

    def drop(self, records: Iterable[Record], blocks: Iterable[BlockId]) -> None:
        """Drop records and blocks, with all that follow those, in one transaction."""
        ...


class PrefixCache:
    """`rt.cache`: warm a prefix, ask what is held, clear it again. Safe from any thread."""

    def __init__(
        self,
        slots: SlotCache,
        *,
        tokenize: Callable[[str], list[int]],
        read: Callable[[NDArray[np.int32], str], Any],
        call: Callable[[Callable[[], Any]], Any],
        post: Callable[[Callable[[], Any]], Any],
        record_store: RecordStore | None = None,
    ) -> None:
        self._slots = slots
        self._view = slots.view
        self._tokenize = tokenize
        self._read = read
        self._call = call
        self._post = post
        self._record_store = record_store
        self._keeping = threading.Lock()
        self._records = RecordIndex(record_store.all() if record_store else ())

    def warm(self, prompt: str | Iterable[int], *, labels: Iterable[str] = (), namespace: str = "") -> Record:
        """Compute a prefix once and keep it. Warmed before, its record comes back with all its labels."""
        ids = _token_ids(self._tokenize(prompt) if isinstance(prompt, str) else prompt)
        wanted = _names(labels)
        kept = self._call(lambda: self._begin(ids, wanted, namespace))
        if kept < self._slots.keepable(len(ids)):
            self._read(ids, namespace)
        record: Record = self._call(lambda: self._note(ids, wanted, namespace))
        if self._record_store is not None:
            # Here, not in the engine thread: nobody's reply waits for the disk.
            with self._keeping:
                latest = self._call(lambda: self._records.get(record))
                if latest is not None:
                    self._record_store.store(latest)
        return record

    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Record]:
        """The warmed prefixes of a namespace, or those of them that carry one of `labels`: up to `limit`,
        behind the one whose `id` is `after`."""
        wanted = None if labels is None else _names(labels)
        _check_limit(limit)
        return self._call(  # type: ignore[no-any-return]
            lambda: self._records.page(wanted, namespace, limit=limit, after=after)
        )

    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]:
        """The blocks that are kept of a namespace, in memory and on disk, each before those that follow it:
        up to `limit`, behind the one whose `id` is `after`."""
        _check_limit(limit)
        return self._call(  # type: ignore[no-any-return]
            lambda: self._view.blocks(namespace, limit=limit, after=after)
        )

    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int:
        """Drop the prefixes of a namespace that carry one of `labels`, or all of them, wherever they are
        kept. Without either, everything there is. How many."""
        wanted = None if labels is None else _names(labels)
        with self._keeping:
            if wanted is None and not namespace:
                return self._clear_all()
            gone, blocks, instead = self._call(lambda: self._take_out(wanted, namespace))
            try:
                if self._record_store is not None:
                    # Here, not in the engine thread: nobody's reply waits for the disk.
                    self._record_store.drop(gone, blocks)
            except BaseException:
                self._call(lambda: self._put_back(gone))
                raise
            # Again: somebody may have read some of it back from the disk meanwhile.
            self._call(lambda: self._drop(gone, blocks, instead))
            return len(gone)

    def _clear_all(self) -> int:
        gone: list[Record] = self._call(self._records.all)
        if self._record_store is not None:
            self._record_store.drop(gone, ())

        def clear() -> None:
            self._records.clear()
            self._slots.clear()

        self._call(clear)
        return len(gone)

    def plan(self, tokens: Iterable[int], *, namespace: str = "") -> Plan:
        """What bringing back the state of `tokens` would take. Nothing is moved."""
        ids = _token_ids(tokens)
        return self._call(lambda: self._view.plan(ids, namespace))  # type: ignore[no-any-return]

    def held(self, tokens: Iterable[int], *, namespace: str = "") -> dict[str, Held]:
        """How much of the state of `tokens` each tier has. Nothing is moved."""
        ids = _token_ids(tokens)
        return self._call(lambda: self._view.held(ids, namespace))  # type: ignore[no-any-return]

    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None:
        """The prefixes of a namespace as a tree: what follows the run with the id `parent`, or starts it; up
        to `limit`, behind the first `after`. None where that run is no longer kept."""

        def look() -> list[PrefixRun] | None:
            records = self._records.of(None, namespace)
            return self._view.runs(namespace, parent, records, limit=limit, after=after)

        return self._call(look)  # type: ignore[no-any-return]

    def slots(self) -> list[SlotState]:
        """What every slot of the engine holds."""
        return self._call(self._view.slots)  # type: ignore[no-any-return]

    def identity(self) -> Identity:
        """Under which state holds here."""
        return self._call(lambda: self._view.identity)  # type: ignore[no-any-return]

    def wake(self, tokens: Iterable[int], *, namespace: str = "") -> ReuseReport:
        """Bring back the state of `tokens`, as far as it is kept; the next request computes the rest."""
        ids = _token_ids(tokens)
        return self._call(lambda: self._slots.swap_in(ids, namespace))  # type: ignore[no-any-return]

    def sleep(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        """Put the state of `tokens` where it outlives the process, and let go of its memory."""
        ids = _token_ids(tokens)
        self._call(lambda: self._slots.swap_out(ids, namespace))
        if self._record_store is not None:
            self._record_store.flush()
            self._call(lambda: self._slots.drop_stored(ids, namespace))

    def save(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        """Have the state of `tokens` written behind whatever happens next. Nobody waits for it."""
        ids = _token_ids(tokens)
        self._post(lambda: self._slots.store(ids, namespace))

    def pack(self, tokens: Iterable[int], *, namespace: str = "") -> tuple[Identity, list[Block]]:
        """The state of a prefix as blocks that can be taken elsewhere, and under which identity it holds."""
        ids = _token_ids(tokens)
        return self._call(lambda: self._slots.pack(ids, namespace))  # type: ignore[no-any-return]

    def unpack(self, identity: Identity, blocks: Sequence[Block], *, namespace: str = "") -> int:
        """Take in state that was packed elsewhere, if it fits here. How many tokens of it."""
        return self._call(lambda: self._slots.unpack(identity, blocks, namespace))  # type: ignore[no-any-return]

    def stats(self) -> CacheStats:
        return self._call(self._stats)  # type: ignore[no-any-return]

    # In the engine thread.

    def _begin(self, ids: NDArray[np.int32], labels: frozenset[str], namespace: str) -> int:
        kept, root = self._slots.store(ids, namespace)
        # Before anything is computed for it.
        self._merged(root, ids, labels, namespace)
        return kept

    def _note(self, ids: NDArray[np.int32], labels: frozenset[str], namespace: str) -> Record:
        kept, root = self._slots.store(ids, namespace)
        record = Record(
            tokens=tuple(ids.tolist()),
            kept=kept,
            labels=self._merged(root, ids, labels, namespace),
            namespace=namespace,
            root=root,
        )
        self._records.put(record)
        return record

    def _merged(
        self, root: BlockId, ids: NDArray[np.int32], labels: frozenset[str], namespace: str
    ) -> frozenset[str]:
        """The labels of a prefix that gets `labels` too; raises where it may not carry or be all that."""
        known = self._records.find(root, ids)
        if known is None:
            self._records.check_room(len(ids), namespace)
        else:
            labels |= known.labels
        check_labels(labels)
        return labels

    def _take_out(
        self, wanted: frozenset[str] | None, namespace: str
    ) -> tuple[list[Record], list[BlockId], list[Block]]:
        """Take records out, with what they alone need: which blocks, and what stays in place of those."""
        gone = self._records.of(wanted, namespace)
        for record in gone:
            self._records.remove(record)
        blocks, instead = self._slots.doomed(gone, self._records)
        self._drop(gone, blocks, ())
        return gone, blocks, instead

    def _put_back(self, records: Iterable[Record]) -> None:
        for record in records:
            self._records.put(record)

    def _drop(self, gone: Sequence[Record], blocks: Sequence[BlockId], instead: Sequence[Block]) -> None:
        self._slots.drop(gone, self._records, blocks)
        self._slots.store_blocks(instead)

    def _stats(self) -> CacheStats:
        tier, lower = self._slots.tier, self._slots.tiers.lower
        return CacheStats(
            blocks=len(tier),
            nbytes=self._slots.nbytes,
            state_bytes=tier.state_bytes,
            budget=self._slots.budget,
            disk_bytes=None if lower is None else lower.nbytes,
            evicted=tier.evicted,
            records=len(self._records),
            record_bytes=self._records.nbytes,
            reused_tokens=dict(self._slots.reused),
            computed_tokens=self._slots.computed,
        )


def _check_limit(limit: int | None) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")


def _names(labels: Iterable[str]) -> frozenset[str]:
    """One label may be given by itself."""
    return frozenset([labels] if isinstance(labels, str) else labels)


def _token_ids(tokens: Iterable[int]) -> NDArray[np.int32]:
    return token_array(list(tokens), 1 << 31, what="a prefix")
