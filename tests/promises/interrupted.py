"""Ctrl-C in the middle of a long decode: `python -m promises.interrupted MODEL TOKENS AT`.

The signal comes while native step AT runs: the thread that sends it is let run only when the main one has
gone into native code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from inside import core_of
from perdure.engine.contract import Batch, Outcome
from perdure.engine.registry import open_model
from promises.kinds import prompt


def main(path: str, count: int, at: int) -> None:
    model = open_model(path, {}, cells=0)
    settings: dict[str, Any] = {"n_ctx": count + 64, "n_batch": 512, "threads": 1}
    before, probe = prompt(40), prompt(5, salt=1)
    with model.context(**settings) as ctx:
        ctx.decode(before)
        ctx.decode(probe)
        expected = ctx.logits().copy()
    ctx = model.context(**settings)
    ctx.decode(before)
    native, stop, calls, now, stopped = core_of(ctx).decode, core_of(ctx).stop, 0, threading.Event(), False

    def decode(batch: Batch) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == at:
            now.set()
        return native(batch)

    def note_stop() -> None:
        nonlocal stopped
        stopped = now.is_set()
        stop()

    def send() -> None:
        now.wait()
        os.kill(os.getpid(), signal.SIGINT)

    # Threads take turns only where one lets go: in native code, or waiting.
    sys.setswitchinterval(1000)
    sender = threading.Thread(target=send)
    sender.start()

    core_of(ctx).decode = decode  # type: ignore[method-assign]
    core_of(ctx).stop = note_stop  # type: ignore[method-assign]
    interrupted = False
    try:
        ctx.decode(prompt(count, salt=2))
    except KeyboardInterrupt:
        interrupted = True
    sender.join()
    kept = ctx.tokens() == before
    core_of(ctx).decode = native  # type: ignore[method-assign]
    ctx.decode(probe)
    right = bool(np.array_equal(ctx.logits(), expected))
    ctx.close()
    found = {"interrupted": interrupted, "stopped": stopped, "steps": calls, "kept": kept, "right": right}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
