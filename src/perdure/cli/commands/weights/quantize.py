"""`perdure quantize`: a model file with smaller weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.options.shared import Json, model_names


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
    import tempfile

    from rich.filesize import decimal

    from perdure.cli.output.facts import tell
    from perdure.cli.output.progress import file_of, working
    from perdure.errors import InvalidInputError
    from perdure.files.quantize import importance_matrix
    from perdure.files.quantize import quantize as write

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
