"""Prefill: the beginning of a reply that a caller wrote, which the model continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from perdure.chat.message import Message
from perdure.chat.parsing.family import Family
from perdure.errors import InvalidInputError, TemplateError

_HERE = "zqcontinuehere"
"""Stands where the beginning goes while the template is rendered."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The beginning of a reply: its message, and which part of it is not at its end yet."""

    message: Message
    part: Literal["content", "reasoning"]

    @classmethod
    def of(cls, messages: tuple[Message, ...], family: Family) -> Prefill:
        """The last of some messages, which must be one that can go on."""
        last = messages[-1]
        if last.role != "assistant":
            raise InvalidInputError(
                "continue_final_message continues a message of the assistant, and the last one is of the "
                f"{last.role}: add one, or leave it out"
            )
        if last.tool_calls:
            raise InvalidInputError("continue_final_message: a message with tool calls is at its end")
        opener = family.reasoning.open.rstrip() if family.reasoning is not None else ""
        content = last.content or ""
        if opener and not last.reasoning and content.lstrip().startswith(opener):
            thought = content.lstrip().removeprefix(opener).lstrip("\n")
            return cls(replace(last, content=None, reasoning=thought), "reasoning")
        return cls(last, "content" if content or last.reasoning is None else "reasoning")

    @property
    def words(self) -> str:
        return (self.message.content if self.part == "content" else self.message.reasoning) or ""

    def text(
        self,
        earlier: tuple[Message, ...],
        render: Callable[[tuple[Message, ...], bool], str],
        guard: Callable[[str], str],
        family: Family,
    ) -> str:
        """The prompt that ends with these words. `render` gives the text of messages, with what opens a reply
        or without."""
        here = (
            replace(self.message, content=_HERE)
            if self.part == "content"
            else replace(self.message, reasoning=_HERE)
        )
        try:
            shown = render((*earlier, here), False)
        except TemplateError:
            # Some insist that a user has the last word.
            shown = ""
        if _HERE in shown:
            return shown[: shown.rindex(_HERE)] + guard(self.words)
        return self._behind(render(earlier, True), guard, family)

    def _behind(self, prompt: str, guard: Callable[[str], str], family: Family) -> str:
        """These words behind the opening of a reply, where the template does not show them."""
        markers = family.reasoning
        if markers is None:
            return prompt + guard(self.words)
        opener, begun = "", family.prompt_opener
        if not family.opens_reasoning(prompt):
            opener = markers.open.removeprefix(begun if begun and prompt.endswith(begun) else "")
        if self.part == "reasoning":
            return prompt + opener + guard(self.words)
        thought = self.message.reasoning
        if thought or not opener:
            prompt += f"{opener}{guard(thought or '')}\n{markers.close}\n\n"
        return prompt + guard(self.words)

    def joined(self, reply: Message) -> Message:
        """The whole message, once the model has written the rest."""
        mine = self.message
        reasoning = (mine.reasoning or "") + (reply.reasoning or "")
        content = (mine.content or "") + (reply.content or "")
        return replace(
            reply,
            content=content or (None if reply.tool_calls else ""),
            reasoning=reasoning or None,
        )
