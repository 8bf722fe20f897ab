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
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack

from perdure.chat.chat_format import ChatFormat
from perdure.chat.message import Message
from perdure.chat.options import ChatOptions, TurnKeywords
from perdure.chat.plans import Exchange, SummaryInterrupted
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.config import SETTLED
from perdure.decode.request import Plan, ReuseReport, TierUsage, take_deadline
from perdure.decode.stream import Stream, StreamPlan, submitted
from perdure.errors import (
    InvalidInputError,
    PerdureError,
    SessionBusyError,
    SessionError,
    StateError,
    StoreError,
)
from perdure.sessions.export import write_export
from perdure.sessions.fold import (
    FoldPlan,
    TurnStream,
    cut_short,
    fold_turn,
    make_room,
    summarised,
    turns_to_compact,
)
from perdure.sessions.history import History, TurnReference
from perdure.sessions.info import SessionInfo, SessionMemory
from perdure.sessions.pending_turn import PendingTurn, TurnExtra
from perdure.sessions.session_view import SessionView, StoreHost, count_turns
from perdure.sessions.store.base import RESPONSE
from perdure.sessions.turn import Said, Turn, added, portable_settings, said_messages

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

    A turn is a transaction: it is part of the session once its reply is whole and on the disk, and else the
    session is as it was before. `kept` in the reply says which. Nothing waits for the model while the
    session's lock is held. Once it was deleted, it refuses whatever would touch the store or the engine.
    What another process has made of it in the meantime is seen by whoever reads or changes it next.
    """

    _host: Host

    def __init__(self, host: Host, info: SessionInfo) -> None:
        super().__init__(host, info)
        self._pending: PendingTurn | None = None
        self.saved: int | None = None
        """Tokens whose state was written. None before the first turn: that turn then shows it."""
        self._computed_with: tuple[Mapping[str, float] | None] | None = None
        """The adapters of the last turn of this process."""
        self.last: ChatReply | None = None
        """The latest reply that this process has made."""

    def stand_at(self, history: History, saved: int | None) -> None:
        """Begin with turns that are at hand already, of which so many tokens have their state written."""
        self._history, self.saved = history, saved

    # Talking.

    def submit(
        self,
        said: Said,
        *,
        keep_partial: bool = False,
        extra: TurnExtra | None = None,
        **settings: Unpack[TurnKeywords],
    ) -> TurnStream:
        """Queue a turn and return at once. It becomes part of the session when its reply is asked for, or
        read to its end; with `keep_partial` also when it is cancelled."""
        messages = said_messages(said)
        with self._beginning(settings, keep_partial, extra) as pending:
            return self._stream(pending, pending.base, messages)

    def submit_unkept(
        self,
        said: Said,
        *,
        preamble: Sequence[Message] = (),
        turn: int | None = None,
        call_ids: str = "",
        **settings: Unpack[TurnKeywords],
    ) -> TurnStream:
        """Queue a reply to what is said, as if it were the next turn, or the one after turn number `turn`.
        The session stays as it is. `call_ids` is as in `TurnExtra`."""
        self._check_there()
        merged = {**self.settings, **settings}
        return Stream(
            self._unkept(said_messages(said), preamble, self.standing(turn), call_ids, merged),
            self._host.backend.submit,
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

    def say(self, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]) -> ChatReply:
        """The reply to a message; the keywords are those of `Runtime.submit_chat`."""
        with self.submit(said, keep_partial=keep_partial, **settings) as stream:
            return stream.reply()

    def stream(
        self, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> Generator[ChatDelta, None, None]:
        """The reply piece by piece. Leaving the loop early cancels the turn."""
        return _deltas(self.submit(said, keep_partial=keep_partial, **settings), keep_partial)

    async def asay(
        self, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> ChatReply:
        """Like `say`, for asyncio. The event loop waits for no summary and for no disk."""
        with await submitted(lambda: self.submit(said, keep_partial=keep_partial, **settings)) as stream:
            return await stream.areply()

    async def astream(
        self, said: Said, *, keep_partial: bool = False, **settings: Unpack[TurnKeywords]
    ) -> AsyncGenerator[ChatDelta, None]:
        """Like `stream`, for asyncio. The event loop waits for no summary and for no disk."""
        stream = await submitted(lambda: self.submit(said, keep_partial=keep_partial, **settings))
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
        """Queue another reply and return at once."""
        with self._beginning(settings, keep_partial) as pending:
            history = pending.base
            if not len(history) or history.last.kind != "turn":
                raise SessionError(f"session {self.name!r} has no reply to make again")
            return self._stream(pending, history.first(len(history) - 1), history.last.messages)

    def stop(self) -> bool:
        """End the reply that is being written, if one is: whoever reads it gets what there is. A turn that
        was submitted with `keep_partial` is kept as far as it is written."""
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
        if not is_whole(keep) or keep < 0:
            raise InvalidInputError(f"keep is a number of turns from 0, got {keep!r}")
        if summary is not None and not isinstance(summary, str):
            raise InvalidInputError(f"a summary is a text, got {summary!r}")
        merged: dict[str, Any] = {"adapters": self.settings.get("adapters"), **settings}
        deadline = take_deadline(merged)
        pending = self._begin()
        base = pending.base
        try:
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
            return write_export(
                Path(path),
                self._stored_turns(),
                packed,
                name=self.name,
                kind=kind or self.kind,
                settings=portable_settings(self.settings),
                key=self._host.store.key,
                progress=progress,
            )

    aexport = _in_thread(export)

    # Changing it.

    def append(self, said: Said, *, read_ahead: bool = True) -> None:
        """Have messages said that nobody answers yet. They are read ahead while the engine is idle."""
        messages = said_messages(said)
        with self._changing():
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
            self._host.chat_format.settle_next(
                self._history.messages,
                options,
                namespace=self.namespace,
                known=self._usable,
                adapters=self._adapters,
                conversation=self._conversation,
            )

    @property
    def _conversation(self) -> str:
        """What tells it from others where state has to be evicted. The lines of an agent's conversation are
        one, so that a compaction takes the place of what came before it."""
        if self.origin.get("agent"):
            return f"agent {self.name.partition('~')[0]}"
        return f"session {self._info.number} {self.name}"

    def note(self, origin: Mapping[str, Any]) -> None:
        """Add to what is written down of its origin. Entries that are not named here stay."""
        with self._lock:
            self._check_there()
            self._info = self._host.store.note(self._info, {**self._info.origin, **origin})

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
        if not isinstance(note, str):
            raise InvalidInputError(f"a note is a text, got {note!r}")
        with self._lock:
            self._check_there()
            self._refresh()
            count = self._turns if turn is None else turn
            self._check_turn(count, 0)
            at = self._place(count)
            return self._host.store.label(self._info, at, label, kind, note)

    def delete(self, *, turns: int | None = None) -> None:
        """Forget the session, with `turns` only if it still has so many: nobody has gone on with it. Forks of
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
        stream = Stream(self._turn(pending), self._host.backend.submit, waits=True)
        pending.stream = weakref.ref(stream)
        return stream

    def _turn(self, pending: PendingTurn) -> StreamPlan[ChatDelta, ChatReply]:
        """A turn as it happens: a summary first where the context is full, the reply, and its commit."""
        base, settings, extra = pending.base, pending.settings, pending.extra
        try:
            if settings.get("date") is None and self._host.chat_format.asks_date:
                settings["date"] = base.date or extra.date or today()
            fold = None
            if settings.get("overflow") == "fold" and len(base):
                fold = yield from make_room(
                    self._host.chat_format,
                    base,
                    lambda: self._start,
                    pending.said,
                    namespace=self.namespace,
                    settings=settings,
                    deadline=pending.deadline,
                )
            messages = base.messages if fold is None else fold.messages
            [exchange] = yield from self._host.chat_format.plan(
                (*extra.preamble, *messages, *pending.said),
                namespace=self.namespace,
                known=self._usable_of(base) if fold is None else None,
                before=base.rendering if fold is None else None,
                conversation=self._conversation,
                call_ids=extra.call_ids,
                deadline=pending.deadline,
                **settings,
            )
            self.last = self._commit(pending, fold, exchange)
            return [self.last]
        except SummaryInterrupted as cut:
            return [cut_short(cut.reply)]
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
            if cut and not (pending.keep_partial and reply.raw.tokens):
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
                if self.kind == RESPONSE:
                    with suppress(PerdureError):
                        self.note({"not_kept": str(error)})
                refused = isinstance(error, StoreError)
                return replace(reply, not_kept=str(error), could_not_be_kept=refused)
            self._history = base.then(numbers, turns, whole, exchange.prompt.rendering)
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

    # One at a time.

    @contextmanager
    def _beginning(
        self, settings: Mapping[str, Any], keep_partial: bool = False, extra: TurnExtra | None = None
    ) -> Iterator[PendingTurn]:
        """Have the session for a turn; nobody else gets it before the turn's end. An error here ends it."""
        merged = {**self.settings, **settings}
        if merged.get("n", 1) != 1:
            raise InvalidInputError("a turn has one reply; leave n at 1, or fork the session")
        deadline = take_deadline(merged)
        pending = self._begin()
        pending.settings, pending.deadline, pending.keep_partial = merged, deadline, keep_partial
        try:
            if extra is not None:
                pending.extra = extra
                pending.refuse_kept(self.name)
                # Before any work: a turn that cannot be kept is not made.
                if extra.follower is not None:
                    extra.follower._wait_for(pending)
            yield pending
        except BaseException:
            self._end(pending)
            raise

    def _begin(self) -> PendingTurn:
        with self._lock:
            self._take()
            info, store, history = self._info, self._host.store, self._history
            self._pending = pending = PendingTurn(
                base=history, head=history.head, let_go=lambda: store.release(info)
            )
            return pending

    def _wait_for(self, pending: PendingTurn) -> None:
        """Have nobody else change the session while a turn that it is to follow is in the making. Refused
        where the session does not stand where that turn began: the turn could not become part of it."""
        with self._lock:
            self._take()
            if self._history.head != pending.head:
                self._host.store.release(self._info)
                raise SessionError(
                    f"session {self.name!r} has moved on since this turn was asked for, so it cannot become "
                    "part of it: ask again"
                )
            info, store, first = self._info, self._host.store, pending.let_go

            def let_go() -> None:
                first()
                store.release(info)

            pending.let_go = let_go
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
    def _changing(self) -> Iterator[None]:
        """Held while a session is moved about: nobody else does, and no turn is on its way."""
        with self._lock:
            self._take()
            try:
                yield
            finally:
                self._host.store.release(self._info)

    def _take(self) -> None:
        """Have the session as it is now, before all other threads and processes."""
        self._check_there()
        self._check_free()
        if self._pending is not None:
            self._pending.release()
        if not self._host.store.take(self._info):
            raise SessionBusyError(
                f"session {self.name!r} is answering another turn in another program: wait for it, or fork it"
            )
        try:
            self._refresh()
        except BaseException:
            self._host.store.release(self._info)
            raise

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
    """The date that a template is told of a conversation that begins now."""
    return datetime.now().isoformat(timespec="seconds")


def _found_kept(reply: ChatReply) -> int:
    """The tokens of a prompt whose state was found where it outlives the process, or is on its way there.
    What only a slot held may not have been written yet."""
    return reply.reuse.reused - reply.reuse.tiers.get("slot", 0)
