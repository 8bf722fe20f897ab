"""Defaults of options, as the config file and the environment have them."""

from __future__ import annotations

from typing import Any

from perdure.config import SETTINGS

_OPTIONS = {setting.name for setting in SETTINGS} - {"model", "store"}
"""Settings that are options of the same name. Model and store are asked for where they are used."""


def defaults(command: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """What the config file and the environment say about the options of a command and of those below it."""
    below = getattr(command, "commands", {})
    own = {
        option.name: chosen[option.name]
        for option in command.params
        if option.name in _OPTIONS & chosen.keys()
    }
    return own | {name: defaults(each, chosen) for name, each in below.items()}
