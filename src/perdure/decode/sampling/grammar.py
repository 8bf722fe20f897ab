"""Structured output: what may come next, as a mask over the vocabulary."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from perdure.decode.sampling.grammar_checker import GrammarLate, GrammarTimeout, Vocabulary, checker
from perdure.engine.model import EngineModel
from perdure.errors import GrammarError

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]

_KINDS: tuple[str, ...] = get_args(GrammarKind)
_SPACE = r"( |\n( {0,40}|\t{0,10}))?"
_KEPT = 256
"""Compiled grammars that a model remembers, and refused ones."""
_REFUSED = 1024
_LONGEST = 600
"""Characters of the library's words in an error."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply must look like: a JSON schema, a regex, or a Lark or GBNF grammar."""

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: Any) -> Grammar:
        """Of a mapping, its text, or a class of pydantic. White space is what people write: a space, or a new
        line with its indent."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else written_schema(schema)
            if parsed is True or (isinstance(parsed, dict) and "x-guidance" not in parsed):
                # Endless white space is valid JSON too, and small models get lost in it.
                parsed = {**({} if parsed is True else parsed), "x-guidance": {"whitespace_pattern": _SPACE}}
            text = json.dumps(parsed, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"a JSON schema must be valid JSON: {error}") from None
        if not isinstance(parsed, (dict, bool)):
            raise GrammarError(f"a JSON schema is an object, got {type(parsed).__name__}")
        check_numbers(parsed)
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


def written_schema(schema: Any) -> Any:
    """The JSON schema of a class of pydantic, or of its `TypeAdapter`; anything else as it is."""
    for name in ("model_json_schema", "json_schema"):
        if not isinstance(schema, (Mapping, bool)) and callable(write := getattr(schema, name, None)):
            return write()
    return schema


def check_numbers(schema: object) -> None:
    """Refuse numbers of a JSON schema that llguidance cannot hold a reply to: it reads them as floats, and
    then as integers of 64 bits."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _LOWER or name in _UPPER:
                    _check_bound(name, value)
                if name in ("const", "enum"):
                    _check_values(name, value)
                elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                    waiting += value.values()
                elif name not in ("default", "examples"):
                    waiting.append(value)


_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INT_MAX = 2**63 - 1


def _check_bound(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    try:
        read = float(value)
    except OverflowError:
        read = math.inf if value > 0 else -math.inf
    clamped = max(min(read, _INT_MAX), -_INT_MAX - 1)
    if clamped <= -_INT_MAX or (clamped < value if name in _LOWER else clamped > value):
        raise GrammarError(
            f"a JSON schema's {name} of {_brief(str(value))} cannot be held to: integers have 64 bits, and "
            "those beyond 53 bits are rounded. Use a bound that is nearer to zero, or a string with a pattern"
        )


def _check_values(name: str, value: object) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int) and (abs(part) > _INT_MAX or float(part) != part):
            raise GrammarError(
                f"a JSON schema's {name} has {_brief(str(part))}, which cannot be held to: integers have "
                "64 bits, and those beyond 53 bits are rounded. Use a string"
            )
        if isinstance(part, (list, dict)):
            waiting += part.values() if isinstance(part, dict) else part


class Grammars:
    """The grammars of one model: its tokens are read once, each grammar is compiled once.

    Always holds: nothing is compiled here that the checker's child did not survive; no lock is held while one
    is compiled; what was refused is refused again without work. Each namespace has what it asked for itself.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Why, by the digest of a grammar."""
        self._making: dict[bytes, threading.Event] = {}

    @functools.cached_property
    def _words(self) -> _Words:
        return _Words(self._model)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        words = self._words
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(words), n_vocab=self._model.n_vocab, eos_token=words.ends or None
        )

    def matcher(self, grammar: Grammar, namespace: str = "", deadline: float | None = None) -> Matcher:
        """A matcher at its start; a grammar that does not compile raises here, before any decoding.
        GrammarLate where the deadline passes first."""
        if grammar.kind not in _KINDS:
            raise GrammarError(f"a grammar is one of {', '.join(_KINDS)}, got {grammar.kind!r}")
        if not isinstance(grammar.text, str):
            raise GrammarError(f"a {grammar.kind} is a text, got {type(grammar.text).__name__}")
        # A namespace cannot time what another one has compiled, or was refused.
        key = f"{namespace}\0{grammar.kind}\0{grammar.text}"
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        native = self._known(digest)
        if native is None:
            with checker.turn(namespace, deadline):
                native = self._make(digest, grammar, namespace, deadline)
        return Matcher(native.deep_copy(), self._model.n_vocab)

    def _known(self, digest: bytes) -> Any:
        """What was compiled; None where nothing is known of it."""
        with self._lock:
            if (why := self._refused.get(digest)) is not None:
                self._refused.move_to_end(digest)
                raise GrammarError(why)
            if (compiled := self._compiled.get(digest)) is None:
                return None
            self._compiled.move_to_end(digest)
            return compiled.native

    def _make(self, digest: bytes, grammar: Grammar, namespace: str, deadline: float | None) -> Any:
        """Compile it, or wait for the thread that does."""
        while (native := self._known(digest)) is None:
            with self._lock:
                making = self._making.get(digest)
                if making is None:
                    self._making[digest] = made = threading.Event()
            if making is not None:
                if not making.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    raise GrammarLate
                continue
            try:
                native = self._compile(grammar, deadline)
                with self._lock:
                    self._compiled[digest] = _Compiled(native, namespace)
                    self._evict()
                return native
            except GrammarTimeout:
                raise
            except GrammarError as error:
                with self._lock:
                    self._refused[digest] = str(error)
                    if len(self._refused) > _REFUSED:
                        self._refused.popitem(last=False)
                raise
            finally:
                with self._lock:
                    del self._making[digest]
                made.set()
        return native

    def _evict(self) -> None:
        """Forget the oldest of the namespace that has the most, so that one that sends many keeps no others
        from being remembered."""
        if len(self._compiled) > _KEPT:
            [(most, _)] = Counter(each.namespace for each in self._compiled.values()).most_common(1)
            oldest = next(key for key, each in self._compiled.items() if each.namespace == most)
            del self._compiled[oldest]

    def _compile(self, grammar: Grammar, deadline: float | None) -> Any:
        import llguidance

        with self._reading:
            tokenizer = self._tokenizer
        checker.check(grammar.kind, grammar.text, self._words.vocabulary, deadline)
        try:
            definition = llguidance.grammar_from(grammar.kind, grammar.text)
            native = llguidance.LLMatcher(tokenizer, definition, log_level=0)
        except ValueError as error:
            raise GrammarError(f"this {grammar.kind} does not compile: {_brief(str(error))}") from None
        if native.is_error():
            raise GrammarError(f"this {grammar.kind} does not compile: {_reason(native)}")
        try:
            # What this finds out is in all copies.
            Matcher(native, self._model.n_vocab).mask()
        except GrammarError:
            raise GrammarError(f"this {grammar.kind} allows no reply at all") from None
        return native


@dataclass(frozen=True, slots=True)
class _Compiled:
    native: Any
    namespace: str


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

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        ids = range(model.n_vocab)
        self.ends = sorted(model.ends)
        self.special_token_ids = sorted(model.controls)
        marks = set(self.special_token_ids)
        self.tokens = [
            b"\xff" + model.piece(token, special=True) if token in marks else model.piece(token, special=True)
            for token in ids
        ]
        self.vocabulary = Vocabulary(
            model.n_vocab, tuple((token, self.tokens[token][1:]) for token in self.special_token_ids)
        )
        self.eos_token_id = self.ends[0] if self.ends else 0
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._model.tokenize(words, special=False, bos=False)
