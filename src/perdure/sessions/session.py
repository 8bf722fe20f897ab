"""One conversation that lasts. What can be read of it is in `session_view.py`.

A turn reads as it happens, in `Session._turn`: a summary first where the context is full, the reply, its
commit. It is a plan (`decode/stream.py`): asking its stream for the reply, or reading it to the end, runs it.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack

from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.chat.options import ChatOptions, TurnKeywords
from perdure.chat.prompt_builder import Exchange
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.config import SETTLED
from perdure.decode.output_queue import OutputQueue
from perdure.decode.request import Plan, Request, ReuseReport, TierUsage, take_deadline
from perdure.decode.stream import Stream, StreamPlan, submitted
from perdure.errors import (
    InvalidInputError,
    PerdureError,
    QuotaError,
    SessionBusyError,
    SessionError,
    StateError,
    StoreError,
)
from perdure.extension import part
from perdure.sessions.history import History, TurnReference
from perdure.sessions.info import NOTE_CHARACTERS, RESPONSE, SessionInfo, SessionMemory
from perdure.sessions.pending_turn import PendingTurn, PendingTurns, TurnExtra
from perdure.sessions.session_view import SessionView, StoreHost, count_turns
from perdure.sessions.turn import Said, Turn, added, portable_settings, said_messages

if TYPE_CHECKING:
    from perdure.sessions.fold import FoldPlan, TurnStream
    from perdure.sessions.pending_info import PendingInfo

Settling = Literal["keep", "discard"]
"""What becomes of a pending turn when something else is said: a turn that was cancelled, or nothing."""
S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


class Host(StoreHost, Protocol):
    """What a session needs of those that it is one of."""

    @property
    def chat_format(self) -> ChatFormat: ...
    @property
    def moving_state(self) -> threading.Lock:
        """Held while all the state of a session is in memory."""
        ...

    def file(self, namespace: str, digest: str) -> bytes | None: ...

    def branch(
        self,
        session: Session,
        name: str,
        place: TurnReference,
        *,
        how: str,
        turns: Sequence[Turn] = (),
        kind: str = "session",
    ) -> Session: ...
    @property
    def pending(self) -> PendingTurns: ...
    def remove(self, session: Session) -> None: ...
    def write_behind(
        self, tokens: Sequence[int], namespace: str, saved: int, *, adapters: Mapping[str, float] | None
    ) -> int: ...
    def save_in_quiet(
        self,
        tokens: Sequence[int],
        namespace: str,
        conversation: str,
        *,
        adapters: Mapping[str, float] | None,
    ) -> None: ...


def _in_thread(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The twin of a method for asyncio: the same call in a thread, so that no event loop waits for it."""

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **keywords: P.kwargs) -> T:
        return await asyncio.to_thread(method, self, *args, **keywords)

    twin.__name__ = f"a{method.__name__}"
    twin.__qualname__ = method.__qualname__.removesuffix(method.__name__) + twin.__name__
    twin.__doc__ = f"Like `{method.__name__}`, for asyncio."
    return twin


class Session(SessionView):
    """A named conversation. Safe from any thread; one turn at a time.

    A turn is a transaction: it is part of the session once its reply is whole and on the disk, and else its
    turns are as they were before. `kept` in the reply says which. What was asked is on the disk before the
    turn's first step, and stays there until the turn is part of the session, or its caller has cancelled it:
    see `pending`. Nothing waits for the model while the session's lock is held. Once it was deleted, it
    refuses whatever would touch the store or the engine. The next call that reads or changes it sees what
    another process has changed in the meantime.
    """

    _host: Host

    def __init__(self, host: Host, info: SessionInfo) -> None:
        super().__init__(host, info)
        self._pending: PendingTurn | None = None
        self.saved: int | None = None
        """Tokens whose state was written. None before the first turn: that turn then shows it."""
        self._schema: Mapping[str, Any] = {}
        """The setting `schema` where it was given as a class: no store has that."""
        self._computed_with: tuple[Mapping[str, float] | None] | None = None
        """The adapters of the last turn of this process."""
        self.last: ChatReply | None = None
        """The latest reply that this process has made."""

    def rebase(self, history: History, saved: int | None) -> None:
        """Begin with turns that are at hand already, of which so many tokens have their state written."""
        self._history, self.saved = history, saved

    def reading_as(self, settings: Mapping[str, Any]) -> Self:
        """Have replies read as the class that was given as a schema of the session, by this process."""
        if (schema := settings.get("schema")) is not None and schema != self.settings.get("schema"):
            self._schema = {"schema": schema}
        return self

    # Talking.

    def submit(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        pending: Settling = "keep",
        extra: TurnExtra | None = None,
        **settings: Unpack[TurnKeywords],
    ) -> TurnStream:
        """Queue a turn and return at once. It becomes part of the session when its reply is asked for, or
        read to its end; with `keep_partial` also when it is cancelled.

        Where a turn is pending, it becomes a turn that was cancelled, with what there is of it; unless the
        same is said again, which takes its place, as with `pending="discard"`."""
        messages = said_messages(said)
        with self._beginning(settings, keep_partial, extra) as turn:
            if pending == "keep" and turn.replaced is not None:
                self._settle(turn, messages)
            return self._stream(turn, turn.base, messages)

    def submit_unkept(
        self,
        said: Said,
        *,
        preamble: Sequence[Message] = (),
        turn: int | None = None,
        call_ids: str = "",
        idle: bool = False,
        **settings: Unpack[TurnKeywords],
    ) -> TurnStream:
        """Queue a reply to what is said, as if it were the next turn, or the one after turn number `turn`.
        The session stays as it is. `call_ids` is as in `TurnExtra`; one that is `idle` is written while there
        is no other request."""
        self._check_there()
        merged = {**self.settings, **self._schema, **settings}
        submit = self._host.backend.submit
        return Stream(
            self._unkept(said_messages(said), preamble, self.standing(turn), call_ids, merged),
            (lambda request: submit(replace(request, idle=True))) if idle else submit,
        )

    def _unkept(
        self,
        new: Sequence[Message],
        preamble: Sequence[Message],
        history: History,
        call_ids: str,
        settings: dict[str, Any],
    ) -> StreamPlan[ChatDelta, ChatReply]:
        exchanges = yield from self._host.chat_format.plan(
            (*preamble, *history.messages, *new),
            namespace=self.namespace,
            known=self._usable_of(history),
            before=history.rendering,
            conversation=self._conversation,
            call_ids=call_ids,
            **settings,
        )
        return [exchange.reply for exchange in exchanges]

    def say(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        pending: Settling = "keep",
        **settings: Unpack[TurnKeywords],
    ) -> ChatReply:
        """The reply to a message; the keywords are those of `Runtime.submit_chat`, `pending` is as in
        `submit`."""
        with self.submit(said, keep_partial=keep_partial, pending=pending, **settings) as stream:
            return stream.reply()

    def stream(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        pending: Settling = "keep",
        **settings: Unpack[TurnKeywords],
    ) -> Generator[ChatDelta, None, None]:
        """The reply piece by piece. Leaving the loop early cancels the turn."""
        stream = self.submit(said, keep_partial=keep_partial, pending=pending, **settings)
        return _deltas(stream, keep_partial)

    async def asay(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        pending: Settling = "keep",
        **settings: Unpack[TurnKeywords],
    ) -> ChatReply:
        """Like `say`, for asyncio. The event loop waits for no summary and for no disk."""
        submit = functools.partial(self.submit, said, keep_partial=keep_partial, pending=pending, **settings)
        with await submitted(submit) as stream:
            return await stream.areply()

    async def astream(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        pending: Settling = "keep",
        **settings: Unpack[TurnKeywords],
    ) -> AsyncGenerator[ChatDelta, None]:
        """Like `stream`, for asyncio. The event loop waits for no summary and for no disk."""
        submit = functools.partial(self.submit, said, keep_partial=keep_partial, pending=pending, **settings)
        stream = await submitted(submit)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()
            if keep_partial:
                with suppress(PerdureError):
                    await stream.areply()

    def edit(
        self, turn: int, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> ChatReply:
        """Say something else in turn number `turn`, from 1, and go on from its new reply."""
        with self.submit_edit(turn, said, keep_partial=keep_partial, **settings) as stream:
            return stream.reply()

    async def aedit(
        self, turn: int, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> ChatReply:
        """Like `edit`, for asyncio."""
        submit = functools.partial(self.submit_edit, turn, said, keep_partial=keep_partial, **settings)
        with await submitted(submit) as stream:
            return await stream.areply()

    def submit_edit(
        self, turn: int, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> TurnStream:
        """Queue an edit and return at once."""
        messages = said_messages(said)
        with self._beginning(settings, keep_partial) as pending:
            self._check_turn(turn, 1)
            return self._stream(pending, pending.base.first(turn - 1), messages)

    def regenerate(self, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]) -> ChatReply:
        """Another reply to the last message, in the place of the one there is."""
        with self.submit_regenerate(keep_partial=keep_partial, **settings) as stream:
            return stream.reply()

    async def aregenerate(self, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]) -> ChatReply:
        """Like `regenerate`, for asyncio."""
        with await submitted(lambda: self.submit_regenerate(keep_partial=keep_partial, **settings)) as stream:
            return await stream.areply()

    def submit_regenerate(
        self, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> TurnStream:
        """Queue another reply and return at once: to a turn that is pending, if one is."""
        if self.pending is not None:
            return self.submit_resume(again=True, **settings)
        with self._beginning(settings, keep_partial) as pending:
            history = pending.base
            if not len(history) or history.last.kind != "turn":
                raise SessionError(f"session {self.name!r} has no reply to make again")
            return self._stream(pending, history.first(len(history) - 1), history.last.messages)

    # What was asked, and not answered to its end.

    @property
    def pending(self) -> PendingInfo | None:
        """The turn that is being answered, or was interrupted: by a kill, the end of the program, an error, a
        client that was lost. None where the last turn is whole, or its caller has cancelled it."""
        self._check_there()
        with self._lock:
            now, record = self._pending, self._host.store.pending(self._info)
            if record is None or (now is not None and now.is_cancelled and now.writes(record)):
                return None
            from perdure.sessions.pending_info import PendingInfo

            if now is None or not now.writes(record):
                return PendingInfo.of(record, running=now is not None and now.is_running)
            return PendingInfo.of(self._host.pending.latest(record, now), running=now.is_running)

    def resume(self, *, again: bool = False, **settings: Unpack[TurnKeywords]) -> ChatReply:
        """The whole reply to the pending turn: what was written of it stands, and it is continued behind its
        last token. `again`: a new one from the start. Settings are those of the turn; others can be given."""
        with self.submit_resume(again=again, **settings) as stream:
            return stream.reply()

    async def aresume(self, *, again: bool = False, **settings: Unpack[TurnKeywords]) -> ChatReply:
        """Like `resume`, for asyncio."""
        with await submitted(lambda: self.submit_resume(again=again, **settings)) as stream:
            return await stream.areply()

    def submit_resume(self, *, again: bool = False, **settings: Unpack[TurnKeywords]) -> TurnStream:
        """Queue the rest of the pending turn and return at once. The stream begins with what was written
        before."""
        with self._beginning({}) as pending:
            info = self.pending
            if info is None:
                raise SessionError(f"session {self.name!r} has no pending turn: nothing to resume")
            deadline_of = {**settings}
            pending.deadline = take_deadline(deadline_of)
            pending.base = pending.base.first(info.after)
            info.resume(pending, deadline_of, again=again, model=self._host.backend.model.digest)
            return self._stream(pending, pending.base, info.messages)

    def discard(self) -> None:
        """Forget the pending turn: what was asked, and what was written of the reply."""
        with self._changing():
            self._host.store.pend(self._info, None)

    adiscard = _in_thread(discard)

    def _settle(self, turn: PendingTurn | None, said: Sequence[Message] = ()) -> None:
        """Have a pending turn end before what follows: as a turn that was cancelled. A client that says the
        same again, or has the whole conversation itself, wants another in its place."""
        if turn is not None and (turn.extra.head is not None or turn.extra.follower is not None):
            return
        if (info := self.pending) is None or info.messages == tuple(said):
            return
        base = self._history.first(info.after)
        cuts = base.transcript.cuts
        turns = info.as_turns(base.place.digest, cuts[-1] if cuts else (0, 0))
        numbers = self._host.store.add(self._info, turns, parent=base.head, expected=self._history.head)
        self._history = base.then(numbers, turns)
        if turn is not None:
            turn.base, turn.head, turn.replaced = self._history, self._history.head, None

    def stop(self) -> bool:
        """End the reply that is being written, if one is: its readers get what there is. A turn that was
        submitted with `keep_partial` is kept as far as it is written."""
        with self._lock:
            pending = self._pending
            stream = pending.stream() if pending is not None and pending.stream is not None else None
        if stream is None or stream.done or stream.cancelled:
            return False
        stream.stop()
        return True

    # Moving about.

    def fork(self, name: str, *, turn: int | None = None) -> Session:
        """A new session that starts after turn number `turn`, or where this one stands."""
        with self._lock:
            self._check_there()
            self._refresh()
            count = self._turns if turn is None else turn
            self._check_turn(count, 0)
            return self._host.branch(self, name, self._place(count), how="fork")

    afork = _in_thread(fork)

    def fold(
        self,
        name: str | None = None,
        *,
        summary: str | None = None,
        keep: int = 2,
        read_ahead: bool = True,
        **settings: Unpack[TurnKeywords],
    ) -> Session:
        """Go on from a summary and the last `keep` turns: in a new session, or without a name in this one.

        The summary is written by the model unless it is given. What was before stays reachable. What the next
        prompt begins with is read ahead while the engine is idle.
        """
        from perdure.chat.plans import SummaryInterrupted
        from perdure.sessions.fold import fold_turn, summarised, turns_to_compact

        if not is_whole(keep) or keep < 0:
            raise InvalidInputError(f"keep is a number of turns from 0, got {keep!r}")
        if summary is not None and not isinstance(summary, str):
            raise InvalidInputError(f"a summary is a text, got {summary!r}")
        merged: dict[str, Any] = {"adapters": self.settings.get("adapters"), **settings}
        deadline = take_deadline(merged)
        pending = self._begin()
        try:
            if name is None:
                self._settle(pending)
            base = pending.base
            turns = turns_to_compact(self._start, base, keep)
            if summary is not None:
                turn = fold_turn(turns, summary, keep)
            else:
                plan = summarised(self._host.chat_format, turns, keep, self.namespace, merged, deadline)
                with Stream(_one_turn(plan), self._host.backend.submit) as stream:
                    turn = stream.reply()
            with self._lock:
                self._check_there()
                if name is not None:
                    place = self._place(len(base))
                    folded = self._host.branch(self, name, place, how="fold", turns=[turn], kind="fold")
                else:
                    folded = self
                    numbers = self._host.store.add(
                        self._info, [turn], parent=base.head, expected=pending.head
                    )
                    self._history = base.then(numbers, [turn])
            if read_ahead:
                folded._read_ahead()
            return folded
        except SummaryInterrupted as cut:
            raise SessionError("the summary was cut short by its timeout: nothing was folded") from cut
        finally:
            self._end(pending)

    afold = _in_thread(fold)

    # Sleeping.

    def sleep(self) -> None:
        """Put its state where it outlives the process, and let go of the memory that it takes."""
        with self._changing():
            if tokens := self._usable.tokens:
                self._host.backend.cache.sleep(tokens, namespace=self.namespace, adapters=self._adapters)

    def save(self) -> None:
        """Put its state where it outlives the process. What is in memory stays there."""
        with self._changing():
            tokens = self._usable.tokens
            if tokens and len(tokens) > (self.saved or 0):
                self._host.backend.cache.save(tokens, namespace=self.namespace, adapters=self._adapters)
                self.saved = len(tokens)

    def plan_wake(self) -> Plan:
        """What waking would take: tokens and bytes by tier, and what would be computed. Nothing is done."""
        self._check_there()
        self._refresh()
        if not (tokens := self._usable.tokens):
            return Plan(tiers={}, blocks=0, nbytes=0, computed=0)
        return self._host.backend.cache.plan(tokens, namespace=self.namespace, adapters=self._adapters)

    def held(self) -> dict[str, TierUsage]:
        """How much of its state each tier has. Nothing is done."""
        self._check_there()
        if not (tokens := self._usable.tokens):
            return {}
        return self._host.backend.cache.held(tokens, namespace=self.namespace, adapters=self._adapters)

    def wake(self) -> ReuseReport:
        """Bring its state back, after proving that its turns are what they were. What is missing or
        damaged is computed with the next turn, and the report says so."""
        with self._changing():
            proved = History.at(self._history.place, self._reader())
            proved.turns  # noqa: B018
            self._history = proved
            if not (tokens := self._usable.tokens):
                return ReuseReport(computed=0, why="nothing was said under this model yet")
            return self._host.backend.cache.wake(tokens, namespace=self.namespace, adapters=self._adapters)

    asleep = _in_thread(sleep)

    aplan_wake = _in_thread(plan_wake)

    awake = _in_thread(wake)

    # Out.

    def export(
        self,
        path: str | Path,
        *,
        state: bool = True,
        kind: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Write the session to one file that can be moved, with its state or without."""
        self._check_there()
        self._refresh()
        # One at a time: all of the state is in memory meanwhile.
        with self._host.moving_state if state else nullcontext():
            packed = None
            if state and (tokens := self._tokens_with_state()):
                packed = self._host.backend.cache.pack(
                    tokens, namespace=self.namespace, adapters=self._adapters
                )
            written: Path = part("session.export", "upkeep")(
                Path(path),
                self._stored_turns(),
                packed,
                name=self.name,
                kind=kind or self.kind,
                settings=portable_settings(self.settings),
                key=self._host.store.key,
                find_file=functools.partial(self._host.file, self.namespace),
                progress=progress,
            )
            return written

    aexport = _in_thread(export)

    # Changing it.

    def append(self, said: Said, *, read_ahead: bool = True) -> None:
        """Have messages said that nobody answers yet. They are read ahead while the engine is idle."""
        messages = said_messages(said)
        self._keep_images(messages)
        with self._changing() as may_have_pending:
            if may_have_pending:
                self._settle(None)
            base = self._history
            whole = base.transcript
            turn = Turn(
                kind="turn",
                messages=tuple(messages),
                keep=whole.cuts[-1] if whole.cuts else (0, 0),
                created=time.time(),
                before=base.place.digest,
            )
            numbers = self._host.store.add(self._info, [turn], parent=base.head, expected=base.head)
            self._history = base.then(numbers, [turn])
            if read_ahead:
                self._read_ahead()

    aappend = _in_thread(append)

    def _read_ahead(self) -> None:
        """Have the turns so far read while the engine is idle: the next one then computes its own words."""
        settings = {**self.settings, "settle": self.settings.get("settle") or SETTLED}
        options, _ = ChatOptions.split(settings)
        # A model without a template, a template that refuses the messages: they are said all the same.
        with suppress(PerdureError):
            self._host.chat_format.prefetch_next(
                self._history.messages,
                options,
                namespace=self.namespace,
                known=self._usable,
                adapters=self._adapters,
                conversation=self._conversation,
            )

    @property
    def _conversation(self) -> str:
        """Its conversation id for eviction. The lines of an agent's conversation are one, so that a
        compaction takes the place of what came before it."""
        if self.origin.get("agent"):
            return f"agent {self.name.partition('~')[0]}"
        return f"session {self._info.number} {self.name}"

    def note(self, origin: Mapping[str, Any], *, bounded: bool = True) -> None:
        """Add to what is written down of its origin. Entries that are not named here stay. What is not
        `bounded` is no client's: a quota counts it, and does not refuse it."""
        with self._lock:
            self._check_there()
            self._info = self._host.store.note(self._info, {**self._info.origin, **origin}, bounded=bounded)

    def rewind(self, turns: int = 1, *, to: int | None = None) -> None:
        """Go back by a number of turns, or to after turn number `to`."""
        with self._changing():
            if not is_whole(turns) or turns < 0:
                raise InvalidInputError(f"turns is a whole number from 0, got {turns!r}")
            if to is None and turns > self._turns:
                raise InvalidInputError(
                    f"session {self.name!r} has {count_turns(self._turns)}, so it cannot go back by {turns}"
                )
            count = self._turns - turns if to is None else to
            self._check_turn(count, 0)
            now, then = self._history, self._history.first(count)
            there = then.place
            self._host.store.move(self._info, there.head, digest=there.digest, expected=now.head)
            self._history = then

    def label(
        self, label: str, *, kind: str = "memory", turn: int | None = None, note: str = ""
    ) -> SessionMemory:
        """Mark a turn of this session, so that it can be woken by its address."""
        for name, value in (("label", label), ("kind", kind)):
            if not isinstance(value, str) or not value:
                raise InvalidInputError(f"a {name} is a text that is not empty, got {value!r}")
        if not isinstance(note, str) or len(note) > NOTE_CHARACTERS:
            got = f"one of {len(note)}" if isinstance(note, str) else repr(note)
            raise InvalidInputError(f"a note is a text of at most {NOTE_CHARACTERS} characters, got {got}")
        with self._lock:
            self._check_there()
            self._refresh()
            count = self._turns if turn is None else turn
            self._check_turn(count, 0)
            at = self._place(count)
            return self._host.store.label(self._info, at, label, kind, note)

    def delete(self, *, turns: int | None = None) -> None:
        """Forget the session, with `turns` only if it still has so many: nobody has continued it. Forks of
        it, and memories, stay."""
        with self._changing():
            if turns is None or self.turns == turns:
                self._host.remove(self)
                self._deleted = True

    arewind = _in_thread(rewind)
    alabel = _in_thread(label)
    adelete = _in_thread(delete)

    # A turn.

    @property
    def _adapters(self) -> Mapping[str, float] | None:
        """What its state was computed with: in this process by its last turn, else by its settings."""
        adapters: Mapping[str, float] | None
        (adapters,) = self._computed_with or (self.settings.get("adapters"),)
        return adapters

    def _stream(self, pending: PendingTurn, base: History, messages: Sequence[Message]) -> TurnStream:
        """Have what is said behind `base` answered. What takes time is done here: render and tokenise."""
        pending.base, pending.said = base, messages
        stream = Stream(self._turn(pending), functools.partial(self._submit, pending), waits=True)
        pending.stream = weakref.ref(stream)
        return stream

    def _submit(self, pending: PendingTurn, request: Request) -> OutputQueue:
        """Queue a request of a turn. What is asked is on the disk before the first one."""
        if pending.record is None:
            self._keep_images(pending.said)
            self._host.pending.write(self._owner(pending), pending, self._host.backend.model.digest)
            # A file that another session named alone may have gone with it: from here on it stays.
            self._keep_images(pending.said)
        output = self._host.backend.submit(request)
        pending.submitted(request, output)
        return output

    def _keep_images(self, messages: Sequence[Message]) -> None:
        """Have the files of images before a turn names them."""
        for message in messages:
            for _, image in message.images:
                self._host.chat_format.image_reader().keep(image, self.namespace)

    def _owner(self, pending: PendingTurn) -> SessionInfo:
        """The session that shows the turn while it is pending."""
        follower = pending.extra.follower
        return self._info if follower is None else follower.info

    def _turn(self, pending: PendingTurn) -> StreamPlan[ChatDelta, ChatReply]:
        """A turn as it happens: a summary first where the context is full, the reply, and its commit."""
        base, settings, extra = pending.base, pending.settings, pending.extra
        try:
            if settings.get("date") is None and self._host.chat_format.asks_date:
                settings["date"] = base.date or extra.date or today()
            fold = pending.fold
            if fold is None and not pending.known and settings.get("overflow") == "fold" and len(base):
                from perdure.chat.plans import SummaryInterrupted
                from perdure.sessions.fold import cut_short, make_room

                try:
                    fold = yield from make_room(
                        self._host.chat_format,
                        base,
                        lambda: self._start,
                        pending.said,
                        namespace=self.namespace,
                        settings=settings,
                        deadline=pending.deadline,
                    )
                except SummaryInterrupted as cut:
                    self._leave(pending, "cancelled")
                    return [cut_short(cut.reply)]
                if fold is not None:
                    # The rest of the reply depends on it, should it be resumed.
                    pending.fold = fold
                    self._host.pending.update(pending)
            pending.answering = True
            messages = base.messages if fold is None else fold.messages
            plan = self._host.chat_format.plan(
                (*extra.preamble, *messages, *pending.said),
                namespace=self.namespace,
                known=self._usable_of(base) if fold is None else None,
                before=base.rendering if fold is None else None,
                conversation=self._conversation,
                call_ids=extra.call_ids,
                deadline=pending.deadline,
                **pending.drawn,
            )
            if pending.known:
                from perdure.chat.media.marks import restore
                from perdure.chat.resume import resumed

                # What was written goes on behind these very images.
                restore([*messages, *pending.said], self.namespace, self._host.chat_format.image_reader)
                plan = resumed(plan, pending.known, self._host.backend.model)
            [exchange] = yield from plan
            if extra.prompt_notes:
                reply = replace(exchange.reply, notes=(*extra.prompt_notes, *exchange.reply.notes))
                exchange = exchange._replace(reply=reply)
            self.last = self._commit(pending, fold, exchange)
            return [self.last]
        except Exception as error:
            pending.failed = f"{type(error).__name__}: {error}"
            if pending.output is not None:
                self._host.pending.leave(pending, pending.failed)
            raise
        finally:
            # Also where its stream is dropped, and nobody asks for the reply.
            pending.release()

    def _commit(self, pending: PendingTurn, fold: Turn | None, exchange: Exchange) -> ChatReply:
        """Make a turn part of the session, with the fold before it, if it may be."""
        base, whole, reply = pending.base, exchange.transcript, exchange.reply
        with self._lock:
            if self._pending is not pending:
                return replace(reply, not_kept="another turn began before this one was read to its end")
            self._pending = None
            cut = reply.finish_reason in ("cancelled", "error")
            if cut and (pending.is_left or not (pending.keep_partial and reply.raw.tokens)):
                self._leave(pending, reply.finish_reason)
                return replace(reply, not_kept=f"the turn ended by {reply.finish_reason}")
            keep, more = added(base.transcript if fold is None else Transcript(), whole)
            before = fold.digest if fold is not None else base.place.digest
            model = self._host.backend.model
            turn = pending.answered(reply, keep, more, before, digest=model.digest, model=model.info.name)
            turns = [turn] if fold is None else [fold, turn]
            follower = pending.extra.follower
            try:
                numbers = self._host.store.add(
                    self._info,
                    turns,
                    parent=base.head,
                    expected=pending.head,
                    follower=follower.info if follower is not None else None,
                )
            except (StoreError, StateError, SessionError, InvalidInputError) as error:
                # What was said was said: the caller has the reply, and learns that it will not last.
                refused = isinstance(error, StoreError) and not isinstance(error, QuotaError)
                if refused:
                    self._host.pending.leave(pending, str(error))
                else:
                    self._host.pending.forget(pending)
                if self.kind == RESPONSE:
                    with suppress(PerdureError):
                        self.note({"not_kept": str(error), "could_not": refused}, bounded=False)
                return replace(reply, not_kept=str(error), could_not_be_kept=refused)
            self._host.pending.done(pending)
            self._history = base.then(numbers, turns, whole, exchange.prompt.made.rendering)
            if follower is not None:
                follower._follow(self._history, pending)
            # Going back or branching has others begin where this one was.
            saved = min(_found_kept(reply) if self.saved is None else self.saved, keep[1])
        self._computed_with = (pending.settings.get("adapters"),)
        self.saved = self._host.write_behind(
            whole.tokens, self.namespace, saved, adapters=pending.settings.get("adapters")
        )
        if self.origin.get("agent"):
            self._host.save_in_quiet(
                whole.tokens, self.namespace, self._conversation, adapters=pending.settings.get("adapters")
            )
        return replace(reply, kept=True)

    def _leave(self, pending: PendingTurn, ended: str) -> None:
        """A turn has ended before its end: it stays pending, unless its caller did that."""
        if pending.is_interrupted:
            self._host.pending.leave(pending, pending.why_left or ended)
        else:
            self._host.pending.forget(pending)

    # One at a time.

    @contextmanager
    def _beginning(
        self, settings: Mapping[str, Any], keep_partial: bool = False, extra: TurnExtra | None = None
    ) -> Iterator[PendingTurn]:
        """Have the session for a turn; nobody else gets it before the turn's end. An error here ends it."""
        merged = {**self.settings, **self._schema, **settings}
        if merged.get("n", 1) != 1:
            raise InvalidInputError("a turn has one reply; leave n at 1, or fork the session")
        deadline = take_deadline(merged)
        pending = self._begin()
        pending.settings, pending.deadline, pending.keep_partial = merged, deadline, keep_partial
        try:
            if extra is not None:
                pending.extra = extra
                pending.refuse_kept(self.name)
                if extra.head is not None and extra.head != pending.head:
                    raise SessionBusyError(
                        f"session {self.name!r} has moved on since its turns were compared: ask again"
                    )
                # Before any work: a turn that cannot be kept is not made.
                if extra.follower is not None:
                    extra.follower._wait_for(pending)
            if pending.may_replace and (record := self._host.store.pending(self._owner(pending))) is not None:
                pending.replaced = record.origin
            yield pending
        except BaseException:
            if pending.record is not None and pending.output is None:
                self._host.pending.refused(self._owner(pending), pending)
            self._end(pending)
            raise

    def _begin(self) -> PendingTurn:
        with self._lock:
            may_replace = self._take()
            info, store, history = self._info, self._host.store, self._history
            self._pending = pending = PendingTurn(
                base=history, head=history.head, unlock=lambda: store.release(info), may_replace=may_replace
            )
            return pending

    def _wait_for(self, pending: PendingTurn) -> None:
        """Have nobody else change the session while a turn that it is to follow is in the making. Refused
        where the session does not stand where that turn began: the turn could not become part of it."""
        with self._lock:
            pending.may_replace = self._take()
            if self._history.head != pending.head:
                self._host.store.release(self._info)
                raise SessionError(
                    f"session {self.name!r} has moved on since this turn was asked for, so it cannot become "
                    "part of it: ask again"
                )
            info, store, first = self._info, self._host.store, pending.unlock

            def unlock() -> None:
                first()
                store.release(info)

            pending.unlock = unlock
            self._pending = pending

    def _follow(self, history: History, pending: PendingTurn) -> None:
        with self._lock:
            self._history = history
            if self._pending is pending:
                self._pending = None

    def _end(self, pending: PendingTurn) -> None:
        with self._lock:
            pending.release()
            if self._pending is pending:
                self._pending = None

    @contextmanager
    def _changing(self) -> Iterator[bool]:
        """Held while a session is moved about: nobody else does, and no turn is on its way. Gives whether one
        may be pending."""
        with self._lock:
            may_have_pending = self._take()
            try:
                yield may_have_pending
            finally:
                self._host.store.release(self._info)

    def _take(self) -> bool:
        """Have the session as it is now, before all other threads and processes; whether it may have a
        pending turn."""
        self._check_there()
        self._check_free()
        before = self._pending
        if before is not None:
            before.release()
        if not self._host.store.take(self._info):
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn in another program: wait for it, or fork it"
            )
        try:
            may_have_pending = self._refresh()
        except BaseException:
            self._host.store.release(self._info)
            raise
        if before is not None and before.record is not None:
            if before.is_left:
                # What follows reads what is written down.
                self._host.pending.leave(before, before.why_left)
            else:
                # Its caller has gone on without it.
                self._host.pending.forget(before)
            self._pending = None
        return may_have_pending

    def _check_free(self) -> None:
        if self._pending is not None and self._pending.is_running:
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn: wait for it, cancel it, or fork it"
            )


def _one_turn(plan: FoldPlan) -> StreamPlan[ChatDelta, Turn]:
    return [(yield from plan)]


def _deltas(stream: TurnStream, keep_partial: bool) -> Generator[ChatDelta, None, None]:
    try:
        yield from stream
    finally:
        stream.cancel()
        if keep_partial:
            with suppress(PerdureError):
                stream.reply()


def today() -> str:
    """The date that a template reads in a conversation that begins now."""
    return datetime.now().isoformat(timespec="seconds")


def _found_kept(reply: ChatReply) -> int:
    """The tokens of a prompt whose state was found where it outlives the process, or is on its way there.
    What only a slot held may not have been written yet."""
    return reply.reuse.reused - reply.reuse.tiers.get("slot", 0)
