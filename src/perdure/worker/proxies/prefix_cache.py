"""Remote prefix cache: `rt.cache` of an engine in another process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from perdure.cache.block import Block
from perdure.cache.block_list import BlockInfo
from perdure.cache.prefix_cache import CacheStats
from perdure.cache.prefix_tree import PrefixRun, SlotState
from perdure.cache.record import Record
from perdure.decode.slots import Held, Plan, ReuseReport
from perdure.identity import Identity


class Ask(Protocol):
    """Calls a method of the cache over there, and waits for what it returns or raises.

    Any: it sends whatever call it is given. The methods below name and type what each one takes.
    """

    def __call__(self, name: str, *args: Any, **keywords: Any) -> Any: ...


class RemotePrefixCache:
    """The calls of `PrefixCache`, made over there."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def warm(self, prompt: str | Iterable[int], *, labels: Iterable[str] = (), namespace: str = "") -> Record:
        record: Record = self._ask("warm", prompt, labels=labels, namespace=namespace)
        return record

    def records(
        self,
        labels: Iterable[str] | None = None,
        *,
        namespace: str = "",
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Record]:
        records: list[Record] = self._ask("records", labels, namespace=namespace, limit=limit, after=after)
        return records

    def blocks(
        self, *, namespace: str = "", limit: int | None = None, after: str | None = None
    ) -> list[BlockInfo]:
        blocks: list[BlockInfo] = self._ask("blocks", namespace=namespace, limit=limit, after=after)
        return blocks

    def clear(self, labels: Iterable[str] | None = None, *, namespace: str = "") -> int:
        count: int = self._ask("clear", labels, namespace=namespace)
        return count

    def plan(self, tokens: Iterable[int], *, namespace: str = "") -> Plan:
        plan: Plan = self._ask("plan", tokens, namespace=namespace)
        return plan

    def wake(self, tokens: Iterable[int], *, namespace: str = "") -> ReuseReport:
        report: ReuseReport = self._ask("wake", tokens, namespace=namespace)
        return report

    def sleep(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        self._ask("sleep", tokens, namespace=namespace)

    def save(self, tokens: Iterable[int], *, namespace: str = "") -> None:
        self._ask("save", tokens, namespace=namespace)

    def pack(self, tokens: Iterable[int], *, namespace: str = "") -> tuple[Identity, list[Block]]:
        packed: tuple[Identity, list[Block]] = self._ask("pack", tokens, namespace=namespace)
        return packed

    def unpack(self, identity: Identity, blocks: Sequence[Block], *, namespace: str = "") -> int:
        count: int = self._ask("unpack", identity, blocks, namespace=namespace)
        return count

    def held(self, tokens: Iterable[int], *, namespace: str = "") -> dict[str, Held]:
        held: dict[str, Held] = self._ask("held", tokens, namespace=namespace)
        return held

    def runs(
        self, parent: str | None = None, *, namespace: str = "", limit: int = 100, after: int = 0
    ) -> list[PrefixRun] | None:
        runs: list[PrefixRun] | None = self._ask(
            "runs", parent, namespace=namespace, limit=limit, after=after
        )
        return runs

    def slots(self) -> list[SlotState]:
        slots: list[SlotState] = self._ask("slots")
        return slots

    def identity(self) -> Identity:
        identity: Identity = self._ask("identity")
        return identity

    def stats(self) -> CacheStats:
        stats: CacheStats = self._ask("stats")
        return stats
