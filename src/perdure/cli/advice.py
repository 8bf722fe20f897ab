"""Commands that an error advises, with the options that were in use when it came."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_ADVISED = re.compile(r"`(perdure (?:chat|run|serve|sessions|cache)\b[^`]*)`")


def with_options(text: str, arguments: Sequence[str]) -> str:
    """`text`, whose advice holds for the store that the command line names."""
    store = _value("--store", arguments)
    if store is None:
        return text
    option = f" --store {shlex.quote(store)}"
    return _ADVISED.sub(lambda found: f"`{found[1]}{'' if '--store' in found[1] else option}`", text)


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
