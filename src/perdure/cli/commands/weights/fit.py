"""`perdure fit` and `perdure tune`: how to open a model on this machine, by its memory and by its speed."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from perdure.cli.options import groups, shared
from perdure.cli.options.shared import model_names
from perdure.cli.output import terminal
from perdure.cli.output.facts import print_json
from perdure.cli.output.terminal import harmless, write_columns

if TYPE_CHECKING:
    from perdure.engine.contract import LoadingKeywords
    from perdure.engine.model import Model
    from perdure.engine.tuning import Trial
    from perdure.models.fit import Fit


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
    slots: Annotated[
        str | None,
        typer.Option(
            "--slots",
            metavar="N|auto",
            show_default="auto",
            callback=shared.number_or_auto,
            help="Requests at once.",
        ),
    ] = None,
    gpu_layers: groups.GpuLayers = None,
    cpu_experts: groups.CpuExperts = None,
    device: groups.Devices = None,
    kv_offload: groups.KvOffload = True,
    as_json: shared.Json = False,
) -> None:
    """Say whether a model fits, what it takes, and how to open it.

    Nothing is fetched: of a model that is not here the first megabytes are read. The exit code is 1 where it
    does not fit.
    """
    from perdure.engine.llama.fit import fit_all

    loading: Any = groups.loading(gpu_layers, device, None, kv_offload, cpu_experts)
    fits = fit_all(
        model or "",
        n_ctx=shared.parse_auto(ctx) or "auto",
        slots=shared.parse_auto(slots) or "auto",
        **loading,
    )
    if as_json:
        print_json([_plain(each) for each in fits])
    elif len(fits) == 1:
        _show(fits[0], model or fits[0].name)
    else:
        _table(fits)
    if all(each.verdict == "not" for each in fits):
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
    verdict = {"fits": "fits", "tight": "is tight", "not": "does not fit"}[fit.verdict]
    terminal.write(f"{terminal.harmless(fit.name)} {verdict}.\n\n")
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
                harmless(each.name),
            )
        )
    write_columns(rows, right=frozenset({1, 2, 3, 4, 5, 6}))


def tune(
    model: shared.ModelName = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=3600, metavar="N", help="About how long to measure.")
    ] = 60.0,
    gpu_layers: groups.GpuLayers = None,
    forget: Annotated[bool, typer.Option("--forget", help="Forget what was tuned for this model.")] = False,
    as_json: shared.Json = False,
) -> None:
    """Find the settings with which a model is fastest here.

    Tries threads, step sizes, K/V types and, with a GPU, placements, for a minute or two. The result is
    remembered for this model and machine, and used unless you set something else. Run it on an idle machine.
    """
    from perdure.engine import tuning

    def say(trial: Trial) -> None:
        prompt = f", prompt {trial.prompt:,.0f} tok/s" if trial.prompt else ""
        terminal.tell(f"{trial.what}: reply {trial.reply:,.1f} tok/s{prompt}")

    def load(keywords: LoadingKeywords) -> Model:
        return terminal.load(model, **(groups.loading(gpu_layers, None, None, True) | keywords))

    # Not where an earlier tuning has placed it: all places are tried anew.
    usual: LoadingKeywords = {"gpu_layers": "auto"} if gpu_layers is None else {}
    loaded = load(usual)
    if gpu_layers is None and not forget and getattr(loaded, "gpu_layers", 0) > 0:
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
        print_json(dataclasses.asdict(best))
    else:
        terminal.write(
            f"{best.threads} threads, steps of {best.n_batch} tokens, K/V in {best.k_type}: "
            f"reply {best.reply:,.1f} tok/s, prompt {best.prompt:,.0f} tok/s. Remembered.\n"
        )
