"""Remote prefix cache: `rt.cache` of an engine in another process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.cache.block import Block
from perdure.cache.cache_view import BlockInfo, PrefixRun, SlotState
from perdure.cache.prefix_cache import CacheStats, PrefixCacheCalls
from perdure.decode.slots import KeptPrefix, Plan, ReuseReport, TierUsage
from perdure.identity import Identity
from perdure.worker.protocol import Ask


class RemotePrefixCache:
    """The calls of `PrefixCache`, made over there."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def warm(
        self, prompt: str | Iterable[int], *, labels: Iterable[str] = (), namespace: str = ""
    ) -> KeptPrefix:
        return self._ask("cache", PrefixCacheCalls.warm, prompt, labels=labels, namespace=namespace)

    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[KeptPrefix]:
        return self._ask(
            "cache", PrefixCacheCalls.records, labels, namespace=namespace, limit=limit, after=after
        )

    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]:
        return self._ask("cache", PrefixCacheCalls.blocks, namespace=namespace, limit=limit, after=after)

    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int:
        return self._ask("cache", PrefixCacheCalls.clear, labels, namespace=namespace)

    def plan(self, tokens: Iterable[int], *, namespace: str = "") -> Plan:
        return self._ask("cache", PrefixCacheCalls.plan, tokens, namespace=namespace)

    def wake(self, tokens: Iterable[int], *, namespace: str = "") -> ReuseReport:
        return self._ask("cache", PrefixCacheCalls.wake, tokens, namespace=namespace)

    def sleep(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        self._ask("cache", PrefixCacheCalls.sleep, tokens, namespace=namespace)

    def save(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        self._ask("cache", PrefixCacheCalls.save, tokens, namespace=namespace)

    def pack(self, tokens: Iterable[int], *, namespace: str = "") -> tuple[Identity, list[Block]]:
        return self._ask("cache", PrefixCacheCalls.pack, tokens, namespace=namespace)

    def unpack(self, identity: Identity, blocks: Sequence[Block], *, namespace: str = "") -> int:
        return self._ask("cache", PrefixCacheCalls.unpack, identity, blocks, namespace=namespace)

    def held(self, tokens: Iterable[int], *, namespace: str = "") -> dict[str, TierUsage]:
        return self._ask("cache", PrefixCacheCalls.held, tokens, namespace=namespace)

    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None:
        return self._ask(
            "cache", PrefixCacheCalls.runs, parent, namespace=namespace, limit=limit, after=after
        )

    def slots(self) -> list[SlotState]:
        return self._ask("cache", PrefixCacheCalls.slots)

    def identity(self) -> Identity:
        return self._ask("cache", PrefixCacheCalls.identity)

    def stats(self) -> CacheStats:
        return self._ask("cache", PrefixCacheCalls.stats)
