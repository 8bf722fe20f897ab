"""Other names of commands, as people's fingers know them. `--help` shows one name for each."""

from __future__ import annotations

from collections.abc import Container, Sequence

_LISTING = ("ls", "list", "show", "search", "stats")
_REMOVING = ("rm", "remove", "unset", "forget")
_MEANT = {
    "ls": _LISTING,
    "list": _LISTING,
    "show": _LISTING,
    "get": ("show",),
    "rm": _REMOVING,
    "remove": _REMOVING,
    "delete": _REMOVING,
    "create": ("add",),
}
"""What a word may stand for where there is no command of that name, the likeliest first."""
_QUESTIONS = {"help": "--help", "version": "--version"}
"""Words for what is asked by an option here."""


def shown_name(word: str, commands: Container[str]) -> str:
    """The name of the command that a word stands for, among `commands`; else the word itself."""
    if word in commands:
        return word
    return next((name for name in _MEANT.get(word, ()) if name in commands), word)


def as_options(arguments: Sequence[str]) -> list[str]:
    """Arguments with `help run` as `run --help`, and `version` as `--version`."""
    if arguments and (option := _QUESTIONS.get(arguments[0])) is not None:
        return [*arguments[1:], option]
    return list(arguments)


def advice_for_word(word: str, commands: Container[str]) -> str | None:
    """What to say about a first word that is no command but a question or a model, if it is one."""
    if shown_name(word, commands) in commands or word.startswith("-"):
        return None
    from perdure.models import names_model

    if any(letter.isspace() for letter in word.strip()):
        return "a question is asked by `perdure run`, or within a conversation by `perdure chat`"
    if names_model(word):
        return f"`perdure run {word} PROMPT` asks that model, `perdure chat {word}` talks with it"
    return None
