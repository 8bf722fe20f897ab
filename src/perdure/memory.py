"""Kinds of memory: what a model keeps of its tokens, and so how far a sequence can go back.

A new kind is a new class here, an entry in `MEMORY_KINDS`, and a line where an engine says which kind its
model has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec:
    """A kind of memory: its parts, and the reuse rule of that kind.

    A kind is a subclass that says which parts it has. The rule here is the strictest and always safe: a
    sequence goes back to a checkpoint, or it is cleared. A kind that can do better overrides it.
    """

    name: ClassVar[str]
    """In messages, in `perdure show`, and in the names of blocks: state of another kind is never found."""
    has_rows: ClassVar[bool]
    """Some layers keep a row for every token, so that most of a state can be cut by token."""
    has_window: ClassVar[bool] = False
    """Some layers keep only the last `window` tokens."""
    has_recurrent_state: ClassVar[bool] = False
    """Some layers keep one state for all tokens so far."""
    overwrites: ClassVar[bool] = True
    """Whether a step can overwrite what the way back needs; `loses` says which one does."""

    window: int | None = None
    keeps_window: bool = True
    """Whether the engine leaves the cells that have slid out of the window where they are."""

    @property
    def kind(self) -> type[MemorySpec]:
        return type(self)

    @property
    def identity(self) -> str:
        """What of it changes what state bytes mean."""
        return f"{self.name}/{self.window}/{'all' if self.keeps_window else 'window'}"

    @property
    def needs_checkpoint(self) -> bool:
        """Whether stored state has a part that belongs to its end: it is put back only to where one was
        kept."""
        return self.has_window or self.has_recurrent_state

    @property
    def cuts(self) -> bool:
        """Whether a sequence can ever be cut short without a checkpoint."""
        return False

    @property
    def forks_in_pool(self) -> bool:
        """Whether two sequences that share cells of one pool can both go on."""
        return True

    @property
    def restores_bits(self) -> bool:
        """Whether what follows a state that was put back is, bit for bit, what follows one computed there."""
        return True

    def can_cut(self, keep: int, oldest: int) -> bool:
        """Whether a sequence that holds the positions from `oldest` on can be cut to `keep` tokens."""
        return False

    def shortest_cut(self, length: int, oldest: int) -> int:
        """The shortest length that a sequence of `length` tokens can be cut to, short of clearing it."""
        return length

    def loses(self, count: int, steps: int) -> bool:
        """Whether `count` more tokens, computed in `steps` steps, overwrite what the way back needs."""
        return self.overwrites and count > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention(MemorySpec):
    """A sequence can be cut anywhere, and no step overwrites anything."""

    name: ClassVar[str] = "full"
    has_rows: ClassVar[bool] = True
    overwrites: ClassVar[bool] = False

    @property
    def cuts(self) -> bool:
        return True

    def can_cut(self, keep: int, oldest: int) -> bool:
        return True

    def shortest_cut(self, length: int, oldest: int) -> int:
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(MemorySpec):
    """A cut is safe while the window before it is there.

    The token after a cut sees `window - 1` tokens before it, so those must be held.
    """

    name: ClassVar[str] = "sliding"
    has_rows: ClassVar[bool] = True
    has_window: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:
        return True

    @property
    def forks_in_pool(self) -> bool:
        # Cells of a lost window can be used again only while one sequence has them: two copies would keep
        # each other from going on.
        return self.keeps_window

    @property
    def restores_bits(self) -> bool:
        # A window that is not kept comes back in another order.
        return self.keeps_window

    def can_cut(self, keep: int, oldest: int) -> bool:
        return self.window is not None and oldest <= max(0, keep - self.window + 1)

    def shortest_cut(self, length: int, oldest: int) -> int:
        if self.window is None or oldest <= 0:
            return 1
        return min(length, oldest + self.window - 1)

    def loses(self, count: int, steps: int) -> bool:
        # One step overwrites only what no later token sees; several lose it.
        return steps > 1 and not self.keeps_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent(MemorySpec):
    """A sequence can only be cleared, or restored from a checkpoint, which is its whole state."""

    name: ClassVar[str] = "recurrent"
    has_rows: ClassVar[bool] = False
    has_recurrent_state: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(MemorySpec):
    """As strict as a recurrent memory; only the recurrent layers' state is in a checkpoint."""

    name: ClassVar[str] = "hybrid"
    has_rows: ClassVar[bool] = True
    has_recurrent_state: ClassVar[bool] = True


MEMORY_KINDS: tuple[type[MemorySpec], ...] = (FullAttention, SlidingWindow, Recurrent, Hybrid)
