"""Groups of options that several commands take, each a dataclass that is written out once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

from perdure.cli.options import offload, shared
from perdure.errors import InvalidInputError
from perdure.options import Option, options_of
from perdure.request_options import RequestOptions, Sampling

if TYPE_CHECKING:
    from perdure.engine.contract import LoadingKeywords

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is loaded, and how much it holds."""

    ctx: shared.Ctx = None
    gpu_layers: offload.GpuLayers = None
    device: offload.Devices = None
    tensor_split: offload.TensorSplit = None
    kv_offload: offload.KvOffload = True
    template: shared.Template = None

    @property
    def loading(self) -> LoadingKeywords:
        """As keywords of `perdure.Model` and `perdure.open`."""
        return offload.loading(self.gpu_layers, self.device, self.tensor_split, self.kv_offload)


REPLY_OPTIONS: dict[str, Option] = {
    "max_tokens": options_of(RequestOptions)["max_tokens"],
    **options_of(Sampling),
}
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
        given: dict[str, Any] = {}
        for name, option in options_of(Sampling).items():
            value = getattr(self, name)
            # An option that may come several times and did not is an empty list, or an empty tuple.
            if value is not None and value != [] and value != ():
                given[name] = option.gather(value) if isinstance(value, (list, tuple)) else value
        Sampling(**given)
        if self.max_tokens is not None:
            try:
                REPLY_OPTIONS["max_tokens"].check(self.max_tokens)
            except InvalidInputError as error:
                raise typer.BadParameter(str(error)) from None
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """Which conversation it is, and what it begins with."""

    session: shared.Session = None
    store: shared.Store = None
    system: shared.SystemText = None
    schema: shared.Schema = None


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its groups as options of its own."""
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
    @functools.wraps(command)
    def folded(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    folded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    folded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return folded
