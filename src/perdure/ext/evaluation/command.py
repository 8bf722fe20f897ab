"""`perdure eval`: how good a model is at a file of texts or tasks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from perdure import InvalidInputError
from perdure.spi.cli import Json, file_of, model_option, print_json, working, write_columns

if TYPE_CHECKING:
    from perdure.ext.evaluation.evaluate import Evaluation


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A text, or tasks as .jsonl: a line of JSON each, with prompt and answer."
        ),
    ],
    models: Annotated[
        list[str] | None,
        model_option(show_default="the default model", help="The model; several make a table."),
    ] = None,
    pair: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            metavar="A B",
            show_default=False,
            help="Two models, or reports of earlier runs: how much B differs from A, and how surely.",
        ),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            "--types",
            metavar="LIST",
            help="Quantise the model to each of these types too, such as Q8_0,Q4_K_M, and compare with it.",
        ),
    ] = None,
    window: Annotated[
        int, typer.Option("--window", metavar="N", help="Tokens read at once for perplexity.")
    ] = 512,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="N",
            show_default=False,
            help="Begin a window every N tokens, and score every token. Without: llama.cpp's own perplexity.",
        ),
    ] = None,
    slots: Annotated[int, typer.Option("--slots", metavar="N", help="Tasks asked at once.")] = 4,
    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", help="Tokens of a task and its reply.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", metavar="N", help="Threads.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write the report of one model, with every task, as JSON."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not resume an interrupted run.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how good a model is. Perplexity of a text; answers, choices, patterns and schemas of tasks."""
    from perdure.ext.evaluation.evaluate import compare, read_report, write_report
    from perdure.ext.evaluation.evaluate import evaluate as measure

    if pair and (models or types):
        raise InvalidInputError("--compare names both models; leave --model and --types out")
    names: list[str] = list(pair) if pair else list(models or ["default"])
    if out and (pair or types or len(names) > 1):
        raise InvalidInputError(
            "--out is the report of one model; leave --compare, --types and other models out"
        )

    def one(name: str) -> Evaluation:
        if Path(name).suffix == ".json":
            return read_report(Path(name))
        path = file_of(name)
        with working(f"Evaluating {path.name}") as progress:
            return measure(
                path,
                file,
                window=window,
                stride=stride,
                slots=slots,
                n_ctx=ctx,
                threads=threads,
                resume=not fresh,
                progress=progress,
            )

    evaluations = [one(name) for name in names]
    labels = [_label(each) for each in evaluations]
    if types:
        with _quantised(file_of(names[0]), types.split(","), threads) as made:
            for kind, path in made:
                evaluations.append(one(str(path)))
                labels.append(kind)
    if out:
        write_report(evaluations[0], out)
    compared = bool(pair) or len(evaluations) > 1
    differences = [compare(evaluations[0], other) for other in evaluations[1:]] if compared else []
    if as_json:
        facts: dict[str, Any] = {"evaluations": [_facts(each) for each in evaluations]}
        if pair:
            facts["differences"] = [
                dataclasses.asdict(each) | {"certain": each.certain} for each in differences[0]
            ]
        print_json(facts)
        return
    _table(evaluations, labels, differences)


@contextmanager
def _quantised(
    source: Path, types: Sequence[str], threads: int | None
) -> Iterator[Iterator[tuple[str, Path]]]:
    """The model in each type, one file at a time in a folder that goes away."""
    from perdure.ext.weights.quantize import quantize

    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:

        def each() -> Iterator[tuple[str, Path]]:
            for kind in types:
                target = Path(folder) / f"{kind.strip()}.gguf"
                with working(f"Writing {kind.strip()}") as progress:
                    quantize(
                        source, target, kind.strip(), requantize=True, threads=threads, progress=progress
                    )
                yield kind.strip(), target
                target.unlink()

        yield each()


def _label(evaluation: Evaluation) -> str:
    return Path(evaluation.model["path"]).name or str(evaluation.model["name"])


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "model": dict(evaluation.model),
        "file": dict(evaluation.file),
        "settings": dict(evaluation.settings),
        "metrics": evaluation.metrics,
        "resumed": evaluation.resumed,
    }


def _table(
    evaluations: Sequence[Evaluation], labels: Sequence[str], differences: Sequence[Sequence[Any]]
) -> None:
    rows: list[tuple[str, ...]] = [
        ("measure", "value", "95% interval", "of", "against the first", "size", "model")
    ]
    for at, (each, label) in enumerate(zip(evaluations, labels, strict=True)):
        against = {difference.kind: difference for difference in differences[at - 1]} if at else {}
        for kind, figure in each.metrics.items():
            rows.append(
                (
                    kind,
                    _figure(kind, figure["value"]),
                    f"{_figure(kind, figure['low'])} to {_figure(kind, figure['high'])}",
                    f"{figure['count']} {'tokens' if kind == 'perplexity' else 'tasks'}",
                    _against(against.get(kind)),
                    decimal(each.model["bytes"]) if each.model.get("bytes") else "",
                    label,
                )
            )
    write_columns(rows, right=frozenset({1, 3, 5}))


def _figure(kind: str, value: float) -> str:
    return f"{value:.4f}" if kind == "perplexity" else f"{100 * value:.1f}%"


def _against(difference: Any) -> str:
    if difference is None:
        return ""
    apart, sure = difference.difference, "" if difference.certain else ", may be chance"
    if difference.kind == "perplexity":
        return f"x{apart.value:.4f} ({apart.low:.4f} to {apart.high:.4f}){sure}"
    return f"{100 * apart.value:+.1f} points ({100 * apart.low:+.1f} to {100 * apart.high:+.1f}){sure}"
