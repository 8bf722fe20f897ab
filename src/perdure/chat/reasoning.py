"""How a model marks its reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What opens and closes a stretch of reasoning. White space that touches a marker belongs to it."""

    open: str
    close: str


THINK = Markers(open="<think>", close="</think>")
BRACKETS = Markers(open="[THINK]", close="[/THINK]")
COMMAND = Markers(open="<|START_THINKING|>", close="<|END_THINKING|>")
CHANNEL = Markers(open="<|channel|>analysis<|message|>", close="<|end|>")
