"""Toy replicas under Ray in a separate process, for a test that takes Ray's head away. Its
arguments are the store, a folder and a port; what it has started ends with it."""

from __future__ import annotations

import sys
from pathlib import Path

from ext.cluster.test_ray import application


def main() -> None:
    store, folder, port = sys.argv[1:]
    with application(store, Path(folder), int(port), min=2, max=2):
        print("ready", flush=True)
        sys.stdin.read()


main()
