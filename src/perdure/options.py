"""Options of a request: each is a field of a frozen dataclass, and said once there.

`option` says of a field what every surface needs to know: its range, one line of help, its bounds in items
and characters. The keywords of the library, the fields of HTTP, the options of the command, the keys of the
config file, `/set`, Ollama's options, the page's settings and the tables in the docs are made from it.

    temperature: float = option(0.8, low=0, high=100, help="divides the logits; 0: the likeliest token")
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from perdure.checks import is_number, is_whole
from perdure.errors import InvalidInputError

WHOLE = 2**31 - 1
"""The largest whole number that an option may be, unless it says less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, as its field says it."""

    name: str
    kind: type
    """float, int, bool, str, list (of texts) or dict."""
    keys: type
    """Of a dict: int for token ids, str for names."""
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

    @property
    def range(self) -> str:
        """What it may be, in words."""
        what = _KINDS.get(self.kind, "")
        if self.choices:
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
        if value is None:
            return self.unset or "none"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (int, float)):
            return f"{value:g}"
        if isinstance(value, (tuple, Mapping)):
            return " ".join(repr(each)[1:-1] for each in value) or "none"
        return str(value)

    def check(self, value: object) -> None:
        """Refuse a value that is out of its range."""
        if not self._is_right(value):
            none = "None or " if self.optional else ""
            shown = repr(value)
            if len(shown) > _SHOWN:
                shown = f"{shown[:_SHOWN]}…"
            raise InvalidInputError(f"{self.name} is {none}{self.range}, got {shown}")

    def parse(self, text: str) -> Any:
        """A value that somebody typed. Several texts have commas between them; a bias is TOKEN=NUMBER."""
        try:
            if self.kind is int or self.kind is float:
                value: Any = self.kind(text)
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
    hints = get_type_hints(kind)
    options = {}
    for each in fields(kind):
        if (details := each.metadata.get(_KEY)) is None:
            continue
        plain, choices, optional = _plain(hints[each.name])
        default = each.default if each.default_factory is MISSING else each.default_factory()
        high = WHOLE if plain is int and details["high"] is None else details["high"]
        name = details["name"] or each.name
        options[each.name] = Option(
            **{**details, "name": name, "ollama": details["ollama"] or name, "high": high},
            kind=plain,
            keys=_keys(hints[each.name]),
            default=default,
            optional=optional,
            choices=choices,
        )
        options[each.name].check(default)
    return options


def _keys(hint: Any) -> type:
    """What the keys of a mapping are."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    origin = get_origin(hint)
    named = isinstance(origin, type) and issubclass(origin, Mapping) and get_args(hint)[0] is str
    return str if named else int


def _plain(hint: Any) -> tuple[type, tuple[str, ...], bool]:
    """The kind of a field, its choices, and whether it may be None."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
        optional = True
    origin = get_origin(hint)
    if origin is Literal:
        return str, get_args(hint), optional
    if origin is None:
        return hint, (), optional
    return (dict if issubclass(origin, Mapping) else list), (), optional


PEERS = {
    "n_threads": "threads",
    "num_thread": "threads",
    "n_gpu_layers": "gpu_layers",
    "num_gpu": "gpu_layers",
    "num_ctx": "n_ctx",
    "context_length": "n_ctx",
    "ctx": "n_ctx",
    "ctx_size": "n_ctx",
    "n_parallel": "slots",
    "num_parallel": "slots",
    "type_k": "k_type",
    "type_v": "v_type",
    "cache_type_k": "k_type",
    "cache_type_v": "v_type",
    "n_cpu_moe": "cpu_experts",
    "flash_attn": "flash",
    "chat_format": "template",
    "chat_template": "template",
    "kv_unified": "shared",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "penalty_last_n",
    "stop_sequences": "stop",
    "json_schema": "schema",
    "top_logprobs": "logprobs",
    "mirostat_mode": "mirostat",
    "num_return_sequences": "n",
}
"""Options of llama-cpp-python, Ollama, llama-server and Transformers, by our names."""


def refuse_unknown(unknown: Collection[str], function: Callable[..., object]) -> None:
    """Refuse keywords that `function` does not name: those that it has in its `**unknown`."""
    if not unknown:
        return
    names = set(inspect.signature(function).parameters) - {"self", "model", "source", "unknown"}
    if (error := unknown_options(unknown, names)) is not None:
        raise error


def unknown_options(names: Iterable[str], known: Collection[str]) -> InvalidInputError | None:
    """An error that names each option that is not among `known`, and the one that was probably meant."""
    problems = []
    for name in names:
        if name in known:
            continue
        ours = PEERS.get(name.lower())
        if ours is not None and ours in known:
            problems.append(f"{name!r} is called {ours!r} here")
        elif near := difflib.get_close_matches(name, known, n=1):
            problems.append(f"there is no option {name!r}; did you mean {near[0]!r}?")
        else:
            problems.append(f"there is no option {name!r}; there are {', '.join(sorted(known))}")
    return InvalidInputError("; ".join(problems)) if problems else None
