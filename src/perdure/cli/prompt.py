"""The prompt of a command: its words, attached files and standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from perdure import atomic
from perdure.atomic import TEXT_BYTES
from perdure.cli.output import terminal
from perdure.engine.registry import names_model
from perdure.errors import InvalidInputError, ModelNotFoundError


def split_model(words: Sequence[str] | None, model: str | None) -> tuple[str | None, list[str]]:
    """The model, if one is named, and the words of the prompt.

    The first word is the model if it can only be meant so, or if it is a word before a quoted prompt. A short
    name, which could be the beginning of a question, is asked about in a terminal, and elsewhere taken as the
    model and said. With `--model` every word belongs to the prompt.
    """
    arguments = list(words or ())
    if (
        model is not None
        and arguments
        and Path(arguments[0]).expanduser().is_file()
        and names_model(arguments[0])
    ):
        raise typer.BadParameter(f"name the model once: {model} or {arguments[0]}", param_hint="MODEL")
    if model is not None or not arguments:
        return model, arguments
    first, *rest = arguments
    if names_model(first):
        return first, rest
    if first.startswith(("./", "../", "/", "~/")) and Path(first).expanduser().is_file():
        raise ModelNotFoundError(f"{first} is not a model; `-f {first}` attaches it to the prompt")
    if len(rest) == 1 and " " in rest[0].strip() and not any(letter.isspace() for letter in first):
        # `run llama3 "why is the sky blue"`: the word before a quoted prompt names a model.
        return first, rest
    if _is_short_name(first):
        return (first, rest) if not rest or _means_model(first) else (None, arguments)
    if rest and (names := _misspelt(first)):
        terminal.note(f"{first} is part of the prompt; a model of nearly that name is {names[0]}")
    return None, arguments


def _is_short_name(word: str) -> bool:
    """Whether a word is a short name of a model, known or of a known family."""
    from perdure.models.finder import finder

    return not any(letter.isspace() for letter in word) and finder().is_short_name(word)


def _misspelt(word: str) -> Sequence[str]:
    """The names that a word is like, if it has a number as they do: `lama3.2`."""
    from perdure.models.finder import finder

    is_name = any(letter.isdigit() for letter in word) and any(letter.isalpha() for letter in word)
    return finder().near(word) if is_name and len(word.split()) == 1 else ()


def _means_model(word: str) -> bool:
    """Whether the first word of a prompt is meant as the model."""
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        return typer.confirm(f"{word} is a model's name. Ask that model?", default=True, err=True)
    terminal.note(f"{word} is taken as the model; with `-m MODEL` before it, it is part of the prompt")
    return True


def prompt_text(words: Sequence[str], files: Sequence[Path], *, piped: bool) -> str:
    """One message: the words, then the files, then all of standard input, if it is `piped`."""
    named = [word for word in words if word != "-"]
    parts = [" ".join(named), *(_attached(file) for file in files)]
    if piped or "-" in words:
        parts.append(standard_input())
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise InvalidInputError("the prompt is empty")
    return text


def standard_input_is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def system_text(prompt: str | None) -> str | None:
    """A system prompt: the text itself, or what is in the file after an @."""
    if prompt is None or not prompt.startswith("@"):
        return prompt
    return read_text(Path(prompt[1:]).expanduser()).strip()


def read_text(path: Path) -> str:
    try:
        return atomic.read_text(path, TEXT_BYTES, regular=False)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not UTF-8 text") from None


def _attached(path: Path) -> str:
    """A file with its name above it, so that the prompt can speak of it."""
    return f"{path.name}:\n```\n{read_text(path).rstrip()}\n```"


def standard_input(what: str = "a prompt", *, from_pipe: bool = False) -> str:
    if sys.stdin is None or sys.stdin.closed or (from_pipe and sys.stdin.isatty()):
        raise typer.BadParameter(f"give {what}, or pipe one in", param_hint="PROMPT")
    try:
        text = atomic.read_stream(sys.stdin.buffer, TEXT_BYTES, "standard input").decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"standard input is not UTF-8 text (byte {error.start})") from None
    # The one newline that every pipe ends with is nobody's wish.
    return text.removesuffix("\n").removesuffix("\r")
