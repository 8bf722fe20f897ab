"""Groups of options that several commands take, each a dataclass that is written out once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

from perdure.cli.options import shared
from perdure.engine_config import EngineConfig, engine_options
from perdure.errors import InvalidInputError
from perdure.options import Option, options_of
from perdure.request_options import Sampling, options_of_replies

T = TypeVar("T")


def engine_config(**values: Any) -> EngineConfig:
    """Options of the engine by their fields, as they were typed. A flag at its usual value was not chosen."""
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        option = engine_options()[name]
        # An option that may come several times and did not is an empty list, or an empty tuple.
        if value is None or value == [] or value == () or (option.kind is bool and value == option.usual):
            continue
        chosen[name] = option.parse(value) if isinstance(value, str) else value
    return EngineConfig.from_options(chosen)


class EngineOptions:
    """How a model is loaded, and how much it holds: the options of the engine that a command has."""

    template: str | None = None
    lora: list[str] | None = None
    control_vector: list[str] | None = None

    @property
    def adapters(self) -> dict[str, float] | None:
        """None where none was given."""
        adapters = [*(self.lora or ()), *(self.control_vector or ())]
        if not adapters:
            return None
        from perdure.engine.adapters import absolute_scales, parse_scaled

        return absolute_scales(dict(map(parse_scaled, adapters)))

    @property
    def config(self) -> EngineConfig:
        values = {name: getattr(self, option.command, None) for name, option in engine_options().items()}
        return replace(engine_config(**values), adapters=self.adapters)


def _engine_options_of(command: str) -> Callable[[type[T]], type[T]]:
    """A class with a field for each option of the engine that a command has."""

    def with_fields(kind: type[T]) -> type[T]:
        notes: dict[str, Any] = {}
        for option in engine_options().values():
            if command in option.surfaces:
                notes[option.command] = shared.engine_annotation(option)
                setattr(kind, option.command, bool(option.usual) if option.kind is bool else None)
        notes |= {
            "template": shared.Template,
            "lora": shared.Lora,
            "control_vector": shared.ControlVector,
        }
        kind.__annotations__ = notes
        return dataclass(frozen=True, kw_only=True)(kind)

    return with_fields


@_engine_options_of("chat")
class ChatEngine(EngineOptions):
    """Of `perdure chat`."""


@_engine_options_of("run")
class RunEngine(EngineOptions):
    """Of `perdure run`."""


@_engine_options_of("serve")
class ServeEngine(EngineOptions):
    """Of `perdure serve`."""


REPLY_OPTIONS: dict[str, Option] = options_of_replies()
"""What can be said of a reply on every command that makes one."""


def _with_options(kind: type[T]) -> type[T]:
    """A class with a field for each option of a reply."""
    for name, option in REPLY_OPTIONS.items():
        kind.__annotations__[name] = shared.typer_option(option)
        setattr(kind, name, None)
    return kind


@dataclass(frozen=True, kw_only=True)
@_with_options
class SamplingOptions:
    """How tokens are drawn, and how many."""

    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """What was chosen besides `max_tokens`, checked before a model is loaded."""
        chosen: dict[str, Any] = {}
        for name, option in REPLY_OPTIONS.items():
            value = getattr(self, name)
            if name == "max_tokens":
                continue
            # An option that may come several times and did not is an empty list, or an empty tuple.
            if value is not None and value != [] and value != ():
                chosen[name] = option.gather(value) if isinstance(value, (list, tuple)) else value
        Sampling(**{name: value for name, value in chosen.items() if name in options_of(Sampling)})
        for name, option in REPLY_OPTIONS.items():
            if name not in options_of(Sampling) and (value := getattr(self, name)) is not None:
                try:
                    option.check(value)
                except InvalidInputError as error:
                    raise typer.BadParameter(str(error)) from None
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """Which conversation it is, and what it begins with."""

    session: shared.Session = None
    store: shared.Store = None
    system: shared.SystemText = None
    schema: shared.Schema = None


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose option groups are unfolded: each field is an option."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name]
            )
            for field in fields(groups[name])
        ]

    # Any: typer calls it with the options of the signature below.
    @wraps(command)
    def folded(**arguments: Any) -> None:
        for name, kind in groups.items():
            arguments[name] = kind(**{field.name: arguments.pop(field.name) for field in fields(kind)})
        command(**arguments)

    folded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    folded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return folded
