"""One conversation that lasts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perdure.chat.chat_format import Prompt, reply_room
from perdure.chat.job import ChatJob
from perdure.chat.message import Message
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.transcript import Transcript
from perdure.decode.request import take_deadline
from perdure.decode.slots import Plan, ReuseReport
from perdure.errors import (
    ContextOverflow,
    InvalidInputError,
    PerdureError,
    SessionBusyError,
    SessionError,
    StateError,
    StoreError,
)
from perdure.sessions.fold import folded
from perdure.sessions.history import History
from perdure.sessions.memory import Memory
from perdure.sessions.rows import SessionInfo
from perdure.sessions.turn import Turn, added, context

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

Said = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A turn on its way. A job that nobody holds any more is cancelled, so it must not be held here."""

    job: weakref.ref[ChatJob] | None = None


class Session:
    """A named conversation. Safe from any thread; one turn at a time.

    A turn is a transaction: it is part of the session once its reply is whole and on the disk, and else the
    session is as it was before. `kept` in the reply says which.
    """

    def __init__(self, sessions: Sessions, row: SessionInfo, point: History) -> None:
        self._sessions = sessions
        self._row = row
        self._history = point
        self._lock = threading.RLock()
        self._ticket: _Ticket | None = None
        self._saved = len(point.transcript.tokens)
        self.last: ChatReply | None = None
        """The latest reply that this process has made."""

    @classmethod
    def open(cls, sessions: Sessions, row: SessionInfo) -> Session:
        return cls(sessions, row, History.at(*sessions.store.chain(row.head, row.name)))

    def __repr__(self) -> str:
        return f"<Session {self.name!r}, {self.turns} turns, {len(self.tokens)} tokens>"

    # What it is.

    @property
    def name(self) -> str:
        return self._row.name

    @property
    def namespace(self) -> str:
        return self._row.namespace

    @property
    def kind(self) -> str:
        return self._row.kind

    @property
    def origin(self) -> Mapping[str, Any]:
        """What it came from: which session, after how many turns, and how."""
        return self._row.origin

    @property
    def settings(self) -> Mapping[str, Any]:
        """What is asked of every reply, unless a turn asks for something else."""
        return self._row.settings

    @property
    def system(self) -> str | None:
        first = self._history.turns[0].messages
        return first[0].content if first and first[0].role == "system" else None

    @property
    def turns(self) -> int:
        return len(self._history.turns) - 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the model has read and written, as far as it is still in the conversation."""
        return tuple(self._history.transcript.tokens)

    def history(self) -> list[Turn]:
        """Its turns, the first one first."""
        return list(self._history.turns[1:])

    def messages(self) -> list[Message]:
        """What the next prompt starts with."""
        return list(self._history.messages)

    # Talking.

    def submit(self, said: Said, *, keep_partial: bool = False, **settings: Any) -> ChatJob:
        """Queue a turn and return at once. It becomes part of the session when its reply is asked for, or
        read to its end; with `keep_partial` also when it is cancelled."""
        return self._submit(self._history, _messages(said), settings, keep_partial)

    def say(self, said: Said, **settings: Any) -> ChatReply:
        """The reply to a message; the keywords are those of `Runtime.submit_chat`."""
        return _answered(self.submit(said, **settings))

    def stream(
        self, said: Said, *, keep_partial: bool = False, **settings: Any
    ) -> Generator[ChatDelta, None, None]:
        """The reply piece by piece. Leaving the loop early cancels the turn."""
        return _deltas(self.submit(said, keep_partial=keep_partial, **settings), keep_partial)

    async def asay(self, said: Said, **settings: Any) -> ChatReply:
        """Like `say`, for asyncio. The event loop waits for no summary and for no disk."""
        job = await asyncio.to_thread(self.submit, said, **settings)
        try:
            return await job.areply()
        finally:
            job.cancel()

    async def astream(
        self, said: Said, *, keep_partial: bool = False, **settings: Any
    ) -> AsyncGenerator[ChatDelta, None]:
        """Like `stream`, for asyncio. The event loop waits for no summary and for no disk."""
        job = await asyncio.to_thread(self.submit, said, keep_partial=keep_partial, **settings)
        try:
            async for delta in job:
                yield delta
        finally:
            job.cancel()
            if keep_partial:
                with suppress(PerdureError):
                    await job.areply()

    def edit(self, turn: int, said: Said, **settings: Any) -> ChatReply:
        """Say something else in turn number `turn`, from 1, and go on from its new reply."""
        return _answered(self.submit_edit(turn, said, **settings))

    def submit_edit(self, turn: int, said: Said, *, keep_partial: bool = False, **settings: Any) -> ChatJob:
        point = self._history
        self._check_turn(turn, 1)
        return self._submit(point.first(turn - 1), _messages(said), settings, keep_partial)

    def regenerate(self, **settings: Any) -> ChatReply:
        """Another reply to the last message, in the place of the one there is."""
        return _answered(self.submit_regenerate(**settings))

    def submit_regenerate(self, *, keep_partial: bool = False, **settings: Any) -> ChatJob:
        point = self._history
        if not self.turns or point.turns[-1].kind != "turn":
            raise SessionError(f"session {self.name!r} has no reply to make again")
        return self._submit(
            point.first(self.turns - 1), list(point.turns[-1].messages), settings, keep_partial
        )

    # Moving about.

    def fork(self, name: str, *, turn: int | None = None) -> Session:
        """A new session that starts after turn number `turn`, or where this one stands."""
        with self._lock:
            count = self.turns if turn is None else turn
            self._check_turn(count, 0)
            return self._sessions.branch(self, name, self._history.first(count), how="fork")

    def rewind(self, turns: int = 1, *, to: int | None = None) -> None:
        """Go back by a number of turns, or to after turn number `to`."""
        with self._changing():
            count = self.turns - turns if to is None else to
            if isinstance(turns, bool) or not isinstance(turns, int) or turns < 0:
                raise InvalidInputError(f"turns is a whole number from 0, got {turns!r}")
            self._check_turn(count, 0)
            point = self._history.first(count)
            self._sessions.store.move(self._row.number, point.numbers[-1])
            self._history = point

    def label(self, label: str, *, kind: str = "memory", turn: int | None = None, note: str = "") -> Memory:
        """Mark a point of this session, so that it can be woken by its address."""
        with self._lock:
            count = self.turns if turn is None else turn
            self._check_turn(count, 0)
            return self._sessions.memories.add(self, self._history.first(count), label, kind=kind, note=note)

    def fold(
        self, name: str | None = None, *, summary: str | None = None, keep: int = 2, **settings: Any
    ) -> Session:
        """Go on from a summary and the last `keep` turns: in a new session, or without a name in this one.

        The summary is written by the model unless it is given. What was before stays reachable.
        """
        with self._changing():
            turn = self._folded(self._history, summary, keep, settings)
            if name is not None:
                return self._sessions.branch(self, name, self._history, how="fold", turns=[turn], kind="fold")
            number = self._sessions.store.add(self._row.number, self._history.numbers[-1], turn)
            self._history = History.at((*self._history.numbers, number), (*self._history.turns, turn))
            return self

    def delete(self) -> None:
        """Forget the session. Forks of it, and memories, stay."""
        with self._changing():
            self._sessions.remove(self)

    # Sleeping.

    def sleep(self) -> None:
        """Put its state where it outlives the process, and let go of the memory that it takes."""
        with self._changing():
            if tokens := self._usable.tokens:
                self._sessions.backend.cache.sleep(tokens, namespace=self.namespace)

    def plan_wake(self) -> Plan:
        """What waking would take: tokens and bytes by tier, and what would be computed. Nothing is done."""
        if not (tokens := self._usable.tokens):
            return Plan(tiers={}, blocks=0, nbytes=0, computed=0)
        return self._sessions.backend.cache.plan(tokens, namespace=self.namespace)

    def wake(self) -> ReuseReport:
        """Bring its state back, after proving that its turns are what they were. What is missing or
        damaged is computed with the next turn, and the report says so."""
        with self._changing():
            self._history = History.at(*self._sessions.store.chain(self._history.numbers[-1], self.name))
            if not (tokens := self._usable.tokens):
                return ReuseReport(computed=0, why="nothing was said under this model yet")
            return self._sessions.backend.cache.wake(tokens, namespace=self.namespace)

    # Out.

    def transcript(self, form: Literal["markdown", "jsonl"] = "markdown") -> str:
        """The conversation as text to read, or as a message a line."""
        found = [message for turn in self._history.turns for message in _said(turn)]
        if form == "jsonl":
            return "".join(json.dumps(message.to_dict(), ensure_ascii=False) + "\n" for message in found)
        if form != "markdown":
            raise InvalidInputError(f"a transcript is markdown or jsonl, not {form!r}")
        parts = [f"# {self.name}\n"]
        for message in found:
            calls = "".join(f"\n`{call.name}({call.arguments})`\n" for call in message.tool_calls)
            parts.append(f"\n**{message.role}**\n\n{message.content or ''}\n{calls}")
        return "".join(parts)

    def export(
        self,
        path: str | Path,
        *,
        state: bool = True,
        kind: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Write the session to one file that can be moved, with its state or without."""
        from perdure.sessions.export import write_export

        tokens = self._usable.tokens if state else None
        packed = None
        if tokens:
            packed = self._sessions.backend.cache.pack(tokens, namespace=self.namespace)
        return write_export(Path(path), self, self._history.turns, packed, kind=kind, progress=progress)

    # Inside.

    @property
    def _usable(self) -> Transcript:
        """Its transcript, if the tokens are of this model."""
        models = self._history.models
        return self._history.transcript if models <= {self._sessions.backend.model.digest} else Transcript()

    def _submit(
        self, point: History, said: list[Message], settings: dict[str, Any], keep_partial: bool
    ) -> ChatJob:
        wanted = {**self.settings, **settings}
        deadline = take_deadline(wanted)
        if wanted.get("n", 1) != 1:
            raise InvalidInputError("a turn has one reply; leave n at 1, or fork the session")
        with self._lock:
            self._check_free()
            if wanted.get("overflow") == "fold":
                point = self._folded_if_full(point, said, wanted, deadline)
            ticket = self._ticket = _Ticket()
            base = point

            def settle(prompt: Prompt, whole: Transcript, reply: ChatReply) -> ChatReply:
                reply = self._settle(ticket, base, said, wanted, keep_partial, prompt, whole, reply)
                self.last = reply
                return reply

            known = self._usable if point is self._history else None
            try:
                job = self._sessions.chat_format.submit(
                    (*point.messages, *said),
                    namespace=self.namespace,
                    known=known,
                    before=point.rendering,
                    then=settle,
                    deadline=deadline,
                    **wanted,
                )
            except BaseException:
                self._ticket = None
                raise
            ticket.job = weakref.ref(job)
            return job

    def _settle(
        self,
        ticket: _Ticket,
        base: History,
        said: Sequence[Message],
        settings: Mapping[str, Any],
        keep_partial: bool,
        prompt: Prompt,
        whole: Transcript,
        reply: ChatReply,
    ) -> ChatReply:
        """Make a turn part of the session, if it may be."""
        with self._lock:
            if self._ticket is not ticket:
                return replace(reply, not_kept="another turn began before this one was read to its end")
            self._ticket = None
            if reply.finish_reason in ("cancelled", "error") and not (keep_partial and reply.raw.tokens):
                return replace(reply, not_kept=f"the turn ended by {reply.finish_reason}")
            keep, more = added(base.transcript, whole)
            turn = Turn(
                kind="turn",
                messages=tuple(said),
                reply=reply.message,
                keep=keep,
                added=more,
                settings=_plain(settings),
                seed=reply.seed,
                finish_reason=reply.finish_reason,
                usage={
                    "prompt_tokens": reply.usage.prompt_tokens,
                    "completion_tokens": reply.usage.completion_tokens,
                    "cached_tokens": reply.usage.cached_tokens,
                },
                dropped=reply.dropped,
                model=self._sessions.backend.model.digest,
                created=time.time(),
                before=base.turns[-1].digest,
            )
            try:
                number = self._sessions.store.add(self._row.number, base.numbers[-1], turn)
            except (StoreError, StateError, SessionError, InvalidInputError) as error:
                # What was said was said: the caller has the reply, and learns that it will not last.
                return replace(reply, not_kept=str(error))
            self._history = base.then(number, turn, whole, prompt.rendering)
        # Going back or branching has others begin where this one was.
        self._saved = min(self._saved, keep[1])
        self._saved = self._sessions.write_behind(whole.tokens, self.namespace, self._saved)
        return replace(reply, kept=True)

    def _folded(
        self, point: History, summary: str | None, keep: int, settings: Mapping[str, Any] | None = None
    ) -> Turn:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise InvalidInputError(f"keep is a number of turns from 0, got {keep!r}")
        return folded(self._sessions.chat_format, point.turns, summary, keep, self.namespace, settings or {})

    def _folded_if_full(
        self, point: History, said: list[Message], settings: dict[str, Any], deadline: float | None
    ) -> History:
        """The point to go on from: where the next prompt does not fit any more, behind a fold."""
        chat_format, limit = self._sessions.chat_format, self._sessions.backend.n_ctx - 1
        room = reply_room(settings, self._sessions.backend.n_ctx)

        def needed(turns: Sequence[Turn]) -> int:
            return len(chat_format.prompt([*context(turns), *said], namespace=self.namespace))

        full = needed(point.turns)
        if full + room <= limit or len(point.turns) == 1:
            return point
        for keep in (2, 1, 0):
            turn = self._folded(point, None, keep, {"deadline": deadline})
            if needed([*point.turns, turn]) + room <= limit:
                break
        else:
            raise ContextOverflow(
                f"even after folding, this message needs more than the {limit} tokens that fit",
                needed=needed([*point.turns, turn]) + room,
                fits=limit,
            )
        number = self._sessions.store.add(self._row.number, point.numbers[-1], turn)
        self._history = History.at((*point.numbers, number), (*point.turns, turn))
        return self._history

    def _changing(self) -> _Changing:
        return _Changing(self)

    def _check_free(self) -> None:
        held = self._ticket.job if self._ticket is not None else None
        job = held() if held is not None else None
        if job is not None and not (job.done or job.cancelled):
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn: wait for it, cancel it, or fork it"
            )

    def _check_turn(self, turn: int, low: int) -> None:
        if isinstance(turn, bool) or not isinstance(turn, int) or not low <= turn <= self.turns:
            raise InvalidInputError(
                f"session {self.name!r} has {self.turns} turns: {turn!r} is none of {low} to {self.turns}"
            )


class _Changing:
    """Held while a session is moved about: nobody else does, and no turn is on its way."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._lock.acquire()
        try:
            self._session._check_free()
        except BaseException:
            self._session._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._session._lock.release()


def _messages(said: Said) -> list[Message]:
    if isinstance(said, str):
        found = [Message(role="user", content=said)]
    elif isinstance(said, (Message, Mapping)):
        found = [Message.parse(said)]
    else:
        found = [Message.parse(each) for each in said]
    if not found:
        raise InvalidInputError("a turn needs at least one message")
    if any(message.role == "user" and not (message.content or "").strip() for message in found):
        raise InvalidInputError("a message needs some text")
    return found


def _said(turn: Turn) -> list[Message]:
    return [*turn.messages, *([turn.reply] if turn.reply is not None else [])]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that can be written down."""
    found = {}
    for name, value in settings.items():
        with suppress(TypeError, ValueError):
            found[name] = json.loads(json.dumps(value))
    return found


def _answered(job: ChatJob) -> ChatReply:
    try:
        return job.reply()
    finally:
        job.cancel()


def _deltas(job: ChatJob, keep_partial: bool) -> Generator[ChatDelta, None, None]:
    try:
        yield from job
    finally:
        job.cancel()
        if keep_partial:
            with suppress(PerdureError):
                job.reply()
