"""`perdure vectors`: a control vector from contrast pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.options import shared


def vectors(
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS", help='A file of lines such as "positive": "I am glad", "negative": "I am sad".'
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The control vector to write, a .gguf file.")],
    model: shared.Model = None,
    method: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="mean: the average difference; or pca.")
    ] = "mean",
) -> None:
    """Make a control vector from contrast pairs. Use it with --control-vector, or as an adapter."""
    from typing import cast

    from perdure.cli.output import terminal
    from perdure.cli.output.progress import working
    from perdure.engine.llama.model import Model
    from perdure.errors import InvalidInputError
    from perdure.inspection.vectors import Method, directions, read_pairs, write_vector

    found = read_pairs(pairs)
    loaded = terminal.load(model)
    if not isinstance(loaded, Model):
        raise InvalidInputError("control vectors are made with models on llama.cpp")
    with loaded:
        with working("Reading pairs") as progress:
            rows = directions(loaded, found, method=cast(Method, method), progress=progress)
        write_vector(output, rows, loaded.info.architecture)
    terminal.tell(f"Wrote {output}: {len(rows)} layers, from {len(found)} pairs.")
