"""Which models are served, and how each is opened: options of a command, a folder, or a TOML file."""

from __future__ import annotations

import functools
import logging
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perdure.atomic import read_text
from perdure.checks import is_number, is_whole
from perdure.engine import registry
from perdure.engine.adapters import is_name, parse_scaled
from perdure.engine_config import EngineConfig, engine_options
from perdure.errors import InvalidInputError, PerdureError
from perdure.models import read_parts
from perdure.models.parts import is_projector
from perdure.models.placement import Sizes
from perdure.options import Option

log = logging.getLogger("perdure.pool")

_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]{0,99}", re.ASCII)
_LATER_PART = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+|\d+(?:\.\d+)?)")
_PART = re.compile(r"(\d+(?:\.\d+)?)([a-zµ]*)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_MOST_SECONDS = 10 * 365 * 86400.0
_MODELS = 256
"""In one server."""


@functools.cache
def _engine_options() -> dict[str, Option]:
    """What can be said of how one of several models is opened, by what TOML calls it."""
    return {each.command: each for each in engine_options().values() if "models" in each.surfaces}


def _names() -> tuple[str, ...]:
    return (*_engine_options(), "template", "keep_alive", "memory", "pin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model to be served: its name, where it is, and how it is opened."""

    name: str
    source: str
    config: EngineConfig = field(default_factory=EngineConfig)
    """What is said of how it is opened; the rest is as for all."""
    template: str | None = None
    keep_alive: float | None = None
    """Seconds without a request after which it is unloaded; below 0, never; None: what holds for all."""
    memory: int | None = None
    """Bytes that it takes, where that is known better than it can be predicted."""
    pinned: bool = False
    """Whether it is loaded at the start, and never unloaded to make room."""
    adapters: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Files of adapters that clients may name, each with the scale that it has where a client names none."""

    @classmethod
    def of(cls, name: str, source: str, options: Mapping[str, Any], where: str) -> ModelSpec:
        """From options by their names, as text or as TOML has them. `where` is for errors."""
        known = _names()
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise InvalidInputError(
                f"{where}: there is no option {unknown[0]!r} of a model; there are {', '.join(known)}"
            )
        if not _NAME.fullmatch(name):
            raise InvalidInputError(
                f"{where}: a model's name has up to 100 letters, digits, and any of . _ : / -, got {name!r}"
            )
        engine = _engine_options()
        said = {key: value for key, value in options.items() if key in engine}
        pinned, template = options.get("pin", False), options.get("template")
        if not isinstance(pinned, bool):
            raise InvalidInputError(f"{where}: pin stands alone, or is true or false, got {pinned!r}")
        if template is not None and (not isinstance(template, str) or not template):
            raise InvalidInputError(f"{where}: template is a text, got {template!r}")
        keep_alive, memory = options.get("keep_alive"), options.get("memory")
        return cls(
            name=name,
            source=source,
            config=_config(said, where),
            template=template,
            keep_alive=None if keep_alive is None else parse_duration(keep_alive, f"{where}: keep_alive"),
            memory=None if memory is None else parse_size(memory, f"{where}: memory"),
            pinned=pinned,
        )


def _config(options: Mapping[str, Any], where: str) -> EngineConfig:
    """Options of the engine, as text or as TOML has them."""
    config = EngineConfig()
    for key, value in options.items():
        option = _engine_options()[key]
        try:
            parsed = option.parse(value) if isinstance(value, str) else value
            config = config.overlaid(EngineConfig.from_options({option.name: parsed}))
        except InvalidInputError:
            raise InvalidInputError(f"{where}: {key} is {option.range}, got {value!r}") from None
    return config


def parse_duration(value: object, where: str = "keep_alive") -> float:
    """Seconds, from a number of them or a text such as `5m` or `1h30m`; below 0 is for ever."""
    if is_number(value) and -_MOST_SECONDS <= value <= _MOST_SECONDS:
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) and len(value) <= 40 else None
    if match is None:
        raise InvalidInputError(
            f"{where} is a number of seconds, or a duration such as 5m; got {str(value)[:40]!r}"
        )
    seconds = sum(float(number) * _UNITS.get(unit, 1.0) for number, unit in _PART.findall(match[2]))
    seconds = min(seconds, _MOST_SECONDS)
    return -seconds if match[1] else seconds


def parse_size(value: object, where: str = "memory") -> int:
    """Bytes, from a number of them or a text such as `8G` (of 1024³)."""
    if is_whole(value) and 0 < value < 1 << 62:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= 40 else None
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if not 0 < size < 1 << 62:
        raise InvalidInputError(f"{where} is a number of bytes above 0, such as 8G; got {str(value)[:40]!r}")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """All models of a server, the first of which is meant where nobody names one."""

    models: tuple[ModelSpec, ...]
    aliases: tuple[str, ...] = ()
    """`PATTERN=NAME` each."""
    memory: int | None = None
    folders: tuple[Path, ...] = ()
    """Those whose files are the models."""


@dataclass(slots=True)
class _Collected:
    models: list[ModelSpec] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    memory: int | None = None


def read_selection(texts: Iterable[str]) -> Selection:
    """Models from what `--model` was given: `NAME=FILE,option=value…`, a folder of GGUF files, or a TOML
    file."""
    collected = _Collected()
    for text in texts:
        _read(text, collected)
    names: dict[str, ModelSpec] = {}
    for spec in collected.models:
        if spec.name in names:
            raise InvalidInputError(
                f"two models are called {spec.name!r}, {names[spec.name].source} and {spec.source}: give one "
                "another name as NAME=FILE"
            )
        names[spec.name] = spec
    if len(names) > _MODELS:
        raise InvalidInputError(f"{len(names)} models are named, {_MODELS} can be served")
    check_aliases(collected.aliases, list(names))
    return Selection(
        models=tuple(collected.models),
        aliases=tuple(collected.aliases),
        memory=collected.memory,
        folders=tuple(collected.folders),
    )


def check_copies(specs: Sequence[ModelSpec]) -> None:
    """Refuse two copies of one model: the state of both would have one place in the store."""
    for number, spec in enumerate(specs):
        for other in specs[:number]:
            if is_copy(spec.source, other.source):
                raise InvalidInputError(
                    f"models {other.name} and {spec.name} are the same ({other.source} and {spec.source}): "
                    f"serve {other.name} alone, and add its other name by --alias {spec.name}={other.name}"
                )


def check_aliases(aliases: Sequence[str], names: Sequence[str]) -> None:
    """Refuse an alias for a model that there is not."""
    for alias in aliases:
        pattern, equals, name = alias.rpartition("=")
        if equals and (name not in names or not pattern):
            raise InvalidInputError(
                f"--alias {alias!r}: {name!r} is none of the models, which are {', '.join(names)}"
            )


def named_adapter(text: str) -> tuple[str, tuple[str, float]]:
    """An adapter that clients may name: NAME=FILE[:SCALE]."""
    name, equals, source = text.partition("=")
    if not equals or not is_name(name) or not source:
        raise InvalidInputError(
            f"--adapter is NAME=FILE, its name of letters, digits, dots, dashes and underscores; got {text!r}"
        )
    return name, parse_scaled(source)


def with_adapters(selection: Selection, texts: Iterable[str]) -> Selection:
    """Models with adapters, each as MODEL:NAME=FILE[:SCALE]."""
    adapters: dict[str, dict[str, tuple[str, float]]] = {each.name: {} for each in selection.models}
    for text in texts:
        model, colon, _ = text.partition("=")[0].rpartition(":")
        if not colon or model not in adapters:
            raise InvalidInputError(
                f"--adapter of one of several models is MODEL:NAME=FILE, its model one of "
                f"{', '.join(adapters)}; got {text!r}"
            )
        name, about = named_adapter(text[len(model) + 1 :])
        adapters[model][name] = about
    models = tuple(replace(each, adapters=adapters[each.name]) for each in selection.models)
    return replace(selection, models=models)


def _read(text: str, collected: _Collected) -> None:
    whole = Path(text).expanduser()
    # A folder holds models, unless it is one, as those of MLX are.
    if whole.is_dir() and not registry.engine_for(place := str(whole.absolute())).opens(place):
        _read_folder(whole, collected)
        return
    if text.endswith(".toml"):
        _read_file(whole, collected)
        return
    head, *options = re.split(rf",(?=(?:{'|'.join(_names())})(?:=|,|$))", text)
    name, equals, source = head.partition("=")
    if not equals or Path(head).expanduser().is_file():
        name, source = "", head
    elif not name:
        source = ""
    if not source:
        raise InvalidInputError(f"--model {text!r}: a model is NAME=FILE, a file, a folder or a TOML file")
    pairs: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        pairs[key] = value if equals else True
    if pairs.get("pin") in ("true", "false"):
        pairs["pin"] = pairs["pin"] == "true"
    named = name or label_of(source)
    collected.models.append(ModelSpec.of(named, source, pairs, f"--model {named}"))


def model_files(folder: Path) -> list[Path]:
    """The first GGUF file of each model in a folder. A projector is no model by itself."""
    files = (path for path in sorted(folder.rglob("*.gguf")) if not _LATER_PART.search(path.name))
    return [path for path in files if not is_projector(path.name)]


def spec_of_file(path: Path, folder: Path) -> ModelSpec:
    """The model in a file that nobody named. Refuses one that cannot be read."""
    Sizes.of(read_parts(path))
    return ModelSpec.of(label_of(str(path)), str(path), {}, f"--model {folder}: {path.name}")


def _read_folder(folder: Path, collected: _Collected) -> None:
    files = model_files(folder)
    if not files:
        raise InvalidInputError(f"--model {folder}: there is no GGUF file in that folder")
    specs: list[ModelSpec] = []
    for path in files:
        try:
            # Nobody named this file: what is wrong with it costs the others nothing.
            spec = spec_of_file(path, folder)
        except PerdureError as error:
            log.warning("%s is left out: %s", path, error)
            continue
        if (first := next((each for each in specs if is_copy(each.source, spec.source)), None)) is not None:
            log.warning("%s is left out: it is a copy of %s", path, first.source)
            continue
        specs.append(spec)
    if not specs:
        raise InvalidInputError(
            f"--model {folder}: none of its {len(files)} GGUF files can be read; the log says why"
        )
    collected.models += specs
    collected.folders.append(folder)


def is_copy(source: str, other: str) -> bool:
    """Whether two sources, as an engine fetched them, are one model."""
    engine = registry.engine_for(source)
    return engine is registry.engine_for(other) and engine.is_copy(source, other)


def _read_file(path: Path, collected: _Collected) -> None:
    try:
        table = tomllib.loads(read_text(path, regular=False))
    except OSError as error:
        raise InvalidInputError(f"--model {path}: it cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"--model {path}: it is not TOML: {error}") from None
    models, aliases = table.pop("models", None), table.pop("aliases", {})
    if "memory" in table:
        collected.memory = parse_size(table.pop("memory"), f"{path}: memory")
    if table or not isinstance(models, dict) or not models or not isinstance(aliases, dict):
        extra = f"; there is no {next(iter(table))!r}" if table else ""
        raise InvalidInputError(
            f"{path}: it holds [models.NAME] with a file each, and perhaps [aliases] and memory{extra}"
        )
    for name, options in models.items():
        source = options.pop("file", None) if isinstance(options, dict) else None
        if not isinstance(source, str) or not source:
            raise InvalidInputError(f'{path}: models.{name} needs a file: file = "model.gguf"')
        if (beside := path.parent / Path(source).expanduser()).is_file():
            source = str(beside)
        collected.models.append(ModelSpec.of(name, source, options, f"{path}: models.{name}"))
    for pattern, name in aliases.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"{path}: aliases.{pattern} is a model's name, got {name!r}")
        collected.aliases.append(f"{pattern}={name}")


def label_of(source: str) -> str:
    """The name of a model that nobody named."""
    label = registry.engine_for(source).label(source)
    return re.sub(r"[^\w.:/-]", "-", label, flags=re.ASCII)
