"""Tool-call formats: how models write tool calls, and the grammar that holds a reply to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perdure.chat.message import Tool
from perdure.chat.parsing.call_parser import CallParser
from perdure.chat.parsing.call_writer import CallWriter
from perdure.decode.sampling.grammar import Grammar
from perdure.errors import GrammarError


class CallFormat:
    """A tool-call format.

    `openers` are the markers that a stretch with calls begins with, `leads` the characters with which one
    may begin unmarked, at the start of a reply. `marks` are further texts with a meaning of their own, that
    no reader should see.
    """

    openers: tuple[str, ...] = ()
    leads: str = ""
    marks: tuple[str, ...] = ()
    writer: CallWriter
    opener_is_text: bool = False
    """Whether an opener is shown where no call follows: it is no control token then."""

    def shows(self, opener: str) -> bool:
        """Whether an opener is shown where no call follows."""
        return self.opener_is_text

    def parser(self, opener: str, tools: Sequence[Tool]) -> CallParser:
        """Reads on behind `opener`; an empty one for a lead."""
        raise NotImplementedError

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, control: Mapping[str, int] | None = None
    ) -> Grammar:
        """What holds a reply to one call of `tools`, or several. `control` maps marks that are control
        tokens of the model to their ids: the others are written as plain text."""
        if not tools:
            raise GrammarError("a call can be required only of tools: give at least one")
        return self.writer.grammar(tools, parallel=parallel, control=control or {})
