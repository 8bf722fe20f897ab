"""Compare the catalogue of models with a hub: each file is there, and as large as the catalogue says.

    python tools/check_catalogue.py                     every model; exits with 1 where one differs
    python tools/check_catalogue.py qwen3:4b gemma3     these
    python tools/check_catalogue.py --update            write the sizes that the hub has into catalogue.toml
    python tools/check_catalogue.py --endpoint URL      another hub

Nothing but sizes is asked for: no model is fetched.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import PerdureError
from perdure.ext.fetching.catalogue import CatalogueModel, catalogue, data_file, find
from perdure.ext.fetching.hub import hub_size
from perdure.models.registry import HubSource

TOLERANCE = 0.03
"""Sizes in the catalogue may have three digits."""


def problem_of(model: CatalogueModel, size: int) -> str | None:
    """What is wrong with a model's size, given the hub's."""
    if abs(size - model.size) <= TOLERANCE * size:
        return None
    return f"{model.name}: the catalogue has {model.size} bytes, the hub {size}"


def with_sizes(text: str, sizes: dict[str, int]) -> str:
    """The catalogue's file with these sizes, by name. `active` follows where it was the same."""
    blocks = text.split("[[model]]")
    for at, block in enumerate(blocks):
        name = re.search(r'^name = "(.+)"$', block, re.MULTILINE)
        if name is None or name[1] not in sizes:
            continue
        old = re.search(r"^size = ([\d_]+)$", block, re.MULTILINE)
        assert old is not None, name[1]
        fields = ("size", "active") if f"\nactive = {old[1]}\n" in block else ("size",)
        for field in fields:
            block = re.sub(rf"^{field} = [\d_]+$", f"{field} = {sizes[name[1]]:_}", block, flags=re.MULTILINE)
        blocks[at] = block
    return "[[model]]".join(blocks)


def main(arguments: Sequence[str], path: Path | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--endpoint", metavar="URL")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if find(name) is None]
    if unknown:
        parser.error(f"the catalogue has no {', '.join(unknown)}")
    chosen = {model.name: model for name in options.names if (model := find(name)) is not None}
    sizes: dict[str, int] = {}
    problems = []
    for model in chosen.values() if options.names else catalogue():
        try:
            size = hub_size(HubSource(repo=model.repo, file=model.file), endpoint=options.endpoint)
        except PerdureError as error:
            problems.append(f"{model.name}: {error}")
            continue
        sizes[model.name] = size
        if (problem := problem_of(model, size)) is not None:
            problems.append(problem)
    print("\n".join([*problems, f"{len(sizes)} found, {len(problems)} problems"]))
    if options.update and sizes:
        file = path or data_file()
        file.write_text(with_sizes(file.read_text(encoding="utf-8"), sizes), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
