"""What can be typed in a chat besides messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from perdure import system
from perdure.checks import check_one_of
from perdure.cli.commands.sessions import title_of
from perdure.cli.options.groups import REPLY_OPTIONS
from perdure.cli.output import terminal, words
from perdure.cli.output.progress import working
from perdure.config import Overflow
from perdure.errors import InvalidInputError, PerdureError, SessionError
from perdure.options import options_of
from perdure.request_options import Sampling

if TYPE_CHECKING:
    from perdure.cli.conversation import Conversation

_QUIT = "/quit"
_ELSEWHERE = {
    "/exit": _QUIT,
    "/bye": _QUIT,
    "/?": "/help",
    "/clear": "/reset",
    "/load": "/sessions",
    "/export": "/save",
}
"""What other programs call it."""
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".wav")
_LISTED = 30
"""Sessions that are shown, the latest first."""


@dataclass(frozen=True, slots=True)
class Command:
    """A word that starts with a slash, and what it does with the text behind it."""

    name: str
    takes: str
    does: str
    run: Callable[[Conversation, str], object]


def run_slash_command(chat: Conversation, line: str) -> bool:
    """Do what a line says. Whether the chat goes on."""
    typed, _, rest = line.partition(" ")
    name = _ELSEWHERE.get(typed, typed)
    if name == _QUIT:
        return False
    slash_command = next((command for command in COMMANDS if command.name == name), None)
    if slash_command is None:
        near = difflib.get_close_matches(name, NAMES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        terminal.tell(f"There is no {typed}; {meant}/help tells what there is.")
        return True
    try:
        slash_command.run(chat, rest.strip())
    except PerdureError as error:
        terminal.note(str(error))
    except OSError as error:
        terminal.note(f"{error.filename or 'this'} cannot be used: {error.strerror or error}")
    return True


def _help(chat: Conversation, _: str) -> None:
    usages = [(f"{command.name} {command.takes}".rstrip(), command.does) for command in COMMANDS]
    usages += [
        (_QUIT, "leave; so does Ctrl-D"),
        ("//…", "a message that starts with a slash"),
        ("Ctrl-C", "stop a reply; what there is of it stays"),
        ("Ctrl-R", "search in what was typed before; the arrow keys bring it back"),
        ("Alt-Enter", 'another line of the same message; a backslash before Enter or """ around it do too'),
    ]
    wide = max(len(usage) for usage, _ in usages)
    terminal.tell("\n".join(f"{usage:<{wide}}  {does}" for usage, does in usages))


def _system(chat: Conversation, text: str) -> None:
    if text:
        chat.start(text)
    else:
        terminal.tell(chat.session.system or "There is no system prompt; /system TEXT starts anew with one.")


def _keep(chat: Conversation, name: str) -> None:
    chat.keep(_needed(name, "a name to keep it under: /keep NAME"))


def _image(chat: Conversation, path: str) -> None:
    chat.attach(Path(_unquoted(_needed(path, "a file: /image FILE"))).expanduser())


def is_pasted_image(line: str) -> bool:
    """Whether a line is the path of an image file, as terminals paste what is dropped on them."""
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(_unquoted(line.strip())).expanduser()
        return path.suffix.lower() in _IMAGES and path.is_file()
    return False


def _unquoted(path: str) -> str:
    """A path as it is, which a terminal may have quoted."""
    if len(path) > 1 and path[0] == path[-1] and path[0] in "\"'":
        return path[1:-1]
    return re.sub(r"\\(.)", r"\1", path) if system.POSIX else path


def _history(chat: Conversation, _: str) -> None:
    for number, turn in enumerate(chat.session.history(), 1):
        messages = [*turn.messages, *([turn.reply] if turn.reply is not None else [])]
        for message in messages:
            text = (message.content or "").strip().replace("\n", "\n    ")
            terminal.tell(f"{number}  {message.role}: {text}")
    if not chat.session.turns:
        terminal.tell("Nothing was said yet.")


def _model(chat: Conversation, name: str) -> None:
    if name:
        chat.change_model(name)
    else:
        terminal.tell(f"{chat.model_path}; /model NAME changes to another one.")


def _set(chat: Conversation, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_")
    if not name:
        for known, each in REPLY_OPTIONS.items():
            chosen = chat.settings.get(known)
            shown = each.default_text if chosen is None else f"{chosen}  (set)"
            terminal.tell(f"{known:<18} {shown:<24} {each.help}")
        full = chat.settings.get("overflow", "error")
        terminal.tell(
            f"{'overflow':<18} {full:<24} what a full context means: {', '.join(get_args(Overflow))}"
        )
        return
    if name == "overflow":
        _set_overflow(chat, value.strip())
        return
    option = REPLY_OPTIONS.get(name)
    if option is None:
        names = (*REPLY_OPTIONS, "overflow")
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise InvalidInputError(f"there is no setting {name!r}; {meant}")
    if not value.strip():
        raise InvalidInputError(f"give a value: /set {name} {option.default_text}, or /set {name} default")
    if value.strip() == "default":
        chat.settings.pop(name, None)
    else:
        chosen = option.parse(value.strip())
        if name in options_of(Sampling):
            Sampling(**{name: chosen})
        chat.settings[name] = chosen
    shown = chat.settings.get(name, option.default_text)
    terminal.tell(f"{name} is {shown} from the next reply on.")


def _set_overflow(chat: Conversation, value: str) -> None:
    """What a full context means from now on. A message that did not fit is sent again."""
    check_one_of("overflow", value, get_args(Overflow))
    chat.settings["overflow"] = value
    if value == "shift":
        # It would go on for ever.
        chat.settings.setdefault("max_tokens", chat.runtime.n_ctx)
    terminal.tell(f"overflow is {value} from the next reply on.")
    if value != "error":
        chat.send_unsent()


def _undo(chat: Conversation, _: str) -> None:
    last = chat.session.history(after=max(0, chat.session.turns - 1))
    if not last:
        raise SessionError("there is nothing to take back yet")
    chat.session.rewind(1)
    text = next((message.content or "" for message in last[-1].messages), "a summary")
    terminal.tell(f"Took back: {text}")


def _continue(chat: Conversation, _: str) -> None:
    chat.resume()


def _again(chat: Conversation, _: str) -> None:
    chat.resume(again=True)


def _discard(chat: Conversation, _: str) -> None:
    chat.discard()


def _fork(chat: Conversation, name: str) -> None:
    chat.fork(_needed(name, "a name for the fork: /fork NAME"))


def _rewind(chat: Conversation, count: str) -> None:
    turns = _whole(count, "/rewind takes a number of turns") if count else 1
    if turns > chat.session.turns:
        there = words.count(chat.session.turns, "turn")
        raise SessionError(f"/rewind {turns} goes back too far: this conversation has {there}")
    chat.session.rewind(turns)
    terminal.tell(f"Back by {words.count(turns, 'turn')}; {words.count(chat.session.turns, 'turn')} left.")


def _edit(chat: Conversation, rest: str) -> None:
    number, _, text = rest.partition(" ")
    if number.isascii() and number.isdigit() and text.strip():
        chat.edit(int(number), text.strip())
        return
    session = chat.session
    numbers = range(session.turns, 0, -1)
    last = next((at for at in numbers if session.history(limit=1, after=at - 1)[0].kind == "turn"), None)
    if last is None:
        raise SessionError("there is nothing to edit yet")
    chat.edit(last, _needed(rest, "the new text: /edit TEXT, or /edit TURN TEXT"))


def _regenerate(chat: Conversation, _: str) -> None:
    chat.regenerate()


def _sessions(chat: Conversation, name: str) -> None:
    if name:
        chat.switch(name)
    else:
        _list(chat)


def _search(chat: Conversation, text: str) -> None:
    text = _needed(text, "what to look for: /search TEXT")
    if not _list(chat, text):
        terminal.tell(f"No session has {words.quoted(text)}.")


def _rename(chat: Conversation, title: str) -> None:
    title = title_of(_needed(title, "a title: /rename TITLE"))
    chat.session.note({"title": title})
    terminal.tell(f"{words.quoted(chat.session.name)} is called {words.quoted(title)} in lists.")


def _branches(chat: Conversation, _: str) -> None:
    """This conversation and those that were split off it by an edit."""
    base = chat.session.name.partition("~")[0]
    _list(chat, branches_of=base)


def _list(chat: Conversation, text: str | None = None, *, branches_of: str | None = None) -> int:
    """The sessions, those with a text, or the branches of one; how many there are."""
    shown = 0
    for sessions, stored in chat.sessions():
        rows = sessions.list(limit=None if branches_of else _LISTED + 1, text=text)
        if branches_of is not None:
            rows = [row for row in rows if row.name.partition("~")[0] == branches_of]
        shown += len(rows)
        for row in rows[:_LISTED]:
            here = "*" if row.name == chat.session.name and chat.kept is stored else " "
            turns = words.count(row.depth, "turn")
            note = "" if stored else "  (not kept)"
            title = f"  {words.quoted(row.title)}" if row.title else ""
            terminal.tell(
                f"{here} {turns:>10}  {words.moment(row.updated)}  {words.quoted(row.name)}{title}{note}"
            )
        if len(rows) > _LISTED:
            terminal.tell(f"  These are the latest {_LISTED}; `perdure sessions ls` lists all of them.")
    return shown


def _sleep(chat: Conversation, _: str) -> None:
    if not chat.kept:
        raise SessionError("this conversation is not kept on disk: /keep NAME keeps it")
    chat.session.sleep()
    estimate = chat.session.plan_wake()
    terminal.tell(
        f"Asleep in {chat.folder}: {words.size(estimate.nbytes)}. To wake it: "
        f"{words.sources(estimate.tiers, estimate.computed)}. The next message does."
    )


def _save(chat: Conversation, file: str) -> None:
    path = Path(_needed(file, "a file: /save FILE (.md and .jsonl give text, others all of it)")).expanduser()
    if path.exists():
        raise InvalidInputError(f"{path} exists already: choose another name")
    form = {".md": "markdown", ".jsonl": "jsonl"}.get(path.suffix.lower())
    if form == "markdown" or form == "jsonl":
        path.write_text(chat.session.transcript(form), encoding="utf-8")  # type: ignore[arg-type]
    else:
        with working(f"Writing {path.name}") as progress:
            chat.session.export(path, progress=progress)
    terminal.tell(f"Saved to {path} ({words.size(path.stat().st_size)}).")


def _stats(chat: Conversation, _: str) -> None:
    session, last = chat.session, chat.session.last
    turns, used = (
        words.count(session.turns, "turn"),
        f"{session.token_count} of {chat.runtime.n_ctx} tokens",
    )
    terminal.tell(f"session  {words.quoted(session.name)}, {turns}, {used}")
    terminal.tell(words.effort(last) if last is not None else "nothing was answered yet")


def _think(chat: Conversation, how: str) -> None:
    if how not in ("show", "hide"):
        raise InvalidInputError("/think show, or /think hide")
    chat.think = how == "show"
    terminal.tell("Reasoning is shown from now on." if chat.think else "Reasoning is hidden.")


def _reset(chat: Conversation, _: str) -> None:
    chat.start(chat.session.system)


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
    Command("/keep", "NAME", "keep the conversation on disk under a name", _keep),
    Command(
        "/image",
        "FILE",
        "show the model an image, or a sound, with the next message; so does a pasted path",
        _image,
    ),
    Command("/history", "", "show the conversation so far", _history),
    Command("/undo", "", "take back the last message and its reply", _undo),
    Command("/rewind", "[N]", "go back by N turns, or by one", _rewind),
    Command(
        "/edit",
        "[TURN] TEXT",
        "say something else in that turn, or in the last; the old line stays",
        _edit,
    ),
    Command("/regen", "", "another reply to the last message", _regenerate),
    Command("/continue", "", "go on with the reply that was interrupted, behind its last word", _continue),
    Command("/again", "", "answer the message anew whose reply was interrupted", _again),
    Command("/discard", "", "forget the message and the reply that was interrupted", _discard),
    Command("/fork", "NAME", "go on in a copy; this conversation stays as it is", _fork),
    Command("/reset", "", "start anew; this conversation stays as it is", _reset),
    Command("/system", "[TEXT]", "show the system prompt, or start anew with that one", _system),
    Command("/model", "[NAME]", "show the model, or go on with another", _model),
    Command("/set", "[NAME VALUE]", "show the settings of replies, or change one", _set),
    Command("/sessions", "[NAME]", "list the sessions, or go to one", _sessions),
    Command(
        "/search", "TEXT", "list the sessions with that text in their names or in what was said", _search
    ),
    Command("/rename", "TITLE", "what the conversation is called in lists; its name stays", _rename),
    Command("/branches", "", "list the lines of this conversation that edits have left", _branches),
    Command("/sleep", "", "put the state on disk and free its memory", _sleep),
    Command("/save", "FILE", "export: .md and .jsonl give text, others the session with its state", _save),
    Command("/stats", "", "what the last reply reused and computed, and how fast it was", _stats),
    Command("/think", "show|hide", "show or hide the model's reasoning", _think),
)
NAMES = (*(command.name for command in COMMANDS), _QUIT)
