"""`perdure compare`: two model files, tensor by tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.options.shared import Json, model_names

if TYPE_CHECKING:
    from perdure.files.compare import Comparison

_MOST = 20
"""Tensors that are shown, those that are furthest apart, unless all are asked for."""


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
    from perdure.cli.output.facts import print_json
    from perdure.cli.output.progress import file_of, working
    from perdure.files.compare import compare as compare_files

    with working("Comparing") as progress:
        found = compare_files(file_of(first), file_of(second), progress=progress)
    if as_json:
        print_json(dataclasses.asdict(found) | {"same_tensors": found.same_tensors})
    else:
        _show(found, everything)
    if not found.same_tensors:
        raise typer.Exit(1)


def _show(found: Comparison, everything: bool) -> None:
    from perdure.cli.output.terminal import write, write_columns

    for what, names in (
        ("only in A", found.only_first),
        ("only in B", found.only_second),
        ("of another shape", found.other_shape),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            write(f"{len(names)} tensors {what}: {', '.join(names[:5])}{more}\n")
    for key, (a, b) in found.metadata.items():
        write(f"{key}: {'-' if a is None else a} → {'-' if b is None else b}\n")
    apart = [each for each in found.tensors if not each.same_bytes]
    write(f"{len(found.tensors) - len(apart)} tensors have the same bytes, {len(apart)} differ\n")
    shown = list(found.tensors) if everything else sorted(apart, key=lambda each: -each.relative)[:_MOST]
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
