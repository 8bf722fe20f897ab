"""Options of every command that loads a model: how much of it goes to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perdure.engine.contract import LoadingKeywords

_GPU = "GPU"


def _layers(text: str | None) -> str | None:
    if text is not None and text != "auto" and not text.isdecimal():
        raise typer.BadParameter(f"a whole number from 0, or auto; got {text}")
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
    typer.Option(
        "--gpu-layers",
        metavar="N|auto",
        show_default="auto",
        callback=_layers,
        help="Layers of the model on the GPU; auto: as many as fit.",
        rich_help_panel=_GPU,
    ),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="NAME", help="A GPU to use; may be given several times.", rich_help_panel=_GPU
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        metavar="A,B",
        show_default="by free memory",
        callback=_shares,
        help="Share of the model for each GPU.",
        rich_help_panel=_GPU,
    ),
]
KvOffload = Annotated[
    bool,
    typer.Option(
        "--kv-offload/--no-kv-offload", help="Keep the K/V cache on the GPU too.", rich_help_panel=_GPU
    ),
]


def loading(
    gpu_layers: str | None, devices: list[str] | None, tensor_split: str | None, kv_offload: bool
) -> LoadingKeywords:
    """What was chosen, as keywords of `perdure.Model` and `perdure.open`."""
    found: LoadingKeywords = {}
    if gpu_layers is not None:
        found["gpu_layers"] = "auto" if gpu_layers == "auto" else int(gpu_layers)
    if devices:
        found["devices"] = tuple(devices)
    if tensor_split is not None:
        found["tensor_split"] = tuple(float(share) for share in tensor_split.split(","))
    if not kv_offload:
        found["kv_offload"] = False
    return found
