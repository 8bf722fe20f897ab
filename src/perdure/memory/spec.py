"""Memory spec: what a model keeps of its tokens, and so how far a sequence can go back."""

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
        return count > 1
