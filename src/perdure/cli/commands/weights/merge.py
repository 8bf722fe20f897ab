"""`perdure merge`, `fuse` and `convert`: models and adapters put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.options.shared import model_names

_Kind = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        show_default="as in the first model",
        help="Type of the matrices: F16, Q8_0, …",
    ),
]


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
    from perdure.cli.output.progress import file_of, working
    from perdure.errors import InvalidInputError
    from perdure.files.merge import METHODS
    from perdure.files.merge import merge as write

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
    from perdure.cli.output.progress import file_of, working
    from perdure.files.merge import fuse as write

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
    from perdure.cli.output.progress import file_of
    from perdure.files.peft import convert_peft
    from perdure.files.trained import convert_trained, is_trained

    write = convert_trained if is_trained(folder) else convert_peft
    typer.echo(write(folder, file_of(base), target))
