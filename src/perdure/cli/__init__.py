"""The command. Exit codes: 0 done, 1 it could not be done, 2 wrong usage, 130 stopped by Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import sys

HELP = os.path.join(os.path.dirname(__file__), "help.txt")
"""What `perdure --help` prints, as tools/command_help.py writes it."""


def main() -> None:
    """Run the command that the process was started with, and exit."""
    sys.unraisablehook = _unraisable
    try:
        try:
            _run(sys.argv[1:])
        finally:
            # What is left is waiting for threads, and Python would answer a second Ctrl-C by a traceback.
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        _explain(error)
        sys.exit(1)
    except Exception as error:
        from perdure.errors import PerdureError

        if not isinstance(error, PerdureError):
            raise
        from perdure.cli.advice import with_options

        _tell(with_options(str(error), sys.argv[1:]))
        sys.exit(1)


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


def _unraisable(details: sys.UnraisableHookArgs) -> None:
    """Have a Ctrl-C that struck where nothing can be raised, as in the middle of an import, strike again."""
    if details.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(details)
        return
    import _thread

    if hasattr(signal, "pthread_kill"):
        # A signal of the system also ends a wait.
        _thread.start_new_thread(signal.pthread_kill, (_thread.get_ident(), signal.SIGINT))
    else:
        _thread.start_new_thread(_thread.interrupt_main, ())


def _run(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]) and _is_wide() and _is_usual():
        # Building all commands, only to name them, takes longer than Python takes to start.
        with open(HELP, encoding="utf-8") as text:
            print(text.read(), end="")
    elif arguments == ["--version"]:
        from perdure import __version__

        print(f"perdure {__version__}")
    else:
        from perdure.cli.app import start

        start(arguments)


def _is_wide() -> bool:
    """Whether lines of 80 characters fit. Where they do not, the help is wrapped anew."""
    import shutil

    return shutil.get_terminal_size().columns >= 80


def _is_usual() -> bool:
    """Whether all extensions are ours, whose commands the text has."""
    from importlib.metadata import entry_points

    return all(entry.value.startswith("perdure.ext.") for entry in entry_points(group="perdure.extensions"))


def _explain(error: OSError) -> None:
    """A disk that is full or a folder that cannot be written, in words and with what can be done."""
    from perdure.config import settings

    home = settings().home
    place = str(error.filename) if error.filename is not None else "a file"
    if error.errno == errno.EPIPE:
        # The reader of the pipe has gone. Python would report it again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"{place} is" if error.filename is not None else f"standard output or {home} is"
        _tell(f"the disk that {where} on is full: make room and try again")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif place.startswith(str(home)):
        _tell(
            f"{place} cannot be written: {error.strerror}. perdure keeps its files in {home}; "
            "PERDURE_HOME=DIR chooses another folder"
        )
    else:
        _tell(f"{place} cannot be used: {error.strerror or error}")


def _tell(text: str) -> None:
    from perdure.cli.output.terminal import note

    note(text)
