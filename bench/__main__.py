"""Every benchmark in turn: each module of this package whose `main` is a `Bench`."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import bench
from bench.harness import Bench, main


def benches() -> list[Bench]:
    found = []
    for module in sorted(pkgutil.iter_modules(bench.__path__), key=lambda each: each.name):
        if not module.name.startswith("_"):
            candidate = getattr(importlib.import_module(f"bench.{module.name}"), "main", None)
            if isinstance(candidate, Bench):
                found.append(candidate)
    return found


if __name__ == "__main__":
    sys.exit(main(benches()))
