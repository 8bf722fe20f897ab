"""Adapters: LoRAs and control vectors of one model, and the sets of them that sequences are computed with.

A set belongs to a sequence. What a sequence holds was computed with its set, so a set is part of what state
depends on (`AdapterSet.key`), and no step has sequences of two sets in it.

An activated LoRA (aLoRA) is switched on by tokens of the prompt: `AdapterSet.activated` finds them. Before
them the state is that of the set without it, which others may have computed and may use.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perdure.errors import InvalidInputError, ModelNotFoundError
from perdure.identity import file_version

if TYPE_CHECKING:
    from perdure.engine.core import Adapter

MAX_ADAPTERS = 64
"""In one set."""
LARGEST_SCALE = float(np.finfo(np.float32).max)

Scales: TypeAlias = Mapping[str, float]
"""Adapters by name or file, each with its scale. A control vector's may end in @FIRST-LAST: its layers."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSet:
    """Adapters with their scales. Two sets are equal exactly when state computed with one serves the other.

    Where one of them was activated, tokens before `start` are computed with the others alone, `before`.
    """

    scales: tuple[tuple[Adapter, float], ...] = ()
    start: float = math.inf
    """The token from which on an activated adapter is used."""
    before: AdapterSet | None = None
    key: str = field(init=False)
    """The identity of the set."""
    _after: AdapterSet | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key, after = ",".join(f"{adapter.digest}*{scale!r}" for adapter, scale in self.scales) or "none", None
        if self.before is not None:
            key, after = f"{self.before.key}; from token {self.start} on {key}", AdapterSet(self.scales)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "_after", after)

    @classmethod
    def of(cls, adapters: Mapping[Adapter, float]) -> AdapterSet:
        """A checked set. One at scale 0 changes nothing and is left out."""
        if not isinstance(adapters, Mapping):
            raise InvalidInputError(f"adapters are given with their scales, got {adapters!r}")
        if len(adapters) > MAX_ADAPTERS:
            raise InvalidInputError(f"{len(adapters)} adapters at once, {MAX_ADAPTERS} may be")
        for adapter, scale in adapters.items():
            if not isinstance(getattr(adapter, "digest", None), str):
                raise InvalidInputError(f"an adapter comes from Model.adapter, got {adapter!r}")
            check_scale(adapter, scale)
        chosen = [(adapter, float(scale)) for adapter, scale in adapters.items() if scale]
        return cls(tuple(sorted(chosen, key=lambda pair: (pair[0].digest, pair[1]))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterSet) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def activated(self, prompt: Sequence[int] | NDArray[np.integer]) -> AdapterSet:
        """The set for a prompt: an activated LoRA is used from the last place on where its invocation tokens
        stand, and not at all where they do not."""
        waiting = [pair for pair in self.scales if pair[0].invocation]
        if not waiting or self.before is not None:
            return self
        always = AdapterSet(tuple(pair for pair in self.scales if not pair[0].invocation))
        places = [(_last_place(np.asarray(prompt, np.int32), pair[0].invocation), pair) for pair in waiting]
        start, chosen = max(places, key=lambda each: each[0])
        if start < 0:
            return always
        scales = sorted([*always.scales, chosen], key=lambda pair: (pair[0].digest, pair[1]))
        return AdapterSet(tuple(scales), start, always)

    def at(self, length: float) -> AdapterSet:
        """What a token behind `length` others is computed with."""
        return (self.before if length < self.start else self._after) or self

    def held(self, length: float) -> AdapterSet:
        """The set that a state of the first `length` tokens depends on."""
        return self.before if self.before is not None and length <= self.start else self

    def shared_until(self, other: AdapterSet) -> float:
        """How many tokens of state the two have alike, if their tokens are."""
        if self.key == other.key:
            return math.inf
        same = (self.before or self).key == (other.before or other).key
        return min(self.start, other.start) if same else 0


PLAIN = AdapterSet()
"""The model without adapters."""


def check_scale(adapter: object, scale: object) -> None:
    """Raise unless `scale` is a finite number that the engine can hold."""
    if not isinstance(scale, (int, float, np.number)) or not abs(float(scale)) <= LARGEST_SCALE:
        raise InvalidInputError(f"the scale of {adapter!r} must be a finite number, got {scale!r}")


def _last_place(tokens: NDArray[np.int32], pattern: Sequence[int]) -> int:
    """Where `pattern` stands in `tokens` last, or -1."""
    count = len(tokens) - len(pattern) + 1
    if count < 1:
        return -1
    fits = np.ones(count, bool)
    for at, token in enumerate(pattern):
        fits &= tokens[at : at + count] == token
    places = fits.nonzero()[0]
    return int(places[-1]) if len(places) else -1


_LAYERS = re.compile(r"(.+)@(\d{1,5})-(\d{1,5})")


def split_layers(source: str) -> tuple[str, tuple[int, int] | None]:
    """A source without the layers at its end, and these."""
    match = _LAYERS.fullmatch(source)
    return (match[1], (int(match[2]), int(match[3]))) if match else (source, None)


def parse_scaled(text: str) -> tuple[str, float]:
    """FILE[@FIRST-LAST][:SCALE] as the command has it. A drive's letter is no scale."""
    source, colon, scale = text.rpartition(":")
    if colon and source:
        try:
            value = float(scale)
        except ValueError:
            return text, 1.0
        check_scale(source, value)
        return source, value
    return text, 1.0


def _version(source: str) -> object:
    """The identity of a file's content; an engine may have adapters that are no files."""
    path = Path(source)
    try:
        return path.resolve(), *file_version(path)
    except (OSError, ValueError):
        return source


class AdapterTable:
    """The adapters of one model, each loaded when it is first asked for. Safe from any thread.

    Always holds: a name means the file that it was opened with; a file that changed is another adapter; what
    can only be a name (`is_name`) never has another file read.
    """

    def __init__(
        self,
        load: Callable[..., Adapter] | None,
        *,
        names: Mapping[str, str] | None = None,
        default: Scales | None = None,
    ) -> None:
        """`load` makes an adapter of a file, and takes its `layers`; an engine may have none. `names` are
        files by name, `default` is for requests that name none. Callers may name files too."""
        self._load = load
        self._names = dict(names or {})
        for name in self._names:
            if not is_name(name):
                raise InvalidInputError(
                    "a name of an adapter has letters, digits, dots, dashes and underscores, and is no file: "
                    f"{name!r}"
                )
        self.default = None if default is None else dict(default)
        """For requests that name none; None: what the context has."""
        self._loaded: dict[tuple[object, tuple[int, int] | None], Adapter] = {}
        self._lock = threading.Lock()
        self.resolve(self.default or {})
        for name in self._names:
            self._find(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    @property
    def always(self) -> AdapterSet:
        """Those of the default that no token has to switch on."""
        return self.resolve(self.default or {})

    def choose(
        self, scales: Scales | None, tokens: Sequence[int] | NDArray[np.integer] = ()
    ) -> AdapterSet | None:
        """The set for a prompt of `tokens` and a request's `scales`, if any. None: what the context has."""
        scales = self.default if scales is None else scales
        return None if scales is None else self.resolve(scales, tokens)

    def resolve(self, scales: Scales, tokens: Sequence[int] | NDArray[np.integer] = ()) -> AdapterSet:
        """The set that `scales` name, for a prompt of `tokens`. Files are judged and loaded here."""
        if not isinstance(scales, Mapping) or not all(isinstance(source, str) for source in scales):
            raise InvalidInputError(f"adapters are files or names with their scales, got {scales!r}")
        if len(scales) > MAX_ADAPTERS:
            raise InvalidInputError(f"{len(scales)} adapters at once, {MAX_ADAPTERS} may be")
        if not scales:
            return PLAIN
        for source, scale in scales.items():
            check_scale(source, scale)
        chosen: dict[Adapter, float] = {}
        for source, scale in scales.items():
            adapter = self._find(source)
            chosen[adapter] = chosen.get(adapter, 0.0) + float(scale)
        return AdapterSet.of(chosen).activated(tokens)

    def files(self, scales: Scales | None) -> dict[str, float]:
        """The files, with their scales, of adapters that `scales` name; without any, of the default. Only
        names are looked up: `scales` may be a client's text."""
        if scales is None:
            return dict(self.default or {})
        by_file = {}
        for source, scale in scales.items():
            name, layers = split_layers(str(source))
            if name not in self._names:
                raise ModelNotFoundError(f"there is no adapter {name!r} here any more")
            check_scale(name, scale)
            by_file[self._names[name] + ("@{}-{}".format(*layers) if layers else "")] = float(scale)
        return by_file

    def _find(self, source: str) -> Adapter:
        name, layers = split_layers(source)
        file = self._names.get(name)
        if file is None and is_name(name):
            known = f"there are {', '.join(self._names)}" if self._names else "none was named"
            raise ModelNotFoundError(
                f"there is no adapter {name!r}: {known}; a file is a path, or ends in .gguf"
            )
        file = name if file is None else file
        if self._load is None:
            raise InvalidInputError("the engine of this model has no adapters")
        with self._lock:
            key = _version(file), layers
            if key not in self._loaded:
                self._loaded[key] = self._load(file, layers=layers)
            return self._loaded[key]


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


def is_name(source: str) -> bool:
    """Whether this can only be a name, and no file."""
    return bool(_NAME.fullmatch(source)) and not source.endswith(".gguf")


def absolute_scales(adapters: Mapping[str, float]) -> dict[str, float]:
    """The same adapters for a process that may be in another folder."""
    if not isinstance(adapters, Mapping):
        raise InvalidInputError(f"adapters are files with their scales, got {adapters!r}")
    return {_absolute(source): scale for source, scale in adapters.items()}


def absolute_names(names: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    return {name: _absolute(os.fspath(source)) for name, source in names.items()}


def _absolute(source: str) -> str:
    if not isinstance(source, str):
        raise InvalidInputError(f"an adapter is a file or a name, got {source!r}")
    file, layers = split_layers(source)
    # Nothing is looked for here: the text may be a client's.
    if is_name(file):
        return source
    return os.path.abspath(file) + (f"@{layers[0]}-{layers[1]}" if layers else "")
