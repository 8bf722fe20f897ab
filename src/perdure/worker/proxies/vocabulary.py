"""Text and tokens, asked of the engine's process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perdure.engine.token_ids import check_token
from perdure.memory import MemorySpec
from perdure.worker.protocol import Ready, Tables, Target

Asked = Callable[..., Any]
"""Calls a method in the engine's process, and waits for what it returns."""


class RemoteVocabulary:
    """What a model says about text and about itself. What is asked token by token comes from tables that
    are fetched once, when they are first needed."""

    def __init__(self, about: Ready, ask: Callable[[Target, str], Asked]) -> None:
        self.n_vocab = about.n_vocab
        self.memory: MemorySpec = about.memory
        self.metadata: Mapping[str, str] = MappingProxyType(dict(about.metadata))
        self.digest = about.digest
        self.path = None if about.path is None else Path(about.path)
        self._ask = ask

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        found: list[int] = self._ask("model", "tokenize")(text, special=special, bos=bos)
        return found

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        found: str = self._ask("model", "detokenize")(list(tokens), special=special)
        return found

    def piece(self, token: int, *, special: bool = False) -> bytes:
        tables = self._tables
        return (tables.special_pieces if special else tables.pieces)[self._check(token)]

    def is_end(self, token: int) -> bool:
        return self._check(token) in self._tables.ends

    def is_control(self, token: int) -> bool:
        return self._check(token) in self._tables.controls

    @property
    def ends(self) -> frozenset[int]:
        return self._tables.ends

    @property
    def controls(self) -> frozenset[int]:
        return self._tables.controls

    @functools.cached_property
    def _tables(self) -> Tables:
        tables: Tables = self._ask("tables", "all")()
        return tables

    def _check(self, token: int) -> int:
        return check_token(token, self.n_vocab)
