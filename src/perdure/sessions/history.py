"""The history of a session: where a conversation stands, and its turns as they are read from the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perdure.chat.message import Message
from perdure.chat.transcript import Transcript
from perdure.sessions.turn import Turn, context, transcript

if TYPE_CHECKING:
    from perdure.chat.template.template import Rendering

_REMEMBERED = 2
"""How many histories before the latest one stay at hand, with their transcripts."""
_AT_ONCE = 16
"""Turns that are read at first; then each time as many as are there. Fewer are not left for later."""


@dataclass(frozen=True, slots=True)
class TurnReference:
    """A turn of a session: its number in the store, its digest, and how many lead to it."""

    head: int
    digest: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class TurnPage:
    """Turns one after another with their numbers, and what stands before them."""

    numbers: Sequence[int]
    turns: Sequence[Turn]
    before: TurnReference | None
    """None where they begin with the start."""


Read = Callable[[TurnReference, int], TurnPage]
"""Reads the turn at a place and those before it, up to a number of turns, each of them proved."""


class _TurnChain:
    """Turns one after another with their numbers. It grows at its end, so that many histories can share it;
    its beginning is read from the store when it is needed."""

    __slots__ = ("before", "lock", "nbytes", "numbers", "read", "start", "turns")

    def __init__(
        self,
        numbers: Sequence[int],
        turns: Sequence[Turn],
        before: TurnReference | None,
        read: Read | None,
        start: Turn | None = None,
    ) -> None:
        self.numbers = list(numbers)
        self.turns = list(turns)
        self.before = before
        """The last turn that was not read yet."""
        self.read = read
        self.start = start
        """The start, where it was read before what comes after it."""
        self.lock = threading.RLock()
        self.nbytes = sum(turn.nbytes for turn in self.turns)
        """Of memory that the turns take which were read, about."""

    def grow(self, numbers: Sequence[int], turns: Sequence[Turn]) -> None:
        """Have more turns at its end."""
        self.numbers += numbers
        self.turns += turns
        self.nbytes += sum(turn.nbytes for turn in turns)

    @property
    def first(self) -> int:
        """The depth of the first turn that was read."""
        return 0 if self.before is None else self.before.depth + 1

    @property
    def end(self) -> int:
        return self.first + len(self.turns)

    def read_to(self, depth: int) -> None:
        """Have the turns from `depth` on read."""
        while self.before is not None and self.first > depth:
            assert self.read is not None
            left = self.before.depth + 1
            page = max(_AT_ONCE, len(self.turns), left - depth)
            chunk = self.read(self.before, page if page + _AT_ONCE <= left else left)
            self.numbers[:0] = chunk.numbers
            self.turns[:0] = chunk.turns
            self.nbytes += sum(turn.nbytes for turn in chunk.turns)
            self.before = chunk.before

    def place(self, depth: int) -> TurnReference:
        with self.lock:
            if self.before is not None and self.before.depth == depth:
                return self.before
            self.read_to(depth)
            at = depth - self.first
            return TurnReference(self.numbers[at], self.turns[at].digest, depth)

    def turn(self, depth: int) -> Turn:
        with self.lock:
            self.read_to(depth)
            return self.turns[depth - self.first]

    def slice(self, start: int, end: int) -> list[Turn]:
        with self.lock:
            if start < end:
                self.read_to(start)
            return self.turns[max(0, start - self.first) : max(0, end - self.first)]

    def up_to(self, count: int) -> _TurnChain:
        """A separate chain that starts with the first `count` turns of this one."""
        if self.before is not None and self.before.depth == count - 1:
            return _TurnChain((), (), self.before, self.read, self.start)
        self.read_to(count - 1)
        length = count - self.first
        line = _TurnChain((), (), self.before, self.read, self.start)
        dropped = self.turns[length:]
        if len(dropped) >= length:
            line.grow(self.numbers[:length], self.turns[:length])
            return line
        # Mostly one turn is dropped, of thousands: the others are not weighed again.
        line.numbers, line.turns = self.numbers[:length], self.turns[:length]
        line.nbytes = self.nbytes - sum(turn.nbytes for turn in dropped)
        return line


class History:
    """The first turns of a line, from the start on. It never changes.

    One that is a turn longer, or some turns shorter, shares the line: neither copies the turns. Turns are
    read when they are first asked for, the last ones first: of a conversation that was folded, what stands
    before the fold is of no use to the next turn. What they come to (transcript, messages) is made when it
    is first asked for.
    """

    __slots__ = ("_before", "_count", "_line", "_messages", "_models", "_place", "_transcript", "rendering")

    def __init__(self, line: _TurnChain, count: int) -> None:
        self._line = line
        self._count = count
        self._place: TurnReference | None = None
        self._transcript: Transcript | None = None
        self._messages: tuple[Message, ...] | None = None
        self._models: frozenset[str] | None = None
        self._before: History | None = None
        self.rendering: Rendering | None = None
        """How its messages were rendered, if they were."""

    @classmethod
    def at(cls, place: TurnReference, read: Read) -> History:
        """All that led to a turn; nothing of it is read yet."""
        return cls(_TurnChain((), (), place, read), place.depth + 1)

    def __len__(self) -> int:
        """Turns, without the start."""
        return self._count - 1

    @property
    def place(self) -> TurnReference:
        """Its last turn."""
        if self._place is None:
            self._place = self._line.place(self._count - 1)
        return self._place

    @property
    def head(self) -> int:
        """The number of its last turn in the store."""
        return self.place.head

    @property
    def last(self) -> Turn:
        return self._line.turn(self._count - 1)

    def start(self, find: Callable[[], Turn]) -> Turn:
        """The start, which `find` reads where not all turns were."""
        line = self._line
        with line.lock:
            if line.before is None:
                return line.turns[0]
            if line.start is None:
                line.start = find()
            return line.start

    @property
    def nbytes(self) -> int:
        """Of memory that its turns take, those that were read, about."""
        return self._line.nbytes

    @property
    def turns(self) -> list[Turn]:
        """All of them, the start first."""
        return self._line.slice(0, self._count)

    def page(self, after: int, limit: int | None) -> list[Turn]:
        """Those behind turn number `after`, the start not counted."""
        end = self._count if limit is None else min(self._count, after + 1 + limit)
        return self._line.slice(after + 1, end)

    def back(self) -> Iterator[tuple[int, Turn]]:
        """Its turns with their numbers, the last one first."""
        for depth in range(self._count - 1, -1, -1):
            yield depth, self._line.turn(depth)

    @property
    def date(self) -> str | None:
        """The date that its last turn rendered, and so the day that the conversation began on: it stays, or
        each new day would change the prompt's beginning."""
        for _, turn in self.back():
            if isinstance(date := turn.settings.get("date"), str):
                return date
        return None

    @property
    def transcript(self) -> Transcript:
        if self._transcript is None:
            self._transcript = transcript(self._transcribed)
        return self._transcript

    @property
    def token_count(self) -> int:
        """Tokens of its transcript."""
        last = self.last
        return last.keep[1] + len(last.added.tokens) if last.kind != "start" else 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the next prompt starts with."""
        if self._messages is None:
            first = next(depth for depth, turn in self.back() if turn.kind == "fold" or not depth)
            self._messages = tuple(context(self._line.slice(first, self._count)))
        return self._messages

    @property
    def models(self) -> frozenset[str]:
        """Those whose tokens are in the transcript."""
        if self._models is None:
            self._models = frozenset(
                turn.model for turn in self._transcribed if turn.kind != "start" and turn.added.tokens
            )
        return self._models

    def transcript_under(self, model: str) -> Transcript:
        """Its transcript, if all the tokens are of the model with that digest."""
        return self.transcript if self.models <= {model} else Transcript()

    @property
    def _transcribed(self) -> list[Turn]:
        """The turns that its transcript is made of: from the last one on that kept nothing."""
        first = next(depth for depth, turn in self.back() if turn.keep == (0, 0) or not depth)
        return self._line.slice(first, self._count)

    def first(self, count: int) -> History:
        """After its first `count` turns."""
        history: History | None = self
        while history is not None:
            if len(history) == count:
                return history
            history = history._before
        return History(self._line, count + 1)

    def then(
        self,
        numbers: Sequence[int],
        turns: Sequence[Turn],
        whole: Transcript | None = None,
        rendering: Rendering | None = None,
    ) -> History:
        """With more turns. `whole` is what all of them come to, if that is known."""
        line = self._line
        with line.lock:
            if line.end != self._count:
                line = line.up_to(self._count)
            line.grow(numbers, turns)
        longer = History(line, self._count + len(turns))
        longer._before = self
        longer._transcript, longer.rendering = whole, rendering
        if all(turn.kind == "turn" for turn in turns):
            messages = [message for turn in turns for message in context([turn])]
            longer._messages = (*self.messages, *messages)
        if all(turn.keep != (0, 0) for turn in turns):
            longer._models = self.models | {turn.model for turn in turns if turn.added.tokens}
        oldest: History | None = longer
        for _ in range(_REMEMBERED):
            oldest = oldest._before if oldest is not None else None
        if oldest is not None:
            oldest._before = None
        return longer
