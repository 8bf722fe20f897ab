"""Eviction: what a block or a slot is worth, in one place for all that evict (slots, memory, disk).

    superseded    a line that its conversation has left: an edit, a compaction, a reply that is read otherwise
    side          what a side request (a title, a summary) has left
    conversation  the rest
    shared        the beginning of several conversations
    kept          a warmed prefix

The least worth goes first, and of equals the one that was used longest ago. A clock counts the bytes that
were stored: what is shared or kept counts as used some budgets later than it was, so that it outlasts
conversations of the same age but not for ever.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perdure.cache.block import BlockId

if TYPE_CHECKING:
    from perdure.cache.held_blocks import HeldBlocks

_BLOCKS = 65_536
"""Blocks of which more is known than that they are there; of more, the oldest are like any others."""
_NAMES = 131_072
"""Blocks in the lines of all conversations, at most."""
_LINES = 4
"""Lines of one conversation that are remembered."""
_APART = 1 << 60
"""More than any clock: a rank below all others."""
_ACTIVE = 4
"""Budgets of bytes after which a namespace that nobody asks for has no share any more."""


class EvictionClass(enum.IntEnum):
    """How much a block is wanted. All blocks of a lower class are evicted before any of the next."""

    SUPERSEDED = 0
    SIDE = 1
    CONVERSATION = 2
    SHARED = 3
    KEPT = 4

    @property
    def is_unwanted(self) -> bool:
        """Whether no request is expected to use it: it evicts no block of another class."""
        return self < EvictionClass.CONVERSATION


_UNKNOWN = "", EvictionClass.CONVERSATION
_LATER = {EvictionClass.SHARED: 2, EvictionClass.KEPT: 4}
"""Budgets by which these count as used later than they were."""


def worth(eviction_class: EvictionClass, clock: int, budget: int) -> int:
    """The smaller, the sooner it goes. `clock` is when it was used, in bytes stored by then."""
    if eviction_class.is_unwanted:
        return clock - _APART * (EvictionClass.CONVERSATION - eviction_class)
    return clock + _LATER.get(eviction_class, 0) * budget


@dataclass(frozen=True, slots=True)
class Use:
    """What uses a sequence: a namespace, a conversation in it, or a side request."""

    namespace: str = ""
    conversation: str = ""
    """Its id within the namespace; empty where that is not known."""
    side: bool = False
    """Whether it is beside a conversation, as a title is: no request will continue it."""

    @property
    def is_known(self) -> bool:
        return self.side or bool(self.conversation)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.conversation


@dataclass(slots=True)
class _Branch:
    """The blocks of one prompt of a conversation with its reply."""

    names: list[BlockId]
    """Whole ones, each after the one before it."""
    prompt: int
    """How many of them are of the prompt."""
    tails: Sequence[BlockId] = ()
    """Shorter ones."""

    @property
    def size(self) -> int:
        return len(self.names) + len(self.tails)


@dataclass(slots=True)
class _Conversation:
    lines: list[_Branch] = field(default_factory=list)
    """The latest last."""

    @property
    def size(self) -> int:
        return sum(line.size for line in self.lines)


class Eviction:
    """What is known of blocks besides their tokens. For any thread.

    Always holds: it knows names and no state, so nothing that it says can change a reply; what it has
    forgotten counts as a conversation's; a side request supersedes nothing.
    """

    def __init__(self, *, pinned: Callable[[bytes], bool] = lambda name: False) -> None:
        """What is `pinned` is not evicted at all for now."""
        self.pinned = pinned
        self._lock = threading.Lock()
        self._blocks: OrderedDict[BlockId, tuple[str, EvictionClass]] = OrderedDict()
        self._kept: dict[BlockId, int] = {}
        """How many warmed prefixes need a block."""
        self._conversations: OrderedDict[tuple[str, str], _Conversation] = OrderedDict()
        self._names = 0
        self._owners: dict[BlockId, str] = {}

    # What a block is worth. Each look is one call of a dict, and takes no lock.

    def class_of(self, block: BlockId | None) -> EvictionClass:
        """What a block is; None is one that is not known."""
        if block in self._kept:
            return EvictionClass.KEPT
        return EvictionClass.CONVERSATION if block is None else self._blocks.get(block, _UNKNOWN)[1]

    def worth(self, block: BlockId, clock: int, budget: int) -> int:
        """What a block is worth that is used at `clock`, in a tier of `budget` bytes."""
        if block not in self._kept and self._blocks.get(block, _UNKNOWN)[1] is EvictionClass.CONVERSATION:
            return clock
        return worth(self.class_of(block), clock, budget)

    def may_evict(self, block: BlockId, worth: int) -> bool:
        """Whether a block may take the place of one of this worth: what is unwanted evicts only its like."""
        return worth < 0 or not self.class_of(block).is_unwanted

    # Whose it is.

    def owns(self, root: BlockId, namespace: str) -> None:
        """Chains that start at `root` are of this namespace."""
        with self._lock:
            if len(self._owners) >= _BLOCKS:
                self._owners.clear()
            self._owners[root] = namespace

    def owner(self, root: BlockId) -> str:
        """Whose chains start at `root`. A root without a known owner is an owner by itself."""
        with self._lock:
            return self._owners[root] if root in self._owners else f"\0{root.hex()}"

    def payers(
        self, owner: str, size: int, usage: Mapping[str, int], seen: Mapping[str, int], now: int, budget: int
    ) -> list[str]:
        """The owners that make room for `size` more bytes of `owner`: those that hold more than their share.

        The budget is shared equally by the owners that were `seen` lately, by the clock of their tier.
        """
        active = {each for each, at in seen.items() if now - at < _ACTIVE * budget and usage.get(each)}
        share = budget // len(active | {owner})
        over = [each for each, nbytes in usage.items() if each not in active or nbytes > share]
        if owner not in over and usage.get(owner, 0) + size > share:
            over.append(owner)
        return over

    # What requests report.

    def use(self, names: Sequence[BlockId], use: Use) -> list[BlockId]:
        """A request has these whole blocks in its prompt. Gives those whose eviction class has changed."""
        with self._lock:
            changed: list[BlockId] = []
            if use.side:
                changed = [name for name in names if self._set(name, "", EvictionClass.SIDE)]
            elif use.conversation:
                # Mostly they are its own already.
                known, own = self._blocks, (use.conversation, EvictionClass.CONVERSATION)
                changed = [name for name in names if known.get(name) != own and self._set(name, *own)]
                if names:
                    changed += self._advance(use.key, list(names))
            self._forget()
            return changed

    def write(self, names: Sequence[BlockId], tails: Sequence[BlockId], use: Use) -> None:
        """These whole blocks and shorter ones are about to be stored: a prompt and what was written behind
        it."""
        with self._lock:
            if use.side:
                for name in (*names, *tails):
                    self._set(name, "", EvictionClass.SIDE)
            elif use.conversation:
                eviction_class = self._grow(use.key, list(names), tails)
                for name in (*names, *tails):
                    self._blocks.setdefault(name, (use.conversation, eviction_class))
            self._forget()

    def keep(self, names: Iterable[BlockId]) -> None:
        """A warmed prefix needs these."""
        with self._lock:
            for name in names:
                self._kept[name] = self._kept.get(name, 0) + 1

    def release(self, names: Iterable[BlockId]) -> None:
        """It does not any more."""
        with self._lock:
            for name in names:
                if (count := self._kept.get(name, 0)) > 1:
                    self._kept[name] = count - 1
                else:
                    self._kept.pop(name, None)

    def clear(self) -> None:
        """Forget everything but what is kept."""
        with self._lock:
            self._blocks.clear()
            self._conversations.clear()
            self._names = 0

    # With the lock held.

    def _set(self, name: BlockId, conversation: str, eviction_class: EvictionClass) -> bool:
        """Note the use of a block: that never lowers its eviction class. Whether the class has changed."""
        before = self._blocks.get(name)
        if before is None:
            self._blocks[name] = conversation, eviction_class
            return eviction_class != EvictionClass.CONVERSATION
        who, was = before
        if eviction_class == EvictionClass.SIDE:
            return False
        if who and who != conversation:
            eviction_class, conversation = EvictionClass.SHARED, who
        self._blocks[name] = (
            conversation,
            max(eviction_class, was) if was != EvictionClass.SUPERSEDED else eviction_class,
        )
        return self._blocks[name][1] != was

    def _advance(self, key: tuple[str, str], names: list[BlockId]) -> list[BlockId]:
        """A prompt of a conversation has these blocks: which of its other lines does it leave?

        One that goes on from a line (it has all of its prompt, or was cut back within it) takes the place of
        that, and of all lines beside it. One that begins a line leaves nothing until it is continued: it
        may be a title.
        """
        conversation = self._conversations.pop(key, None) or _Conversation()
        self._conversations[key] = conversation
        self._names -= conversation.size
        new, left = _Branch(names, len(names)), []
        best = max(conversation.lines, key=lambda line: _common(line.names, names), default=None)
        if best is not None and _common(best.names, names) >= min(best.prompt, len(names)):
            left, conversation.lines = conversation.lines, [new]
        else:
            conversation.lines.append(new)
            if len(conversation.lines) > _LINES:
                left = [conversation.lines.pop(0)]
        self._names += conversation.size
        changed = []
        for line in left:
            for name in (*line.names[_common(line.names, names) :], *line.tails):
                if self._blocks.get(name) == (key[1], EvictionClass.CONVERSATION):
                    self._blocks[name] = key[1], EvictionClass.SUPERSEDED
                    changed.append(name)
        return changed

    def _grow(self, key: tuple[str, str], names: list[BlockId], tails: Sequence[BlockId]) -> EvictionClass:
        """What is written behind the prompt of a line belongs to it; of a line that was left, it is left."""
        conversation = self._conversations.get(key)
        if conversation is None:
            return EvictionClass.CONVERSATION
        for line in reversed(conversation.lines):
            if _common(line.names, names) >= line.prompt:
                self._names -= line.size
                line.names, line.tails = names, tuple(tails)
                self._names += line.size
                return EvictionClass.CONVERSATION
        return EvictionClass.SUPERSEDED

    def _forget(self) -> None:
        while len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        while self._names > _NAMES and len(self._conversations) > 1:
            self._names -= self._conversations.popitem(last=False)[1].size


def _common(one: Sequence[BlockId], other: Sequence[BlockId]) -> int:
    """How many blocks two lines begin with alike. A block's name says all that comes before it."""
    low, high = 0, min(len(one), len(other))
    if high and one[high - 1] == other[high - 1]:
        # Mostly one goes on from the other.
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


class Pins:
    """What is not evicted for now: the blocks of prefixes with an end, made for the first of these, in the
    engine thread."""

    def __init__(self) -> None:
        self.budget = 0
        """Bytes that all of them may hold together."""
        self._blocks: HeldBlocks | None = None

    @property
    def blocks(self) -> HeldBlocks:
        if self._blocks is None:
            from perdure.cache.held_blocks import HeldBlocks

            self._blocks = HeldBlocks(self.budget)
        return self._blocks

    def holds(self, name: bytes) -> bool:
        """Whether a block or a checkpoint is to stay. For any thread."""
        return self._blocks is not None and self._blocks.holds(name)

    def clear(self) -> None:
        if self._blocks is not None:
            self._blocks.clear()
