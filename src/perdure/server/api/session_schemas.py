"""Sessions, turns and memories as resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from perdure.chat.message import Message
from perdure.decode.request import TierUsage
from perdure.server.core.schemas import Items, Label, Name, RequestSchema, ResponseSchema
from perdure.server.protocols.chat import ChatMessage, ChatOptionsSchema
from perdure.sessions.info import NOTE_CHARACTERS, TITLE_LENGTH, SessionInfo, SessionMemory
from perdure.sessions.pending_info import PendingInfo
from perdure.sessions.session import Session
from perdure.sessions.sessions import ImportResult
from perdure.sessions.tree import Tree, turn_id
from perdure.sessions.turn import Turn, plain_settings

Count = Annotated[int, Field(ge=0, lt=2**31)]


Title = Annotated[str, Field(max_length=TITLE_LENGTH)]
Folder = Annotated[str, Field(max_length=100)]


class CreateRequest(RequestSchema):
    name: Name
    system: str | None = None
    title: Title = ""
    """What a person calls it, in lists; empty: its name."""


class FilingRequest(RequestSchema):
    """What a person calls a session, and where it is filed. What is left out stays; an empty text removes."""

    title: Title | None = None
    folder: Folder | None = None
    pinned: bool | None = None


class Saying(RequestSchema):
    """A message by itself, or several."""

    message: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None


class AppendRequest(Saying):
    """Messages that nobody answers yet."""

    read_ahead: bool = True
    """Whether they are read while the engine is idle."""


class SayRequest(Saying, ChatOptionsSchema):
    """A turn."""


class EditRequest(SayRequest):
    turn: int = Field(ge=1, lt=2**31)
    """Which turn to say differently, from 1. What came after it is left."""


class RegenerateRequest(ChatOptionsSchema):
    pass


class ResumeRequest(ChatOptionsSchema):
    """Settings that are left out are those that the turn was asked with."""

    again: bool = False
    """Whether the same is answered from the start, and what was written of it goes."""


class ForkRequest(RequestSchema):
    name: Name
    turn: Count | None = None
    """After which turn the new session starts; where this one stands, if left out."""


class RewindRequest(RequestSchema):
    turns: Count = 1


class LabelRequest(RequestSchema):
    label: Label
    kind: Label = "memory"
    turn: Count | None = None
    note: Annotated[str, Field(max_length=NOTE_CHARACTERS)] = ""


class WakeMemoryRequest(RequestSchema):
    name: Name
    """Of the new session."""
    address: str | None = None
    """Of the memory. It may be left out while there is exactly one."""


class OriginAnswer(ResponseSchema):
    how: str
    session: str | None
    turn: int | None

    @classmethod
    def of(cls, origin: Mapping[str, Any]) -> OriginAnswer | None:
        if not origin.get("how"):
            return None
        return cls(how=str(origin["how"]), session=origin.get("session"), turn=origin.get("turn"))


class SessionSummary(ResponseSchema):
    """A session as it is listed."""

    name: str
    kind: str
    turns: int
    created: float
    updated: float
    origin: OriginAnswer | None
    agent: str
    """The program that made it, as it calls itself; empty where that is not known."""
    parent: str = ""
    """The session of the agent that started it, as the program names that."""
    model: str = ""
    """The model that answered last, by its own name; empty where that is not known."""
    tokens: int = 0
    """Of the last prompt and the reply to it."""
    title: str = ""
    """What a person calls it; empty where nobody said."""
    folder: str = ""
    pinned: bool = False

    @classmethod
    def of(cls, row: SessionInfo) -> SessionSummary:
        return cls.copy_of(
            row,
            turns=row.depth,
            title=row.title,
            folder=str(row.origin.get("folder", "")),
            pinned=bool(row.origin.get("pinned", False)),
            origin=OriginAnswer.of(row.origin),
            agent=str(row.origin.get("agent", "")),
            parent=str(row.origin.get("parent", "")),
        )


class SessionList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[SessionSummary]
    has_more: bool
    """Whether there are more behind these: ask with `after`, the name of the last one."""


class SaidMessage(ResponseSchema):
    role: str
    content: str | None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    images: list[tuple[int, str] | tuple[int, str, Literal["low", "sound"]]] | None = None
    """Those in the content, each with the number of characters before it and its SHA-256, in hex; behind that
    `low` for less detail, `sound` for a sound."""

    @classmethod
    def of(cls, message: Message) -> SaidMessage:
        return cls(**message.to_dict())


class TurnAnswer(ResponseSchema):
    turn: int
    kind: str
    messages: list[SaidMessage]
    reply: SaidMessage | None
    finish_reason: str
    usage: dict[str, int]
    why: str
    """Why not more of its prompt was reused."""
    dropped: int
    seed: int
    created: float
    settings: dict[str, Any]
    """What was asked of the reply, in the words of the library."""

    @classmethod
    def of(cls, number: int, turn: Turn) -> TurnAnswer:
        return cls.copy_of(
            turn,
            turn=number,
            messages=[SaidMessage.of(message) for message in turn.messages],
            reply=SaidMessage.of(turn.reply) if turn.reply is not None else None,
            usage=turn.counts,
            why=str(turn.usage.get("why", "")),
            settings=plain_settings(turn.settings),
        )


class SessionAnswer(ResponseSchema):
    object: Literal["session"] = "session"
    name: str
    kind: str
    system: str | None
    turns: int
    tokens: int
    """All that the model has read and written, as far as it is still in the conversation."""
    settings: dict[str, Any]
    """What is asked of every reply, unless a turn asks for something else."""
    origin: OriginAnswer | None
    title: str = ""
    """What a person calls it; empty where nobody said."""

    @classmethod
    def of(cls, session: Session) -> SessionAnswer:
        origin, settings = OriginAnswer.of(session.origin), dict(session.settings)
        title = str(session.origin.get("title", ""))
        return cls.copy_of(session, tokens=session.token_count, settings=settings, origin=origin, title=title)


class ImportAnswer(SessionAnswer):
    """A session that was imported."""

    taken: dict[str, int]
    """Turns; tokens as they were; tokens whose state was taken."""
    left_out: dict[str, str]
    """`tokens` and `state`, each with the reason, where the file had some that were not taken."""

    @classmethod
    def of_result(cls, result: ImportResult) -> ImportAnswer:
        return cls(
            **SessionAnswer.of(result.session).model_dump(),
            taken={"turns": result.turns, "tokens": result.tokens, "state_tokens": result.state_tokens},
            left_out=dict(result.left_out),
        )


PAGE_BYTES = 4 << 20
"""Of the turns or memories of one page, unless a single one is longer."""


class TurnList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[TurnAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `after`, the number of the last one."""

    @classmethod
    def of(cls, session: Session, limit: int, after: int) -> TurnList:
        turns = session.history(limit=limit, after=after, nbytes=PAGE_BYTES)
        return cls(
            data=[TurnAnswer.of(after + number, turn) for number, turn in enumerate(turns, 1)],
            has_more=after + len(turns) < session.turns,
        )


class PendingTurnAnswer(ResponseSchema):
    """What was asked of a session and is no turn of it."""

    after: int
    """The turn that it goes on from."""
    messages: list[SaidMessage]
    reply: SaidMessage
    """What was answered so far."""
    tokens: int
    """Of that."""
    started: float
    ended: str
    """Why it ended, where that is known; empty while it is being answered, and after a kill."""
    running: bool
    """Whether this server is answering it."""

    @classmethod
    def of(cls, info: PendingInfo, *, running: bool) -> PendingTurnAnswer:
        return cls.copy_of(
            info,
            messages=[SaidMessage.of(message) for message in info.messages],
            reply=SaidMessage.of(info.reply),
            tokens=len(info.tokens),
            running=running,
        )


class PendingAnswer(ResponseSchema):
    object: Literal["session.pending"] = "session.pending"
    pending: PendingTurnAnswer | None
    """None where the last turn is whole."""


class StopAnswer(ResponseSchema):
    stopped: bool
    """Whether a reply was being written."""


class StateAnswer(ResponseSchema):
    """Where the state of a session is."""

    awake: bool
    """Whether some of it needs no reading from a disk."""
    tokens: int
    """Of the whole session."""
    tiers: dict[str, TierUsage]
    """What each tier has of it; blocks that are shared with other sessions count for each."""
    turn_bytes: int
    """What its turns take on the disk, apart from state."""

    @classmethod
    def of(cls, session: Session) -> StateAnswer:
        tiers = session.held()
        return cls(
            awake=bool(tiers.keys() & {"slot", "memory"}),
            tokens=len(session.tokens),
            tiers=tiers,
            turn_bytes=session.turn_bytes,
        )


class TreeTurnAnswer(ResponseSchema):
    """A turn in a tree, with the first words of it."""

    id: str
    parent: str | None
    turn: int
    """Its number in every session that it is part of; 0 for what stands before the conversation."""
    kind: str
    said: str
    reply: str
    finish_reason: str
    created: float


class BranchAnswer(ResponseSchema):
    """A session of a tree, and the turn at which it stands."""

    name: str
    at: str
    turns: int
    updated: float


class PlaceAnswer(ResponseSchema):
    """A memory of a tree, and its turn."""

    address: str
    label: str
    kind: str
    note: str
    at: str


class TreeAnswer(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[TreeTurnAnswer]
    """Each after the one it follows."""
    has_more: bool
    """Whether there are more behind these: ask with `after`, the id of the last one."""
    sessions: list[BranchAnswer]
    """Those that stand in the tree; they come with its first turns."""
    memories: list[PlaceAnswer]

    @classmethod
    def of(cls, tree: Tree, limit: int) -> TreeAnswer:
        return cls(
            data=[TreeTurnAnswer.copy_of(turn, turn=turn.depth) for turn in tree.turns[:limit]],
            has_more=len(tree.turns) > limit,
            sessions=[
                BranchAnswer.copy_of(each, at=turn_id(each.digest), turns=each.depth)
                for each in tree.sessions
            ],
            memories=[PlaceAnswer.copy_of(each, at=turn_id(each.digest)) for each in tree.memories],
        )


class MemoryAnswer(ResponseSchema):
    address: str
    session: str
    turn: int
    label: str
    kind: str
    note: str
    digest: str
    created: float

    @classmethod
    def of(cls, memory: SessionMemory) -> MemoryAnswer:
        return cls.copy_of(memory, digest=memory.digest.hex())


class MemoryList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[MemoryAnswer]
    has_more: bool
    """Whether there are more behind these: ask with `after`, the address of the last one."""
