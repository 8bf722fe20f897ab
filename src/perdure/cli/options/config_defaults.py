"""Defaults of options, as the config file and the environment have them."""

from __future__ import annotations

from typing import Any

from perdure.config import SETTINGS, settings

_OPTIONS = {setting.name for setting in SETTINGS} - {"model", "store", "engine"}
"""Settings that are options of the same name. The others are asked for where they are used."""


def defaults(command: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """What the config file and the environment say about the options of a command and of those below it."""
    below = getattr(command, "commands", {})
    own = {
        option.name: chosen[option.name]
        for option in command.params
        if option.name in _OPTIONS & chosen.keys()
    }
    return own | {name: defaults(each, chosen) for name, each in below.items()}


def usual_value(group: Any, name: str) -> str:
    """What a setting is where nobody has chosen it, as the help of its option says."""
    if name == "model":
        return "the small default model"
    if name == "store":
        return str(settings().store)
    if name == "engine":
        return "small ones that fit the machine, else cpu"
    options = [option for each in ("serve", "chat") for option in group.commands[each].params]
    option = next(option for option in options if option.name == name)
    if isinstance(option.show_default, str):
        return option.show_default
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, float):
        return f"{option.default:g}"
    return "none" if option.default is None else str(option.default)
