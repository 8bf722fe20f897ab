"""A text and the tokens that stand for it."""

from __future__ import annotations

import bisect
import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from perdure.chat.message import Image

    # Sessions are listed and read without an engine, and without the time that it takes to import one.
    from perdure.engine.contract import Tokenizer

GUARD = "\ue000"
"""Put into what only looks like a control token, so that it stays text. Of Unicode's private use."""
_TYPED = GUARD * 2
"""The same character, where a user typed it."""
_APART = "\0"
"""Between marks that are looked through as one text."""
_IDENTIFIER = re.compile(r"[\w .-]*")
_CUT = r"\g<0>" + GUARD
_Tree: TypeAlias = dict[str, "_Tree"]


MARK = "\ue001"
"""What stands around the name of an image in a prompt's text. Of Unicode's private use, too."""
_NAME = "[0-9a-f]{64}(?:low)?"
MARKED = re.compile(f"{MARK}({_NAME}){MARK}")
OURS = secrets.token_hex(16)
"""Nobody can type a mark: until the text around it is guarded, this stands in it, and is never written."""
_GENUINE = re.compile(f"{GUARD}?{MARK}{OURS}({_NAME}){GUARD}?{MARK}")
ImageTokens: TypeAlias = Callable[[str], Sequence[int]]
"""The tokens of an image of a prompt, by its name."""


def marked(content: str, images: Sequence[tuple[int, Image]]) -> str:
    """A text with marks where its images stand, before it is guarded."""
    parts, start = [], 0
    for at, image in images:
        parts += [content[start:at], f"{MARK}{OURS}{image.name}{MARK}"]
        start = at
    return "".join([*parts, content[start:]])


def unguarded(text: str) -> str:
    """A guarded text with its genuine marks as they stand in a prompt."""
    return _GENUINE.sub(rf"{MARK}\1{MARK}", text) if OURS in text else text


T = TypeVar("T")


class _computed_once(Generic[T]):  # noqa: N801 (used as a decorator)
    """A property that is computed when it is first asked for.

    No `functools.cached_property`: until Python 3.12 its lock is one for all objects of a class, and the
    tokenizer of a model that is being loaded would have those of other models wait.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> T:
        if owner is None:
            return self  # type: ignore[return-value]
        # What it gives is found in the object before this from then on. Two threads give the same.
        value = owner.__dict__[self._name] = self._compute(owner)
        return value


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

    Text that only looks like a control token (a user typed it) never becomes one: `guard` puts a character
    into it that cuts it in two, and everything here knows that character. `marks` are texts that the chat
    format gives a meaning: where the vocabulary has a token for one, it counts as a control token, since
    the library makes user-defined tokens out of any text. `erased` are texts that the template takes out of
    messages: what is left must not become a mark either.
    """

    def __init__(self, model: Tokenizer, marks: Iterable[str] = (), *, erased: Iterable[str] = ()) -> None:
        self._model = model
        self._candidates = frozenset(marks)
        self._erased = tuple(erased)

    @_computed_once
    def control(self) -> dict[int, str]:
        """The control tokens and their texts."""
        model = self._model
        texts = {t: model.piece(t, special=True).decode("utf-8", "replace") for t in sorted(model.controls)}
        return {token: text for token, text in texts.items() if text}

    @_computed_once
    def marks(self) -> dict[int, str]:
        """The control tokens, and the user-defined ones that mean something in this chat format."""
        marks = dict(self.control)
        for text in sorted(self._candidates - set(marks.values())):
            tokens = self._model.tokenize(text, bos=False)
            if len(text) > 1 and len(tokens) == 1 and self._model.piece(tokens[0]) == text.encode():
                marks[tokens[0]] = text
        return marks

    @_computed_once
    def _texts(self) -> list[str]:
        # A mark of one character could not be guarded, and would be no mark.
        return sorted({text for text in self.marks.values() if len(text) > 1}, key=len, reverse=True)

    @_computed_once
    def _marks(self) -> re.Pattern[str]:
        return re.compile(_pattern(_tree(self._texts)))

    @_computed_once
    def _mark_starts(self) -> re.Pattern[str]:
        # Looking ahead finds marks that overlap, too.
        starts = [f"{re.escape(first)}(?={_pattern(rest)})" for first, rest in _tree(self._texts).items()]
        return re.compile("|".join(starts) or r"(?!)")

    @_computed_once
    def _begins(self) -> frozenset[str]:
        """What marks begin with, from two characters on."""
        return frozenset(text[:size] for text in self._texts for size in range(2, len(text)))

    @_computed_once
    def _ends(self) -> frozenset[str]:
        """What marks end with, from two characters on."""
        return frozenset(text[-size:] for text in self._texts for size in range(2, len(text)))

    @_computed_once
    def _pairs(self) -> tuple[frozenset[str], frozenset[str]]:
        """The first two characters of all ends, and the last two of all beginnings: few texts have them."""
        return frozenset(end[:2] for end in self._ends), frozenset(begin[-2:] for begin in self._begins)

    @_computed_once
    def _middles(self) -> str:
        """All marks but for their first and last characters, one behind the other."""
        return _APART.join(text[1:-1] for text in self._texts)

    @_computed_once
    def _longest(self) -> int:
        return max(map(len, self._texts), default=0)

    @_computed_once
    def start(self) -> Transcript:
        """What every prompt starts with, if it does not say so itself."""
        tokens = self._model.tokenize("")
        return Transcript("", array("i", tokens), ((0, len(tokens)),) if tokens else ())

    @_computed_once
    def _spaced(self) -> bool:
        """Whether this vocabulary puts a space before a text that it starts with."""
        tokens = self._model.tokenize("a", bos=False)
        return b"".join(self._model.piece(token) for token in tokens) != b"a"

    def guard(self, text: str) -> str:
        """Cut in two whatever in `text` looks like a control token."""
        if GUARD in text:
            text = text.replace(GUARD, _TYPED)
        if MARK in text:
            text = text.replace(MARK, GUARD + MARK)
        return self._mark_starts.sub(_CUT, text)

    def guard_field(self, text: str) -> str:
        """`guard` for a text that a template puts between others: together they make no control token."""
        guarded = self.guard(text)
        for gone in self._erased:
            if gone in guarded and self._marks.search(guarded.replace(gone, "")):
                guarded = guarded.replace(gone, gone + GUARD)
        # Templates strip messages, so what counts are the edges of their words.
        words = guarded.strip()
        sizes = range(2, min(self._longest, len(words) + 1))
        first, last = self._pairs
        # Every field of a whole history comes here with every request.
        before = words[:2] in first and any(words[:size] in self._ends for size in sizes)
        behind = words[-2:] in last and any(words[-size:] in self._begins for size in sizes)
        if not _IDENTIFIER.fullmatch(words) and self._is_inside(words):
            before = behind = True
        return _cut_edges(guarded, before, behind) if before or behind else guarded

    def guard_name(self, text: str) -> str:
        """`guard_field` for a name that may stand in the middle of a template's own mark."""
        guarded = self.guard_field(text)
        return _cut_edges(guarded, True, True) if self._is_inside(guarded) else guarded

    def _is_inside(self, text: str) -> bool:
        """Whether a text is the middle of a mark."""
        if not 0 < len(text) < self._longest:
            return False
        if _APART in text:
            return any(text in mark[1:-1] for mark in self._texts)
        # At once: some vocabularies have a thousand marks.
        return text in self._middles

    def encode(
        self, text: str, after: Transcript | None = None, images: ImageTokens | None = None
    ) -> Transcript:
        """A text behind `after`. Unguarded marks in it become control tokens, and those of images what stands
        for them."""
        before = after if after is not None else self._opening(text)
        tokens: list[int] = []
        for index, part in enumerate(_pieces(text)):
            if MARK in part and images is not None:
                tokens += self._with_images(part, images, goes_on=index > 0)
            elif part:
                tokens += self._go_on(part) if index else self._model.tokenize(part, special=True, bos=False)
        cuts, at = [], 0
        for count, token in enumerate(tokens, 1):
            mark = self.marks.get(token)
            if mark is not None and (start := text.find(mark, at)) >= 0:
                at = start + len(mark)
                cuts.append((at, count))
        return before + Transcript(text, array("i", tokens), _with_end(cuts, len(text), len(tokens)))

    def _with_images(self, text: str, images: ImageTokens, *, goes_on: bool) -> list[int]:
        """The tokens of a text with marks of images in it."""
        tokens: list[int] = []
        for index, part in enumerate(MARKED.split(text)):
            if index % 2:
                tokens += images(part)
            elif part:
                first = not index and not goes_on
                tokens += self._model.tokenize(part, special=True, bos=False) if first else self._go_on(part)
        return tokens

    def _go_on(self, text: str) -> list[int]:
        """The tokens of a text that stands behind other text, without a space before it."""
        if self._spaced:
            tokens, read = self._model.tokenize("\n" + text, special=True, bos=False), b""
            for count, token in enumerate(tokens, 1):
                read += self._model.piece(token)
                if read.lstrip(b" ") == b"\n":
                    return tokens[count:]
                if read.strip(b" "):
                    break
        return self._model.tokenize(text, special=True, bos=False)

    def decode(self, tokens: Sequence[int]) -> Transcript:
        """Tokens that a model wrote, with the text that stands for them."""
        parts: list[str] = []
        cuts: list[tuple[int, int]] = []
        plain: list[bytes] = []
        length = 0
        for count, token in enumerate(tokens, 1):
            mark = self.marks.get(token)
            if mark is None:
                plain.append(self._model.piece(token))
                continue
            parts += [self.guard(b"".join(plain).decode("utf-8", "replace")), mark]
            length += len(parts[-2]) + len(mark)
            plain = []
            cuts.append((length, count))
        parts.append(self.guard(b"".join(plain).decode("utf-8", "replace")))
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
        if not count or known.tokens[count - 1] in self.marks or at == len(text):
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


def _cut_edges(text: str, before: bool, behind: bool) -> str:
    """Cuts before the first word of a text, or behind the last."""
    words = text.strip()
    at = text.index(words)
    end = at + len(words)
    return text[:at] + GUARD * before + words + GUARD * behind + text[end:]


def _tree(texts: Iterable[str]) -> _Tree:
    """Texts by their characters: what each may go on with, and nothing where one ends."""
    tree: _Tree = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return tree


def _pattern(tree: _Tree) -> str:
    """A pattern that matches where one of the texts begins. A place is decided by a few comparisons, however
    many texts there are: a list of them would be gone through at every place."""
    alike = ""
    while len(tree) == 1 and "" not in tree:
        [(character, tree)] = tree.items()
        alike += re.escape(character)
    if "" in tree:
        return alike
    ways = [re.escape(character) + _pattern(rest) for character, rest in tree.items()]
    return f"{alike}(?:{'|'.join(ways) or '(?!)'})"


def _pieces(text: str) -> list[str]:
    """A guarded text, cut where it is guarded."""
    if GUARD not in text:
        return [text]
    pieces = [""]
    for index, part in enumerate(re.split(f"({GUARD}{{1,2}})", text)):
        if index % 2 == 0:
            pieces[-1] += part
        elif part == _TYPED:
            pieces[-1] += GUARD
        else:
            pieces.append("")
    return pieces


def _with_end(cuts: list[tuple[int, int]], chars: int, count: int) -> tuple[tuple[int, int], ...]:
    end = (chars, count)
    return tuple(cuts if cuts and cuts[-1] == end else [*cuts, end] if count else cuts)
