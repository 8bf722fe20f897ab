"""Matchers: a reply's way through a compiled grammar, from its first token on or from an opener on.

A lazy matcher leaves a reply free up to an opener, and holds it to a grammar from there on.

    The weather? <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Paris"}}\\n</tool_call>
    asleep       awake

The grammar describes the whole reply: free text without an opener, then an opener and what must follow. While
no opener has begun, its mask would allow every token, so none is computed and nothing is fed to it. The first
bytes of an opener wake it, since one token may hold the rest of the opener and more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure.errors import GrammarError

_LONGEST = 600
"""Characters of the library's words in an error."""


@dataclass(frozen=True, slots=True)
class Openers:
    """Where a lazy grammar begins to hold a reply: at each of `texts`. Up to there the reply is free."""

    texts: tuple[str, ...]
    goes_on: bool = True
    """Whether the reply is free again where the grammar allows it to end."""
    quotes: tuple[str, ...] = ()
    """Two marks between which an opener opens nothing; or none."""
    quoted: bool = False
    """Whether a reply begins between these marks."""


class Matcher:
    """One reply's way through a grammar."""

    awake = True
    """Whether it has a say in what comes next."""

    def __init__(self, native: Any, n_vocab: int) -> None:
        self._native = native
        self._forced: list[int] | None = None
        """Asked for once behind each token."""
        self._mask: NDArray[np.uint8] = np.zeros(-(-n_vocab // 32) * 4, np.uint8)

    @property
    def complete(self) -> bool:
        """Whether nothing more may follow."""
        return bool(self._native.is_stopped())

    @property
    def accepts_end(self) -> bool:
        """Whether the reply may end here."""
        return bool(self._native.is_accepting())

    def mask(self) -> NDArray[np.uint8]:
        """One bit a token: whether it may come next. GrammarError where none may."""
        self._native.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._native.is_error() or not self._mask.any():
            raise GrammarError(
                f"the grammar came to a dead end: no token may follow ({reason_of(self._native)})"
            )
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        return bool(self._native.validate_tokens([token]))

    def allows_all(self, tokens: Sequence[int]) -> bool:
        """Whether these may come next, one after the other."""
        return bool(self._native.validate_tokens(list(tokens)) == len(tokens))

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice: `mask` allows just the first of them."""
        if self._forced is None:
            self._forced = self._native.compute_ff_tokens()
        return self._forced

    def consume(self, token: int) -> None:
        self._forced = None
        if not self._native.consume_token(token):
            raise GrammarError(f"the grammar refused token {token}: {reason_of(self._native)}")


class LazyMatcher:
    """One reply's way through a lazy grammar. While it is not `awake`, every token may come next."""

    def __init__(
        self,
        native: Any,
        n_vocab: int,
        openers: Openers,
        texts: Sequence[bytes],
        spelling: Mapping[bytes, int],
    ) -> None:
        """`native` is the grammar at its start. `texts` are what tokens add to the reply, by token, and
        `spelling` has the tokens of single bytes; without it, it is awake from the start."""
        self._native, self._n_vocab = native, n_vocab
        self._openers = tuple(text.encode() for text in openers.texts)
        self._goes_on = openers.goes_on
        self._quotes = tuple(text.encode() for text in openers.quotes)
        self._quoted = bool(openers.quotes) and openers.quoted
        self._texts, self._spelling = texts, spelling
        self._first = frozenset(text[0] for text in (*self._openers, *self._quotes))
        self._begun = b""
        """The end of the reply so far that a mark may begin with."""
        self._opened = False
        """Whether an opener was read."""
        self._matcher: Matcher | None = None
        if not spelling:
            self._matcher = Matcher(native.deep_copy(), n_vocab)

    @property
    def awake(self) -> bool:
        return self._matcher is not None

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self._matcher.complete

    @property
    def accepts_end(self) -> bool:
        return self._matcher is None or self._matcher.accepts_end

    def mask(self) -> NDArray[np.uint8]:
        assert self._matcher is not None
        return self._matcher.mask()

    def allows(self, token: int) -> bool:
        return self._matcher is None or self._matcher.allows(token)

    def allows_all(self, tokens: Sequence[int]) -> bool:
        """Whether these may come next, one after the other."""
        return self._matcher is None or self._matcher.allows_all(tokens)

    def forced(self) -> list[int]:
        return [] if self._matcher is None else self._matcher.forced()

    def consume(self, token: int) -> None:
        text = self._texts[token]
        if self._matcher is not None:
            self._matcher.consume(token)
            self._follow(text)
        elif self._begun or not self._first.isdisjoint(text):
            self._read(token, self._begun + text)

    def _follow(self, text: bytes) -> None:
        """Sleep again where the text is free and no opener has begun."""
        assert self._matcher is not None
        text = self._begun + text
        self._opened = self._opened or any(opener in text for opener in self._openers)
        if not self._spelling or (self._opened and not self._goes_on):
            return
        if self._matcher.accepts_end:
            self._quoted = bool(self._quotes) and self._quotes[0] in text
        self._begun = b"" if self._quoted else self._beginning(text)
        if self._matcher.accepts_end and not self._begun:
            self._matcher = None

    def _read(self, token: int, text: bytes) -> None:
        while (mark := self._first_mark(text)) is not None:
            if mark in self._openers:
                self._opened = True
                self._wake(token, text[text.index(mark) :])
                return
            self._quoted = mark == self._quotes[0]
            text = text[text.index(mark) + len(mark) :]
        self._begun = self._beginning(text)
        begins = bool(self._begun) and not self._quoted
        if begins and any(opener.startswith(self._begun) for opener in self._openers):
            self._wake(token, self._begun)

    @property
    def _marks(self) -> tuple[bytes, ...]:
        if self._quoted:
            return self._quotes[1:]
        return (*self._openers, *self._quotes[:1])

    def _first_mark(self, text: bytes) -> bytes | None:
        marks = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        return min(marks)[1] if marks else None

    def _beginning(self, text: bytes) -> bytes:
        """The longest end of a text that a mark begins with, but is not."""
        marks = self._marks
        for at in range(max(0, len(text) - max(map(len, marks)) + 1), len(text)):
            if any(mark.startswith(text[at:]) for mark in marks):
                return text[at:]
        return b""

    def _wake(self, token: int, text: bytes) -> None:
        """Go on under the grammar, which has read `text`: the end of `token`, or that and what was before."""
        self._matcher = Matcher(self._native.deep_copy(), self._n_vocab)
        if self._texts[token] == text:
            self._matcher.consume(token)
            return
        for byte in text:
            self._matcher.consume(self._spelling[bytes([byte])])


def reason_of(native: Any) -> str:
    """The library's own words, without the dump of its state that follows them."""
    return brief((native.get_error() or "no reason was given").partition("<state>")[0])


def brief(words: str) -> str:
    """An error quotes what it is about, which may be a megabyte."""
    words = words.strip()
    return words if len(words) <= _LONGEST else f"{words[: _LONGEST // 2]} … {words[-_LONGEST // 2 :]}"
