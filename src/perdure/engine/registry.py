"""Which engines there are, and which one opens what is given.

Each engine is one object with the calls of `Engine`. It is named by where it can be imported from
("module:attribute"), so that a worker process finds the same one. The first engine whose `opens` says yes
takes a source:

    1. those of `register`, the last one first;
    2. llama.cpp: GGUF files and the default model;
    3. those of extensions, such as MLX for folders with safetensors;
    4. functions that make a model, as "module:function";
    5. llama.cpp: names of models, addresses, and what nobody else claims: it says what is wrong with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from perdure.engine_config import N_CTX, SLOTS, EngineConfig
from perdure.errors import InvalidInputError
from perdure.extension import imported, references

if TYPE_CHECKING:
    # A tenth of a second of every command, of which few open a model.
    from typing import Unpack

    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import EngineModel
    from perdure.models.card import Card
    from perdure.models.placement import Sizes
    from perdure.models.registry import Progress

Source: TypeAlias = "str | os.PathLike[str] | None"
"""What people name a model by: a file, a name, an address; None is the default model."""

Bars: TypeAlias = "Callable[[str], AbstractContextManager[Progress | None]]"
"""Makes a progress bar for what has to be fetched, by its name."""


Agree: TypeAlias = Callable[[str, int], bool]
"""Asks the user whether so many bytes may be fetched, and says what for."""


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
    ) -> EngineModel:
        """Load what `fetch` returned, so that a context of `cells` tokens fits beside it."""
        raise NotImplementedError

    def fetch(self, source: Source, bars: Bars = no_bars, agree: Agree | None = None) -> str:
        """Have all that `open` needs on this machine, and say what to give it, in this process or another.

        Where nobody can `agree`, no more than is usual is fetched.
        """
        return str(source)

    def label(self, source: str) -> str:
        """The name under which a server offers the model that `fetch` returned, unless `--name` is given."""
        return source

    def is_same(self, source: Source, path: str | None, digest: str) -> bool:
        """Whether `source` is the model at `path`, or the one with that digest. It must not fetch."""
        return path is None

    def is_copy(self, source: str, other: str) -> bool:
        """Whether two sources that `fetch` returned are one model. It may have to read both whole."""
        return source == other

    def build(self) -> str:
        """What decides, besides the files of a model and the settings, whether it can be loaded: the library
        and its version. It must not fetch."""
        return self.name

    def sizes(self, source: Source) -> Sizes | None:
        """A model's sizes, from the headers of its files; None where they are not here, or not known. It must
        not fetch."""
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


_FACTORY = "perdure.engine.factory:FACTORY"
_LLAMA = "perdure.engine.llama.engine:ENGINE"
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
    if source is None or is_gguf(source):
        candidates: Iterator[str] = iter((*_registered, _LLAMA))
    else:
        candidates = _named()
    return next((name for name in candidates if imported(name).opens(source)), _LLAMA)


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a GGUF file on this machine."""
    try:
        with open(Path(source).expanduser(), "rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError, RuntimeError):
        return False


def engine_for(source: Source) -> Engine:
    """The engine that opens `source`."""
    return cast(Engine, imported(find(source)))


def names_model(word: str) -> bool:
    """Whether a word can only be meant as a model."""
    names = chain(_registered, (_LLAMA,), references("engines"))
    return any(imported(name).opens(word) for name in names)


def open_model(source: Source, loading: LoadingKeywords, *, cells: int) -> EngineModel:
    """A model, loaded so that a context of so many tokens fits beside it on the device."""
    engine = engine_for(source)
    return engine.open(engine.fetch(source), cells=cells, **loading)


def cells(config: EngineConfig) -> int:
    """Tokens of a context that is to be opened, in f16: with smaller types it takes the room of fewer. What
    is "auto" fills the room that is left, and is usual until then."""
    n_ctx = config.n_ctx if isinstance(config.n_ctx, int) else N_CTX
    slots = config.slots if isinstance(config.slots, int) else SLOTS
    return int(n_ctx * slots * config.kv.bits / 32)


def _named() -> Iterator[str]:
    return chain(_registered, references("engines"), (_FACTORY, _LLAMA))
