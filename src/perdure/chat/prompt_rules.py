"""Prompt rules: what extensions know of clients whose prompts change where they need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from perdure.chat.message import Message, Tool
from perdure.extension import brought


class RuledPrompt(NamedTuple):
    """Messages and tools as rules have them."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    notes: tuple[str, ...] = ()
    """A line about each rule that was followed."""


class PromptRule(Protocol):
    """A rule about the prompts of one model, for requests with `stable_prefix`. Called from any thread.

    Always holds: the words of a request are in what it gives, each as often as they were sent, and no others.
    """

    def apply(self, messages: Sequence[Message], tools: tuple[Tool, ...], namespace: str) -> RuledPrompt: ...

    def is_side_request(self, messages: Sequence[Message]) -> bool:
        """Whether nobody continues this conversation, so that its state may be evicted first. Asked with and
        without `stable_prefix`."""
        ...


class PromptRules:
    """The rules of all extensions, made when they are first needed."""

    def __init__(self) -> None:
        self._rules: tuple[PromptRule, ...] | None = None

    @property
    def _all(self) -> tuple[PromptRule, ...]:
        if self._rules is None:
            self._rules = tuple(make() for make in brought("prompt_rules"))
        return self._rules

    def apply(self, messages: Sequence[Message], tools: tuple[Tool, ...], namespace: str) -> RuledPrompt:
        prompt = RuledPrompt(tuple(messages), tools)
        for rule in self._all:
            after = rule.apply(prompt.messages, prompt.tools, namespace)
            prompt = after._replace(notes=(*prompt.notes, *after.notes))
        return prompt

    def is_side_request(self, messages: Sequence[Message]) -> bool:
        return any(rule.is_side_request(messages) for rule in self._all)
