"""Asks about an image, and is killed on the way.

    python dying.py MODEL STORE FILE WHERE

WHERE is `encode`, once the encoder has the file; the number of a file of the folder `media/` that is opened
or renamed; or 0. Prints the tokens of the reply.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import perdure
from perdure.ext.images import encoder


def main(model: str, store: str, file: str, where: str) -> None:
    if where == "encode":
        module: Any = encoder
        usual = module.send

        def send(pipe: Any, message: dict[str, Any], *parts: bytes) -> None:
            usual(pipe, message, *parts)
            if "encode" in message:
                os.kill(os.getpid(), signal.SIGKILL)

        module.send = send
    elif int(where):
        calls = itertools.count(1)

        def hook(event: str, given: tuple[Any, ...]) -> None:
            # What is written: where it begins, and where it gets its name.
            writes = event == "os.rename" or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
            if writes and f"{os.sep}media{os.sep}" in str(given[0]) and next(calls) == int(where):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
    with perdure.open(model, store=store, n_ctx=1024, slots=1, threads=1, exact=True) as rt:
        said: Any = {"role": "user", "content": ["what is ", perdure.Image(Path(file).read_bytes()), "?"]}
        reply = rt.session("walk").say(said, max_tokens=8, temperature=0)
    print(*reply.tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
