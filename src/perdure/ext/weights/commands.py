"""`perdure quantize`, `merge`, `fuse`, `convert` and `compare`: model files made from others."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from perdure import InvalidInputError
from perdure.spi.cli import Json, file_of, model_names, print_json, tell, working, write, write_columns

if TYPE_CHECKING:
    from perdure.ext.weights.compare import Comparison

_MOST = 20
"""Tensors that are shown, those that are furthest apart, unless all are asked for."""
_Kind = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        show_default="as in the first model",
        help="Type of the matrices: F16, Q8_0, …",
    ),
]


def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            autocompletion=model_names,
            help="The model: a .gguf file or a name that `perdure ls` shows.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    kind: Annotated[str, typer.Argument(metavar="TYPE", help="Such as Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16.")],
    importance: Annotated[
        Path | None,
        typer.Option("--importance", metavar="FILE", help="An importance matrix, ours or llama-imatrix's."),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--importance-text",
            metavar="FILE",
            help="Make an importance matrix from this text file first; may be given several times.",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            "--chunks", metavar="N", help="Read so many chunks of 512 tokens of the texts, at most."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save-importance", metavar="FILE", help="Keep the importance matrix in this file."),
    ] = None,
    output_type: Annotated[
        str | None, typer.Option("--output-type", metavar="TYPE", help="Type of the output tensor.")
    ] = None,
    embedding_type: Annotated[
        str | None, typer.Option("--embedding-type", metavar="TYPE", help="Type of the token embeddings.")
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="One type for all tensors, no mixture.")] = False,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Allow a file that is quantised already. It loses twice.")
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--no-provenance", help="Write the library's own bytes, without what the file was made from."
        ),
    ] = False,
    threads: Annotated[int | None, typer.Option("--threads", "-t", metavar="N", help="Threads.")] = None,
    as_json: Json = False,
) -> None:
    """Write a model with smaller weights. By llama.cpp's own quantiser; Ctrl-C leaves nothing behind."""
    from perdure.ext.weights.quantize import importance_matrix
    from perdure.ext.weights.quantize import quantize as write

    if importance and texts:
        raise InvalidInputError("give a matrix (--importance) or texts for one (--importance-text), not both")
    if (save or chunks) and not texts:
        raise InvalidInputError("--save-importance and --chunks need --importance-text")
    path = file_of(source)
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        if texts:
            importance = save or Path(folder) / "importance.gguf"
            with working("Reading texts") as progress:
                importance_matrix(path, texts, importance, chunks=chunks, threads=threads, progress=progress)
        with working(f"Writing {target.name}") as progress:
            made = write(
                path,
                target,
                kind,
                importance=importance,
                output_type=output_type,
                embedding_type=embedding_type,
                pure=pure,
                requantize=requantize,
                provenance=not plain,
                threads=threads,
                progress=progress,
            )
    share = 100 * made.bytes_after / max(made.bytes_before, 1)
    tell(
        as_json,
        f"{made.path}: {decimal(made.bytes_after)}, {share:.0f}% of {decimal(made.bytes_before)}",
        {
            "path": str(made.path),
            "bytes": made.bytes_after,
            "bytes_before": made.bytes_before,
            "tensors": made.tensors,
        },
    )


def merge(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, .gguf or .safetensors.")],
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL[:WEIGHT]…", help="The models, each with its weight, 1 unless given."),
    ],
    method: Annotated[str, typer.Option("--method", metavar="HOW", help="linear, slerp or ties.")] = "linear",
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            autocompletion=model_names,
            help="ties: what the models were made from.",
        ),
    ] = None,
    t: Annotated[
        float, typer.Option("--t", metavar="X", help="slerp: how far from the first to the second.")
    ] = 0.5,
    density: Annotated[
        float,
        typer.Option("--density", metavar="X", help="ties: the share of each one's changes that counts."),
    ] = 0.2,
    kind: _Kind = None,
) -> None:
    """Merge models of one architecture and size."""
    from perdure.ext.weights.merge import METHODS
    from perdure.ext.weights.merge import merge as write

    way = next((each for each in METHODS if each == method), None)
    if way is None:
        raise InvalidInputError(f"there is no way to merge {method!r}; there are {', '.join(METHODS)}")
    weighted = {}
    for word in models:
        name, weight = _weighted(word)
        weighted[file_of(name)] = weight
    with working(f"Writing {target.name}") as progress:
        write(
            weighted,
            target,
            method=way,
            base=None if base is None else file_of(base),
            t=t,
            density=density,
            kind=kind,
            progress=progress,
        )
    typer.echo(target)


def _weighted(word: str) -> tuple[str, float]:
    """A model's name and its weight. Names hold colons too: what follows the last one may be no number."""
    name, colon, weight = word.rpartition(":")
    try:
        return (name, float(weight)) if colon and name else (word, 1.0)
    except ValueError:
        return word, 1.0


def fuse(
    base: Annotated[str, typer.Argument(metavar="BASE", autocompletion=model_names, help="The model.")],
    adapter: Annotated[Path, typer.Argument(metavar="LORA", help="A LoRA adapter as .gguf.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    scale: Annotated[float, typer.Option("--scale", metavar="X", help="How much of the adapter.")] = 1.0,
    kind: _Kind = None,
) -> None:
    """Write a model with a LoRA adapter in its weights."""
    from perdure.ext.weights.merge import fuse as write

    with working(f"Writing {target.name}") as progress:
        write(file_of(base), adapter, target, scale=scale, kind=kind, progress=progress)
    typer.echo(target)


def convert(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A LoRA as PEFT, mlx-lm or `perdure train` writes it, or a whole model that was trained.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, as .gguf.")],
    base: Annotated[
        str,
        typer.Option(
            "--base", metavar="MODEL", autocompletion=model_names, help="The model it was made from, as GGUF."
        ),
    ],
) -> None:
    """Convert a LoRA adapter or a trained model to GGUF."""
    from perdure.ext.weights.peft import convert_peft
    from perdure.ext.weights.trained import convert_trained, is_trained

    write = convert_trained if is_trained(folder) else convert_peft
    typer.echo(write(folder, file_of(base), target))


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", autocompletion=model_names, help="A .gguf or .safetensors file, or a model's name."
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", autocompletion=model_names, help="The other.")],
    everything: Annotated[bool, typer.Option("--all", help="Show all tensors, in the order of A.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two model files tensor by tensor. The exit code is 1 where tensors differ."""
    from perdure.ext.weights.compare import compare as compare_files

    with working("Comparing") as progress:
        comparison = compare_files(file_of(first), file_of(second), progress=progress)
    if as_json:
        print_json(dataclasses.asdict(comparison) | {"same_tensors": comparison.same_tensors})
    else:
        _show(comparison, everything)
    if not comparison.same_tensors:
        raise typer.Exit(1)


def _show(comparison: Comparison, everything: bool) -> None:
    for what, names in (
        ("only in A", comparison.only_first),
        ("only in B", comparison.only_second),
        ("of another shape", comparison.other_shape),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            write(f"{len(names)} tensors {what}: {', '.join(names[:5])}{more}\n")
    for key, (a, b) in comparison.metadata.items():
        write(f"{key}: {'-' if a is None else a} → {'-' if b is None else b}\n")
    apart = [each for each in comparison.tensors if not each.same_bytes]
    write(f"{len(comparison.tensors) - len(apart)} tensors have the same bytes, {len(apart)} differ\n")
    shown = list(comparison.tensors) if everything else sorted(apart, key=lambda each: -each.relative)[:_MOST]
    if shown:
        rows = [("relative error", "largest", "cosine", "types", "tensor")]
        for each in shown:
            types = each.types[0] if each.types[0] == each.types[1] else " → ".join(each.types)
            rows.append(
                (f"{each.relative:.2e}", f"{each.largest:.2e}", f"{each.cosine:.6f}", types, each.name)
            )
        write("\n")
        write_columns(rows, right=frozenset({0, 1, 2}))
    if len(apart) > len(shown):
        write(f"\n{len(apart) - len(shown)} more differ; --all shows them\n")
