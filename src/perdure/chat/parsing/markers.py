"""Markers: the texts in a reply that mean something of their own, and the scanner that finds them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What opens and closes a stretch of reasoning. White space that touches a marker belongs to it."""

    open: str
    close: str
    opens_in_words: bool = False
    """Whether the opener is words of the reasoning, which a prompt begins for the model."""


SPACE = " \t\r\n"
"""What belongs to a marker that it touches."""

THINK = Markers(open="<think>", close="</think>")
BRACKETS = Markers(open="[THINK]", close="[/THINK]")
COMMAND = Markers(open="<|START_THINKING|>", close="<|END_THINKING|>")
SEED = Markers(open="<seed:think>", close="</seed:think>")
HUNYUAN = Markers(open="<think:opensource>", close="</think:opensource>")
MINIMAX = Markers(open="<mm:think>", close="</mm:think>")
THOUGHT = Markers(open="<|channel>thought\n", close="<channel|>")
KIMI_K3 = Markers(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>")
TO_SELF = Markers(open="<|start|>assistant to=self<|message|>", close="<|eom|>")
FINAL_RESPONSE = Markers(
    open="Here are my reasoning steps:\n", close="[BEGIN FINAL RESPONSE]", opens_in_words=True
)
CHANNEL = Markers(open="<|channel|>analysis<|message|>", close="<|end|>")

Meaning = Literal["call", "call mark", "reasoning", "answer", "nothing"]


class MarkerScanner:
    """Finds the first marker of a family in a text that comes in pieces."""

    def __init__(self, meanings: dict[str, Meaning]) -> None:
        self.meanings = meanings
        self._any = re.compile("|".join(map(re.escape, sorted(meanings, key=len, reverse=True))) or r"(?!)")
        self._starts = frozenset(mark[:size] for mark in meanings for size in range(1, len(mark)))
        self.firsts = frozenset(mark[:1] for mark in meanings)
        self._longest = max(map(len, meanings), default=1) - 1

    def first(self, text: str, *, ended: bool = False) -> tuple[int, str]:
        """Where the first marker begins and the marker; where it may yet turn out to begin, and nothing.

        A marker that another one begins with counts once it is certain which of them it is: when the text
        has `ended`, or goes on otherwise.
        """
        found = self._any.search(text)
        end = len(text)
        last = end if found is None else found.start() + 1
        for at in range(end if ended else max(0, end - self._longest), last):
            if text[at] in self.firsts and text[at:] in self._starts:
                return at, ""
        return (end, "") if found is None else (found.start(), found[0])
