"""Groups of options that several commands take, each a dataclass that is written out once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, get_type_hints

import typer

from perdure.cli.options import shared
from perdure.errors import InvalidInputError
from perdure.options import Option, options_of
from perdure.request_options import Sampling, options_of_replies

if TYPE_CHECKING:
    from perdure.engine.contract import PlacementKeywords


T = TypeVar("T")


class CacheTypes(TypedDict, total=False):
    """The K/V types that were chosen, and the draft model."""

    k_type: str
    v_type: str
    force_kv: bool
    draft: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is loaded, and how much it holds."""

    ctx: shared.Ctx = None
    kv_type: shared.KvType = None
    force_kv: shared.ForceKv = False
    gpu_layers: GpuLayers = None
    device: Devices = None
    tensor_split: TensorSplit = None
    kv_offload: KvOffload = True
    cpu_experts: CpuExperts = None
    template: shared.Template = None
    lora: shared.Lora = None
    control_vector: shared.ControlVector = None
    draft: shared.DraftModel = None

    @property
    def adapters(self) -> dict[str, float] | None:
        """As a keyword of `perdure.open`; None where none was given."""
        adapters = [*(self.lora or ()), *(self.control_vector or ())]
        if not adapters:
            return None
        from perdure.engine.adapters import absolute_scales, parse_scaled

        return absolute_scales(dict(map(parse_scaled, adapters)))

    @property
    def loading(self) -> PlacementKeywords:
        """As keywords of `perdure.Model` and `perdure.open`."""
        return loading(self.gpu_layers, self.device, self.tensor_split, self.kv_offload, self.cpu_experts)

    @property
    def cache_types(self) -> CacheTypes:
        """As keywords of `perdure.open`."""
        chosen: CacheTypes = {} if self.draft is None else {"draft": self.draft}
        if self.kv_type is not None:
            k_type, _, v_type = self.kv_type.partition(":")
            chosen |= {"k_type": k_type, "v_type": v_type or k_type, "force_kv": self.force_kv}
        return chosen

    @property
    def n_ctx(self) -> int | Literal["auto"] | None:
        return shared.parse_auto(self.ctx)


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
    @wraps(command)
    def folded(**arguments: Any) -> None:
        for name, kind in groups.items():
            arguments[name] = kind(**{field.name: arguments.pop(field.name) for field in fields(kind)})
        command(**arguments)

    folded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    folded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return folded


# Options of every command that loads a model: how much of it goes to a GPU.

_gpu_option = partial(typer.Option, rich_help_panel="GPU")


def _layers(text: str | None) -> str | None:
    if text is not None and text != "auto" and not text.isdecimal():
        raise typer.BadParameter(f"a whole number from 0, or auto; got {text}")
    return text


def _experts(text: str | None) -> str | None:
    if text is not None and text not in ("all", "auto") and not text.isdecimal():
        raise typer.BadParameter(f"a whole number from 0, all, or auto; got {text}")
    return text


def _shares(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if min(shares) < 0 or not sum(shares):
        raise typer.BadParameter(f"shares such as 3,1, none below 0; got {text}")
    return text


GpuLayers = Annotated[
    str | None,
    _gpu_option(
        "--gpu-layers",
        metavar="N|auto",
        show_default="auto",
        callback=_layers,
        help="Layers of the model on the GPU; auto: as many as fit.",
    ),
]
Devices = Annotated[
    list[str] | None,
    _gpu_option("--device", metavar="NAME", help="A GPU to use; may be given several times."),
]
TensorSplit = Annotated[
    str | None,
    _gpu_option(
        "--tensor-split",
        metavar="A,B",
        show_default="by free memory",
        callback=_shares,
        help="Share of the model for each GPU.",
    ),
]
KvOffload = Annotated[
    bool, _gpu_option("--kv-offload/--no-kv-offload", help="Keep the K/V cache on the GPU too.")
]
CpuExperts = Annotated[
    str | None,
    _gpu_option(
        "--cpu-experts",
        metavar="N|all|auto",
        show_default="auto",
        callback=_experts,
        help="Layers whose experts stay in memory and are computed by the CPU; auto: as few as must.",
    ),
]


def loading(
    gpu_layers: str | None,
    devices: list[str] | None,
    tensor_split: str | None,
    kv_offload: bool,
    cpu_experts: str | None = None,
) -> PlacementKeywords:
    """What was chosen, as keywords of `perdure.Model` and `perdure.open`."""
    placement: PlacementKeywords = {}
    if gpu_layers is not None:
        placement["gpu_layers"] = "auto" if gpu_layers == "auto" else int(gpu_layers)
    if devices:
        placement["devices"] = tuple(devices)
    if tensor_split is not None:
        placement["tensor_split"] = tuple(float(share) for share in tensor_split.split(","))
    if not kv_offload:
        placement["kv_offload"] = False
    if cpu_experts is not None:
        placement["cpu_experts"] = _count(cpu_experts)
    return placement


def _count(text: str) -> int | Literal["all", "auto"]:
    if text == "all":
        return "all"
    return "auto" if text == "auto" else int(text)
