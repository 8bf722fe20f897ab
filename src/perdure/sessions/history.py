"""Where a conversation stands."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from perdure.chat.message import Message
from perdure.chat.templates.renderer import Rendering
from perdure.chat.transcript import Transcript
from perdure.sessions.turn import Turn, context, transcript

_REMEMBERED = 2
"""How many histories before the latest one stay at hand, with their transcripts."""


class _Line:
    """Turns one after another with their numbers. It only grows, so that many histories can share it."""

    __slots__ = ("lock", "numbers", "turns")

    def __init__(self, numbers: Sequence[int], turns: Sequence[Turn]) -> None:
        self.numbers = list(numbers)
        self.turns = list(turns)
        self.lock = threading.Lock()


class History:
    """The first turns of a line, from the start on. It never changes.

    One that is a turn longer, or some turns shorter, shares the line: neither copies the turns. What the
    turns come to (transcript, messages) is made when it is first asked for.
    """

    __slots__ = ("_before", "_count", "_line", "_messages", "_models", "_transcript", "rendering")

    def __init__(self, numbers: Sequence[int], turns: Sequence[Turn]) -> None:
        self._line = _Line(numbers, turns)
        self._count = len(self._line.turns)
        self._transcript: Transcript | None = None
        self._messages: tuple[Message, ...] | None = None
        self._models: frozenset[str] | None = None
        self._before: History | None = None
        self.rendering: Rendering | None = None
        """How its messages were rendered, if they were."""

    def __len__(self) -> int:
        """Turns, without the start."""
        return self._count - 1

    @property
    def head(self) -> int:
        """The number of its last turn in the store."""
        return self._line.numbers[self._count - 1]

    @property
    def last(self) -> Turn:
        return self._line.turns[self._count - 1]

    @property
    def start(self) -> Turn:
        return self._line.turns[0]

    @property
    def turns(self) -> list[Turn]:
        """All of them, the start first."""
        return self._line.turns[: self._count]

    def page(self, after: int, limit: int | None) -> list[Turn]:
        """Those behind turn number `after`, the start not counted."""
        end = self._count if limit is None else min(self._count, after + 1 + limit)
        return self._line.turns[after + 1 : end]

    @property
    def transcript(self) -> Transcript:
        if self._transcript is None:
            self._transcript = transcript(self.turns)
        return self._transcript

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the next prompt starts with."""
        if self._messages is None:
            self._messages = tuple(context(self.turns))
        return self._messages

    @property
    def models(self) -> frozenset[str]:
        """Those whose tokens are in the transcript."""
        if self._models is None:
            self._models = frozenset(
                turn.model for turn in self.turns if turn.kind != "start" and turn.added.tokens
            )
        return self._models

    def first(self, count: int) -> History:
        """After its first `count` turns."""
        found: History | None = self
        while found is not None:
            if len(found) == count:
                return found
            found = found._before
        return self._sharing(self._line, count + 1)

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
            if len(line.turns) != self._count:
                line = _Line(line.numbers[: self._count], line.turns[: self._count])
            line.numbers += numbers
            line.turns += turns
        found = self._sharing(line, self._count + len(turns))
        found._before = self
        found._transcript, found.rendering = whole, rendering
        if all(turn.kind == "turn" for turn in turns):
            said = [message for turn in turns for message in context([turn])]
            found._messages = (*self.messages, *said)
            found._models = self.models | {turn.model for turn in turns if turn.added.tokens}
        oldest: History | None = found
        for _ in range(_REMEMBERED):
            oldest = oldest._before if oldest is not None else None
        if oldest is not None:
            oldest._before = None
        return found

    def _sharing(self, line: _Line, count: int) -> History:
        found = History((), ())
        found._line, found._count = line, count
        return found
