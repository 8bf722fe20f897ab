"""Agent conversation: the session of a client that sends its whole history with every request.

    stored      system, user 1, reply 1, user 2, reply 2
    sent        system, user 1, reply 1, user 2, reply 2, user 3      goes on: user 3 is said
    sent        system, user 1, reply 1, user 4                       differs: a branch after reply 1
    sent        system, summary                                       differs at once: a line of its own

The first line of a conversation has its name, those that branch off have `NAME~2`, `NAME~3` and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.chat.message import Message
from perdure.chat.volatile import stable_key

if TYPE_CHECKING:
    from perdure.sessions.session import Session
    from perdure.sessions.sessions import Sessions

_LINES = 200
"""Of one conversation."""
_COMPARED = 8
"""Lines that a history is compared with, the latest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConversation:
    """How a client names a conversation of its own, and the one that it was started from."""

    name: str
    parent: str = ""
    agent: str = ""
    keep_seconds: float | None = None
    """How long its state is to be kept after a request."""
    closes: bool = False
    """Whether the request is its last: its state then leaves the slots."""

    def __post_init__(self) -> None:
        if self.parent == self.name:
            # A client may name itself: nothing is its own parent.
            object.__setattr__(self, "parent", "")

    @property
    def origin(self) -> dict[str, str]:
        """What its sessions say of where they come from."""
        return {name: value for name, value in (("agent", self.agent), ("parent", self.parent)) if value}

    def closed(self) -> AgentConversation:
        return replace(self, closes=True)

    def line(self, number: int) -> str:
        return self.name if number == 1 else f"{self.name}~{number}"

    def count(self, sessions: Sessions, namespace: str) -> int:
        """How many lines it has."""
        count = 0
        while count < _LINES and sessions.store.has(namespace, self.line(count + 1)):
            count += 1
        return count

    def lines(self, sessions: Sessions, namespace: str) -> Iterator[Session]:
        """The lines that were begun last, the latest first."""
        count = self.count(sessions, namespace)
        for number in range(count, max(0, count - _COMPARED), -1):
            yield sessions.get(self.line(number), namespace)


class FoundLine(NamedTuple):
    """The session that a history goes on from."""

    session: Session
    said: list[Message]
    """What is new in the history."""
    made: bool
    """Whether it was branched off or made for this."""


def find_line(
    sessions: Sessions, conversation: AgentConversation, messages: Sequence[Message], namespace: str
) -> FoundLine | None:
    """The session that a history goes on from, opened, branched off or made. None for a history that no
    session can hold, and for the last request of a conversation that goes on from none."""
    system, rest = _without_system(messages)
    if all(each.role in ("system", "developer") for each in rest) or rest[-1].role == "assistant":
        return None
    keys = _keys(rest)
    best: tuple[int, Session] | None = None
    for session in conversation.lines(sessions, namespace):
        common, stored = _compared(session, system, keys)
        if common == stored and common < len(keys):
            return FoundLine(session, _behind(rest, keys, common), made=False)
        if common > (best[0] if best is not None else 0):
            best = (common, session)
    if conversation.closes:
        return None
    if best is None and conversation.parent:
        # An agent that was started with the conversation of its parent branches off from there.
        for session in AgentConversation(name=conversation.parent).lines(sessions, namespace):
            common, _ = _compared(session, system, keys)
            if common > (best[0] if best is not None else 0):
                best = (common, session)
    count = conversation.count(sessions, namespace)
    if count >= _LINES:
        return None
    name = conversation.line(count + 1)
    if best is not None and (turns := _whole_turns(best[1], best[0])):
        turn, length = turns
        if length < len(keys):
            branch = best[1].fork(name, turn=turn)
            branch.note(conversation.origin)
            return FoundLine(branch, _behind(rest, keys, length), made=True)
    made = sessions.create(
        name, system=system, namespace=namespace, agent=conversation.agent, parent=conversation.parent
    )
    return FoundLine(made, list(rest), made=True)


def said_behind(session: Session, messages: Sequence[Message]) -> list[Message] | None:
    """What a history has behind the turns of a session; None where it does not go on from them."""
    system, rest = _without_system(messages)
    keys = _keys(rest)
    common, stored = _compared(session, system, keys)
    return _behind(rest, keys, common) if common == stored and common < len(keys) else None


def _compared(session: Session, system: str | None, keys: Sequence[tuple[int, object]]) -> tuple[int, int]:
    """How many messages of a history a session begins with, and how many it has. With another system prompt
    it begins with none, whatever it has."""
    if session.system != system:
        return 0, -1
    messages = [each for each in session.messages() if each.role != "system" or not _is_first(session, each)]
    stored = _keys(messages)
    return _common([key for _, key in stored], [key for _, key in keys]), len(stored)


def without_session_options(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of a turn; None where a session cannot follow them."""
    if (
        options.get("n", 1) != 1
        or options.get("continue_final_message")
        or options.get("overflow", "error") != "error"
    ):
        return None
    return {name: value for name, value in options.items() if name not in ("n", "stable_prefix")}


def _without_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The system prompt of a history, and what is said behind it: agents say more to the system at first."""
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages


def _is_first(session: Session, message: Message) -> bool:
    """Whether a message is the system prompt of a session."""
    return message.content == session.system


def _keys(messages: Sequence[Message]) -> list[tuple[int, object]]:
    """What messages are the same by, with their places; those that are volatile as a whole are left out."""
    return [(at, key) for at, each in enumerate(messages) if (key := stable_key(each)) is not None]


def _behind(messages: Sequence[Message], keys: Sequence[tuple[int, object]], count: int) -> list[Message]:
    """The messages behind the first `count` keys, and behind what is volatile there."""
    return list(messages[keys[count][0] :])


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _whole_turns(session: Session, common: int) -> tuple[int, int] | None:
    """How many turns of a session are in its first `common` messages, and how many messages those have."""
    turns = messages = 0
    for turn in session.history():
        if turn.kind != "turn":
            return None
        count = messages + len(_keys([*turn.messages, *((turn.reply,) if turn.reply is not None else ())]))
        if count > common:
            break
        turns, messages = turns + 1, count
    return (turns, messages) if turns else None
