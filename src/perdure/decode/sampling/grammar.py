"""Structured output: what may come next, as a mask over the vocabulary."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from perdure.engine.model import Model
from perdure.errors import GrammarError

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]

_KINDS: tuple[str, ...] = get_args(GrammarKind)
_SPACE = r"( |\n( {0,40}|\t{0,10}))?"
_KEPT = 256
"""Compiled grammars that a model remembers."""
_LONGEST = 600
"""Characters of the library's words in an error."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply must look like: a JSON schema, a regex, or a Lark or GBNF grammar."""

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """White space is what people write: a space, or a new line with its indent."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if parsed is True or (isinstance(parsed, dict) and "x-guidance" not in parsed):
                # Endless white space is valid JSON too, and small models get lost in it.
                parsed = {**({} if parsed is True else parsed), "x-guidance": {"whitespace_pattern": _SPACE}}
            text = json.dumps(parsed, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"a JSON schema must be valid JSON: {error}") from None
        if not isinstance(parsed, (dict, bool)):
            raise GrammarError(f"a JSON schema is an object, got {type(parsed).__name__}")
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        return cls("gbnf", text)


class Grammars:
    """The grammars of one model: its tokens are read once, each grammar is compiled once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(maxsize=_KEPT)(self._compile)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        words = _Words(self._model)
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(words), n_vocab=self._model.n_vocab, eos_token=words.ends or None
        )

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at its start; a grammar that does not compile raises here, before any decoding."""
        with self._lock:
            return Matcher(self._compiled(grammar).deep_copy(), self._model.n_vocab)

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind not in _KINDS:
            raise GrammarError(f"a grammar is one of {', '.join(_KINDS)}, got {grammar.kind!r}")
        if not isinstance(grammar.text, str):
            raise GrammarError(f"a {grammar.kind} is a text, got {type(grammar.text).__name__}")
        import llguidance

        try:
            definition = llguidance.grammar_from(grammar.kind, grammar.text)
            native = llguidance.LLMatcher(self._tokenizer, definition, log_level=0)
        except ValueError as error:
            raise GrammarError(f"this {grammar.kind} does not compile: {_brief(str(error))}") from None
        if native.is_error():
            raise GrammarError(f"this {grammar.kind} does not compile: {_reason(native)}")
        try:
            Matcher(native.deep_copy(), self._model.n_vocab).mask()
        except GrammarError:
            raise GrammarError(f"this {grammar.kind} allows no reply at all") from None
        return native


class Matcher:
    """One reply's way through a grammar."""

    def __init__(self, native: Any, n_vocab: int) -> None:
        self._native = native
        self._forced: list[int] | None = None
        """Asked for once behind each token."""
        self._mask: NDArray[np.uint8] = np.zeros(-(-n_vocab // 32) * 4, np.uint8)

    @property
    def complete(self) -> bool:
        """Whether nothing more may follow."""
        return bool(self._native.is_stopped())

    def mask(self) -> NDArray[np.uint8]:
        """One bit a token: whether it may come next. GrammarError where none may."""
        self._native.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._native.is_error() or not self._mask.any():
            raise GrammarError(
                f"the grammar came to a dead end: no token may follow ({_reason(self._native)})"
            )
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        return bool(self._native.validate_tokens([token]))

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice: `mask` allows just the first of them."""
        if self._forced is None:
            self._forced = self._native.compute_ff_tokens()
        return self._forced

    def consume(self, token: int) -> None:
        self._forced = None
        if not self._native.consume_token(token):
            raise GrammarError(f"the grammar refused token {token}: {_reason(self._native)}")


def _reason(native: Any) -> str:
    """The library's own words, without the dump of its state that follows them."""
    return _brief((native.get_error() or "no reason was given").partition("<state>")[0])


def _brief(words: str) -> str:
    """An error quotes what it is about, which may be a megabyte."""
    words = words.strip()
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST // 2]} … {words[-_LONGEST // 2 :]}"


class _Words:
    """A model's vocabulary as llguidance reads it: control tokens are not text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        ids = range(model.n_vocab)
        self.ends = sorted(model.ends)
        self.special_token_ids = sorted(model.controls)
        marks = set(self.special_token_ids)
        self.tokens = [
            b"\xff" + model.piece(token, special=True) if token in marks else model.piece(token, special=True)
            for token in ids
        ]
        self.eos_token_id = self.ends[0] if self.ends else 0
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._model.tokenize(words, special=False, bos=False)
