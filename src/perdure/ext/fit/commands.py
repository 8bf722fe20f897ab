"""`perdure fit` and `perdure tune`: how to open a model on this machine, by its memory and by its speed."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.filesize import decimal

from perdure import FetchError, PerdureError
from perdure.spi.base import system
from perdure.spi.cli import groups, model_names, print_json, shared, terminal, words, write_columns

if TYPE_CHECKING:
    from perdure.ext.fetching.catalogue import CatalogueModel
    from perdure.ext.fit.fit import Fit
    from perdure.ext.fit.tuning import Trial
    from perdure.spi.base import FitKeywords
    from perdure.spi.engine import EngineModel, LoadingKeywords

_VERDICTS = {"fits": "fits", "tight": "is tight", "not": "does not fit"}
_LENGTHS = (512, 2048)
"""Tokens behind which the speed of each K/V type is measured."""
_LOOK = 1.0
"""Seconds for which other programs are watched."""
_BUSY = 0.5
"""Cores that other programs may use beside a measurement."""


def fit(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default="that of `perdure config show`, else the small default model",
            autocompletion=model_names,
            help="A .gguf file, owner/repo (all its quantisations) or owner/repo:Q4_K_M, or a URL.",
        ),
    ] = None,
    ctx: shared.Ctx = None,
    slots: Annotated[str | None, shared.engine_option("slots", show_default="auto")] = None,
    gpu_layers: shared.GpuLayers = None,
    cpu_experts: Annotated[str | None, shared.engine_option("cpu_experts")] = None,
    device: Annotated[list[str] | None, shared.engine_option("devices")] = None,
    kv_offload: Annotated[bool, shared.engine_option("kv_offload")] = True,
    as_json: shared.Json = False,
) -> None:
    """Say whether a model fits, what it takes, and how to open it.

    Nothing is fetched: of a model that is not here the first megabytes are read. The exit code is 1 where it
    does not fit.
    """
    from perdure.ext.fetching.catalogue import find
    from perdure.ext.fit.fit import fit_all

    config = groups.engine_config(
        n_ctx=ctx,
        slots=slots,
        gpu_layers=gpu_layers,
        cpu_experts=cpu_experts,
        devices=device,
        kv_offload=kv_offload,
    )
    try:
        fits = fit_all(model or "", **cast("FitKeywords", config.keywords))
    except FetchError as error:
        if as_json or (known := find(model or "")) is None:
            raise
        _show_known(known, error)
        return
    if as_json:
        print_json([_plain(each) for each in fits])
    elif len(fits) == 1:
        _show(fits[0], model or fits[0].name)
    else:
        _table(fits)
    if all(each.verdict == "not" for each in fits):
        raise typer.Exit(1)


def _show_known(model: CatalogueModel, error: FetchError) -> None:
    """What the catalogue has of a model whose file cannot be read."""
    from perdure.ext.fetching.catalogue import fit_of

    verdict = fit_of(model.memory)
    takes = f"about {decimal(model.memory)} of memory with the usual context"
    terminal.write(
        f"{model.name} {_VERDICTS[verdict]}: {takes} ({decimal(model.size)} to fetch).\n\n"
        f"This is from the catalogue, since its file cannot be read: {error}.\n"
    )
    if verdict == "not":
        raise typer.Exit(1)


def _plain(fit: Fit) -> dict[str, Any]:
    return {
        "name": fit.name,
        "verdict": fit.verdict,
        "options": fit.options,
        "weights": fit.weights,
        "machine": {**dataclasses.asdict(fit.machine), "free": fit.room.machine},
        "device": {**dataclasses.asdict(fit.device), "free": fit.room.device},
        "reasons": list(fit.reasons),
    }


def _show(fit: Fit, name: str) -> None:
    terminal.write(f"{terminal.harmless(fit.name)} {_VERDICTS[fit.verdict]}.\n\n")
    rows: list[tuple[str, ...]] = [("", "weights", "K/V", "buffers", "in all", "free")]
    places = [("memory", fit.machine, fit.room.machine)]
    if fit.room.device:
        places.append(("GPU", fit.device, fit.room.device))
    for place, need, free in places:
        figures = (need.weights, need.cache, need.compute, need.total, free)
        rows.append((place, *map(decimal, figures)))
    write_columns(rows, right=frozenset({1, 2, 3, 4}))
    terminal.write("\n")
    for reason in fit.reasons:
        terminal.write(f"{reason[0].upper()}{reason[1:]}.\n")
    if fit.verdict != "not":
        terminal.write(f"\nperdure serve {terminal.harmless(name)} {_options(fit)}\n")


def _options(fit: Fit) -> str:
    """As options of the command, those that differ from its defaults."""
    setup = fit.setup
    words = [f"--ctx {setup.n_ctx}", f"--slots {setup.slots}"]
    if fit.room.device:
        words.append(f"--gpu-layers {setup.gpu_layers}")
    if setup.cpu_experts:
        words.append(f"--cpu-experts {setup.cpu_experts}")
    return " ".join(words)


def _table(fits: list[Fit]) -> None:
    rows = [("", "weights", "memory", "GPU", "context", "slots", "layers", "file")]
    for each in fits:
        setup = each.setup
        works = each.verdict != "not"
        rows.append(
            (
                each.verdict,
                decimal(each.weights),
                decimal(each.machine.total),
                decimal(each.device.total) if each.room.device else "",
                f"{setup.n_ctx:,}" if works else "",
                str(setup.slots) if works else "",
                str(setup.gpu_layers) if works and each.room.device else "",
                terminal.harmless(each.name),
            )
        )
    write_columns(rows, right=frozenset({1, 2, 3, 4, 5, 6}))


def tune(
    model: shared.ModelName = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=3600, metavar="N", help="About how long to measure.")
    ] = 60.0,
    gpu_layers: shared.GpuLayers = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Measure though other programs run.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was tuned for this model.")] = False,
    as_json: shared.Json = False,
) -> None:
    """Find the settings with which a model is fastest here.

    Tries threads, step sizes, K/V types and, with a GPU, placements, for a minute or two. The result is
    remembered for this model and machine, and used unless you set something else. Run it on an idle machine:
    where other programs take a core, nothing is tried without --anyway.
    """
    from perdure.ext.fit import tuning

    if not (forget or anyway) and (busy := system.busy_cores_now(_LOOK) or 0.0) >= _BUSY:
        raise PerdureError(
            f"other programs use {busy:.1f} of {system.usable_cores()} cores, and what is fastest beside "
            "them would be remembered for good: run it when they are idle, or with --anyway"
        )

    def say(trial: Trial) -> None:
        prompt = f", prompt {trial.prompt:,.0f} tok/s" if trial.prompt else ""
        terminal.tell(f"{trial.what}: reply {trial.reply:,.1f} tok/s{prompt}")

    def load(keywords: LoadingKeywords) -> EngineModel:
        return terminal.load(model, **(groups.engine_config(gpu_layers=gpu_layers).loading | keywords))

    # Not where an earlier tuning has placed it: all places are tried anew.
    usual: LoadingKeywords = {"gpu_layers": "auto"} if gpu_layers is None else {}
    loaded = load(usual)
    if gpu_layers is None and not forget and loaded.gpu_layers:
        loaded.close()
        place = tuning.place(lambda keywords: load(keywords or usual), progress=say)
        loaded = load(place or usual)
    with closing(loaded):
        if forget:
            tuning.forget(loaded)
            terminal.tell("Forgotten: this model is opened as usual.")
            return
        best = tuning.tune(loaded, seconds=seconds, progress=say)
    if as_json:
        print_json(best.to_json())
    else:
        terminal.write(
            f"{words.count(best.config.threads or 1, 'thread')}, steps of {best.config.n_batch} tokens, "
            f"K/V in {best.config.kv}: reply {best.reply:,.1f} tok/s, prompt {best.prompt:,.0f} tok/s. "
            "Remembered.\n"
        )


def show_losses(name: str, as_json: bool) -> None:
    """`perdure show --kv`: what types of K and V cost a model."""
    from perdure import OutOfMemoryError
    from perdure.ext.fit.kv_loss import measure, remember, speed
    from perdure.spi.base import EXACT_TYPES, KvType

    rows: list[tuple[str, ...]] = [
        (
            "type",
            "bytes a token",
            "KL",
            "same top",
            "perplexity",
            "greedy",
            *(f"at {n}" for n in _LENGTHS),
            "",
        )
    ]
    facts = []
    with closing(terminal.load(name)) as model:
        for text in ("f16", "q8_0", "q8_0:f16", "q4_0"):
            kv = KvType.parse(text)
            try:
                loss = measure(model, *kv)
            except OutOfMemoryError:
                # An engine that does not take these types together for this model.
                continue
            if not set(kv) <= EXACT_TYPES:
                remember(model, loss)
            speeds = {length: speed(model, *kv, length) for length in _LENGTHS}
            facts.append(dataclasses.asdict(loss) | {"large": loss.large, "tokens_a_second": speeds})
            rows.append(
                (
                    text,
                    f"{loss.bytes_per_token:,}",
                    f"{loss.kl:.4f}",
                    f"{loss.same_top:.1%}",
                    f"{loss.perplexity:.2f}",
                    f"{loss.greedy:.0%}",
                    *(f"{each:.1f} tok/s" for each in speeds.values()),
                    "refused unless --force-kv" if loss.large else "",
                )
            )
    if as_json:
        print_json(facts)
    else:
        write_columns(rows, right=frozenset(range(1, len(rows[0]) - 1)))
