"""Which tokens are in the cache, and the way back for when a call fails in its middle."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.engine.context.rows import StepRows
from perdure.engine.contract import Core
from perdure.memory import MemorySpec


class Ledger:
    """For each sequence, the tokens that are truly in the cache, nothing more.

    It is written after the engine was asked and has answered, never before.
    """

    def __init__(self, n_seq: int) -> None:
        self._tokens = [array("i") for _ in range(n_seq)]

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

    def array(self, seq: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        return np.array(self._tokens[seq][start:stop], dtype=np.int32)

    def starts_with(self, seq: int, prefix: NDArray[np.int32]) -> bool:
        held = self._tokens[seq]
        return len(prefix) <= len(held) and held[: len(prefix)].tobytes() == prefix.tobytes()

    def common_prefix(self, seq: int, tokens: NDArray[np.int32]) -> int:
        count = min(len(tokens), len(self._tokens[seq]))
        held = np.frombuffer(self._tokens[seq][:count], np.int32) if count else tokens[:0]
        different = np.flatnonzero(held != tokens[:count])
        return int(different[0]) if len(different) else count

    def append(self, seq: int, tokens: NDArray[np.int32]) -> None:
        self._tokens[seq].frombytes(tokens.tobytes())

    def append_each(self, seqs: Iterable[int], tokens: Iterable[int]) -> None:
        """Append one token to each of several sequences."""
        held = self._tokens
        for seq, token in zip(seqs, tokens, strict=True):
            held[seq].append(token)

    def cut(self, seq: int, length: int) -> None:
        del self._tokens[seq][length:]

    def replace(self, seq: int, tokens: NDArray[np.int32]) -> None:
        self._tokens[seq] = array("i", tokens.tobytes())

    def copy(self, src: int, dst: int) -> None:
        self._tokens[dst] = self._tokens[src][:]


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
        length = self._ledger.length(seq)
        if not length or not self._memory.loses(count, steps):
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
        kept: dict[int, int] = {}
        while self.marks:
            try:
                self._rows.publish({}, {})
                for seq, mark in self.marks.items():
                    length = self.return_to(seq, mark)
                    self._ledger.cut(seq, length)
                    kept[seq] = length
                self.marks = {}
            except KeyboardInterrupt:
                # A second Ctrl-C must not leave the ledger and the cache apart.
                continue
        return kept

    def return_to(self, seq: int, mark: Mark) -> int:
        """Bring the cache of `seq` to `mark`, or empty it where that is impossible. The length kept."""
        core, (length, state) = self._core, mark
        if state is not None:
            # First the part that cannot be cut: the engine refuses to cut the rest before it.
            good = core.write(seq, state, partial=True)
            core.remove(seq, length)
        else:
            untouched = core.newest(seq) == length - 1
            good = untouched or self._memory.can_cut(length, core.oldest(seq))
            core.remove(seq, length)
        if length and good and core.newest(seq) == length - 1:
            return length
        core.remove(seq, 0)
        return 0
