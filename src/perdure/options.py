"""Options of a request and of an engine: each is a field of a frozen dataclass, and said once there.

`option` says of a field what every surface needs to know: its range, one line of help, its bounds in items
and characters. The keywords of the library, the fields of HTTP, the options of the command, the keys of the
config file, `/set`, Ollama's options, the page's settings and the tables in the docs are made from it.

    temperature: float = option(0.8, low=0, high=100, help="divides the logits; 0: the likeliest token")
    threads: int | None = option(None, low=1, high=512, help="threads that compute", unset="by the machine")
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from perdure.checks import is_number, is_whole
from perdure.errors import InvalidInputError

WHOLE = 2**31 - 1
"""The largest whole number that an option may be, unless it says less."""
SURFACES = ("chat", "run", "serve", "file", "models")
"""Where an option of the engine stands, unless it says where: these commands, the config file, and what is
said of one of several models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, as its field says it."""

    name: str
    kind: type
    """float, int, bool, str, list or dict. Of several it is the first."""
    keys: type
    """Of a dict: int for token ids, str for names. Of a list: what each of it is."""
    words: tuple[str, ...]
    """What a number may be besides."""
    default: Any
    help: str
    low: float | None
    high: float | None
    optional: bool
    """Whether it may be None."""
    unset: str
    """What None means."""
    choices: tuple[str, ...]
    items: int | None
    """At most so many, of a list or a mapping."""
    characters: int | None
    """Of a text, or of each text of a list."""
    common: bool
    """Whether many people set it: it then stands first in help and settings."""
    flags: tuple[str, ...]
    """Short names on the command line."""
    ollama: str
    """What Ollama's API calls it."""
    usual: Any
    """The value that None stands for, where it is always the same."""
    what: str
    """What it may be, where the range is not enough to say that."""
    command: str
    """What the command, the config file and a model of several call it."""
    metavar: str
    """What stands for its value in the help of the command."""
    surfaces: tuple[str, ...]
    affects_reply: bool
    """Whether a reply depends on it: processes that share an engine then have to agree on it."""
    affects_memory: bool
    """Whether the memory that a model takes depends on it."""
    peers: tuple[str, ...]
    """What other programs call it."""
    checked: bool
    """Whether its kind and range are all there is to check; else its reader does."""
    calls: tuple[str, ...]
    """Which calls take it as a keyword, where an extension brings it: open, Model, Model.context."""
    resolve: Callable[[Any], Mapping[str, Any]] | None
    """What an engine is given for its value, by option, where that is another."""

    @property
    def range(self) -> str:
        """What it may be, in words."""
        if self.what:
            return self.what
        what = _KINDS.get(self.kind, "")
        if self.words:
            others = "".join(f"{word}, " for word in self.words[:-1])
            what = f"{what} from {self.low:g}, {others}or {self.words[-1]}"
        elif self.choices:
            what = f"one of {', '.join(self.choices)}"
        elif self.low is not None and self.high is not None:
            high = f"{self.high:g}" if self.kind is float else f"{self.high:.0f}"
            what = f"{what} from {self.low:g} to {high}"
        elif self.items is not None:
            what = f"at most {self.items:,} {what}"
        if self.characters is not None:
            each = " each" if self.kind is list else ""
            what = f"{what} of at most {self.characters:,} characters{each}"
        return what

    @property
    def default_text(self) -> str:
        """The default as people read it."""
        value = self.default
        if value is None and (self.unset or self.usual is None):
            return self.unset or "none"
        if value is None:
            value = self.usual
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (int, float)):
            return f"{value:g}"
        if isinstance(value, (tuple, Mapping)):
            return " ".join(repr(each)[1:-1] for each in value) or "none"
        return str(value)

    def check(self, value: object, *, none: bool = True) -> None:
        """Refuse a value that is out of its range; the error names None where it is one."""
        if self.checked and not self._is_right(value):
            either = "None or " if self.optional and none else ""
            shown = repr(value)
            if len(shown) > _SHOWN:
                shown = f"{shown[:_SHOWN]}…"
            raise InvalidInputError(f"{self.name} is {either}{self.range}, got {shown}")

    def parse(self, text: str) -> Any:
        """A value that a user typed. Several texts have commas between them; a bias is TOKEN=NUMBER."""
        try:
            if text in self.words:
                value: Any = text
            elif self.kind is int or self.kind is float:
                value = self.kind(text)
            elif self.kind is list and self.keys is not str:
                value = tuple(self.keys(part) for part in text.split(","))
            elif self.kind is bool:
                value = {"true": True, "on": True, "false": False, "off": False}[text.lower()]
            elif self.kind is list or self.kind is dict:
                value = self.gather([part for part in text.split(",") if part])
            else:
                value = text
        except (ValueError, KeyError):
            raise InvalidInputError(f"{self.name} is {self.range}, got {text!r}") from None
        self.check(value)
        return value

    def gather(self, texts: Iterable[str]) -> Any:
        """The value that several texts make: a tuple of them, or a mapping of TOKEN=NUMBER to biases, or of
        NAME=NUMBER to scales."""
        if self.kind is not dict:
            return tuple(text.encode().decode("unicode_escape") if "\\" in text else text for text in texts)
        pairs: dict[Any, float] = {}
        for text in texts:
            key, _, number = text.rpartition("=")
            try:
                if self.keys is str:
                    pairs[key] = float(number)
                else:
                    bias = float(number)
                    pairs[int(key)] = bias if bias > -100 else -math.inf
            except ValueError:
                what = "NAME" if self.keys is str else "TOKEN"
                raise InvalidInputError(f"{self.name} is {what}=NUMBER, got {text!r}") from None
        return pairs

    def to_json(self, value: Any) -> Any:
        """A value as JSON has it: what is ruled out has a bias of -100."""
        if isinstance(value, Mapping) and self.keys is str:
            return dict(value)
        if isinstance(value, Mapping):
            return {str(token): max(bias, -100.0) for token, bias in value.items()}
        return list(value) if isinstance(value, tuple) else value

    def from_json(self, value: Any) -> Any:
        """The value that JSON has; its kind was checked, the range is `check`'s."""
        if self.kind is list:
            return tuple(value)
        if self.kind is dict and self.keys is str:
            return dict(value)
        if self.kind is dict:
            return {self._token(key): bias if bias > -100 else -math.inf for key, bias in value.items()}
        return value

    def _token(self, key: str) -> int:
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise InvalidInputError(f"{self.name}: {key[:40]!r} is no token id")
        return int(key)

    def _is_right(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, str) and value in self.words:
            return True
        if self.kind is float:
            return is_number(value) and self._in_range(value)
        if self.kind is int:
            return is_whole(value) and self._in_range(value)
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is str:
            return isinstance(value, str) and self._is_text(value)
        if self.kind is list:
            few = isinstance(value, (tuple, list)) and (self.items is None or len(value) <= self.items)
            if self.keys is not str:
                is_right = is_whole if self.keys is int else is_number
                return few and all(is_right(each) and self._in_range(each) for each in value)
            return few and all(isinstance(each, str) and each != "" and self._is_text(each) for each in value)
        if self.keys is str:
            few = isinstance(value, Mapping) and (self.items is None or len(value) <= self.items)
            return few and all(
                isinstance(name, str) and name != "" and is_number(number) and self._in_range(number)
                for name, number in value.items()
            )
        # How many entries a client may send is for its protocol to check: those of our own come on top.
        return isinstance(value, Mapping)

    def _in_range(self, value: float) -> bool:
        # A number that is none is in no range.
        low, high = (
            (-_LARGEST if self.low is None else self.low),
            _LARGEST if self.high is None else self.high,
        )
        return low <= value <= high

    def _is_text(self, text: str) -> bool:
        if self.choices and text not in self.choices:
            return False
        return self.characters is None or len(text) <= self.characters


_KINDS: dict[type, str] = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    list: "texts",
    dict: "entries",
}
_LARGEST = 1e300
_SHOWN = 80
"""Characters of a wrong value in an error."""
_KEY = "option"


def option(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002 - what the other surfaces call it
    name: str = "",
    factory: Callable[[], Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    unset: str = "",
    items: int | None = None,
    characters: int | None = None,
    common: bool = False,
    flags: tuple[str, ...] = (),
    ollama: str = "",
    choices: tuple[str, ...] = (),
    usual: Any = None,
    what: str = "",
    command: str = "",
    metavar: str = "",
    surfaces: tuple[str, ...] = SURFACES,
    affects_reply: bool = True,
    affects_memory: bool = False,
    peers: tuple[str, ...] = (),
    checked: bool = True,
    calls: tuple[str, ...] = ("open",),
    resolve: Callable[[Any], Mapping[str, Any]] | None = None,
) -> Any:
    """A field of a dataclass that is an option on every surface, there under `name` if that is another."""
    details = {
        "name": name,
        "help": help,
        "low": low,
        "high": high,
        "unset": unset,
        "items": items,
        "characters": characters,
        "common": common,
        "flags": flags,
        "ollama": ollama,
        "choices": choices,
        "usual": usual,
        "what": what,
        "command": command,
        "metavar": metavar,
        "surfaces": surfaces,
        "affects_reply": affects_reply,
        "affects_memory": affects_memory,
        "peers": peers,
        "checked": checked,
        "calls": calls,
        "resolve": resolve,
    }
    if factory is not None:
        return field(default_factory=factory, metadata={_KEY: details})
    return field(default=default, metadata={_KEY: details})


def options_of(kind: type) -> Mapping[str, Option]:
    """The options among the fields of a dataclass, by field."""
    return _read(kind)


def check_options(options: Any) -> None:
    """Refuse an instance with an option that is out of its range."""
    for field_name, each in options_of(type(options)).items():
        # Of a request most are left at their defaults, which were checked when they were read.
        if (value := getattr(options, field_name)) is not each.default:
            each.check(value)


@functools.cache
def _read(kind: type) -> Mapping[str, Option]:
    hints = _hints(kind)
    options = {}
    for each in fields(kind):
        if (details := each.metadata.get(_KEY)) is None:
            continue
        kind, keys, words, choices, optional = _plain(hints[each.name])
        default = each.default if each.default_factory is MISSING else each.default_factory()
        high = WHOLE if kind is int and details["high"] is None else details["high"]
        name = details["name"] or each.name
        derived = {
            "name": name,
            "ollama": details["ollama"] or name,
            "command": details["command"] or name,
            "choices": choices or details["choices"],
            "high": high,
        }
        options[each.name] = Option(
            **{**details, **derived}, kind=kind, keys=keys, words=words, default=default, optional=optional
        )
        options[each.name].check(default)
        PEERS.update(dict.fromkeys(details["peers"], name))
    return options


def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's options. Those of other fields may be known to type checkers alone."""
    names = {each.name for each in fields(kind) if _KEY in each.metadata}
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        notes = {name: note for name, note in vars(base).get("__annotations__", {}).items() if name in names}
        hints |= get_type_hints(SimpleNamespace(__annotations__=notes), vars(sys.modules[base.__module__]))
    return hints


def _plain(hint: Any) -> tuple[type, type, tuple[str, ...], tuple[str, ...], bool]:
    """The kind of a field, what its keys or entries are, its words besides a number, its choices, and whether
    it may be None."""
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    optional = NoneType in kinds
    kinds = [each for each in kinds if each is not NoneType]
    words: tuple[str, ...] = ()
    if len(kinds) > 1:
        words = tuple(word for each in kinds if get_origin(each) is Literal for word in get_args(each))
        kinds = [each for each in kinds if get_origin(each) is not Literal]
    origin, parts = get_origin(kinds[0]), get_args(kinds[0])
    if origin is Literal:
        return str, int, (), parts, optional
    if origin is None:
        return kinds[0], int, words, (), optional
    if issubclass(origin, Mapping):
        return dict, str if parts[0] is str else int, words, (), optional
    return list, parts[0], words, (), optional


PEERS = {
    "chat_format": "template",
    "chat_template": "template",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
    "stop_sequences": "stop",
    "json_schema": "schema",
    "response_format": "schema",
    "lora": "adapters",
    "lora_path": "adapters",
    "top_logprobs": "logprobs",
    "mirostat_mode": "mirostat",
    "num_return_sequences": "n",
}
"""Options of llama-cpp-python, Ollama, llama-server and Transformers, by our names; those of the engine come
with their fields."""


_LACKING = {"mmproj": "the projector is found beside the model's file, if its name has mmproj in it"}
"""Options of others for what is not there."""

F = TypeVar("F", bound=Callable[..., object])


def named_by(keywords: type) -> Callable[[F], F]:
    """A function that takes `**options` with the entries of a typed dictionary: its signature names each."""

    def named(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_written(note))
            for name, note in keywords.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return named


def _written(annotation: Any) -> str:
    """An annotation as it stands in the source."""
    return annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else str(annotation)


def refuse_unknown(unknown: Collection[str], function: Callable[..., object]) -> None:
    """Refuse keywords that `function` does not name."""
    if not unknown:
        return
    names = set(inspect.signature(function).parameters) - {"self", "model", "source", "repository", "unknown"}
    if (error := unknown_options(unknown, names)) is not None:
        raise error


def unknown_options(names: Iterable[str], known: Collection[str]) -> InvalidInputError | None:
    """An error that names each option that is not among `known`, and the one that was probably meant."""
    problems = []
    for name in names:
        if name in known:
            continue
        ours = PEERS.get(name.lower())
        if name in _LACKING:
            problems.append(f"{name!r}: {_LACKING[name]}")
            continue
        if ours is not None and ours in known:
            problems.append(f"{name!r} is called {ours!r} here")
        elif near := difflib.get_close_matches(name, known, n=1):
            problems.append(f"there is no option {name!r}; did you mean {near[0]!r}?")
        else:
            problems.append(f"there is no option {name!r}; there are {', '.join(sorted(known))}")
    return InvalidInputError("; ".join(problems)) if problems else None
