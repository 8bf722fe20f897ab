"""Agent conversation: the session of a client that sends its whole history with every request.

    stored      system, user 1, reply 1, user 2, reply 2
    sent        system, user 1, reply 1, user 2, reply 2, user 3      goes on: user 3 is said
    sent        system, user 1, reply 1, user 4                       differs: a branch after reply 1
    sent        system, summary                                       differs at once: an independent line

The first line of a conversation has its name, those that branch off have `NAME~2`, `NAME~3` and so on.

A session may hold what its client sent before and leaves out now: reasoning, and volatile text such as a
reminder. It is then read with them, as it was. Whatever the client does send is read as it was sent: where
the model would read another text, the history differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perdure import Message, Session
from perdure.ext.agents.volatile_text import Values, announced, announcement, apart, extract
from perdure.spi.sessions import History, Sessions, TurnExtra

_LINES = 200
"""Of one conversation."""
_COMPARED = 8
"""Lines that a history is compared with, the latest first."""
CACHE_KEY = "cache-key:"
"""What the name begins with where other conversations may have the same: a client may send one cache key with
all that it asks. What a request leaves out is then not taken from a session."""
ReadsAlike = Callable[[Sequence[Message], Sequence[Message]], bool]
"""Whether a model reads two histories as the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConversation:
    """A conversation as a client names it, and the one that it was started from."""

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
    head: int
    """The turn at which the session stands. Once it has moved on, the history does not go on from it."""
    notes: tuple[str, ...]
    """What was moved, and what only the session holds."""

    def extra(self, extra: TurnExtra | None) -> TurnExtra:
        """What its turn has besides the messages."""
        return replace(extra or TurnExtra(), head=self.head, prompt_notes=self.notes)


def find_line(
    sessions: Sessions,
    conversation: AgentConversation,
    messages: Sequence[Message],
    namespace: str,
    reads_alike: ReadsAlike,
    *,
    stable: bool,
) -> FoundLine | None:
    """The session that a history goes on from, opened, branched off or made. None for a history that no
    session can hold, and for the last request of a conversation that goes on from none. With `stable`, what
    is volatile in the system prompt moves behind what is new."""
    sent = _Sent.of(messages, conversation.name, reads_alike, stable=stable)
    if all(each.role in ("system", "developer") for each in sent.rest) or sent.rest[-1].role == "assistant":
        return None
    best: tuple[list[int], Session] | None = None
    for session in conversation.lines(sessions, namespace):
        history = session.standing()
        ends, is_whole = sent.compared(session.system, history.messages)
        if is_whole and sent.goes_on(ends):
            return sent.found(session, history, ends)
        if len(ends) > (len(best[0]) if best is not None else 0):
            best = (ends, session)
    if conversation.closes:
        return None
    if best is None and conversation.parent:
        # An agent that was started with the conversation of its parent branches off from there.
        for session in AgentConversation(name=conversation.parent).lines(sessions, namespace):
            ends, _ = sent.compared(session.system, session.messages())
            if len(ends) > (len(best[0]) if best is not None else 0):
                best = (ends, session)
    count = conversation.count(sessions, namespace)
    if count >= _LINES:
        return None
    name = conversation.line(count + 1)
    if best is not None and (turns := _whole_turns(best[1], len(best[0]))):
        turn, length = turns
        if sent.goes_on(ends := best[0][:length]):
            branch = best[1].fork(name, turn=turn)
            branch.note(conversation.origin)
            return sent.found(branch, branch.standing(), ends, made=True)
    made = sessions.create(
        name, system=sent.system, namespace=namespace, agent=conversation.agent, parent=conversation.parent
    )
    return sent.found(made, made.standing(), [], made=True)


def same_line(
    session: Session, messages: Sequence[Message], reads_alike: ReadsAlike, *, stable: bool
) -> FoundLine | None:
    """A session, if a history goes on from its turns."""
    sent = _Sent.of(messages, session.name, reads_alike, stable=stable)
    history = session.standing()
    ends, is_whole = sent.compared(session.system, history.messages)
    return sent.found(session, history, ends) if is_whole and sent.goes_on(ends) else None


@dataclass(frozen=True, slots=True)
class _Sent:
    """A history as a client sent it, to be compared with what sessions hold."""

    system: str | None
    rest: Sequence[Message]
    """What is said behind the system prompt: agents say more to the system at first."""
    values: Values
    """Volatile text that was taken out of the system prompt."""
    reads_alike: ReadsAlike
    stable: bool
    """Whether a session may hold volatile text that the history has no longer."""
    shared: bool
    """Whether a session may be of another conversation, which has nothing that this one has not."""

    @classmethod
    def of(cls, messages: Sequence[Message], name: str, reads_alike: ReadsAlike, *, stable: bool) -> _Sent:
        """Sent under the name of a conversation or of one of its lines."""
        values: Values = {}
        shared = name.startswith(CACHE_KEY)
        if stable:
            messages, values = extract(messages)
        if messages and messages[0].role == "system":
            return cls(messages[0].content, messages[1:], values, reads_alike, stable, shared)
        return cls(None, messages, values, reads_alike, stable, shared)

    def compared(self, system: str | None, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """For each message that a session begins with as this history does, how many of the history are read
        up to it; and whether those are all. With another system prompt it begins with none."""
        if system != self.system:
            return [], False
        stored = _without_system(messages, system)
        ends: list[int] = []
        read: list[Message] = []
        unsure, at = len(stored), 0
        for index, message in enumerate(stored):
            now = self.rest[at] if at < len(self.rest) else None
            known = self._as_stored(message, now) if now is not None else None
            if known is not None:
                at += 1
            elif self._may_hold(message):
                known = message
            else:
                break
            if known != message:
                unsure = min(unsure, index)
            read.append(known)
            ends.append(at)
        if unsure < len(ends):
            more = self.rest[at:]
            if not self.reads_alike((*stored[: len(ends)], *more), (*read, *more)):
                del ends[unsure:]
        return ends, len(ends) == len(stored)

    def goes_on(self, ends: Sequence[int]) -> bool:
        """Whether it says more than what a session has of it."""
        return (ends[-1] if ends else 0) < len(self.rest)

    def found(
        self, session: Session, history: History, ends: Sequence[int], *, made: bool = False
    ) -> FoundLine:
        """A session that has what this history begins with: what is new behind that, and the volatile text
        that the session does not say."""
        count = ends[-1] if ends else 0
        said = [*self.rest[count:], *announced(history.messages, self.values)]
        kept: dict[str, None] = {}
        if self.stable and not self.shared:
            held = _volatile_parts(_without_system(history.messages, self.system))
            held -= _volatile_parts(self.rest[:count])
            kept = {rule: None for rule, _ in held if rule not in self.values}
        notes = (
            *(f"moved behind the messages: {name}" for name in self.values),
            *(f"kept as it was read: {name}" for name in kept),
        )
        return FoundLine(session, said, made, history.head, notes)

    def _as_stored(self, stored: Message, now: Message) -> Message | None:
        """A message as it was sent, with what only the session has of it; None where it is another one. Where
        it is not the stored one, the two may still be read alike."""
        if now == stored:
            return stored
        if stored.role != now.role or len(stored.tool_calls) != len(now.tool_calls):
            return None
        drawn = [call.id for call in stored.tool_calls if call.has_drawn_id]
        if now.reasoning is None and (not self.shared or (drawn and drawn == [c.id for c in now.tool_calls])):
            now = replace(now, reasoning=stored.reasoning)
        text, parts = apart(stored)
        text_now, parts_now = apart(now)
        if text.strip() != text_now.strip():
            return None
        if parts != parts_now:
            left = iter(parts)
            if not self.stable or self.shared or not all(part in left for part in parts_now):
                # It has words that the session has not, or the other way round.
                return None
            now = replace(now, content=stored.content)
        calls = zip(stored.tool_calls, now.tool_calls, strict=True)
        if any((one.name, one.arguments) != (other.name, other.arguments) for one, other in calls):
            return None
        return now

    def _may_hold(self, message: Message) -> bool:
        """Whether a session may hold a message that the history has not: one that is volatile as a whole. It
        was sent before, or was a line of the system prompt."""
        if message.role not in ("system", "developer"):
            return False
        text, parts = apart(message)
        if text.strip() or not parts:
            return False
        return self.stable and (not self.shared or {*parts} <= {*apart(announcement(self.values))[1]})


def _without_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """The messages of a session without its system prompt."""
    has_it = messages and messages[0].role == "system" and messages[0].content == system
    return messages[1:] if has_it else messages


def _volatile_parts(messages: Iterable[Message]) -> Counter[tuple[str, str]]:
    return Counter(part for each in messages for part in apart(each)[1])


def _whole_turns(session: Session, common: int) -> tuple[int, int] | None:
    """How many turns of a session are in its first `common` messages, and how many messages those have."""
    turns = messages = 0
    for turn in session.history():
        if turn.kind != "turn":
            return None
        count = messages + len(turn.messages) + (turn.reply is not None)
        if count > common:
            break
        turns, messages = turns + 1, count
    return (turns, messages) if turns else None
