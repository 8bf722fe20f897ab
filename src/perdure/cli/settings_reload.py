"""The settings of a server that runs, read again from the config file."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perdure.cli.options.config_defaults import defaults
from perdure.cli.options.groups import SamplingOptions
from perdure.cli.options.live import LiveOptions
from perdure.config import choices, settings
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    from perdure.server.core.app_state import AppState
    from perdure.server.core.keys import Keys
    from perdure.server.core.settings import LiveSettings

log = logging.getLogger("perdure.server")
_LIVE = frozenset(field.name for kind in (LiveOptions, SamplingOptions) for field in fields(kind))


def live_settings(options: LiveOptions, sampling: SamplingOptions, *, host: str, keys: Keys) -> LiveSettings:
    """What a server has from its options; `host` is where it listens."""
    from perdure.server.core.middleware.host_check import AllowedHosts, check_origins
    from perdure.server.core.settings import LiveSettings, ReplyDefaults

    origins = check_origins(options.cors or (), keys=keys.required)
    further = options.allow_host or ()
    return LiveSettings(
        limits=options.limits,
        # Whoever has a key may come under any name.
        hosts=AllowedHosts(host, further, origins) if further or not keys.required else None,
        origins=origins,
        aliases=tuple(options.alias or ()),
        strict=options.strict,
        log_text=options.log_text,
        defaults=ReplyDefaults(sampling=sampling.given(), max_tokens=sampling.max_tokens),
    )


class SettingsReload:
    """The options of a server that runs. Those of its command line stay; of the others, those that can change
    while it runs are taken from the config file, and those that cannot are named in the log."""

    def __init__(self, context: typer.Context, *, host: str) -> None:
        self._command = context.command
        self._host = host
        self._given = {name: value for name, value in context.params.items() if _is_given(context, name)}
        self._now = self._read()
        self._at_start = self._now

    def into(self, app_state: AppState) -> None:
        """Read the settings, and have the server go on with them. What is wrong is raised, and changes
        nothing."""
        read = self._read()
        options = LiveOptions(**{field.name: read[field.name] for field in fields(LiveOptions)})
        sampling = SamplingOptions(**{field.name: read[field.name] for field in fields(SamplingOptions)})
        try:
            new = live_settings(options, sampling, host=self._host, keys=app_state.keys)
        except typer.BadParameter as error:
            raise InvalidInputError(error.format_message()) from None
        app_state.change(new)
        changed = _differing(read, self._now) & _LIVE
        log.info("the settings were read again: %s", _listed(changed) or "none changed")
        if waiting := _differing(read, self._at_start) - _LIVE:
            log.warning("%s changed since the start: restart the server for that", _listed(waiting))
        self._now = read
        set_log_level(options.log_level)

    def _read(self) -> dict[str, Any]:
        """Every option as a start would have it now."""
        chosen = {name: choice.value for name, choice in choices().items()}
        try:
            # The rules of an option hold for what the file says too.
            context = self._command.make_context("serve", [], default_map=defaults(self._command, chosen))
        except typer.BadParameter as error:
            raise InvalidInputError(error.format_message()) from None
        read = {**context.params, **self._given}
        # These two are asked for where they are used.
        if read["model"] is None:
            read["model"] = settings().model
        if read["store"] is None and not read["no_store"]:
            read["store"] = settings().store
        return {name: str(value) if isinstance(value, Path) else value for name, value in read.items()}


def set_log_level(level: str) -> None:
    logging.getLogger("perdure").setLevel(level.upper())


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands in the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name, value in one.items() if value != other[name]}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
