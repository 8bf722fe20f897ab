"""The catalogue: current open models under the short names that people know, and which of them fit here.

    find("llama3.2")     the model of that name or alias: `llama3.2:3b`, its file on a hub, its size
    ranked()             all of them with "fits", "tight" or "not" for this machine, the best one first
    recommended()        the one to talk to here

The data is `catalogue.toml` beside this file. `tools/check_catalogue.py` compares it with a hub.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from perdure.spi.base import N_CTX, read_text, system

if TYPE_CHECKING:
    from perdure.spi.models import FitLevel

_COMPUTE = 400 << 20
"""Bytes for the buffers of a step and the program itself."""
_QUICK = 5_500_000_000
"""Bytes of weights a token that a CPU still reads several times a second: more is no first recommendation."""
_LATEST = ":latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A model with a short name. `repo` and `file` are where a hub has it; sizes are in bytes."""

    name: str
    aliases: tuple[str, ...] = ()
    repo: str
    file: str
    size: int
    active: int
    """That are read for one token."""
    kv: int
    """Of keys and values a token."""
    context: int
    quality: int
    purpose: str
    licence: str
    sees: bool = False
    """Whether its repo has a projector for images, which `perdure pull` fetches too."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def memory(self) -> int:
        """Bytes that it takes with the usual context: weights, keys and values, and the buffers of a step."""
        return self.size + self.kv * N_CTX + _COMPUTE


def fit_of(needed: int, free: int | None = None) -> FitLevel:
    """Whether so many bytes fit into those that are free, by the rule of `perdure fit`; a machine that does
    not say what is free is believed to have enough."""
    from perdure.spi.models import judge

    room = system.available_memory() if free is None else free
    return "fits" if room is None else judge(needed, room)


@functools.cache
def catalogue() -> tuple[CatalogueModel, ...]:
    """All of them, in the order of the file."""
    table = tomllib.loads(read_text(data_file()))
    return tuple(
        CatalogueModel(**{**each, "aliases": tuple(each.get("aliases", ()))}) for each in table["model"]
    )


def data_file() -> Path:
    return Path(__file__).with_suffix(".toml")


def find(name: str) -> CatalogueModel | None:
    """The model of a name or an alias; `:latest` may stand behind it."""
    return _by_name().get(name.lower().removesuffix(_LATEST))


def names_of(file: str | Path) -> tuple[str, ...]:
    """The short names of the model in a file of that name; none where the catalogue does not have it."""
    return _by_file().get(PurePosixPath(str(file)).name, ())


def near(name: str) -> tuple[str, ...]:
    """The names that are like one that is not known: of its family, or by spelling."""
    query = name.lower().removesuffix(_LATEST)
    family = query.partition(":")[0]
    same = [each.name for each in catalogue() if each.name.partition(":")[0] == family]
    return tuple(same or difflib.get_close_matches(query, _by_name(), n=3, cutoff=0.75))


def is_like_a_name(word: str) -> bool:
    """Whether a word begins as the names of a family do, and goes on with a number: `llama9`, `qwen3.9`."""
    stem = word.lower().partition(":")[0].rstrip("0123456789.")
    return stem != word.lower() and stem in {
        each.name.partition(":")[0].rstrip("0123456789.") for each in catalogue()
    }


def ranked(free: int | None = None) -> list[tuple[CatalogueModel, FitLevel]]:
    """All of them with how they fit, the best first: what fits, then what is tight, then the rest; the
    recommended one before all others."""
    fits = [(model, fit_of(model.memory, free)) for model in catalogue()]
    order: Sequence[FitLevel] = ("fits", "tight", "not")
    best = recommended(free)
    return sorted(fits, key=lambda each: (each[0] is not best, order.index(each[1]), -each[0].quality))


def recommended(free: int | None = None, *, most: int | None = None) -> CatalogueModel | None:
    """The best model that fits and that is quick enough to talk to without a GPU, of at most so many bytes to
    fetch; None where none fits."""
    quick = (
        model for model in catalogue() if model.active <= _QUICK and (most is None or model.size <= most)
    )
    fitting = [model for model in quick if fit_of(model.memory, free) == "fits"]
    return max(fitting, key=lambda model: model.quality, default=None)


@functools.cache
def _by_name() -> dict[str, CatalogueModel]:
    return {name: model for model in catalogue() for name in model.names}


@functools.cache
def _by_file() -> dict[str, tuple[str, ...]]:
    from perdure.spi.models import part_names

    return {part: model.names for model in catalogue() for part in part_names(model.file)}
