"""A browser agent: 40 screenshots, one a turn; three forks, a subagent, and two ends of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCREENSHOTS = 40


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn of one conversation."""

    conversation: str
    text: str
    image: int | None = None
    """The number of a screenshot."""
    fork_of: str = ""
    """The conversation whose turns it starts with."""
    before: Literal["", "kill", "switch"] = ""
    """What happens first: everything is killed and started again, or another model is asked in between."""


def trace(screenshots: int = SCREENSHOTS) -> list[Ask]:
    asks = []
    for number in range(1, screenshots + 1):
        before: Literal["", "kill", "switch"] = ""
        if number == screenshots * 5 // 8 + 1:
            before = "kill"
        elif number == screenshots * 7 // 8 + 1:
            before = "switch"
        asks.append(Ask("main", f"w{number} w20 w21 w22", number, before=before))
        if number in (screenshots // 4, screenshots // 2, screenshots * 3 // 4):
            fork = f"fork {number}"
            asks.append(Ask(fork, "w30 w31 w32", fork_of="main"))
            asks.append(Ask(fork, "w33 w34", number))
        if number == screenshots * 3 // 8:
            asks.append(Ask("subagent", "w40 w41", number - 1))
            asks.append(Ask("subagent", "w42 w43", number))
    return [*asks, Ask("subagent", "w44 w45")]
