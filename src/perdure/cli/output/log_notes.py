"""Warnings of the library, told as the commands tell things."""

from __future__ import annotations

import logging

_LIBRARY = logging.getLogger("perdure")
_ENGINE = "perdure.llama"
"""What llama.cpp says is for those who build it."""


class LogNotes(logging.Handler):
    """Puts warnings on standard error, each a line after `perdure: `, with our options for the keywords."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        from perdure.cli.output import terminal

        if record.name != _ENGINE and not record.name.startswith(f"{_ENGINE}."):
            terminal.note(record.getMessage().replace("n_ctx", "--ctx"))


def tell_warnings() -> None:
    """Have warnings told from now on, until there is a log for them."""
    _LIBRARY.addHandler(LogNotes())


def leave_warnings_to_the_log() -> None:
    for handler in [each for each in _LIBRARY.handlers if isinstance(each, LogNotes)]:
        _LIBRARY.removeHandler(handler)
