"""What can be typed in a chat besides messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.cli import terminal, words
from perdure.errors import InvalidInputError, PerdureError, SessionError

if TYPE_CHECKING:
    from perdure.cli.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Command:
    """A word that starts with a slash, and what it does with the text behind it."""

    name: str
    takes: str
    does: str
    run: Callable[[Conversation, str], object]


def obey(chat: Conversation, line: str) -> bool:
    """Do what a line says. Whether the chat goes on."""
    name, _, rest = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    found = next((command for command in COMMANDS if command.name == name), None)
    if found is None:
        terminal.tell(f"There is no {name}; /help tells what there is.")
        return True
    try:
        found.run(chat, rest.strip())
    except PerdureError as error:
        terminal.note(str(error))
    except OSError as error:
        terminal.note(f"{error.filename or 'this'} cannot be used: {error.strerror or error}")
    return True


def _help(chat: Conversation, _: str) -> None:
    usages = [(f"{command.name} {command.takes}".rstrip(), command.does) for command in COMMANDS]
    usages += [("/quit", "leave; so does Ctrl-D"), ("Ctrl-C", "stop a reply; what there is of it stays")]
    usages += [
        ("//…", "a message that starts with a slash"),
        ('…\\ or """', "a message of several lines: end each with a backslash, or quote them all"),
    ]
    wide = max(len(usage) for usage, _ in usages)
    terminal.tell("\n".join(f"{usage:<{wide}}  {does}" for usage, does in usages))


def _system(chat: Conversation, text: str) -> None:
    chat.start(_needed(text, "a system message: /system You are terse."))


def _fork(chat: Conversation, name: str) -> None:
    chat.fork(_needed(name, "a name for the fork: /fork NAME"))


def _rewind(chat: Conversation, count: str) -> None:
    turns = _whole(count, "/rewind takes a number of turns") if count else 1
    chat.session.rewind(turns)
    terminal.tell(f"Back by {words.count(turns, 'turn')}; {words.count(chat.session.turns, 'turn')} left.")


def _edit(chat: Conversation, rest: str) -> None:
    number, _, text = rest.partition(" ")
    if number.isascii() and number.isdigit() and text.strip():
        chat.edit(int(number), text.strip())
        return
    said = [at for at, turn in enumerate(chat.session.history(), 1) if turn.kind == "turn"]
    if not said:
        raise SessionError("there is nothing to edit yet")
    chat.edit(said[-1], _needed(rest, "the new text: /edit TEXT, or /edit TURN TEXT"))


def _regenerate(chat: Conversation, _: str) -> None:
    chat.regenerate()


def _sessions(chat: Conversation, name: str) -> None:
    if name:
        chat.switch(name)
        return
    for row in chat.runtime.sessions.list():
        here = "*" if row.name == chat.session.name else " "
        turns = words.count(row.depth, "turn")
        terminal.tell(f"{here} {turns:>10}  {words.moment(row.updated)}  {words.quoted(row.name)}")


def _sleep(chat: Conversation, _: str) -> None:
    if chat.store is None:
        raise SessionError("this chat is not kept on disk: start it with --session NAME to let it sleep")
    chat.session.sleep()
    plan = chat.session.plan_wake()
    terminal.tell(
        f"Asleep in {chat.store}: {words.size(plan.nbytes)}. To wake it: "
        f"{words.sources(plan.tiers, plan.computed)}. The next message does."
    )


def _save(chat: Conversation, file: str) -> None:
    path = Path(_needed(file, "a file: /save FILE (.md and .jsonl give text, others all of it)")).expanduser()
    if path.exists():
        raise InvalidInputError(f"{path} exists already: choose another name")
    form = {".md": "markdown", ".jsonl": "jsonl"}.get(path.suffix.lower())
    if form == "markdown" or form == "jsonl":
        path.write_text(chat.session.transcript(form), encoding="utf-8")  # type: ignore[arg-type]
    else:
        from perdure.cli.progress import working

        with working(f"Writing {path.name}") as progress:
            chat.session.export(path, progress=progress)
    terminal.tell(f"Saved to {path} ({words.size(path.stat().st_size)}).")


def _stats(chat: Conversation, _: str) -> None:
    session, last = chat.session, chat.session.last
    turns, used = (
        words.count(session.turns, "turn"),
        f"{len(session.tokens)} of {chat.runtime.n_ctx} tokens",
    )
    terminal.tell(f"session  {words.quoted(session.name)}, {turns}, {used}")
    terminal.tell(words.effort(last) if last is not None else "nothing was answered yet")


def _think(chat: Conversation, how: str) -> None:
    if how not in ("show", "hide"):
        raise InvalidInputError("/think show, or /think hide")
    chat.think = how == "show"
    terminal.tell("Reasoning is shown from now on." if chat.think else "Reasoning is hidden.")


def _reset(chat: Conversation, _: str) -> None:
    chat.session.rewind(to=0)
    terminal.tell("The conversation is forgotten.")


def _needed(text: str, what: str) -> str:
    if not text:
        raise InvalidInputError(f"give {what}")
    return text


def _whole(text: str, otherwise: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidInputError(f"{otherwise}, got {text!r}")
    return int(text)


COMMANDS = (
    Command("/help", "", "show this", _help),
    Command("/system", "TEXT", "start anew with that system message", _system),
    Command("/fork", "NAME", "go on in a copy; this conversation stays as it is", _fork),
    Command("/rewind", "[N]", "go back by N turns, or by one", _rewind),
    Command("/edit", "[TURN] TEXT", "say something else in that turn, or in the last", _edit),
    Command("/regen", "", "another reply to the last message", _regenerate),
    Command("/sessions", "[NAME]", "list the sessions, or go to one", _sessions),
    Command("/sleep", "", "put the state on disk and free its memory", _sleep),
    Command("/save", "FILE", "export: .md and .jsonl give text, others the session with its state", _save),
    Command("/stats", "", "what the last reply reused and computed, and how fast it was", _stats),
    Command("/think", "show|hide", "show what the model thinks before it answers, or do not", _think),
    Command("/reset", "", "forget the conversation and start anew", _reset),
)
WORDS = (*(command.name for command in COMMANDS), "/quit")
