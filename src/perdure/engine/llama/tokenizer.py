"""Text to tokens and back, with every id checked before the library sees it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import numpy as np

from perdure.engine.contract import check_token
from perdure.engine.llama.native import library
from perdure.engine.llama.weights import LlamaWeights
from perdure.errors import InvalidInputError

_TEXT_LIMIT = 1 << 28


class LlamaTokenizer:
    """The tokens of a model. Pieces are bytes, since a token can be part of a character."""

    def __init__(self, weights: LlamaWeights) -> None:
        self._lib = library.load()
        self._weights = weights
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self.size = weights.n_vocab

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        try:
            data = text.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise InvalidInputError(f"text to tokenize must be valid Unicode text: {error}") from None
        if len(data) > _TEXT_LIMIT:
            raise InvalidInputError(f"text of {len(data)} bytes is over the limit of {_TEXT_LIMIT}")
        # No tokenizer makes more tokens than bytes, but for the few that it adds around the text.
        room = len(data) + 8
        while True:
            ids = np.empty(room, np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = self._lib.llama_tokenize(
                self._weights.vocab, data, len(data), pointer, room, bos, special
            )
            if count >= 0:
                return ids[:count].tolist()  # type: ignore[no-any-return]
            room = -count

    def detokenize(self, tokens: Iterable[int], *, special: bool) -> str:
        ids = np.array([self.check(token) for token in tokens], np.int32)
        if not ids.size:
            return ""
        pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        room = 8 * len(ids) + 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._lib.llama_detokenize(
                self._weights.vocab, pointer, len(ids), buffer, room, False, special
            )
            if size >= 0:
                return buffer.raw[:size].decode("utf-8", "replace")
            room = -size

    def piece(self, token: int, *, special: bool) -> bytes:
        known = self._pieces.get((token, special))
        if known is not None:
            return known
        self.check(token)
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._lib.llama_token_to_piece(self._weights.vocab, token, buffer, room, 0, special)
            if size >= 0:
                break
            room = -size
        return self._pieces.setdefault((token, special), buffer.raw[:size])

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        ask, vocab = self._lib.llama_vocab_is_eog, self._weights.vocab
        return frozenset(token for token in range(self.size) if ask(vocab, token))

    @functools.cached_property
    def controls(self) -> frozenset[int]:
        ask, vocab = self._lib.llama_vocab_is_control, self._weights.vocab
        return frozenset(token for token in range(self.size) if ask(vocab, token))

    def special(self, name: str) -> int | None:
        """The id of `bos`, `eos`, `eot`, … where the model has one."""
        token = int(getattr(self._lib, f"llama_vocab_{name}")(self._weights.vocab))
        return token if 0 <= token < self.size else None

    def check(self, token: int) -> int:
        return check_token(token, self.size)
