"""A conversation with the person at the terminal, or the program at the other end of the pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure.chat.message import Image
from perdure.cli.output import progress, terminal, words
from perdure.cli.output.reply_view import ReplyView
from perdure.cli.runtime import model_path, note_demo, opened
from perdure.closing import Closing
from perdure.engine_config import EngineConfig
from perdure.errors import (
    ContextOverflow,
    InvalidInputError,
    PerdureError,
    SessionError,
    SessionNotFoundError,
)

if TYPE_CHECKING:
    from perdure import ChatDelta, ChatReply, Runtime, Session, Stream, Turn
    from perdure.engine.model import EngineModel
    from perdure.sessions.sessions import Sessions

NAME = "chat"
"""Of a conversation that nobody has named."""
_NO = ("n", "no")
_SHOWN = 300
"""Characters that are shown of a message and of its reply that were interrupted."""


class Conversation(Closing):
    """One session at a time, and a model that can be changed. An error is printed, and leaves the session as
    it was before.

    Without a name the sessions are in memory, until they are kept under one.
    """

    def __init__(
        self,
        model: str | None,
        name: str | None,
        *,
        system: str | None,
        settings: Mapping[str, Any],
        folder: Path,
        config: EngineConfig,
        template: str | None,
        watched: bool,
    ) -> None:
        self._model = model
        self.settings = dict(settings)
        """What is asked of every reply."""
        self.folder = folder
        """Where sessions are kept."""
        self.watched = watched
        """Whether a person sits there, who can stop a reply and go on."""
        self.think = False
        """Whether reasoning is shown."""
        self.attached: list[Image] = []
        """Images of the next message."""
        self.unsent: str | None = None
        """The last message, where it did not fit."""
        self._hinted = False
        self._config = config
        self._template = template
        self._stored = name is not None
        """Whether the runtime has the store, with state and all."""
        self._extra: Sessions | None = None
        """Sessions on disk that a runtime without a store has begun to keep."""
        self.runtime = self._opened(model)
        with ExitStack() as undo:
            undo.callback(self.close)
            # A model without a template is reported now, not after the first message.
            _ = self.runtime.chat_format
            name = NAME if name is None else name
            known = self.runtime.sessions.store.has("", name)
            self._home = self.runtime.sessions
            """Of which the session is one."""
            self.session = self._home.open(name, system=system)
            if known:
                self.wake()
            undo.pop_all()

    def close(self) -> None:
        if self._extra is not None:
            self._extra.close()
        self.runtime.close()

    @property
    def kept(self) -> bool:
        """Whether the session outlives this process."""
        return self._stored or self._home is self._extra

    @property
    def model_path(self) -> Path:
        return model_path(self.runtime)

    @property
    def prompt(self) -> str:
        name = self.session.name
        if self.kept:
            return f"{words.quoted(name)}> "
        return "> " if name == NAME else f"{words.quoted(name)} (not kept)> "

    def greet(self) -> None:
        """What a person at a terminal should know at the start."""
        terminal.tell(f"{self.model_path.name}. /help lists what else can be typed, Ctrl-D leaves.")
        if not self.kept:
            terminal.tell("This conversation is not kept; /keep NAME keeps it.")

    # Talking.

    def say(self, text: str) -> bool:
        """Show the reply to a message as it comes. Whether it could be given whole."""
        self.unsent = text
        said = {"role": "user", "content": [*self.attached, text]} if self.attached else text
        return self.follow(lambda: self.session.submit(said, keep_partial=True, **self.settings))

    def attach(self, path: Path) -> None:
        """Have an image in the next message."""
        if not self._stored:
            raise InvalidInputError(
                "images are kept with their conversation, and this one is not kept: start with --session NAME"
            )
        from perdure.cli.image_files import image_of

        self.attached.append(image_of(path))
        terminal.tell(f"{path.name} goes with the next message.")

    def send_unsent(self) -> None:
        """Send a message again that did not fit."""
        if (text := self.unsent) is not None:
            terminal.tell("Sending the message again that did not fit.")
            self.say(text)

    def offer_pending(self, ask: Callable[[str], str]) -> None:
        """Show the turn that was interrupted here, and ask what becomes of it."""
        if (info := self.session.pending) is None:
            return
        asked = "\n".join(message.content or "" for message in info.messages)
        why = f" ({info.ended})" if info.ended else ""
        terminal.tell(f"The reply to this was interrupted{why}:\n{_cut(asked)}")
        if info.text:
            terminal.tell(f"So far:\n{_cut(info.text)}")
        answer = ask("[C]ontinue it, [a]sk again, [d]iscard it, or [l]eave it? ").strip().lower()
        if answer in ("", "c", "continue", "y", "yes"):
            self.resume()
        elif answer in ("a", "again"):
            self.resume(again=True)
        elif answer in ("d", "discard"):
            self.discard()
        else:
            terminal.tell("/continue, /again and /discard do the same later; another message keeps both.")

    def resume(self, *, again: bool = False) -> bool:
        """Have the turn answered that was interrupted: on from where it was, or from the start."""
        if again:
            return self.follow(lambda: self.session.submit_resume(again=True, **self.settings))
        return self.follow(self.session.submit_resume)

    def discard(self) -> None:
        """Forget the turn that was interrupted."""
        there = self.session.pending is not None
        self.session.discard()
        terminal.tell("Discarded." if there else "There is nothing to discard.")

    def edit(self, turn: int, text: str) -> bool:
        """Say something else in a turn. The line that there was stays, as a branch."""
        before = self.session.fork(self._branch_name())
        good, made = False, False
        try:
            good = self.follow(
                lambda: self.session.submit_edit(turn, text, keep_partial=True, **self.settings)
            )
        finally:
            made = self.session.standing().head != before.standing().head
            if not made:
                # Nothing came of it: there is no second line.
                before.delete()
        if not made:
            return good
        there = words.quoted(before.name)
        terminal.tell(f"What was said before is kept as {there}; /sessions {there} goes there.")
        return good

    def _branch_name(self) -> str:
        base = self.session.name.partition("~")[0]
        number = 2
        while self._home.store.has(self.session.namespace, name := f"{base}~{number}"):
            number += 1
        return name

    def regenerate(self) -> bool:
        settings = dict(self.settings)
        if settings.get("seed") is not None and (last := self._last_turns(1)):
            # The same seed would only draw the same reply again.
            settings["seed"] = (last[-1].seed + 1) % (1 << 32)
        return self.follow(lambda: self.session.submit_regenerate(keep_partial=True, **settings))

    def follow(self, submit: Callable[[], Stream[ChatDelta, ChatReply]]) -> bool:
        """Show a reply until it ends, or until Ctrl-C or a signal that ends the process ends it."""
        started = time.time()
        try:
            job = submit()
        except ContextOverflow as error:
            terminal.note(
                f"with this message the conversation has {words.needed(error)}, but {error.fits} fit. It was "
                "not sent. /set overflow drop_oldest leaves out the oldest turns, /set overflow fold puts a "
                "summary in their place; either sends it again. /rewind goes back, /reset starts anew, and a "
                f"larger --ctx than {self.runtime.n_ctx} makes more fit"
            )
            return False
        except PerdureError as error:
            terminal.note(str(error))
            return False
        view = ReplyView(think=self.think)
        stop = terminal.Stop()
        try:
            with (
                terminal.keys_held_back(),
                terminal.stopped_by_signal(job, ended=lambda: job.interrupt("the chat was ended")) as stop,
                progress.reading(job, self.watched) as begun,
            ):

                def add(delta: ChatDelta) -> None:
                    begun()
                    view.add(delta)

                lost = terminal.show(job, add)
                reply = job.reply()
        except PerdureError as error:
            if stop.ends_process:
                raise SystemExit(stop.code) from None
            view.end()
            terminal.note(str(error))
            return False
        finally:
            job.cancel()
        if stop.ends_process:
            with suppress(OSError):
                view.end()
            raise SystemExit(stop.code)
        if lost is not None:
            raise lost
        view.end()
        self.unsent = None
        self.attached.clear()
        # A fold is kept together with the reply it made room for, so it shows only now.
        if any(turn.kind == "fold" and turn.created >= started for turn in self._last_turns(2)):
            terminal.tell("The conversation was full: a summary and its last turns stand for it now.")
        self._tell(reply, view)
        note_demo(self.runtime)
        if stop.code and not self.watched:
            raise typer.Exit(stop.code)
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
        if reply.finish_reason == "repetition":
            terminal.tell("(The reply repeated itself, so it was ended.)")
        if reply.finish_reason == "length" and self._limited(reply) and self.watched:
            limit = self.settings["max_tokens"]
            terminal.tell(f"(Cut at the limit of {words.count(limit, 'token')}; /set max_tokens changes it.)")
        elif reply.finish_reason == "length" and not self._limited(reply):
            terminal.note(
                f"the context of {self.runtime.n_ctx} tokens is full, so the reply ends here. "
                "/reset starts anew; --ctx makes more fit"
            )

    def _limited(self, reply: ChatReply) -> bool:
        """Whether a reply is as long as it was allowed to be."""
        limit = self.settings.get("max_tokens")
        return limit is not None and reply.usage.completion_tokens >= limit

    def _last_turns(self, count: int) -> list[Turn]:
        return self.session.history(after=max(0, self.session.turns - count))

    # Moving about.

    def wake(self) -> None:
        """Bring the state of the session back, and say what that took."""
        session = self.session
        started = time.monotonic()
        report = session.wake()
        took = time.monotonic() - started
        turns = words.count(session.turns, "turn")
        terminal.tell(
            f"{words.quoted(session.name)}: {turns}, {words.count(session.token_count, 'token')}; woken in "
            f"{words.milliseconds(took)}: {words.sources(report.tiers, report.computed)}."
        )

    def sessions(self) -> list[tuple[Sessions, bool]]:
        """Where there are sessions, and whether they are kept."""
        stores = [(self.runtime.sessions, self._stored)]
        return [*stores, (self._extra, True)] if self._extra is not None else stores

    def switch(self, name: str) -> None:
        """Go to another session, in memory or on disk."""
        for sessions, _ in self.sessions():
            if sessions.store.has("", name):
                self.session, self._home = sessions.get(name), sessions
                self.wake()
                if self.session.pending is not None:
                    terminal.tell("A reply here was interrupted: /continue, /again or /discard.")
                return
        there = " on disk" if self._stored else f"; those in {self.folder} are opened by --session NAME"
        raise SessionNotFoundError(f"there is no session {name!r} here{there}")

    def fork(self, name: str) -> None:
        left = self.session.name
        self.session = self.session.fork(name)
        message = f"Now in {words.quoted(name)}, a copy; {words.quoted(left)} stays as it is."
        terminal.tell(message if self.kept else f"{message} Neither is kept; /keep NAME keeps this one.")

    def start(self, system: str | None) -> None:
        """Start anew. What was said before stays, under its name."""
        old, sessions = self.session, self._home
        if not old.turns and not self.kept:
            old.delete()
            self.session = sessions.open(old.name, system=system)
            terminal.tell("The conversation starts anew.")
            return
        number = 2
        while sessions.store.has(old.namespace, name := f"{old.name}-{number}"):
            number += 1
        self.session = sessions.open(name, system=system)
        terminal.tell(f"Now in {words.quoted(name)}; {words.quoted(old.name)} stays as it is.")

    def keep(self, name: str) -> None:
        """Have the session on disk from now on, under a name."""
        if self.kept:
            raise SessionError(
                f"this conversation is kept as {self.session.name!r} already; /fork NAME makes a copy"
            )
        from perdure.sessions.sessions import Sessions

        if self._extra is None:
            self._extra = Sessions(
                self.folder, backend=self.runtime.backend, chat_format=lambda: self.runtime.chat_format
            )
        old, self.session = self.session, self._extra.copy(self.session, name)
        self._home = self._extra
        old.delete()
        terminal.tell(
            f"Kept as {words.quoted(name)} in {self.folder}: "
            f"`perdure chat --session {words.quoted(name)}` continues it."
        )

    def offer_to_keep(self, ask: Callable[[str], str]) -> None:
        """Before leaving, ask: no conversation is dropped that its user may have wanted."""
        if self._stored:
            return
        here = None if self.kept else self.session.name
        decided: dict[str, str] = {}
        """What became of a conversation; its branches go the same way."""
        # A conversation before its branches.
        for info in sorted(self.runtime.sessions.list(), key=lambda each: "~" in each.name):
            base, mark, number = info.name.partition("~")
            if mark and base in decided:
                if decided[base]:
                    self._home = self.runtime.sessions
                    self.session = self._home.get(info.name)
                    self.keep(f"{decided[base]}~{number}")
                continue
            self._home = self.runtime.sessions
            self.session = self._home.get(info.name)
            turns = words.count(self.session.turns, "turn")
            while self.session.turns:
                label = (
                    "This conversation"
                    if info.name == here
                    else f"The conversation {words.quoted(info.name)}"
                )
                question = f"{label} ({turns}) is not saved. Name to save it under, or n to discard: "
                name = ask(question).strip()
                if name.lower() in ("", *_NO):
                    decided[info.name] = ""
                    break
                try:
                    self.keep(name)
                    decided[info.name] = name
                    break
                except PerdureError as error:
                    terminal.note(str(error))

    def change_model(self, name: str) -> None:
        """Go on with another model. The old one stays until the new one is ready."""
        if (holder := getattr(self.runtime.backend, "holder", None)) is not None:
            raise SessionError(
                f"the model is that of {holder}: `perdure chat {name}` starts another chat with that one"
            )
        if self._extra is not None:
            raise SessionError(
                f"this chat has begun to keep sessions: start again with "
                f"`perdure chat {name} --session {words.quoted(self.session.name)}` to change the model"
            )
        model = terminal.load(name)
        file = Path(str(getattr(model, "path", name))).name
        if not self._template and not model.info.template.strip():
            model.close()
            raise SessionError(f"{file} has no chat template, so it cannot chat")
        old = self.runtime
        sessions = [] if self._stored else [old.sessions.get(info.name) for info in old.sessions.list()]
        for session in sessions:
            # Read now: what they are kept in is closed before they are copied.
            session.history()
        here = self.session.name
        # A store has one engine, so the old runtime is closed before the new one is opened.
        old.close()
        try:
            self.runtime = self._opened(name, model)
        except BaseException:
            self.runtime = self._opened(self._model)
            self._bring(sessions, here)
            raise
        self._bring(sessions, here)
        self._model = name
        terminal.tell(f"Now with {file}. It reads the conversation with the next message.")

    def _bring(self, sessions: list[Session], here: str) -> None:
        for session in sessions:
            self.runtime.sessions.copy(session, session.name)
        self._home = self.runtime.sessions
        self.session = self._home.get(here)

    def _opened(self, name: str | None, model: EngineModel | None = None) -> Runtime:
        return opened(
            name,
            replace(self._config, slots=1),
            store=self.folder if self._stored else None,
            template=self._template,
            model=model,
        )


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
