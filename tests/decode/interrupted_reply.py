"""Ctrl-C while a reply is waited for: `python -m decode.interrupted_reply MODEL WAY`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import perdure
from perdure import LogitsView


def main(path: str, way: str) -> None:
    waiting, asked = threading.Event(), threading.Event()

    def hold(tokens: Sequence[int], logits: LogitsView) -> NDArray[np.float32]:
        """In the engine thread, at the third token: the signal is sent while the main thread waits."""
        if len(tokens) == 3 + 3 and not asked.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGINT)
            waiting.wait()
        return logits.copy()

    settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with perdure.open(path, n_ctx=256, slots=1, threads=1) as rt:
        right = rt.generate([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True).tokens
        job = None
        interrupted = False
        try:
            if way == "generate":
                rt.generate([4, 5, 6], processors=[hold], **settings)
            elif way == "stream":
                for _ in rt.stream([4, 5, 6], processors=[hold], **settings):
                    pass
            else:
                job = rt.submit([4, 5, 6], processors=[hold], **settings)
                job.reply()
        except KeyboardInterrupt:
            interrupted = True
            if job is not None:
                job.cancel()
        waiting.set()
        again = rt.generate([1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True).tokens
        found = {
            "interrupted": interrupted,
            "cancelled": None if job is None else job.reply().finish_reason,
            "idle": rt.load == (0, 0),
            "right": right == again,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
