"""One conversation that lasts."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, Unpack

from perdure.chat.keywords import TurnKeywords
from perdure.chat.message import Message
from perdure.chat.plans import SummaryCut
from perdure.chat.reply import ChatDelta, ChatReply
from perdure.chat.transcript import Transcript
from perdure.checks import is_whole
from perdure.decode.request import take_deadline
from perdure.decode.slots import Plan, ReuseReport, TierUsage
from perdure.decode.stream import Stream, StreamPlan, submitted
from perdure.errors import InvalidInputError, PerdureError, SessionError
from perdure.sessions.export import write_export
from perdure.sessions.fold import FoldPlan, TurnStream, fold_turn, foldable, summarised
from perdure.sessions.history import History, TurnReference
from perdure.sessions.info import SessionInfo
from perdure.sessions.stored_session import StoredSession
from perdure.sessions.turn import Said, Turn, said_messages
from perdure.sessions.turn_transaction import TurnExtra, TurnHost, TurnTransaction


class Host(TurnHost, Protocol):
    """What a session needs of those that it is one of."""

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


class Session(StoredSession):
    """A named conversation. Safe from any thread; one turn at a time.

    A turn is a transaction: it is part of the session once its reply is whole and on the disk, and else the
    session is as it was before. `kept` in the reply says which. Nothing waits for the model while the
    session's lock is held. Once it was deleted, it refuses whatever would touch the store or the engine.
    What another process has made of it in the meantime is seen by whoever reads or changes it next.
    """

    _host: Host

    def __init__(self, host: Host, info: SessionInfo) -> None:
        super().__init__(host, info)

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
        return self._submit(lambda history: (history, messages), settings, keep_partial, extra)

    def submit_unkept(
        self, said: Said, *, preamble: Sequence[Message] = (), **settings: Unpack[TurnKeywords]
    ) -> TurnStream:
        """Queue a reply to what is said, as if it were the next turn. The session stays as it is."""
        return Stream(
            self._unkept(said_messages(said), preamble, {**self.settings, **settings}),
            self._host.backend.submit,
        )

    def _unkept(
        self, said: Sequence[Message], preamble: Sequence[Message], settings: dict[str, Any]
    ) -> StreamPlan[ChatDelta, ChatReply]:
        history = self._history
        exchanges = yield from self._host.chat_format.plan(
            (*preamble, *history.messages, *said),
            namespace=self.namespace,
            known=self._usable_of(history),
            before=history.rendering,
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

        def choose(history: History) -> tuple[History, list[Message]]:
            self._check_turn(turn, 1)
            return history.first(turn - 1), messages

        return self._submit(choose, settings, keep_partial)

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

        def choose(history: History) -> tuple[History, list[Message]]:
            if not len(history) or history.last.kind != "turn":
                raise SessionError(f"session {self.name!r} has no reply to make again")
            return history.first(len(history) - 1), list(history.last.messages)

        return self._submit(choose, settings, keep_partial)

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

    async def afork(self, name: str, *, turn: int | None = None) -> Session:
        """Like `fork`, for asyncio."""
        return await asyncio.to_thread(self.fork, name, turn=turn)

    def fold(
        self,
        name: str | None = None,
        *,
        summary: str | None = None,
        keep: int = 2,
        **settings: Unpack[TurnKeywords],
    ) -> Session:
        """Go on from a summary and the last `keep` turns: in a new session, or without a name in this one.

        The summary is written by the model unless it is given. What was before stays reachable.
        """
        if not is_whole(keep) or keep < 0:
            raise InvalidInputError(f"keep is a number of turns from 0, got {keep!r}")
        wanted: dict[str, Any] = {**settings}
        deadline = take_deadline(wanted)
        pending, base = self._begin()
        try:
            if summary is None:
                chat_format = self._host.chat_format
                turns = foldable(self._start, base, keep)
                plan = summarised(chat_format, turns, keep, self.namespace, wanted, deadline)
                try:
                    with Stream(_only(plan), self._host.backend.submit) as stream:
                        turn = stream.reply()
                except SummaryCut as cut:
                    raise SessionError(
                        "the summary was cut short by its timeout: nothing was folded"
                    ) from cut
            else:
                turn = fold_turn(foldable(self._start, base, keep), summary, keep)
            with self._lock:
                self._check_there()
                if name is not None:
                    place = self._place(len(base))
                    return self._host.branch(self, name, place, how="fold", turns=[turn], kind="fold")
                numbers = self._host.store.add(self._info, [turn], parent=base.head, expected=pending.head)
                self._history = base.then(numbers, [turn])
                return self
        finally:
            self._end(pending)

    async def afold(
        self,
        name: str | None = None,
        *,
        summary: str | None = None,
        keep: int = 2,
        **settings: Unpack[TurnKeywords],
    ) -> Session:
        """Like `fold`, for asyncio."""
        return await asyncio.to_thread(self.fold, name, summary=summary, keep=keep, **settings)

    # Sleeping.

    def sleep(self) -> None:
        """Put its state where it outlives the process, and let go of the memory that it takes."""
        with self._changing():
            if tokens := self._usable.tokens:
                self._host.backend.cache.sleep(tokens, namespace=self.namespace)

    def plan_wake(self) -> Plan:
        """What waking would take: tokens and bytes by tier, and what would be computed. Nothing is done."""
        self._check_there()
        self._refresh()
        if not (tokens := self._usable.tokens):
            return Plan(tiers={}, blocks=0, nbytes=0, computed=0)
        return self._host.backend.cache.plan(tokens, namespace=self.namespace)

    def held(self) -> dict[str, TierUsage]:
        """How much of its state each tier has. Nothing is done."""
        self._check_there()
        if not (tokens := self._usable.tokens):
            return {}
        return self._host.backend.cache.held(tokens, namespace=self.namespace)

    def wake(self) -> ReuseReport:
        """Bring its state back, after proving that its turns are what they were. What is missing or
        damaged is computed with the next turn, and the report says so."""
        with self._changing():
            proved = History.at(self._history.place, self._reader())
            proved.turns  # noqa: B018
            self._history = proved
            if not (tokens := self._usable.tokens):
                return ReuseReport(computed=0, why="nothing was said under this model yet")
            return self._host.backend.cache.wake(tokens, namespace=self.namespace)

    async def asleep(self) -> None:
        """Like `sleep`, for asyncio."""
        await asyncio.to_thread(self.sleep)

    async def aplan_wake(self) -> Plan:
        """Like `plan_wake`, for asyncio."""
        return await asyncio.to_thread(self.plan_wake)

    async def awake(self) -> ReuseReport:
        """Like `wake`, for asyncio."""
        return await asyncio.to_thread(self.wake)

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
        history = self._history
        # One at a time: all of the state is in memory meanwhile.
        with self._host.moving_state if state else nullcontext():
            packed = None
            if state and (tokens := self._usable_of(history).tokens):
                packed = self._host.backend.cache.pack(tokens, namespace=self.namespace)
            return write_export(
                Path(path),
                self._stored_turns(),
                packed,
                name=self.name,
                kind=kind or self.kind,
                settings=self.settings,
                key=self._host.store.key,
                progress=progress,
            )

    async def aexport(
        self,
        path: str | Path,
        *,
        state: bool = True,
        kind: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Like `export`, for asyncio."""
        return await asyncio.to_thread(self.export, path, state=state, kind=kind, progress=progress)

    # Inside.

    @property
    def _usable(self) -> Transcript:
        return self._usable_of(self._history)

    def _usable_of(self, history: History) -> Transcript:
        """Its transcript, if the tokens are of this model."""
        return history.transcript_under(self._host.backend.model.digest)

    def _submit(
        self,
        choose: Callable[[History], tuple[History, list[Message]]],
        settings: Mapping[str, Any],
        keep_partial: bool,
        extra: TurnExtra | None = None,
    ) -> TurnStream:
        extra = extra or TurnExtra()
        wanted = {**self.settings, **settings}
        if wanted.get("n", 1) != 1:
            raise InvalidInputError("a turn has one reply; leave n at 1, or fork the session")
        deadline = take_deadline(wanted)
        with self._lock:
            pending, history = self._begin()
            try:
                base, said = choose(history)
                # Before any work: a turn that cannot be kept is not made.
                if extra.follower is not None:
                    extra.follower._lend(pending)
            except BaseException:
                self._end(pending)
                raise
        # Without the lock: it takes time to render and to tokenise.
        try:
            stream = TurnTransaction(
                host=self._host,
                session=self,
                base=base,
                said=said,
                keep_partial=keep_partial,
                deadline=deadline,
                pending=pending,
                extra=extra,
            ).submit(wanted)
        except BaseException:
            self._end(pending)
            raise
        pending.stream = weakref.ref(stream)
        return stream


def _only(plan: FoldPlan) -> StreamPlan[ChatDelta, Turn]:
    return [(yield from plan)]


def _deltas(stream: TurnStream, keep_partial: bool) -> Generator[ChatDelta, None, None]:
    try:
        yield from stream
    finally:
        stream.cancel()
        if keep_partial:
            with suppress(PerdureError):
                stream.reply()
