"""Text and tokens, asked of the engine's process."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from perdure.engine.contract import Tokenizer, check_token
from perdure.memory import MemorySpec
from perdure.worker.protocol import Ask, Ready, Tables


class TableCalls(Protocol):
    """What is asked about the vocabulary as a whole."""

    def all(self) -> Tables: ...


class RemoteTokenizer:
    """What a model says about text and about itself. What is asked token by token comes from tables that
    are fetched once, when they are first needed."""

    def __init__(self, about: Ready, ask: Ask) -> None:
        self.n_vocab = about.n_vocab
        self.memory: MemorySpec = about.memory
        self.info = about.info
        self.metadata: Mapping[str, str] = MappingProxyType(dict(about.metadata))
        self.digest = about.digest
        self.path = None if about.path is None else Path(about.path)
        self._ask = ask

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        return self._ask("model", Tokenizer.tokenize, text, special=special, bos=bos)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        return self._ask("model", Tokenizer.detokenize, list(tokens), special=special)

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
        return self._ask("tables", TableCalls.all)

    def _check(self, token: int) -> int:
        return check_token(token, self.n_vocab)
