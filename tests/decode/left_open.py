"""A program that ends in the middle of replies and closes nothing: `python -m decode.left_open MODEL`."""

from __future__ import annotations

import sys

import perdure


def main(path: str) -> None:
    rt = perdure.open(path, n_ctx=2048, slots=2, threads=1)
    jobs = [rt.submit([1, 2, at], temperature=0, ignore_eos=True) for at in range(6)]
    print(len(next(iter(jobs[0])).tokens), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
