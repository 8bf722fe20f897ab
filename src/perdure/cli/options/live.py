"""Options of `perdure serve` that can change while it runs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from perdure.cli.options import shared
from perdure.cli.options.groups import SamplingOptions
from perdure.config import SETTLED, WARMED, choices, settings
from perdure.errors import InvalidInputError
from perdure.extension import part

if TYPE_CHECKING:
    from perdure.server.core.keys import Keys
    from perdure.server.core.server_state import ServerState
    from perdure.server.core.settings import Limits, LiveSettings


LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Who may use the server, how much one request may ask for, and what the log has."""

    alias: list[str] | None = typer.Option(
        None,
        "--alias",
        metavar="PATTERN[=MODEL]",
        help="A further name for the model, such as 'gpt-*', or for one of several, such as "
        "'claude-*haiku*=small'; may be given several times.",
    )
    allow_host: list[str] | None = shared.access_option(
        None,
        "--allow-host",
        metavar="NAME",
        help="A further host name that requests may be sent to; may be given several times.",
    )
    cors: list[str] | None = shared.access_option(
        None,
        "--cors",
        metavar="ORIGIN",
        help="A site whose pages may use the server, such as https://chat.example.org, or * for any "
        "(with --keys); may be given several times.",
    )
    image_hosts: list[str] | None = shared.access_option(
        None,
        "--image-hosts",
        metavar="HOST[:PORT]",
        help="A host that images of requests are fetched from, over https; with a port, or of this machine, "
        "over http too; may be given several times.",
    )
    strict: bool = shared.access_option(
        False, "--strict/--no-strict", help="Refuse requests with fields that are not known."
    )
    conversations: bool = shared.access_option(
        True,
        "--conversations/--no-conversations",
        help="Keep conversations that agents name by their headers as sessions.",
    )
    stable_prefix: bool = shared.access_option(
        True,
        "--stable-prefix/--as-sent",
        help="Move text that clients change at every turn (dates, counters, reminders) behind the rest, "
        "or give prompts to the model as they were sent.",
    )
    settle: int = shared.access_option(
        SETTLED,
        "--settle",
        min=0,
        max=1 << 20,
        metavar="N",
        help="Tokens of a conversation's next prompt to read ahead while no request is served; 0: none.",
    )
    warm: int = shared.access_option(
        WARMED,
        "--warm",
        min=0,
        max=1 << 20,
        metavar="N",
        help="After the start, while no request is served, wake the beginnings of known clients' prompts, "
        "and compute up to N tokens that are no longer kept; 0: neither.",
    )
    # Not the `overflow` of the config file, which is for chats: these are sessions, and may be folded.
    full_context: Literal["error", "drop_oldest", "shift"] | None = shared.limit_option(
        None,
        "--overflow",
        show_default="error",
        help="When a conversation no longer fits and the request does not say. error: refuse it; "
        "drop_oldest: leave out the oldest turns; shift: go on without the oldest tokens.",
    )
    log_level: LogLevel = shared.access_option(
        "info", "--log-level", help="Least level of the lines in the log; a request is one at info."
    )
    log_text: bool = shared.access_option(
        False, "--log-text/--no-log-text", help="Put messages and replies into the log."
    )
    body_bytes: int = shared.limit_option(
        16 << 20, "--body-bytes", min=1, metavar="N", help="Most bytes of one request."
    )
    messages: int = shared.limit_option(
        4096, "--messages", min=1, metavar="N", help="Most messages of one request."
    )
    requests: int = shared.limit_option(
        512, "--requests", min=1, metavar="N", help="Most requests at once, waiting ones included."
    )
    request_seconds: float = shared.limit_option(
        900.0, "--request-seconds", metavar="S", help="Seconds that one request may take."
    )
    body_seconds: float = shared.limit_option(
        60.0, "--body-seconds", metavar="S", help="Seconds that the body of a request may take to arrive."
    )
    response_days: float = shared.limit_option(
        30.0, "--response-days", metavar="N", help="Days that a stored response is kept."
    )
    grace: float = shared.limit_option(
        20.0, "--grace", metavar="S", help="Seconds for replies to finish once the server is stopping."
    )

    drain: float = shared.limit_option(
        0.0,
        "--drain",
        min=0,
        metavar="S",
        help="Seconds before that in which it answers as ever, and /ready says that it is draining.",
    )

    @property
    def limits(self) -> Limits:
        from perdure.server.core.settings import Limits

        return Limits(
            body_bytes=self.body_bytes,
            messages=self.messages,
            requests=self.requests,
            request_seconds=self.request_seconds,
            body_seconds=self.body_seconds,
            response_seconds=86400 * self.response_days,
            grace_seconds=self.grace,
            drain_seconds=self.drain,
        )


# The settings of a server that runs, read again from the config file.

log = logging.getLogger("perdure.server")
_LIVE = frozenset(field.name for kind in (LiveOptions, SamplingOptions) for field in fields(kind))


def live_settings(options: LiveOptions, sampling: SamplingOptions, *, host: str, keys: Keys) -> LiveSettings:
    """What a server has from its options; `host` is where it listens."""
    from perdure.server.core.settings import AllowedHosts, LiveSettings, ReplyDefaults, check_origins

    origins = check_origins(options.cors or (), keys=keys.required)
    further = options.allow_host or ()
    return LiveSettings(
        limits=options.limits,
        # A client with a key may use any host name.
        hosts=AllowedHosts(host, further, origins) if further or not keys.required else None,
        origins=origins,
        image_hosts=part("hosts of images", "images")(options.image_hosts) if options.image_hosts else (),
        aliases=tuple(options.alias or ()),
        strict=options.strict,
        conversations=options.conversations,
        warm=options.warm,
        log_text=options.log_text,
        defaults=ReplyDefaults(
            sampling=sampling.given(),
            max_tokens=sampling.max_tokens,
            stable_prefix=options.stable_prefix,
            settle=options.settle,
            overflow=options.full_context,
        ),
    )


class SettingsReload:
    """The options of a server that runs. Those of its command line stay; of the others, those that can change
    while it runs are taken from the config file, and those that cannot are named in the log."""

    def __init__(self, context: typer.Context, *, host: str) -> None:
        self._command = context.command
        self._host = host
        self._given = {name: value for name, value in context.params.items() if is_given(context, name)}
        self._now = self._read()
        self._at_start = self._now

    def into(self, state: ServerState) -> None:
        """Read the settings, and have the server go on with them. What is wrong is raised, and changes
        nothing."""
        read = self._read()
        options = LiveOptions(**{field.name: read[field.name] for field in fields(LiveOptions)})
        sampling = SamplingOptions(**{field.name: read[field.name] for field in fields(SamplingOptions)})
        try:
            new = live_settings(options, sampling, host=self._host, keys=state.keys)
        except typer.BadParameter as error:
            raise InvalidInputError(error.format_message()) from None
        state.change(new)
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
            context = self._command.make_context(
                "serve", [], default_map=shared.defaults(self._command, chosen)
            )
        except typer.BadParameter as error:
            raise InvalidInputError(error.format_message()) from None
        read = {**context.params, **self._given}
        # These two are asked for where they are used.
        if read["model"] is None:
            read["model"] = settings().model
        if read["store"] is None and not read["no_store"]:
            from perdure.cli.runtime import usual_store

            read["store"] = usual_store()
        return {name: str(value) if isinstance(value, Path) else value for name, value in read.items()}


def set_log_level(level: str) -> None:
    logging.getLogger("perdure").setLevel(level.upper())


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option stands in the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name, value in one.items() if value != other[name]}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
