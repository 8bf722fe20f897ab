"""Prefix cache: labelled prefixes that callers asked to keep, and listing and clearing what is cached."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from perdure.cache.block import Block, BlockId
from perdure.cache.kept_prefixes import check_labels
from perdure.cache.slots.cache import SlotCache
from perdure.decode.request import KeptPrefix, Plan, ReuseReport, TierUsage
from perdure.engine.adapters import AdapterSet, AdapterTable, Scales
from perdure.engine.contract import token_array
from perdure.errors import InvalidInputError
from perdure.identity import Identity

if TYPE_CHECKING:
    from perdure.cache.cache_view import BlockInfo, CacheView, PrefixRun, SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What is held now, and what has come of it so far."""

    blocks: int
    nbytes: int
    state_bytes: int
    budget: int
    disk_bytes: int | None
    """What is on the disk; None where nothing is kept there."""
    tier_bytes: dict[str, int]
    """What each tier behind the memory keeps, by its name."""
    written_bytes: dict[str, int]
    """What was written to each of them since the engine started."""
    evicted: int
    evicted_as: dict[str, int]
    """What the evicted blocks were: `superseded`, `side`, `conversation`, `shared` or `kept`."""
    records: int
    record_bytes: int
    reused_tokens: dict[str, int]
    computed_tokens: int


class PrefixCacheCalls(Protocol):
    """`rt.cache`, whichever process the engine is in."""

    def warm(
        self,
        prompt: str | Iterable[int],
        *,
        labels: Iterable[str] = (),
        namespace: str = "",
        adapters: Scales | None = None,
    ) -> KeptPrefix: ...
    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[KeptPrefix]: ...
    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]: ...
    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int: ...
    def plan(self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None) -> Plan: ...
    def held(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> dict[str, TierUsage]: ...
    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None: ...
    def slots(self) -> list[SlotState]: ...
    def identity(self) -> Identity: ...
    def wake(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> ReuseReport: ...
    def sleep(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> None: ...
    def save(
        self,
        tokens: Iterable[int],
        *,
        namespace: str = "",
        adapters: Scales | None = None,
        conversation: str = "",
    ) -> None: ...
    def pack(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> tuple[Identity, list[Block]]: ...
    def unpack(
        self,
        identity: Identity,
        blocks: Sequence[Block],
        *,
        namespace: str = "",
        adapters: Scales | None = None,
    ) -> int: ...
    def stats(self) -> CacheStats: ...


class PrefixCache:
    """`rt.cache`: warm a prefix, ask what is held, clear it again. Safe from any thread."""

    def __init__(
        self,
        slots: SlotCache,
        *,
        tokenize: Callable[[str], list[int]],
        read: Callable[[NDArray[np.int32], str, Scales | None], Any],
        adapters: AdapterTable,
        call: Callable[[Callable[[], Any]], Any],
        post: Callable[[Callable[[], Any]], Any],
        post_in_quiet: Callable[[Hashable, Callable[[], object]], None],
        peek: Callable[..., Any],
    ) -> None:
        """`read` computes a prompt with adapters, which are those of a table; `call`, `post`,
        `post_in_quiet` and `peek` are the engine loop's."""
        self._slots = slots
        self._tiers = slots.tiers
        self._tokenize = tokenize
        self._read = read
        self._adapters = adapters
        self._call = call
        self._post = post
        self._post_in_quiet = post_in_quiet
        self._keeping = threading.Lock()
        self._kept = slots.kept
        if (tier := self._tiers.prefix_tier) is not None:
            for prefix in tier.tier.prefixes():
                self._kept.add(prefix)
        self._peek = peek

    @functools.cached_property
    def _view(self) -> CacheView:
        """Loaded for those who look at what is kept."""
        from perdure.cache.cache_view import CacheView

        return CacheView(self._slots)

    def warm(
        self,
        prompt: str | Iterable[int],
        *,
        labels: Iterable[str] = (),
        namespace: str = "",
        adapters: Scales | None = None,
    ) -> KeptPrefix:
        """Compute a prefix once and keep it. Warmed before, its record comes back with all its labels."""
        ids, chosen = self._prefix(self._tokenize(prompt) if isinstance(prompt, str) else prompt, adapters)
        names = _names(labels)
        stored = self._call(lambda: self._begin(ids, names, namespace, chosen))
        if stored < self._slots.reusable_length(len(ids)):
            self._read(ids, namespace, adapters)
        prefix: KeptPrefix = self._call(lambda: self._keep(ids, names, namespace, chosen))
        if (tier := self._tiers.prefix_tier) is not None:
            # Here, not in the engine thread: nobody's reply waits for the disk.
            with self._keeping:
                latest = self._call(lambda: self._kept.get(prefix))
                if latest is not None:
                    tier.keep(latest)
        return prefix

    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[KeptPrefix]:
        """The warmed prefixes of a namespace, or those of them that carry one of `labels`: up to `limit`,
        behind the one whose `id` is `after`."""
        names = None if labels is None else _names(labels)
        _check_limit(limit)
        return self._peek(  # type: ignore[no-any-return]
            lambda: self._kept.page(names, namespace, limit=limit, after=after)
        )

    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]:
        """The blocks that are kept of a namespace, in memory and on disk, each before those that follow it:
        up to `limit`, behind the one whose `id` is `after`."""
        _check_limit(limit)
        return self._peek(  # type: ignore[no-any-return]
            lambda: self._view.blocks(namespace, limit=limit, after=after)
        )

    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int:
        """Drop the prefixes of a namespace that carry one of `labels`, or all of them, wherever they are
        kept. Without either, everything there is. How many."""
        names = None if labels is None else _names(labels)
        with self._keeping:
            if names is None and not namespace:
                return self._clear_all()
            dropped, blocks, instead = self._call(lambda: self._take_out(names, namespace))
            try:
                # Here, not in the engine thread: nobody's reply waits for the disk.
                for tier in self._tiers.lower:
                    tier.drop(blocks, dropped)
            except BaseException:
                self._call(lambda: self._put_back(dropped))
                raise
            # Again: a request may have read some of it back from a lower tier meanwhile.
            self._call(lambda: self._drop(dropped, blocks, instead))
            return len(dropped)

    def _clear_all(self) -> int:
        dropped: list[KeptPrefix] = self._call(self._kept.all)
        for tier in self._tiers.lower:
            tier.drop((), dropped)
        self._call(self._slots.clear)
        return len(dropped)

    def plan(self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None) -> Plan:
        """What bringing back the state of `tokens` would take. Nothing is moved."""
        ids, chosen = self._prefix(tokens, adapters)
        return self._call(lambda: self._view.plan(ids, namespace, chosen))  # type: ignore[no-any-return]

    def held(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> dict[str, TierUsage]:
        """How much of the state of `tokens` each tier has. Nothing is moved."""
        ids, chosen = self._prefix(tokens, adapters)
        return self._call(lambda: self._view.usage(ids, namespace, chosen))  # type: ignore[no-any-return]

    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None:
        """The prefixes of a namespace as a tree: what follows the run with the id `parent`, or starts it; up
        to `limit`, behind the first `after`. None where that run is no longer kept."""

        def read() -> list[PrefixRun] | None:
            prefixes = self._kept.of(None, namespace)
            return self._view.runs(namespace, parent, prefixes, limit=limit, after=after)

        return self._peek(read)  # type: ignore[no-any-return]

    def slots(self) -> list[SlotState]:
        """What every slot of the engine holds; during a long step, what it held before."""
        return self._peek(self._view.slots)  # type: ignore[no-any-return]

    def identity(self) -> Identity:
        """Under which state holds here."""
        return self._peek(lambda: self._view.identity)  # type: ignore[no-any-return]

    def wake(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> ReuseReport:
        """Bring back the state of `tokens`, as far as it is kept; the next request computes the rest."""
        ids, chosen = self._prefix(tokens, adapters)
        began = time.monotonic()
        report: ReuseReport = self._call(lambda: self._slots.swap_in(ids, namespace, chosen))
        if (events := self._slots.events).on:
            from perdure.events.event import Woken

            fields = (dict(report.tiers), report.computed, report.why, namespace)
            events.emit(Woken, "", *fields, time.monotonic() - began)
        return report

    def sleep(self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None) -> None:
        """Put the state of `tokens` where it outlives the process, and let go of its memory."""
        ids, chosen = self._prefix(tokens, adapters)
        began = time.monotonic()
        self._call(lambda: self._slots.swap_out(ids, namespace, chosen))
        if self._tiers.lower:
            self._tiers.flush()
            # A long one is more than may wait to be written at once.
            blocks: list[Block] = self._call(lambda: self._slots.held(ids, namespace, chosen))
            for tier in self._tiers.lower:
                tier.backfill(blocks)
            self._call(lambda: self._slots.drop_stored(ids, namespace, chosen))
        if (events := self._slots.events).on:
            from perdure.events.event import Slept

            events.emit(Slept, "", len(ids), namespace, time.monotonic() - began)

    def save(
        self,
        tokens: Iterable[int],
        *,
        namespace: str = "",
        adapters: Scales | None = None,
        conversation: str = "",
    ) -> None:
        """Have the state of `tokens` written behind whatever happens next. Nobody waits for it.

        With a `conversation` that happens once the engine has nothing to do, and whatever else was read for
        it by then is written too: the next prompt may begin otherwise than this one."""
        ids, chosen = self._prefix(tokens, adapters)
        if not conversation:
            self._post(lambda: self._slots.store(ids, namespace, chosen))
            return

        def store() -> None:
            self._slots.store(ids, namespace, chosen)
            self._slots.store_conversation(namespace, conversation)

        self._post_in_quiet((namespace, conversation), store)

    def pack(
        self, tokens: Iterable[int], *, namespace: str = "", adapters: Scales | None = None
    ) -> tuple[Identity, list[Block]]:
        """The state of a prefix as blocks that can be taken elsewhere, and under which identity it holds."""
        ids, chosen = self._prefix(tokens, adapters)
        return self._call(lambda: self._slots.pack(ids, namespace, chosen))  # type: ignore[no-any-return]

    def unpack(
        self,
        identity: Identity,
        blocks: Sequence[Block],
        *,
        namespace: str = "",
        adapters: Scales | None = None,
    ) -> int:
        """Take in state that was packed elsewhere, if it fits here. How many tokens of it."""
        tokens = np.concatenate([block.tokens for block in blocks]) if blocks else np.empty(0, np.int32)
        chosen = self._adapters.choose(adapters, tokens)
        return self._call(lambda: self._slots.unpack(identity, blocks, namespace, chosen))  # type: ignore[no-any-return]

    def stats(self) -> CacheStats:
        return self._peek(self._stats)  # type: ignore[no-any-return]

    def _prefix(
        self, tokens: Iterable[int], adapters: Scales | None
    ) -> tuple[NDArray[np.int32], AdapterSet | None]:
        """The tokens of a prefix, and the set that it is computed with; None: what the context has."""
        ids = token_array(list(tokens), 1 << 31, what="a prefix", media=True)
        if adapters is None and self._adapters.default is None:
            return ids, None
        return ids, self._adapters.choose(adapters, ids)

    # In the engine thread.

    def _begin(
        self, ids: NDArray[np.int32], labels: frozenset[str], namespace: str, adapters: AdapterSet | None
    ) -> int:
        stored, root = self._slots.store(ids, namespace, adapters)
        # Before anything is computed for it.
        self._merged(root, ids, labels, namespace)
        return stored

    def _keep(
        self, ids: NDArray[np.int32], labels: frozenset[str], namespace: str, adapters: AdapterSet | None
    ) -> KeptPrefix:
        stored, root = self._slots.store(ids, namespace, adapters)
        prefix = KeptPrefix(
            tokens=tuple(ids.tolist()),
            kept=stored,
            labels=self._merged(root, ids, labels, namespace),
            namespace=namespace,
            root=root,
        )
        self._slots.keep(prefix, ids, namespace, adapters)
        return prefix

    def _merged(
        self, root: BlockId, ids: NDArray[np.int32], labels: frozenset[str], namespace: str
    ) -> frozenset[str]:
        """The labels of a prefix that gets `labels` too; raises where it may not carry or be all that."""
        known = self._kept.find(root, ids)
        if known is None:
            self._kept.check_room(len(ids), namespace)
        else:
            labels |= known.labels
        check_labels(labels)
        return labels

    def _take_out(
        self, labels: frozenset[str] | None, namespace: str
    ) -> tuple[list[KeptPrefix], list[BlockId], list[Block]]:
        """Take prefixes out, with what they alone need: which blocks, and what stays in place of those."""
        dropped = self._kept.of(labels, namespace)
        for prefix in dropped:
            self._kept.remove(prefix)
        blocks, instead = self._slots.blocks.drop_plan(dropped, self._kept)
        self._drop(dropped, blocks, ())
        return dropped, blocks, instead

    def _put_back(self, prefixes: Iterable[KeptPrefix]) -> None:
        for prefix in prefixes:
            self._kept.add(prefix)

    def _drop(
        self, dropped: Sequence[KeptPrefix], blocks: Sequence[BlockId], instead: Sequence[Block]
    ) -> None:
        self._slots.drop(dropped, blocks)
        self._slots.blocks.replace((), instead)

    def _stats(self) -> CacheStats:
        memory, tiers = self._tiers.memory, {tier.name: tier.nbytes for tier in self._tiers.lower}
        return CacheStats(
            blocks=len(memory),
            nbytes=self._slots.nbytes,
            state_bytes=memory.state_bytes,
            budget=self._slots.budget,
            disk_bytes=tiers.get("disk"),
            tier_bytes=tiers,
            written_bytes={tier.name: tier.written for tier in self._tiers.lower},
            evicted=memory.evicted,
            evicted_as=dict(memory.evicted_as),
            records=len(self._kept),
            record_bytes=self._kept.nbytes,
            reused_tokens=dict(self._slots.reused),
            computed_tokens=self._slots.computed,
        )


def _check_limit(limit: int | None) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InvalidInputError(f"limit is None or a number from 1, got {limit!r}")


def _names(labels: Iterable[str]) -> frozenset[str]:
    """One label may be given by itself."""
    return frozenset([labels] if isinstance(labels, str) else labels)
