"""Call buffer: the calls of a reply that comes piece by piece, each given out once it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.chat.reply import CallDelta


@dataclass(slots=True)
class WholeCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


class CallBuffer:
    """Holds the call that is being written.

    A reply that begins like a call may turn out to be none, and most protocols cannot take back what
    they have shown.
    """

    def __init__(self) -> None:
        self._open: dict[int, WholeCall] = {}

    @property
    def holds(self) -> bool:
        return bool(self._open)

    def push(self, deltas: Sequence[CallDelta]) -> list[WholeCall]:
        """Take what is new, and give the calls that it ends."""
        whole: list[WholeCall] = []
        dropped = self.drop(deltas)
        for delta in deltas:
            if delta.index in dropped:
                continue
            if delta.index not in self._open:
                whole += self.finish()
            call = self._open.setdefault(delta.index, WholeCall())
            call.id += delta.id
            call.name += delta.name
            call.arguments += delta.arguments
        return whole

    def drop(self, deltas: Sequence[CallDelta]) -> set[int]:
        """Forget the calls that turned out to be none; their numbers. Their text comes in the same delta, so
        this goes before that is written."""
        dropped = {delta.index for delta in deltas if delta.dropped}
        for index in dropped:
            self._open.pop(index, None)
        return dropped

    def finish(self) -> list[WholeCall]:
        """The calls that are left, once something else follows or the reply has ended."""
        whole, self._open = list(self._open.values()), {}
        return [call for call in whole if call.name]
