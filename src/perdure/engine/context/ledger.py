"""Which tokens are in the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


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
        held = self._tokens
        return [len(held[seq]) for seq in seqs]

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

    def append_one(self, seq: int, token: int) -> None:
        self._tokens[seq].append(token)

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
