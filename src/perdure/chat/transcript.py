"""A text and the tokens that stand for it."""

from __future__ import annotations

import bisect
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from perdure.engine.contract import Vocabulary

_GUARD = "\ue000"
"""Put into what only looks like a control token, so that it stays text. Of Unicode's private use."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What a model has read and written, as text and as tokens.

    `cuts` are the places, as lengths of the text and of the tokens, where both can be cut alike: behind
    every control token, and at the end. Between them, other words might have given other tokens.
    """

    text: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cuts: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: Transcript) -> Transcript:
        chars, count = len(self.text), len(self.tokens)
        moved = tuple((chars + at, count + token) for at, token in other.cuts)
        return Transcript(self.text + other.text, self.tokens + other.tokens, self.cuts + moved)

    def first(self, cut: int) -> Transcript:
        """Up to its cut number `cut`."""
        chars, count = self.cuts[cut]
        if (chars, count) == (len(self.text), len(self.tokens)):
            return self
        return Transcript(self.text[:chars], self.tokens[:count], self.cuts[: cut + 1])


class ChatTokenizer:
    """Tokenizer of conversations: text to tokens and tokens to text, for one vocabulary.

    Text that only looks like a control token (somebody typed it) never becomes one: `guard` marks it, and
    everything here knows the mark.
    """

    def __init__(self, model: Vocabulary) -> None:
        self._model = model

    @cached_property
    def control(self) -> dict[int, str]:
        """The control tokens and their texts."""
        model = self._model
        texts = {t: model.piece(t, special=True).decode("utf-8", "replace") for t in sorted(model.controls)}
        return {token: text for token, text in texts.items() if text}

    @cached_property
    def _texts(self) -> list[str]:
        # A mark of one character could not be guarded, and would be no mark.
        return sorted((text for text in self.control.values() if len(text) > 1), key=len, reverse=True)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    @cached_property
    def _guarded(self) -> re.Pattern[str]:
        return re.compile("(" + ("|".join(re.escape(_guard(text)) for text in self._texts) or r"(?!)") + ")")

    @cached_property
    def start(self) -> Transcript:
        """What every prompt starts with, if it does not say so itself."""
        tokens = self._model.tokenize("")
        return Transcript("", array("i", tokens), ((0, len(tokens)),) if tokens else ())

    @cached_property
    def _spaced(self) -> bool:
        """Whether this vocabulary puts a space before a text that it starts with."""
        tokens = self._model.tokenize("a", bos=False)
        return b"".join(self._model.piece(token) for token in tokens) != b"a"

    def guard(self, text: str) -> str:
        """Mark whatever in `text` looks like a control token."""
        return self._marks.sub(lambda found: _guard(found[0]), text)

    def encode(self, text: str, after: Transcript | None = None) -> Transcript:
        """A text behind `after`. Unguarded marks in it become control tokens."""
        before = after if after is not None else self._opening(text)
        tokens: list[int] = []
        for index, part in enumerate(self._guarded.split(text)):
            if part:
                plain = part.replace(_GUARD, "", 1) if index % 2 else part
                tokens += self._model.tokenize(plain, special=index % 2 == 0, bos=False)
        cuts, at = [], 0
        for count, token in enumerate(tokens, 1):
            mark = self.control.get(token)
            if mark is not None and (found := text.find(mark, at)) >= 0:
                at = found + len(mark)
                cuts.append((at, count))
        return before + Transcript(text, array("i", tokens), _with_end(cuts, len(text), len(tokens)))

    def decode(self, tokens: Sequence[int]) -> Transcript:
        """Tokens that a model wrote, with the text that stands for them."""
        parts: list[str] = []
        cuts: list[tuple[int, int]] = []
        plain, length = b"", 0
        for count, token in enumerate(tokens, 1):
            mark = self.control.get(token)
            if mark is None:
                plain += self._model.piece(token)
                continue
            parts += [self.guard(plain.decode("utf-8", "replace")), mark]
            length += len(parts[-2]) + len(mark)
            plain = b""
            cuts.append((length, count))
        parts.append(self.guard(plain.decode("utf-8", "replace")))
        text = "".join(parts)
        return Transcript(text, array("i", tokens), _with_end(cuts, len(text), len(tokens)))

    def shared_prefix(self, text: str, known: Transcript) -> Transcript | None:
        """The longest beginning of `known` whose tokens can stand for a beginning of `text`."""
        shared = shared_length(text, known.text)
        cut = bisect.bisect_right(known.cuts, shared, key=lambda cut: cut[0]) - 1
        if cut >= 0 and not self._can_go_on(text, known, cut):
            cut -= 1
        return known.first(cut) if cut >= 0 else None

    def _can_go_on(self, text: str, known: Transcript, cut: int) -> bool:
        """Whether tokens behind a cut do not depend on those before it."""
        at, count = known.cuts[cut]
        if not count or known.tokens[count - 1] in self.control or at == len(text):
            return True
        return self._marks.match(text, at) is not None or (text[at].isspace() and not self._spaced)

    def _opening(self, text: str) -> Transcript:
        first = "".join(self.control.get(token, "") for token in self.start.tokens)
        return Transcript() if first and text.startswith(first) else self.start


def shared_length(first: str, second: str) -> int:
    """How many characters two texts start with alike."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _guard(mark: str) -> str:
    return mark[0] + _GUARD + mark[1:]


def _with_end(cuts: list[tuple[int, int]], chars: int, count: int) -> tuple[tuple[int, int], ...]:
    end = (chars, count)
    return tuple(cuts if cuts and cuts[-1] == end else [*cuts, end] if count else cuts)
