"""Where a conversation stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.chat.message import Message
from perdure.chat.templates.renderer import Rendering
from perdure.chat.transcript import Transcript
from perdure.sessions.turn import Turn, context, transcript


@dataclass(frozen=True, slots=True)
class History:
    """Where a conversation stands: the turns that led there, as they are and as they are registered."""

    numbers: tuple[int, ...]
    turns: tuple[Turn, ...]
    transcript: Transcript
    messages: tuple[Message, ...]
    """What the next prompt starts with."""
    models: frozenset[str]
    """Those whose tokens are in the transcript."""
    rendering: Rendering | None = None

    @classmethod
    def at(cls, numbers: Sequence[int], turns: Sequence[Turn]) -> History:
        models = frozenset(turn.model for turn in turns if turn.kind != "start" and turn.added.tokens)
        return cls(tuple(numbers), tuple(turns), transcript(turns), tuple(context(turns)), models)

    def then(self, number: int, turn: Turn, whole: Transcript, rendering: Rendering | None) -> History:
        """One turn further. The work does not grow with the conversation, but for copying."""
        said = (*turn.messages, *([turn.reply] if turn.reply is not None else []))
        return History(
            (*self.numbers, number),
            (*self.turns, turn),
            whole,
            self.messages + said,
            self.models | {turn.model},
            rendering,
        )

    def first(self, count: int) -> History:
        """After its first `count` turns."""
        if count == len(self.turns) - 1:
            return self
        return History.at(self.numbers[: count + 1], self.turns[: count + 1])
