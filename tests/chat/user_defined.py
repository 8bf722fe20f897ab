"""A toy whose marks are user-defined tokens, as those of gpt-oss are: no control tokens, but one token each,
which any text makes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from perdure.memory import MemorySpec
from perdure.testing.toy import ToyModel
from perdure.testing.toy.model import SPECIAL


class UserDefinedModel(ToyModel):
    def __init__(self, kind: type[MemorySpec], marks: Iterable[str], *, ends: Iterable[str] = ()) -> None:
        super().__init__(kind, marks=marks)
        self._end_marks = frozenset(ends)

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        found = super().tokenize(text, special=True, bos=bos)
        if special:
            return found
        return [each for token in found for each in self._as_text(token)]

    def _as_text(self, token: int) -> Iterable[int]:
        return super().piece(token, special=True) if token in self.controls else [token]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return super().piece(token, special=special or token not in self.controls)

    def is_control(self, token: int) -> bool:
        return token in self.controls

    def is_end(self, token: int) -> bool:
        return token in self.ends

    @cached_property
    def _own_ends(self) -> frozenset[int]:
        return frozenset(self.tokenize(mark, special=True)[0] for mark in self._end_marks)

    @property
    def ends(self) -> frozenset[int]:
        return super().ends | self._own_ends

    @property
    def controls(self) -> frozenset[int]:
        return frozenset(range(256, 256 + len(SPECIAL)))
