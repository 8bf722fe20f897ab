"""The process that encodes: `python -m perdure.ext.images.child`. It reads and writes messages (`wire`).

    {"library": "…/xllamacpp.abi3.so", "packages": "", "projector": …, "model": …, "threads": 2, "gpu": true,
     "idle": 60}
    → {"version": "0.6.0", "images": true, "sounds": false}

    {"encode": "image", "low": false} and the file's bytes
    → {"decoded": [640, 480]}
    → {"pieces": [[1, 260], {"kind": "image", "tokens": 64, …}, [259]]} and the rows, float32
    {"count": "image", "low": false} and the bytes → {"tokens": 66}

    → {"error": "InvalidInputError", "message": "…"} in place of any answer

    {} → {}

It believes nothing of a file and keeps nothing of it. It ends where nothing comes for a time, and when its
parent is gone: nothing can come then.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from perdure import InvalidInputError, PerdureError, TooLargeError
from perdure.ext.images.media import MOST_LOW, Medium, Piece
from perdure.ext.images.wire import receive, send
from perdure.spi.base import processes

if TYPE_CHECKING:
    from perdure.ext.images.library import Mtmd

_LONGEST = 600
"""Seconds of a sound."""


def main() -> None:
    for each in (signal.SIGINT, *processes.ending_signals()):
        signal.signal(each, signal.SIG_IGN)
    processes.leave_no_core()
    # What anything else prints is for the log.
    out: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    source = sys.stdin.buffer
    setup, _ = receive(source)
    if setup["packages"]:
        # Behind what is installed.
        sys.path.append(setup["packages"])
    try:
        mtmd = _load(setup)
    except PerdureError as error:
        _refuse(out, error)
        return
    send(out, {"version": mtmd.version, "images": mtmd.images, "sounds": mtmd.sounds})
    while True:
        idle = threading.Timer(setup["idle"], os._exit, (0,))
        idle.daemon = True
        idle.start()
        try:
            request, data = receive(source)
        except EOFError:
            # Not through the library's destructors: some wait for threads that are gone.
            os._exit(0)
        finally:
            idle.cancel()
        try:
            _serve(mtmd, request, data, out)
        except PerdureError as error:
            _refuse(out, error)


def _load(setup: dict[str, Any]) -> Mtmd:
    from perdure.ext.images.library import Mtmd

    paths = (Path(setup[each]) for each in ("library", "projector", "model"))
    return Mtmd(*paths, threads=setup["threads"], gpu=setup["gpu"])


def _serve(mtmd: Mtmd, request: dict[str, Any], data: bytes, out: BinaryIO) -> None:
    from perdure.ext.images.pixels import pixels_of, resized, size_of

    if not request:
        send(out, {})
        return
    kind = request.get("encode") or request["count"]
    if not (mtmd.sounds if kind == "audio" else mtmd.images):
        raise InvalidInputError(f"this model takes no {'sounds' if kind == 'audio' else 'images'}")
    if "count" in request and kind == "image":
        size = size_of(data)
        send(out, {"tokens": mtmd.count_image(*(_low(mtmd, size) if request["low"] else size))})
        return
    if kind == "audio":
        samples = samples_of(data, mtmd.sample_rate)
        if "count" in request:
            send(out, {"tokens": mtmd.count_sound(samples)})
            return
        send(out, {"decoded": [len(samples)]})
        pieces = mtmd.encode_sound(samples)
    else:
        pixels = pixels_of(data)
        if request["low"]:
            pixels = resized(pixels, _low(mtmd, pixels.shape[1::-1]))
        send(out, {"decoded": pixels.shape[1::-1]})
        pieces = mtmd.encode_image(pixels)
    rows = [piece.rows.tobytes() for piece in pieces if isinstance(piece, Medium)]
    send(out, {"pieces": list(map(_described, pieces))}, *rows)


def _low(mtmd: Mtmd, size: tuple[int, ...]) -> tuple[int, ...]:
    """The size that an image is scaled down to: where it takes no fewer tokens so, it is left as it is."""
    smaller = tuple(max(1, round(each * min(1.0, MOST_LOW / max(size)))) for each in size)
    return smaller if mtmd.count_image(*smaller) < mtmd.count_image(*size) else size


def _described(piece: Piece) -> Any:
    if not isinstance(piece, Medium):
        return list(piece)
    count, width = piece.rows.shape
    return {
        "kind": piece.kind,
        "tokens": count,
        "width": width,
        "n_pos": piece.n_pos,
        "grid": piece.grid,
        "causal": piece.causal,
    }


def samples_of(data: bytes, rate: int) -> NDArray[np.float32]:
    """The samples of a WAV file: 16 bits each, of one channel or the mean of several, at the model's rate."""
    try:
        with wave.open(io.BytesIO(data)) as sound:
            if sound.getnframes() > _LONGEST * sound.getframerate():
                raise TooLargeError(f"a sound has at most {_LONGEST} seconds", limit=_LONGEST)
            if sound.getsampwidth() != 2 or sound.getframerate() != rate:
                raise InvalidInputError(
                    f"a sound is a WAV file of 16 bits at {rate} samples a second; this one has "
                    f"{8 * sound.getsampwidth()} bits at {sound.getframerate()}"
                )
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
            channels = samples.reshape(-1, sound.getnchannels())
            mean: NDArray[np.float32] = (channels.mean(axis=1) / 32768).astype(np.float32)
            return mean
    except PerdureError:
        raise
    except Exception as error:
        # The module raises whatever a header makes it stumble over.
        raise InvalidInputError(
            f"this is no WAV file that can be read: {error or type(error).__name__}"
        ) from None


def _refuse(out: BinaryIO, error: PerdureError) -> None:
    send(out, {"error": type(error).__name__, "message": str(error), "limit": getattr(error, "limit", None)})


if __name__ == "__main__":
    main()
