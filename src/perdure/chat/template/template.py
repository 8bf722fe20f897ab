"""A model's template: messages in, the text that the model was trained on out."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from perdure.atomic import read_text
from perdure.chat.message import Message, Tool, ToolCall
from perdure.chat.template.limits import BoundedContext, RenderLimits
from perdure.chat.template.sandbox import Sandbox
from perdure.errors import InvalidInputError, PerdureError, TemplateError

_LONGEST = 1 << 18
_WORDS = 600
"""Characters of a template's own words in an error."""
_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_MARK = re.compile(r"<[|｜/]?[^\s<>]{1,60}>|\[/?[A-Z][A-Z_ ]{1,30}\]")
_ERASED = re.compile(r"""replace\(\s*(['"])(.+?)\1\s*,\s*(['"])\3""")


@dataclass(frozen=True, slots=True)
class Guard:
    """Functions that texts from outside pass before a template sees them: one for texts, one for names and
    ids, which a template may put inside its marks."""

    text: Callable[[str], str]
    name: Callable[[str], str]


UNGUARDED = Guard(str, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedMessage(Message):
    """A message in the form that a template takes it in."""

    before: str = ""
    behind: str = ""
    """What stands around the content. It was guarded where that was needed."""
    null_content: bool = False
    """Whether content that is empty goes in as none."""
    text_arguments: bool = False
    """Whether the arguments of calls go in as JSON text."""
    thinking_part: bool = False
    """Whether reasoning goes in as a part of the content."""


class Template:
    """A compiled template. Its text is untrusted code: it cannot reach out of its sandbox, and what it
    may use of time and memory is bounded. Safe from any thread."""

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", name: str = "the model's template"
    ) -> None:
        if not isinstance(source, str):
            raise TemplateError(f"{name} must be text, got {type(source).__name__}")
        if len(source) > _LONGEST:
            raise TemplateError(f"{name} is {len(source)} characters long; {_LONGEST} fit")
        self.source = source
        self.bos = bos
        self.eos = eos
        self.name = name
        self.digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        # Mistral's templates refuse the ids of other makers.
        self._short_ids = _SHORT_IDS.search(source) is not None
        try:
            self._compiled = sandbox().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            line = source.splitlines()[error.lineno - 1 : error.lineno]
            shown = f": {line[0].strip()[:_WORDS]}" if line else ""
            raise TemplateError(f"{name}, line {error.lineno}: {error.message}{shown}") from None
        except Exception as error:
            # Deep nesting and the like fail in Jinja's or Python's own compiler.
            raise TemplateError(f"{name} does not compile: {_words(error)}") from None
        # Jinja's own is a ChainMap, which every rendering would go through several times.
        self._compiled.globals = dict(self._compiled.globals)

    @property
    def mark_texts(self) -> frozenset[str]:
        """Texts of the template that may be marks, if the model has tokens for them."""
        return frozenset(_MARK.findall(self.source))

    @property
    def erased_texts(self) -> tuple[str, ...]:
        """Texts that the template takes out of messages."""
        return tuple(sorted({match[1] for match in _ERASED.findall(self.source)}))

    @classmethod
    def of_model(cls, source: str | None, bos: str = "", eos: str = "") -> Template:
        """The template that came with a model; an error where none did, since a guess would be silent."""
        if not source or not source.strip():
            raise TemplateError(
                "this model brings no chat template: give one with template=, as one of the names "
                f"{', '.join(cls.names())}, or as Template.from_file(path); or complete plain text instead"
            )
        return cls(source, bos=bos, eos=eos)

    @classmethod
    def named(cls, name: str, *, bos: str = "", eos: str = "") -> Template:
        """One of the templates that perdure brings along."""
        if name not in cls.names():
            raise TemplateError(f"there is no template {name!r}; there are {', '.join(cls.names())}")
        source = (_library() / f"{name}.jinja").read_text("utf-8")
        return cls(source, bos=bos, eos=eos, name=f"the template {name}")

    @classmethod
    def from_file(cls, path: str | Path, *, bos: str = "", eos: str = "") -> Template:
        try:
            source = read_text(Path(path), regular=False)
        except (OSError, ValueError) as error:
            raise TemplateError(f"the template {path} cannot be read: {error}") from None
        return cls(source, bos=bos, eos=eos, name=f"the template {path}")

    @staticmethod
    @functools.cache
    def names() -> tuple[str, ...]:
        """The templates that perdure brings along."""
        files = (each.name for each in _library().iterdir())
        return tuple(sorted(name.removesuffix(".jinja") for name in files if name.endswith(".jinja")))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        guard: Guard = UNGUARDED,
        now: datetime | None = None,
        no_tools: list[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text. `variables` are the template's further variables, as plain values; `now`
        is the date that it reads, `no_tools` the value of its tools where there are none.

        Every text that came from outside passes `guard` first, after it was decoded.
        """
        shaped = [self._shape(message, guard) for message in messages]
        values = {
            "bos_token": self.bos,
            "eos_token": self.eos,
            "documents": None,
            **{name: plain(value, name, guard.text) for name, value in variables.items()},
            "messages": shaped,
            "tools": [shape_tool(tool, guard) for tool in tools] or no_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        context = self._compiled.new_context(values)
        assert isinstance(context, BoundedContext)
        context.now = now
        size = _size(shaped)
        context.limits = RenderLimits(size + (len(repr(values["tools"])) if tools else 0))
        context.limits.know(shaped, size)
        try:
            return "".join(self._compiled.root_render_func(context))
        except TemplateError as error:
            raise TemplateError(f"{self.name}{self._line(error)}: {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self.name}{self._line(error)}: {_words(error)}") from None
        except Exception as error:
            # Whatever fails in there is the template's doing.
            raise TemplateError(f"{self.name}{self._line(error)} fails: {_words(error)}") from None

    def _line(self, error: BaseException) -> str:
        """Where in the template an error was raised."""
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("environment") is self._compiled.environment:
                line = self._compiled.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return f", line {line}" if line else ""

    def _shape(self, message: Message, guard: Guard) -> dict[str, Any]:
        """As templates expect a message: they add texts up, and take arguments apart."""
        shape: dict[str, Any] = {"role": message.role, "content": guard.text(message.content or "")}
        form = message if isinstance(message, NormalisedMessage) else _AS_GIVEN
        if form.before or form.behind:
            shape["content"] = form.before + shape["content"] + form.behind
        elif form.null_content and not shape["content"]:
            shape["content"] = None
        if message.reasoning and form.thinking_part:
            text = [{"type": "text", "text": shape["content"]}] if shape["content"] else []
            shape["content"] = [{"type": "thinking", "thinking": guard.text(message.reasoning)}, *text]
        elif message.reasoning:
            # Templates have three words for it.
            thought = guard.text(message.reasoning)
            shape["reasoning_content"] = shape["thinking"] = shape["reasoning"] = thought
        if message.tool_calls:
            as_text = form.text_arguments
            shape["tool_calls"] = [self._shape_call(call, guard, as_text) for call in message.tool_calls]
        if message.tool_call_id is not None:
            shape["tool_call_id"] = guard.name(self._id(message.tool_call_id))
        if message.name is not None:
            shape["name"] = guard.name(message.name)
        return shape

    def _shape_call(self, call: ToolCall, guard: Guard, as_text: bool) -> dict[str, Any]:
        arguments: Any = guard.text(call.arguments)
        if not as_text:
            # Guarded only now: JSON may hide a mark in its escapes.
            with suppress(InvalidInputError):
                arguments = plain(call.parsed, "arguments", guard.text, guard.name)
        function = {"name": guard.name(call.name), "arguments": arguments}
        return {"id": guard.name(self._id(call.id)), "type": "function", "function": function}

    def _id(self, call_id: str) -> str:
        if not self._short_ids or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


_AS_GIVEN = NormalisedMessage(role="user")


@functools.cache
def sandbox() -> Sandbox:
    return Sandbox()


def _library() -> Any:
    return importlib.resources.files("perdure.chat.template") / "library"


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    total = 0
    for message in messages:
        content = message["content"]
        length = len(content) if isinstance(content, str) else len(repr(content))
        total += 64 + length + 2 * len(message.get("thinking", ""))
        if "tool_calls" in message:
            total += len(repr(message["tool_calls"]))
    return total


def shape_tool(tool: Tool, guard: Guard) -> dict[str, Any]:
    shape: dict[str, Any] = plain(tool.to_dict(), tool.name, guard.text)
    shape["function"]["name"] = guard.name(tool.name)
    return shape


def plain(
    value: Any,
    name: str,
    guard: Callable[[str], str],
    guard_key: Callable[[str], str] | None = None,
    depth: int = 0,
) -> Any:
    """A copy made of plain values, with guarded texts: objects with methods stay out of the sandbox."""
    if isinstance(value, str):
        return guard(str(value))
    if value is None or type(value) in (int, float, bool):
        return value
    if depth > 50:
        raise InvalidInputError(f"{name} is nested deeper than 50")
    key_guard = guard_key or guard
    if isinstance(value, Mapping):
        return {
            key_guard(str(key)): plain(each, name, guard, key_guard, depth + 1) for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(each, name, guard, key_guard, depth + 1) for each in value]
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise InvalidInputError(f"{name} must be a plain value for the template, got {type(value).__name__}")


def _words(error: BaseException) -> str:
    words = str(error) or type(error).__name__
    return words if len(words) <= _WORDS else f"{words[:_WORDS]} …"


# Conversations as text, turn by turn where their template allows it.

_ROLES = ("system", "user", "assistant")
_TURNS = ("user", "assistant")
_WITH_RESULTS = ("user", "assistant", "tool", "assistant")
_ANSWERED = ("user", "tool")
"""Whose messages a reply answers."""
_NEAR = 8
"""Messages that are rendered for a new one at most, besides those of the system."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Messages and the text that they make, without what opens the reply."""

    messages: tuple[Message, ...]
    text: str
    near: tuple[Message, ...]
    """A short conversation that starts and ends as this one does."""
    near_length: int
    """Characters of the text that it makes."""

    def begins(self, messages: tuple[Message, ...]) -> bool:
        """Whether `messages` go on from its own."""
        return len(messages) > len(self.messages) and messages[: len(self.messages)] == self.messages


class TemplateRenderer:
    """Renders whole conversations, and of one that goes on only what is new.

    The latter only if the template was seen to treat every turn by itself, and to open every reply alike, for
    plain messages: then the text is the same. Whatever else a template does with a conversation, it is
    rendered as a whole.
    """

    def __init__(self, template: Template, guard: Guard = UNGUARDED) -> None:
        self._template = template
        self._guard = guard

    def whole(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        reply_follows: bool = True,
        now: datetime | None = None,
    ) -> str:
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=reply_follows,
            guard=self._guard,
            now=now,
            **(variables or {}),
        )

    def prompt(
        self,
        messages: tuple[Message, ...],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        before: Rendering | None = None,
        now: datetime | None = None,
    ) -> tuple[str, Rendering | None]:
        """The prompt of a conversation, and what a later prompt may go on from.

        `before` is a rendering of its beginning.
        """
        if "tools" not in self._template.source:
            # It cannot ask for them: they were written into a message.
            tools = ()
        if tools or variables or self.opening is None or not messages or messages[-1].role not in _ANSWERED:
            return self.whole(messages, tools=tools, variables=variables, now=now), None
        if before is not None and before.begins(messages):
            new = messages[len(before.messages) :]
            if all(map(self._is_plain, (*before.near, *new))):
                return self._go_on(before, new)
        if not all(map(self._is_plain, messages)):
            return self.whole(messages), None
        text = self.whole(messages, reply_follows=False)
        rendering = None
        # A template may insist on what the short conversation lacks.
        with suppress(PerdureError):
            rendering = self._rendering(messages, text, messages, len(text))
        return text + self.opening, rendering

    @cached_property
    def opening(self) -> str | None:
        """What opens a reply, if the template treats each turn by itself, as far as trials can tell."""
        # Other words on another day.
        if "strftime_now" in self._template.source:
            return None
        try:
            openings = {self._tried(system, _TURNS) for system in (None, "s\n", "t /no_think")}
        except PerdureError:
            return None
        return openings.pop() if len(openings) == 1 else None

    @cached_property
    def _takes_results(self) -> bool:
        """Whether it renders results of tools alone, also where it is rendered without the tools."""
        try:
            return all(self._tried(system, _WITH_RESULTS) == self.opening for system in (None, "s\n"))
        except PerdureError:
            return False

    def _tried(self, system: str | None, roles: Sequence[str]) -> str | None:
        # Among them what some templates take for a switch or for a tool's result, wherever it was said.
        words = (
            *("a", " b\n\n", "c <x>\n", "d", "\te ", "f", "g\n", "h", "i\n", "j", "k /no_think", "l", "m"),
            *("n", "o /think", "p", "<tool_response>\nq\n</tool_response>", "r", "s", "t", "u"),
        )
        dialogue = [Message(role=roles[at % len(roles)], content=word) for at, word in enumerate(words)]
        messages = tuple([Message(role="system", content=system)] * (system is not None) + dialogue)
        start = messages[: len(messages) - len(words) + 1]
        text = self.whole(start, reply_follows=False)
        opening = self.whole(start)[len(text) :]
        before = self._rendering(start, text, start, len(text))
        for end in range(len(start) + 2, len(messages) + 1, 2):
            assert messages[end - 1].role in _ANSWERED
            before = self._more(before, messages[len(before.messages) : end])
            if before.text != self.whole(messages[:end], reply_follows=False):
                return None
            if before.text + opening != self.whole(messages[:end]):
                return None
        return opening

    def _go_on(self, before: Rendering, new: tuple[Message, ...]) -> tuple[str, Rendering | None]:
        assert self.opening is not None
        try:
            after = self._more(before, new)
        except PerdureError:
            return self.whole(before.messages + new), None
        return after.text + self.opening, after

    def _more(self, before: Rendering, new: tuple[Message, ...]) -> Rendering:
        """The text of the next messages, as the end of a short conversation that continues alike."""
        near = before.near + new
        shown = self.whole(near, reply_follows=False)
        text = before.text + shown[before.near_length :]
        return self._rendering(before.messages + new, text, near, len(shown))

    def _is_plain(self, message: Message) -> bool:
        return (
            (message.role in _ROLES or (message.role == "tool" and self._takes_results))
            and isinstance(message.content, str)
            and not message.tool_calls
            and not message.reasoning
        )

    def _rendering(
        self, messages: tuple[Message, ...], text: str, near: tuple[Message, ...], near_length: int
    ) -> Rendering:
        if len(near) > _NEAR:
            near = _end(near)
            near_length = len(self.whole(near, reply_follows=False))
        return Rendering(messages, text, near, near_length)


def _end(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """A conversation's head, and its last turns."""
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    tail = messages[max(head, len(messages) - 3) :]
    return (*messages[:head], *tail)
