"""What a file asks of a model: a text to be read, or a line of JSON a task.

    {"text": "Once upon a time …"}                                             perplexity
    {"prompt": "2 + 2 =", "answer": "4"}                                       exact match
    {"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}      multiple choice
    {"messages": [{"role": "user", "content": "Hello"}], "regex": "[Hh]ello"}  the reply has a match
    {"prompt": "A user as JSON:", "schema": {"type": "object"}}                the reply fits a schema

A task may have an `id` and `max_tokens`. A file that does not end with .jsonl is one text.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from perdure import InvalidInputError, PerdureError, Runtime, TooLargeError
from perdure.spi.base import is_whole, read_file
from perdure.spi.chat import parse_messages

LARGEST_FILE = 1 << 30
"""Bytes of a file of tasks, which is held in memory."""
WINDOW = 512
"""Tokens that are read at once for perplexity, unless another number is chosen: llama.cpp's own."""
_LONGEST_REPLY = 128
_KEYS = {"id", "text", "prompt", "messages", "answer", "choices", "regex", "schema", "max_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What came of one task. A text has log probabilities of its tokens, any other task is right or not."""

    task: str
    kind: str
    right: bool | None = None
    reply: str | None = None
    logprobs: tuple[float, ...] = ()
    text_bytes: int = 0
    """Bytes of text that the scored tokens stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(ABC):
    """One thing to ask. Always holds: it was checked, so that no run stops half way for a bad line."""

    KIND: ClassVar[str]

    name: str

    @abstractmethod
    def judge(self, runtime: Runtime) -> Judgement:
        """Ask a model. May be called from several threads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Task):
    """Tokens of a text of which the last `scored` count: those before them are what the model has read."""

    KIND: ClassVar[str] = "perplexity"

    tokens: tuple[int, ...]
    scored: int

    def judge(self, runtime: Runtime) -> Judgement:
        reply = runtime.generate(self.tokens, prompt_logprobs=0, max_tokens=1, temperature=0)
        logprobs = [
            entry.logprob for entry in (reply.prompt_logprobs or ())[-self.scored :] if entry is not None
        ]
        size = sum(len(runtime.model.piece(token)) for token in self.tokens[-self.scored :])
        return Judgement(task=self.name, kind=self.KIND, logprobs=tuple(logprobs), text_bytes=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Task):
    """A task that the model answers in writing, at temperature 0."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    max_tokens: int

    def judge(self, runtime: Runtime) -> Judgement:
        if self.messages is not None:
            text = runtime.chat(self.messages, max_tokens=self.max_tokens, temperature=0).text
        else:
            assert self.prompt is not None
            text = runtime.generate(self.prompt, max_tokens=self.max_tokens, temperature=0).text
        return Judgement(task=self.name, kind=self.KIND, right=self.is_right(text), reply=text)

    @abstractmethod
    def is_right(self, text: str) -> bool:
        """Whether a reply is what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch(Written):
    """The reply is the answer, but for white space around it. After a raw prompt its first line counts."""

    KIND: ClassVar[str] = "exact match"

    answer: str

    def is_right(self, text: str) -> bool:
        words = text.strip()
        if self.prompt is not None and "\n" not in self.answer.strip():
            words = words.split("\n", 1)[0].strip()
        return words == self.answer.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexMatch(Written):
    """Somewhere in the reply the pattern matches."""

    KIND: ClassVar[str] = "regex"

    pattern: re.Pattern[str]

    def is_right(self, text: str) -> bool:
        return self.pattern.search(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaMatch(Written):
    """The reply is JSON that fits the schema; a fence of three backticks around it does not count."""

    KIND: ClassVar[str] = "schema"

    schema: Mapping[str, Any]

    def is_right(self, text: str) -> bool:
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import ValidationError

        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
            Draft202012Validator(self.schema).validate(value)
        except (ValueError, RecursionError, ValidationError):
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoice(Task):
    """The likeliest option, per token, is the right one."""

    KIND: ClassVar[str] = "multiple choice"

    prompt: str
    choices: tuple[str, ...]
    answer: int

    def judge(self, runtime: Runtime) -> Judgement:
        best = runtime.choose(self.prompt, self.choices, by="token")[0]
        return Judgement(
            task=self.name, kind=self.KIND, right=best.index == self.answer, reply=self.choices[best.index]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file of texts and tasks, read and checked. `digest` is the SHA-256 of its bytes."""

    path: Path
    digest: str
    texts: tuple[tuple[str, str], ...]
    """Names and texts whose perplexity is asked for."""
    others: tuple[Task, ...]

    def tasks(self, runtime: Runtime, *, window: int, stride: int | None) -> Iterator[Task]:
        """Everything that a model is to be evaluated on, texts cut into windows of its tokens."""
        for name, text in self.texts:
            yield from windows(name, text, runtime, window=window, stride=stride)
        yield from self.others


def windows(name: str, text: str, runtime: Runtime, *, window: int, stride: int | None) -> Iterator[Window]:
    """A text cut into windows.

    Without a stride as llama.cpp's own tool does it: windows stand side by side, the second half of each is
    scored, and what is left at the end is not. With one, windows begin `stride` tokens after each other and
    score what none before did: all tokens but the first count, each with `window - stride` before it or more.
    """
    tokens = runtime.model.tokenize(text)
    plain = runtime.model.tokenize(text[:256], bos=False)
    lead = tokens[:1] if tokens[:1] != plain[:1] else []
    if len(tokens) < 2:
        raise InvalidInputError(f"{name} has {len(tokens)} tokens; perplexity needs 2 and more")
    if stride is None:
        if len(tokens) < 2 * window:
            raise InvalidInputError(
                f"{name} has {len(tokens)} tokens, and llama.cpp's way needs two windows of {window}: "
                "choose a smaller window, or a stride (--stride), which scores every token"
            )
        for start in range(0, len(tokens) - window + 1, window):
            own = [*lead, *tokens[start + len(lead) : start + window]]
            yield Window(name=f"{name}@{start}", tokens=tuple(own), scored=window - window // 2 - 1)
        return
    done, start = 1, 0
    while done < len(tokens):
        end = min(start + window, len(tokens))
        own = tokens[start:end] if not start else [*lead, *tokens[start + len(lead) : end]]
        yield Window(name=f"{name}@{start}", tokens=tuple(own), scored=end - done)
        done, start = end, start + stride


def read_tasks(path: Path) -> TaskFile:
    """Read a file of tasks. What is wrong with a line is said with its number."""
    try:
        raw = read_file(path, LARGEST_FILE, regular=False)
    except TooLargeError as error:
        raise InvalidInputError(str(error)) from None
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}") from None
    digest = hashlib.sha256(raw).hexdigest()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8: {error}") from None
    if path.suffix != ".jsonl":
        if not text.strip():
            raise InvalidInputError(f"{path} is empty")
        return TaskFile(path=path, digest=digest, texts=((path.name, text),), others=())
    texts: list[tuple[str, str]] = []
    others: list[Task] = []
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path.name}"
        record = _record(line, where)
        name = str(record.get("id", number))
        if name in names:
            raise InvalidInputError(f"{where}: the id {name!r} was there before")
        names.add(name)
        if "text" in record:
            texts.append((name, _text(record, "text", where)))
        else:
            others.append(_task(record, name, where))
    if not texts and not others:
        raise InvalidInputError(f"{path} has no tasks")
    return TaskFile(path=path, digest=digest, texts=tuple(texts), others=tuple(others))


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise InvalidInputError(f"{where} is no JSON object")
    if unknown := set(record) - _KEYS:
        raise InvalidInputError(
            f"{where} has the unknown field {min(unknown)!r}; there are {', '.join(sorted(_KEYS))}"
        )
    return record


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{where}: {key} is a text that is not empty, got {value!r:.60}")
    return value


def _task(record: Mapping[str, Any], name: str, where: str) -> Task:
    prompt = _text(record, "prompt", where) if "prompt" in record else None
    messages = record.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidInputError(f"{where} needs a text, a prompt or messages, and one of them")
    if messages is not None:
        try:
            parse_messages(messages)
        except (PerdureError, TypeError) as error:
            raise InvalidInputError(f"{where}: {error}") from None
    if "choices" in record:
        return _choice(record, name, prompt, where)
    limit = record.get("max_tokens", _LONGEST_REPLY)
    if not is_whole(limit) or limit < 1:
        raise InvalidInputError(f"{where}: max_tokens is a whole number from 1, got {limit!r}")
    shared: dict[str, Any] = {"name": name, "prompt": prompt, "messages": messages, "max_tokens": limit}
    keys = [key for key in ("answer", "regex", "schema") if key in record]
    if len(keys) != 1:
        raise InvalidInputError(f"{where} needs one of answer, regex, schema and choices")
    if "answer" in record:
        return ExactMatch(answer=_text(record, "answer", where), **shared)
    if "regex" in record:
        try:
            return RegexMatch(pattern=re.compile(_text(record, "regex", where)), **shared)
        except re.error as error:
            raise InvalidInputError(f"{where}: the regex does not compile: {error}") from None
    _check_schema(record["schema"], where)
    return SchemaMatch(schema=record["schema"], **shared)


def _check_schema(schema: object, where: str) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    if not isinstance(schema, dict):
        raise InvalidInputError(f"{where}: the schema is a JSON object, got {schema!r:.60}")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InvalidInputError(f"{where}: the schema is invalid: {error.message}") from None


def _choice(record: Mapping[str, Any], name: str, prompt: str | None, where: str) -> MultipleChoice:
    choices, answer = record["choices"], record.get("answer")
    if prompt is None:
        raise InvalidInputError(f"{where}: choices follow a prompt, not messages")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise InvalidInputError(f"{where}: choices are two texts or more")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if not is_whole(answer) or not 0 <= answer < len(choices):
        raise InvalidInputError(
            f"{where}: the answer is one of the choices, or its place from 0 to {len(choices) - 1}, "
            f"got {answer!r:.60}"
        )
    return MultipleChoice(name=name, prompt=prompt, choices=tuple(choices), answer=answer)
