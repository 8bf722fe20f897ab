"""Texts as vectors of length 1, and the nearest of them to a question."""

from __future__ import annotations

import argparse

import numpy as np

import perdure

NOTES = (
    "The ferry to the island leaves at seven.",
    "Bread needs flour, water, salt and time.",
    "The museum is closed on Mondays.",
    "A sourdough starter is fed once a day.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    parser.add_argument("--question", default="How do I bake?")
    options = parser.parse_args()
    with perdure.open(options.model, n_ctx=256) as runtime:
        notes = runtime.embed(list(NOTES)).vectors
        [question] = runtime.embed(options.question).vectors
        for index in np.argsort(-(notes @ question)):
            print(f"{notes[index] @ question:6.3f}  {NOTES[index]}")


if __name__ == "__main__":
    main()
