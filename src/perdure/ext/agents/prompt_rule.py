"""Prompt rule of agents: where volatile text and tools stand, and which requests are side requests."""

from __future__ import annotations

from collections.abc import Sequence

from perdure import Message, Tool
from perdure.ext.agents.side_requests import side_request
from perdure.ext.agents.volatile_text import VolatileText
from perdure.spi.chat import RuledPrompt


class AgentPrompts:
    """What is known of the prompts that agents send to one model."""

    def __init__(self) -> None:
        self._volatile = VolatileText()

    def apply(self, messages: Sequence[Message], tools: tuple[Tool, ...], namespace: str) -> RuledPrompt:
        canonical, moved = self._volatile.canonicalise(messages, namespace)
        ordered, put_back = self._volatile.ordered(tools, namespace)
        return RuledPrompt(canonical, ordered, (*moved, *put_back))

    def is_side_request(self, messages: Sequence[Message]) -> bool:
        return side_request(messages) is not None
