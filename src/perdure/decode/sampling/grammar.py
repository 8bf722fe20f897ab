"""Structured output: what may come next, as a mask over the vocabulary."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from perdure.decode.sampling.grammar_checker import GrammarLate, GrammarTimeout, Vocabulary, checker
from perdure.decode.sampling.matcher import LazyMatcher, Matcher, Openers, brief, reason_of
from perdure.engine.model import EngineModel
from perdure.errors import GrammarError

GrammarKind = Literal["json_schema", "regex", "lark", "gbnf"]

_KINDS: tuple[str, ...] = get_args(GrammarKind)
_SPACE = r"( |\n( {0,40}|\t{0,10}))?"
_KEPT = 256
"""Compiled grammars that a model remembers, and refused ones."""
_REFUSED = 1024
_GRAMMAR_LINE = re.compile(r"\n\s*\d+ \|")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply must look like: a JSON schema, a regex, or a Lark or GBNF grammar."""

    kind: GrammarKind
    text: str
    openers: Openers | None = None
    """For a lazy grammar, which begins with free text; None: it holds the whole reply."""

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
    def lark(cls, text: str, openers: Openers | None = None) -> Grammar:
        return cls("lark", text, openers)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        return cls("gbnf", text)


def written_schema(schema: Any) -> Any:
    """The JSON schema of a class of pydantic, or of its `TypeAdapter`, with no properties besides its fields;
    anything else as it is."""
    for name in ("model_json_schema", "json_schema"):
        if not isinstance(schema, (Mapping, bool)) and callable(write := getattr(schema, name, None)):
            return _closed(write())
    return schema


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # Small models go on for long with properties that they make up.
    own = {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else {}
    return own | {name: _closed(each) for name, each in schema.items()}


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
            f"a JSON schema's {name} of {brief(str(value))} cannot be held to: integers have 64 bits, and "
            "those beyond 53 bits are rounded. Use a bound that is nearer to zero, or a string with a pattern"
        )


def _check_values(name: str, value: object) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int) and (abs(part) > _INT_MAX or float(part) != part):
            raise GrammarError(
                f"a JSON schema's {name} has {brief(str(part))}, which cannot be held to: integers have "
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
        self._texts_by_visible: dict[frozenset[int], list[bytes]] = {}
        self._tokens_by_text: dict[bytes, list[int]] = {}

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
        return Matcher(self._native(grammar, namespace, deadline).deep_copy(), self._model.n_vocab)

    def lazy_matcher(
        self,
        grammar: Grammar,
        namespace: str = "",
        deadline: float | None = None,
        *,
        visible: frozenset[int] = frozenset(),
    ) -> LazyMatcher:
        """The same for a lazy grammar. The control tokens `visible` have a text."""
        assert grammar.openers is not None
        return self._lazy(self._native(grammar, namespace, deadline), grammar.openers, visible)

    def _native(self, grammar: Grammar, namespace: str, deadline: float | None) -> Any:
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
        return native

    def _lazy(self, native: Any, openers: Openers, visible: frozenset[int]) -> LazyMatcher:
        spelling = self._spelling
        marks = {text.encode() for text in (*openers.texts, *openers.quotes)}
        if not {bytes([byte]) for mark in marks for byte in mark} <= spelling.keys():
            spelling = {}
        # A token that holds an opener and something behind it: nothing but its mask could keep it out.
        if any(
            not native.validate_tokens([token])
            for text in openers.texts
            for token in self._tokens_within(text.encode())
        ):
            spelling = {}
        return LazyMatcher(native, self._model.n_vocab, openers, self._texts(visible), spelling)

    @functools.cached_property
    def _spelling(self) -> dict[bytes, int]:
        """The tokens of single bytes."""
        return {text: token for token, text in enumerate(self._words.tokens) if len(text) == 1}

    def _texts(self, visible: frozenset[int]) -> list[bytes]:
        """What each token adds to a reply's text."""
        if (texts := self._texts_by_visible.get(visible)) is None:
            texts = list(self._words.tokens)
            for token in self._words.special_token_ids:
                texts[token] = texts[token][1:] if token in visible else b""
            self._texts_by_visible[visible] = texts
        return texts

    def _tokens_within(self, text: bytes) -> list[int]:
        """The tokens that hold a text and something behind it, but for control tokens."""
        if (within := self._tokens_by_text.get(text)) is None:
            tokens = enumerate(self._words.tokens)
            within = [token for token, each in tokens if text in each[:-1] and not each.startswith(b"\xff")]
            self._tokens_by_text[text] = within
        return within

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
        begins = "" if grammar.openers is None else grammar.openers.texts[0]
        checker.check(grammar.kind, grammar.text, self._words.vocabulary, deadline, begins)
        try:
            definition = llguidance.grammar_from(grammar.kind, grammar.text)
            native = llguidance.LLMatcher(tokenizer, definition, log_level=0)
        except ValueError as error:
            raise GrammarError(f"this {grammar.kind} does not compile: {brief(str(error))}") from None
        if native.is_error() and grammar.openers is not None:
            reason = _GRAMMAR_LINE.split(reason_of(native))[0]
            raise GrammarError(
                f"tool calls cannot be held to these schemas: {reason}. Change them, or set unchecked_calls"
            )
        if native.is_error():
            raise GrammarError(f"this {grammar.kind} does not compile: {reason_of(native)}")
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
