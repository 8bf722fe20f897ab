"""A conversation with whoever is at the other end of the command."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from perdure.cli import terminal, words
from perdure.cli.reply_view import ReplyView
from perdure.errors import ContextOverflow, PerdureError

if TYPE_CHECKING:
    from pathlib import Path

    from perdure import ChatJob, ChatReply, Runtime, Session

NAME = "chat"
"""Of a conversation that nobody has named."""


@dataclass(slots=True)
class Conversation:
    """One session of a runtime at a time. What goes wrong is told, and the session is as it was before."""

    runtime: Runtime
    session: Session
    settings: Mapping[str, Any]
    """What is asked of every reply."""
    store: Path | None
    """Where sessions are kept; without one they end with the process."""
    watched: bool
    """Whether somebody sits there, who can stop a reply and go on."""
    think: bool = False
    """Whether reasoning is shown."""
    _hinted: bool = False

    @classmethod
    def begin(
        cls,
        runtime: Runtime,
        name: str | None,
        *,
        system: str | None,
        settings: Mapping[str, Any],
        store: Path | None,
        watched: bool,
    ) -> Conversation:
        """Go on with the session of that name, or start it."""
        name = NAME if name is None else name
        known = runtime.sessions.store.has("", name)
        session = runtime.session(name, system=system)
        conversation = cls(runtime, session, settings, store, watched)
        if known:
            conversation.wake()
        return conversation

    # Talking.

    def say(self, text: str) -> bool:
        """Show the reply to a message as it comes. Whether it could be given whole."""
        return self.follow(lambda: self.session.submit(text, keep_partial=True, **self.settings))

    def edit(self, turn: int, text: str) -> bool:
        return self.follow(lambda: self.session.submit_edit(turn, text, keep_partial=True, **self.settings))

    def regenerate(self) -> bool:
        settings = dict(self.settings)
        if settings.get("seed") is not None and self.session.history():
            # The same seed would only draw the same reply again.
            settings["seed"] = (self.session.history()[-1].seed + 1) % (1 << 32)
        return self.follow(lambda: self.session.submit_regenerate(keep_partial=True, **settings))

    def follow(self, submit: Callable[[], ChatJob]) -> bool:
        """Show a reply until it ends, or until Ctrl-C ends it."""
        before = self._folds()
        try:
            job = submit()
        except ContextOverflow as error:
            terminal.note(
                f"with this message the conversation has {error.needed} tokens, but {error.fits} fit. It was "
                "not sent. /rewind goes back, /reset starts anew; --ctx makes more fit, and "
                "--overflow drop_oldest leaves out the oldest turns"
            )
            return False
        except PerdureError as error:
            terminal.note(str(error))
            return False
        finally:
            # Folding comes first, so a message that is refused may have been preceded by it.
            if self._folds() > before:
                terminal.tell("The conversation was full: a summary and its last turns stand for it now.")
        view = ReplyView(think=self.think)
        try:
            with terminal.stopped_by_ctrl_c(job) as stopped:
                for delta in job:
                    view.add(delta)
                reply = job.reply()
        except PerdureError as error:
            view.end()
            terminal.note(str(error))
            return False
        finally:
            job.cancel()
        view.end()
        self._tell(reply, view)
        if stopped.is_set() and not self.watched:
            raise typer.Exit(130)
        return reply.finish_reason != "length" or self._limited(reply)

    def _tell(self, reply: ChatReply, view: ReplyView) -> None:
        """Whatever a reader should know and cannot see."""
        if view.thought and not self.think and not self._hinted:
            how = "/think show shows it" if self.watched else "that is not shown"
            terminal.tell(f"(The model has reasoned first; {how}.)")
            self._hinted = True
        if not reply.text and reply.finish_reason == "stop" and self.watched:
            terminal.tell("(The reply is empty.)")
        if reply.dropped:
            left_out = words.count(reply.dropped, "message")
            terminal.tell(f"The oldest {left_out} had to be left out of the prompt.")
        if reply.shifted:
            left_out = words.count(reply.shifted, "token")
            terminal.tell(f"The oldest {left_out} had to be left out while it was written.")
        if reply.finish_reason == "cancelled" and self.watched:
            terminal.tell(
                "Stopped; what there is of it is kept." if reply.kept else "Stopped; nothing is kept."
            )
        elif not reply.kept:
            terminal.note(f"this turn is not kept: {reply.not_kept}")
        if reply.finish_reason == "length" and not self._limited(reply):
            terminal.note(
                f"the context of {self.runtime.n_ctx} tokens is full, so the reply ends here. "
                "/reset starts anew; --ctx makes more fit"
            )

    def _limited(self, reply: ChatReply) -> bool:
        """Whether a reply is as long as it was allowed to be."""
        limit = self.settings.get("max_tokens")
        return limit is not None and reply.usage.completion_tokens >= limit

    def _folds(self) -> int:
        return sum(turn.kind == "fold" for turn in self.session.history())

    # Moving about.

    def wake(self) -> None:
        """Bring the state of the session back, and say what that took."""
        session = self.session
        started = time.monotonic()
        report = session.wake()
        took = time.monotonic() - started
        turns = words.count(session.turns, "turn")
        terminal.tell(
            f"{words.quoted(session.name)}: {turns}, {words.count(len(session.tokens), 'token')}; woken in "
            f"{words.milliseconds(took)}: {words.sources(report.tiers, report.computed)}."
        )

    def switch(self, name: str) -> None:
        self.session = self.runtime.sessions.get(name)
        self.wake()

    def fork(self, name: str) -> None:
        left = self.session.name
        self.session = self.session.fork(name)
        terminal.tell(f"Now in {words.quoted(name)}; {words.quoted(left)} stays as it is.")

    def start(self, system: str | None) -> None:
        """Start anew with another system message. What was said under the old one stays, if it is kept."""
        old = self.session
        if self.store is None or not old.turns:
            old.delete()
            self.session = self.runtime.session(old.name, system=system)
            terminal.tell("The conversation starts anew.")
            return
        taken = {row.name for row in self.runtime.sessions.list()}
        number = 2
        while (name := f"{old.name}-{number}") in taken:
            number += 1
        self.session = self.runtime.session(name, system=system)
        terminal.tell(f"Now in {words.quoted(name)}; {words.quoted(old.name)} stays as it is.")
