"""`perdure.fit`: how a model can be opened on this machine, before it is fetched or loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Never, TypedDict, Unpack

from perdure import models, system
from perdure.checks import check_whole
from perdure.config import settings
from perdure.engine.llama.native import library
from perdure.engine.llama.offload import (
    CpuExperts,
    GpuLayers,
    check_cpu_experts,
    check_gpu_layers,
    choose_devices,
    count_experts,
)
from perdure.engine.registry import engine_for
from perdure.errors import EngineLibraryError, InvalidInputError, ModelNotFoundError
from perdure.models.download import Remote, RemoteBytes, web
from perdure.models.fit import CACHE_BITS, N_BATCH, Fit, FitConstraints, Room, Sizes, propose
from perdure.models.header import parse_header
from perdure.models.hub import chosen, read_offers
from perdure.models.local_models import locate
from perdure.models.registry import DEFAULT, HubSource, UrlSource, resolve
from perdure.options import unknown_options


class FitKeywords(TypedDict, total=False):
    """What you choose of how a model is opened. The rest is proposed, with `kv_offload` and `flash` and a
    batch of 512 tokens."""

    n_ctx: int | Literal["auto"]
    slots: int | Literal["auto"]
    k_type: str | None
    v_type: str | None
    gpu_layers: GpuLayers
    cpu_experts: CpuExperts
    devices: Sequence[str] | None
    kv_offload: bool
    n_batch: int
    flash: bool


def fit(model: str | os.PathLike[str] | None = None, **wishes: Unpack[FitKeywords]) -> Fit:
    """How a model can be opened in the memory that is free now: context, requests at once, K/V type, layers
    and experts on a GPU, what each takes, and why.

    The model is a file, a name, an address or `owner/repo:Q4_K_M`. One that is not here is not fetched: the
    first megabytes of its file are read. What you choose is kept, the rest is proposed. `Fit.options` are
    keywords for `open`. It computes with what is free at the moment, so ask before the model is open.
    """
    return _fits(model, alone=True, **wishes)[0]


def fit_all(repository: str, **wishes: Unpack[FitKeywords]) -> list[Fit]:
    """`fit` for every quantisation of a repository, from the smallest to the largest; one for other models.

    The sizes of the smallest are read from its header. Of the others the size of the file is enough.
    """
    return _fits(repository, alone=False, **wishes)


def _fits(
    model: str | os.PathLike[str] | None,
    *,
    alone: bool,
    n_ctx: int | Literal["auto"] = "auto",
    slots: int | Literal["auto"] = "auto",
    k_type: str | None = None,
    v_type: str | None = None,
    gpu_layers: GpuLayers = "auto",
    cpu_experts: CpuExperts = "auto",
    devices: Sequence[str] | None = None,
    kv_offload: bool = True,
    n_batch: int = N_BATCH,
    flash: bool = True,
    **unknown: Never,
) -> list[Fit]:
    if (error := unknown_options(unknown, FitKeywords.__annotations__)) is not None:
        raise error
    for name, number in (("n_ctx", n_ctx), ("slots", slots), ("n_batch", n_batch)):
        if number != "auto":
            check_whole(name, number, 1, 1 << 31)
    for name, kind in (("k_type", k_type), ("v_type", v_type)):
        if kind is not None and kind not in CACHE_BITS:
            raise InvalidInputError(f"{name} is one of {', '.join(CACHE_BITS)}, got {kind!r}")
    layers, experts = check_gpu_layers(gpu_layers), check_cpu_experts(cpu_experts)
    own = engine_for(model).sizes(model)
    room = room_now(devices)
    if own is not None:
        # Another engine, which computes in the memory that the machine has.
        room, layers, experts = Room(machine=room.machine), 0, 0
    fits = []
    for name, sizes in [(Path(str(model)).name, own)] if own else _read_sizes(model, alone=alone):
        constraints = FitConstraints(
            n_ctx=None if n_ctx == "auto" else n_ctx,
            slots=None if slots == "auto" else slots,
            k_type=k_type,
            v_type=v_type,
            gpu_layers=None if layers == "auto" else layers,
            cpu_experts=None if experts == "auto" else count_experts(experts, sizes),
            kv_offload=kv_offload,
            n_batch=n_batch,
            flash=flash,
        )
        fits.append(propose(name, sizes, room, constraints))
    return fits


def room_now(devices: Sequence[str] | None = None) -> Room:
    """What is free at this moment, on the machine and on the devices that layers would go to."""
    try:
        gpus = choose_devices(library.loaded().device_list, devices)
    except EngineLibraryError:
        # Nothing is installed yet: the CPU is what there is in any case.
        gpus = ()
    return Room(
        machine=system.available_memory() or system.memory_to_share() // 2,
        device=sum(device.free for device in gpus),
        devices=max(1, len(gpus)),
    )


def _read_sizes(model: str | os.PathLike[str] | None, *, alone: bool) -> list[tuple[str, Sizes]]:
    """The sizes of a model, or of all models of a repo, by the name of their file."""
    name = model or settings().model or DEFAULT
    source = resolve(name)
    here = locate(source)
    if isinstance(source, HubSource) and (here is None or not alone):
        offers, headers = read_offers(source)
        smallest = Sizes.of(headers)
        # The files are larger than their weights by their header and a few bytes between the tensors.
        besides = offers[0].size - smallest.weights
        if alone:
            names = chosen([offer.file for offer in offers], source.tag)
            if len(names) > 1:
                shown = ", ".join(PurePosixPath(each).name for each in names[:12])
                raise ModelNotFoundError(
                    f"{source.repo} has {len(names)} models: name one as {source.repo}:Q4_K_M, or ask for "
                    f"all with perdure.fit_all or `perdure fit {source.repo}`. There are: {shown}"
                )
            offers = [offer for offer in offers if offer.file == names[0]]
        return [(offer.file, smallest.scaled(offer.size - besides)) for offer in offers]
    if isinstance(source, UrlSource) and here is None:
        remote = Remote(url=source.url)
        with web() as client:
            size = int(client.head(remote.url).headers.get("Content-Length", 0))
            header = parse_header(RemoteBytes(client, remote), Path(Path(source.place).name), size)
        return [(header.path.name, Sizes.of([header]))]
    headers = models.read_parts(models.path(name))
    return [(headers[0].path.name, Sizes.of(headers))]
