"""Groups of options that several commands take, each a dataclass that is written out once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from perdure.cli.options import offload, shared
from perdure.sampling import Sampling

if TYPE_CHECKING:
    from perdure.engine.keywords import LoadingKeywords


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, and how many."""

    max_tokens: shared.MaxTokens = None
    temperature: shared.Temperature = None
    top_p: shared.TopP = None
    top_k: shared.TopK = None
    min_p: shared.MinP = None
    repeat_penalty: shared.RepeatPenalty = None
    seed: shared.Seed = None

    def given(self) -> dict[str, Any]:
        """What was chosen besides `max_tokens`, checked before a model is loaded."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {name: value for name, value in values.items() if value is not None and name != "max_tokens"}
        Sampling(**found)
        return found


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
