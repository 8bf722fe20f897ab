"""What an error advises, in options of the command, with those that were in use when it came."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Sequence

_ADVISED = re.compile(r"`(perdure (?:chat|run|serve|sessions|cache)\b[^`]*)`")
_OPTIONS = {
    'n_ctx="auto"': "--ctx auto",
    "n_ctx": "--ctx",
    "n_seq": "--slots",
    "kv_type": "--kv-type",
    "v_type": "--kv-type",
    "force_kv=True (--force-kv)": "--force-kv",
    "give max_tokens": "give --max-tokens",
    "gpu_layers": "--gpu-layers",
    "cpu_experts": "--cpu-experts",
    "tensor_split": "--tensor-split",
    "kv_offload=False": "--no-kv-offload",
}
"""What the library calls by the names of keywords."""
_KEYWORDS = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, _OPTIONS))})(?!\w)")


def in_options(text: str) -> str:
    """`text` with the options of the command for the library's keywords."""
    return _KEYWORDS.sub(lambda match: _OPTIONS[match[0]], text)


def with_options(text: str, arguments: Sequence[str]) -> str:
    """`text` in options, whose advice holds for the store that the command line names."""
    text = in_options(text)
    store = _value("--store", arguments)
    if store is None:
        return text
    option = f" --store {shlex.quote(store)}"
    return _ADVISED.sub(lambda match: f"`{match[1]}{'' if '--store' in match[1] else option}`", text)


def _value(option: str, arguments: Sequence[str]) -> str | None:
    """What an option was given, if it was."""
    for at, word in enumerate(arguments):
        if word == "--":
            return None
        if word == option and at + 1 < len(arguments):
            return arguments[at + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


# Warnings of the library, shown like the notes of a command.

_LIBRARY = logging.getLogger("perdure")
_ENGINE = "perdure.llama"
"""The log of llama.cpp, which is for developers."""


class LogNotes(logging.Handler):
    """Puts warnings on standard error, each a line after `perdure: `, with our options for the keywords."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        from perdure.cli.output import terminal

        if record.name != _ENGINE and not record.name.startswith(f"{_ENGINE}."):
            terminal.note(in_options(record.getMessage()))


def show_warnings() -> None:
    """Show warnings from now on, until there is a log for them."""
    _LIBRARY.addHandler(LogNotes())


def leave_warnings_to_the_log() -> None:
    for handler in [each for each in _LIBRARY.handlers if isinstance(each, LogNotes)]:
        _LIBRARY.removeHandler(handler)
