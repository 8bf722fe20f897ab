"""Live settings: what can change while a server runs."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.server.limits import Limits
from perdure.server.middleware.host_check import AllowedHosts
from perdure.server.reply_defaults import ReplyDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Settings that hold for requests from now on. Each is a field of the app state, of the same name."""

    limits: Limits
    hosts: AllowedHosts | None
    origins: tuple[str, ...]
    aliases: tuple[str, ...]
    strict: bool
    log_text: bool
    defaults: ReplyDefaults
