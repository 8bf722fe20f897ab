"""Which engines there are, and which one opens what is given.

Each engine is one object with the calls of `Engine`. It is named by where it can be imported from
("module:attribute"), so that a worker process finds the same one. The first engine whose `opens` says yes
takes a source:

    1. those of `register`, the last one first;
    2. functions that make a model, as "module:function";
    3. MLX: folders with safetensors;
    4. llama.cpp: GGUF files, names of models, addresses;
    5. those of installed packages (entry points of the group `perdure.engines`).

A source that none of them claims goes to llama.cpp, which says what is wrong with it.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from perdure.config import N_CTX, SLOTS
from perdure.errors import InvalidInputError

if TYPE_CHECKING:
    # A tenth of a second of every command, of which few open a model.
    from typing import Unpack

    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import Model
    from perdure.models.card import Card
    from perdure.models.download import Progress
    from perdure.models.fit import Room, Sizes

Source: TypeAlias = "str | os.PathLike[str] | None"
"""What people name a model by: a file, a name, an address; None is the default model."""

GROUP = "perdure.engines"
"""The entry points of packages that bring an engine."""


Bars: TypeAlias = "Callable[[str], AbstractContextManager[Progress | None]]"
"""Makes a progress bar for what has to be fetched, by its name."""


Agree: TypeAlias = Callable[[str, int], bool]
"""Asks whoever is there whether so many bytes may be fetched, and what for."""


def no_bars(what: str) -> AbstractContextManager[Progress | None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `perdure doctor` looked at. `advice` says what to do where it is not all right."""

    name: str
    state: Literal["ok", "warn", "bad"]
    found: str
    advice: str = ""


class Engine:
    """One way to run models. A subclass says what it opens and how; the rest has defaults.

    All calls may be made from any thread, before and after a model of it is open.
    """

    name = ""

    def opens(self, source: Source) -> bool:
        """Whether `source` can only be meant for this engine. It is asked often, and must not fetch."""
        raise NotImplementedError

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> Model:
        """Load what `fetch` returned, so that a context of `cells` tokens fits beside it."""
        raise NotImplementedError

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        """Have all that `open` needs on this machine, and say what to give it, in this process or another.

        Where nobody can `agree`, no more than is usual is fetched.
        """
        return str(source)

    def label(self, source: str) -> str:
        """What a server calls the model that `fetch` returned, unless it is told otherwise."""
        return source

    def is_assistant(self, source: str) -> bool:
        """Whether what `fetch` returned reads hidden states of another model, and can only guess for that."""
        return False

    def is_same(self, source: Source, path: str | None, digest: str) -> bool:
        """Whether `source` is the model at `path`, or the one with that digest. It must not fetch."""
        return path is None

    def memory_needed(
        self, source: Source, room: Room, settings: Mapping[str, Any], loading: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Bytes of the machine's memory and of the devices' that a model takes, opened so in `room`; 0 where
        nothing is known. It must not fetch."""
        return 0, 0

    def sizes(self, source: Source) -> Sizes | None:
        """A model's sizes, for `perdure fit`; None where the file is a GGUF file, which says them itself."""
        return None

    def card(self, source: Source, bars: Bars = no_bars) -> tuple[Card, Mapping[str, Any]]:
        """A model's figures and its metadata, for `perdure show`."""
        from perdure.models.card import Card

        model = self.open(self.fetch(source, bars), cells=0)
        try:
            info = model.info
            card = Card(
                path=Path(str(source)),
                file_bytes=info.nbytes,
                architecture=info.architecture or None,
                name=info.name or None,
                quantisation=info.quantisation or None,
                context_length=info.n_ctx_train or None,
                vocabulary=model.n_vocab,
                memory=type(model.memory),
                window=model.memory.window,
                chat_template=info.template or None,
            )
            return card, dict(model.metadata)
        finally:
            model.close()

    def findings(self) -> Iterator[Finding]:
        """What `perdure doctor` says about it."""
        yield Finding("engine", "ok", f"{self.name} is registered")


class FactoryEngine(Engine):
    """Models that a function makes: the source is "module:function"."""

    name = "factory"
    _PATTERN = re.compile(r"(?!hf:|ollama:|lmstudio:)[A-Za-z_]\w*(\.\w+)*:(?!latest$)[A-Za-z_]\w*")

    def opens(self, source: Source) -> bool:
        if not isinstance(source, str) or self._PATTERN.fullmatch(source) is None:
            return False
        from perdure.models.catalogue import find

        # `gemma4:e4b` is a model's name.
        return find(source) is None

    def open(
        self,
        source: str,
        *,
        cells: int,
        progress: Callable[[float], bool] | None = None,
        **loading: Unpack[LoadingKeywords],
    ) -> Model:
        return cast("Model", imported(source, "function that makes a model")())

    def findings(self) -> Iterator[Finding]:
        return iter(())


FACTORY = FactoryEngine()
_FACTORY = f"{__name__}:FACTORY"
_LLAMA = "perdure.engine.llama.engine:ENGINE"
_MLX = "perdure.engine.mlx.engine:ENGINE"
_registered: list[str] = []


def register(engine: str) -> None:
    """Use the engine at "module:attribute" too, before those that are there already."""
    instance = imported(engine)
    if not isinstance(instance, Engine):
        raise InvalidInputError(f"{engine} is no Engine, it is a {type(instance).__name__}")
    unregister(engine)
    _registered.insert(0, engine)


def unregister(engine: str) -> None:
    """Do not use a registered engine any more. Models that it has opened are not touched."""
    if engine in _registered:
        _registered.remove(engine)


def engines() -> list[str]:
    """Where each engine can be imported from, in the order in which they are asked."""
    return list(_named())


def find(source: Source) -> str:
    """Where the engine that opens `source` can be imported from."""
    for name in _named():
        if imported(name).opens(source):
            return name
    return _LLAMA


def engine_for(source: Source) -> Engine:
    """The engine that opens `source`."""
    return cast(Engine, imported(find(source)))


def names_model(word: str) -> bool:
    """Whether a word can only be meant as a model."""
    return any(imported(name).opens(word) for name in (*_registered, _MLX, _LLAMA))


def open_model(source: Source, loading: LoadingKeywords, *, cells: int) -> Model:
    """A model, loaded so that a context of so many tokens fits beside it on the device."""
    engine = engine_for(source)
    return engine.open(engine.fetch(source), cells=cells, **loading)


def cells(n_ctx: object, slots: object, context: Mapping[str, Any]) -> int:
    """Tokens of a context of so many requests, in f16: with smaller types it takes the room of fewer.

    What is "auto" fills the room that is left, and is usual until then. 0 where something is wrong, which is
    said when the context is opened.
    """
    from perdure.models.fit import CACHE_BITS

    n_ctx, slots = N_CTX if n_ctx == "auto" else n_ctx, SLOTS if slots == "auto" else slots
    if not isinstance(n_ctx, int) or not isinstance(slots, int):
        return 0
    types = [str(context.get(name, "f16")) for name in ("k_type", "v_type")]
    bits = sum(CACHE_BITS.get(each, 16.0) for each in types)
    return max(0, int(n_ctx * slots * bits / 32))


def imported(name: str, what: str = "engine") -> Any:
    """What is at "module:attribute"."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"{name} names no {what}: {error}") from None


def _named() -> Iterator[str]:
    yield from (*_registered, _FACTORY, _MLX, _LLAMA)
    # To read what is installed takes longer than to load a small model: only where none of those will do.
    from importlib.metadata import entry_points

    yield from (entry.value for entry in entry_points(group=GROUP))
