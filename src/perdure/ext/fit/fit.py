"""`perdure.fit`: how a model can be opened on this machine, before it is fetched or loaded."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Unpack, cast

from perdure import ModelNotFoundError, PerdureError
from perdure.ext.fetching.download import Remote, RemoteBytes, web
from perdure.ext.fetching.hub import chosen, read_offers
from perdure.spi.base import EngineConfig, FitKeywords, FitOptions, KvType, named_by, optional_part, settings
from perdure.spi.engine import registry
from perdure.spi.llama import room_now
from perdure.spi.models import (
    DEFAULT,
    LEAST_CONTEXT,
    FitConstraints,
    FitLevel,
    HubSource,
    ModelPlacement,
    Need,
    Room,
    Sizes,
    UrlSource,
    judge,
    locate,
    models,
    parse_header,
    placements,
    resolve,
)

TYPE_CHOICES = (KvType("f16", "f16"), KvType("q8_0", "q8_0"))
"""K/V types of a proposal: the second where the first leaves too little context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model can be opened here, and what that takes."""

    name: str
    verdict: FitLevel
    """`fits`; `tight`: with less than was wished, or nearly all that is free; `not`: not at all."""
    setup: ModelPlacement
    machine: Need
    """Of the machine's own memory."""
    device: Need
    """Of the devices' memory."""
    room: Room
    weights: int
    reasons: tuple[str, ...]
    """Why it was proposed so, a sentence each."""

    @property
    def options(self) -> FitOptions:
        """As keywords of `perdure.open`."""
        setup = self.setup
        config = EngineConfig(
            n_ctx=setup.n_ctx,
            slots=setup.slots,
            kv_type=str(setup.kv),
            gpu_layers=setup.gpu_layers,
            cpu_experts=setup.cpu_experts,
        )
        return cast("FitOptions", config.keywords)


@named_by(FitKeywords)
def fit(model: str | os.PathLike[str] | None = None, **wishes: Unpack[FitKeywords]) -> Fit:
    """How a model can be opened in the memory that is free now: context, requests at once, K/V type, layers
    and experts on a GPU, what each takes, and why.

    The model is a file, a name, an address or `owner/repo:Q4_K_M`. One that is not here is not fetched: the
    first megabytes of its file are read. What you choose is kept, the rest is proposed. `Fit.options` are
    keywords for `open`. It computes with what is free at the moment, so ask before the model is open.
    """
    return _fits(model, EngineConfig.of(wishes, fit), alone=True)[0]


@named_by(FitKeywords)
def fit_all(repository: str, **wishes: Unpack[FitKeywords]) -> list[Fit]:
    """`fit` for every quantisation of a repository, from the smallest to the largest; one for other models.

    The sizes of the smallest are read from its header. Of the others the size of the file is enough.
    """
    return _fits(repository, EngineConfig.of(wishes, fit_all), alone=False)


def _fits(model: str | os.PathLike[str] | None, config: EngineConfig, *, alone: bool) -> list[Fit]:
    room = room_now(config.devices)
    fits = []
    for name, sizes in _read_sizes(model or settings().model or DEFAULT, alone=alone):
        # An engine that does not offload computes in the memory that the machine has.
        here = room if sizes.offloads else Room(machine=room.machine)
        projector = _projector(model or settings().model or DEFAULT)
        # The process that encodes images has it in memory, beside the model.
        left = dataclasses.replace(here, machine=max(0, here.machine - projector)) if projector else here
        proposed = propose(name, sizes, left, FitConstraints.of(config, sizes))
        if projector:
            reason = f"{_gib(projector)} of the memory are for the projector, which encodes images"
            proposed = dataclasses.replace(proposed, reasons=(*proposed.reasons, reason))
        fits.append(proposed)
    return fits


def _projector(model: str | os.PathLike[str]) -> int:
    """Bytes of the projector beside a model that is here; 0 where there is none."""
    find_projector = optional_part("projector beside a model")
    # What is wrong with a name or a file is said where the model is read.
    with suppress(PerdureError):
        place = locate(resolve(model))
        projector = find_projector(place) if find_projector is not None and place is not None else None
        return int(projector.nbytes) if projector is not None else 0
    return 0


def _read_sizes(model: str | os.PathLike[str], *, alone: bool) -> list[tuple[str, Sizes]]:
    """The sizes of a model, or of all models of a repo, by the name of their file."""
    own = registry.engine_for(model).sizes(model)
    if own is not None and not own.offloads:
        return [(Path(str(model)).name, own)]
    source = resolve(model)
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
    headers = models.read_parts(models.path(model))
    return [(headers[0].path.name, Sizes.of(headers))]


def propose(name: str, sizes: Sizes, room: Room, constraints: FitConstraints | None = None) -> Fit:
    """The best way to open a model in `room`: the first of a list, from the best to the least, that fits."""
    constraints = constraints or FitConstraints()
    ways = list(placements(sizes, room, constraints, TYPE_CHOICES[: 2 if constraints.flash else 1]))
    setup = next((each for each in ways if room.holds(sizes, each)), None)
    verdict: FitLevel
    reasons: tuple[str, ...]
    if setup is None:
        setup, verdict = ways[-1], "not"
        device, machine = room.device_bytes(sizes, setup), sizes.machine(setup).total
        reason = (
            f"with {setup.n_ctx:,} tokens for {setup.slots} request(s) it takes at least "
            f"{_gib(machine)} of memory, {_gib(room.machine)} are free"
        )
        if device:
            reason += f", and {_gib(device)} of the GPU's, {_gib(room.device)} are free"
        reasons = (reason,)
    else:
        if constraints.n_ctx is None:
            n_ctx = room.largest_context(sizes, setup, least=setup.n_ctx)
            setup = dataclasses.replace(setup, n_ctx=n_ctx)
        verdict = _verdict(sizes, setup, ways[0], room, constraints)
        reasons = _reasons(sizes, setup, ways[0], room, constraints)
    return Fit(
        name=name,
        verdict=verdict,
        setup=setup,
        machine=sizes.machine(setup),
        device=sizes.device(setup),
        room=room,
        weights=sizes.weights,
        reasons=reasons,
    )


def _verdict(
    sizes: Sizes, setup: ModelPlacement, best: ModelPlacement, room: Room, constraints: FitConstraints
) -> FitLevel:
    if setup.gpu_layers < best.gpu_layers or setup.cpu_experts > best.cpu_experts:
        return "tight"
    if setup.kv != best.kv or (setup.slots == 1 and best.slots > 1):
        return "tight"
    if constraints.n_ctx is None and setup.n_ctx > LEAST_CONTEXT:
        # What is left was filled with context, which can be given up.
        setup = dataclasses.replace(setup, n_ctx=LEAST_CONTEXT)
    levels = {judge(sizes.machine(setup).total, room.machine)}
    if setup.gpu_layers:
        levels.add(judge(room.device_bytes(sizes, setup), room.device))
    return "tight" if "tight" in levels else "fits"


def _reasons(
    sizes: Sizes, setup: ModelPlacement, best: ModelPlacement, room: Room, constraints: FitConstraints
) -> tuple[str, ...]:
    reasons = []
    if setup.gpu_layers and setup.gpu_layers >= sizes.all_layers and not setup.cpu_experts:
        reasons.append(f"all of it fits on the GPU, of which {_gib(room.device)} are free")
    elif setup.cpu_experts:
        reasons.append(
            f"the experts of {min(setup.cpu_experts, len(sizes.experts))} of {len(sizes.experts)} layers "
            f"stay in memory and are computed by the CPU: with them it would take "
            f"{_gib(room.device_bytes(sizes, dataclasses.replace(setup, cpu_experts=0)))} of the GPU's "
            f"{_gib(room.device)}"
        )
    if 0 < setup.gpu_layers < sizes.all_layers:
        reasons.append(
            f"{setup.gpu_layers} of {sizes.all_layers} layers fit on the GPU, of which {_gib(room.device)} "
            "are free; the CPU computes the others"
        )
    elif not setup.gpu_layers and room.device and constraints.gpu_layers is None:
        reasons.append(f"no layer fits on the GPU, of which {_gib(room.device)} are free")
    if constraints.n_ctx is None:
        trained = f"the model was trained for {sizes.trained:,}"
        reasons.append(
            f"{setup.n_ctx:,} tokens a request: "
            + (trained if setup.n_ctx >= sizes.trained else f"more do not fit; {trained}")
        )
    if constraints.slots is None and setup.slots < best.slots:
        reasons.append(
            f"{setup.slots} request(s) at once: {best.slots} do not fit with {best.n_ctx:,} tokens"
        )
    if setup.kv != best.kv:
        reasons.append(f"K/V in {setup.kv}: in {best.kv} it does not fit")
    return tuple(reasons)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
