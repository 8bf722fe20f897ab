"""Options of `perdure serve` that can change while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from perdure.server.core.settings import Limits

LogLevel = Literal["debug", "info", "warning", "error"]
_Access = "Access"
_Limits = "Limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Who may use the server, how much one request may ask for, and what the log has."""

    alias: Annotated[
        list[str] | None,
        typer.Option(
            "--alias",
            metavar="PATTERN",
            help="A further name for the model, such as 'gpt-*'; may be given several times.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further host name that requests may be sent to; may be given several times.",
            rich_help_panel=_Access,
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="A site whose pages may use the server, such as https://chat.example.org, or * for any "
            "(with --keys); may be given several times.",
            rich_help_panel=_Access,
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict/--no-strict",
            help="Refuse requests with fields that are not known.",
            rich_help_panel=_Access,
        ),
    ] = False
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level",
            help="Least level of the lines in the log; a request is one at info.",
            rich_help_panel=_Access,
        ),
    ] = "info"
    log_text: Annotated[
        bool,
        typer.Option(
            "--log-text/--no-log-text", help="Put messages and replies into the log.", rich_help_panel=_Access
        ),
    ] = False
    body_bytes: Annotated[
        int,
        typer.Option(
            "--body-bytes", min=1, metavar="N", help="Most bytes of one request.", rich_help_panel=_Limits
        ),
    ] = 16 << 20
    messages: Annotated[
        int,
        typer.Option(
            "--messages", min=1, metavar="N", help="Most messages of one request.", rich_help_panel=_Limits
        ),
    ] = 4096
    requests: Annotated[
        int,
        typer.Option(
            "--requests",
            min=1,
            metavar="N",
            help="Most requests at once, waiting ones included.",
            rich_help_panel=_Limits,
        ),
    ] = 512
    request_seconds: Annotated[
        float,
        typer.Option(
            "--request-seconds",
            metavar="S",
            help="Seconds that one request may take.",
            rich_help_panel=_Limits,
        ),
    ] = 900.0
    body_seconds: Annotated[
        float,
        typer.Option(
            "--body-seconds",
            metavar="S",
            help="Seconds that the body of a request may take to arrive.",
            rich_help_panel=_Limits,
        ),
    ] = 60.0
    response_days: Annotated[
        float,
        typer.Option(
            "--response-days",
            metavar="N",
            help="Days that a stored response is kept.",
            rich_help_panel=_Limits,
        ),
    ] = 30.0
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="S",
            help="Seconds for replies to finish once the server is told to stop.",
            rich_help_panel=_Limits,
        ),
    ] = 20.0

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
        )
