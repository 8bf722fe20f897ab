"""Ctrl-C in the middle of a long decode: `python -m promises.interrupted MODEL TOKENS AT`.

The signal comes while native step AT runs, the main thread waiting for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np

from perdure import Model
from perdure.engine.batch import Batch
from perdure.engine.contract import Outcome
from promises.kinds import prompt


def main(path: str, count: int, at: int) -> None:
    model = Model(path)
    settings: dict[str, Any] = {"n_ctx": count + 64, "n_batch": 32, "threads": 1}
    before, probe = prompt(40), prompt(5, salt=1)
    with model.context(**settings) as ctx:
        ctx.decode(before)
        ctx.decode(probe)
        expected = ctx.logits().copy()
    ctx = model.context(**settings)
    ctx.decode(before)
    native, calls = ctx._core.decode, 0

    def decode(batch: Batch) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGINT)
        return native(batch)

    ctx._core.decode = decode  # type: ignore[method-assign]
    interrupted = False
    try:
        ctx.decode(prompt(count, salt=2))
    except KeyboardInterrupt:
        interrupted = True
    kept = ctx.tokens() == before
    ctx._core.decode = native  # type: ignore[method-assign]
    ctx.decode(probe)
    right = bool(np.array_equal(ctx.logits(), expected))
    ctx.close()
    print(json.dumps({"interrupted": interrupted, "steps": calls, "kept": kept, "right": right}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
