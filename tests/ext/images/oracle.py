"""Reads an image twice in one process: by libmtmd's own helper, and by a context of ours.

    PERDURE_LLAMA=FOLDER python oracle.py MODEL PROJECTOR FILE KIND [change]

The library of the folder is the engine and the encoder. Prints the largest difference of the logits behind
the prompt. A change (`reversed`, `flipped`, `swapped`, `flat`) is made to the medium first: it has to be
seen.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_bool, c_float, c_int32, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import Model
from perdure.ext.images.child import samples_of
from perdure.ext.images.library import Mtmd
from perdure.ext.images.media import Medium
from perdure.ext.images.pixels import pixels_of
from perdure.spi.engine import Floats


class One:
    """Media that are in memory."""

    def __init__(self, media: list[Medium]) -> None:
        self._media = media

    def medium(self, ids: NDArray[np.int32]) -> Medium:
        return next(each for each in self._media if each.ids[0] == ids[0])


def main(model_path: str, projector: str, file: str, kind: str, change: str = "") -> None:
    [library] = Path(os.environ["PERDURE_LLAMA"]).glob("xllamacpp*.so")
    mtmd = Mtmd(library, Path(projector), Path(model_path), threads=1)
    data = Path(file).read_bytes()
    model = Model(model_path)
    with model.context(n_ctx=2048, n_seq=2, threads=1) as ctx:
        before, after = model.tokenize("w1 w2 "), model.tokenize(" w3 w4", bos=False)
        core: Any = vars(ctx)["_core"]

        # Theirs, in sequence 1: text, the helper's reading of the chunks, text.
        ctx.decode(before, 1)
        if kind == "audio":
            samples = samples_of(data, mtmd.sample_rate)
            new = mtmd.call("mtmd_bitmap_init_from_audio", c_void_p, ctypes.c_size_t, c_void_p)
            bitmap = new(len(samples), samples.ctypes.data)
        else:
            pixels = pixels_of(data)
            bitmap = mtmd.bitmap(pixels.shape[1], pixels.shape[0], pixels.ctypes.data)
        with mtmd.chunks(bitmap) as chunks:
            past = c_int32(len(before))
            evaluate = mtmd.call(
                "mtmd_helper_eval_chunk_single",
                *(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_bool, POINTER(c_int32)),
            )
            for chunk in chunks:
                code = evaluate(
                    mtmd.handle, vars(core)["_context"], chunk, past, 1, 512, False, ctypes.byref(past)
                )
                assert code == 0, code
        theirs = behind(core, after, past.value)

        # Ours, in sequence 0.
        pieces = mtmd.encode_sound(samples) if kind == "audio" else mtmd.encode_image(pixels)
        media = [piece for piece in pieces if isinstance(piece, Medium)]
        if change:
            changed = [altered(medium, change) for medium in media]
            pieces = [changed.pop(0) if isinstance(piece, Medium) else piece for piece in pieces]
            media = [piece for piece in pieces if isinstance(piece, Medium)]
        ctx.media = One(media)
        prompt = list(before)
        for piece in pieces:
            prompt += piece.ids.tolist() if isinstance(piece, Medium) else piece
        ctx.decode(prompt, rows="none")
        ctx.decode(after)
        ours = np.array(ctx.logits())
    print(float(np.abs(ours - theirs).max()))


def altered(medium: Medium, change: str) -> Medium:
    if change == "reversed":
        return replace(medium, rows=medium.rows[::-1].copy())
    if change == "flipped":
        return replace(medium, causal=not medium.causal)
    if change == "flat":
        return replace(medium, grid=(0, 0), n_pos=len(medium))
    return replace(medium, grid=medium.grid[::-1])


def behind(core: Any, tokens: list[int], position: int) -> Floats:
    """The logits behind tokens at a position of sequence 1, which its ledger does not know."""
    from perdure.spi.engine import Batch, BatchPart

    marks = np.zeros(len(tokens), np.int8)
    marks[-1] = 1
    batch = Batch(len(tokens))
    batch.fill([BatchPart(1, position, np.array(tokens, np.int32), marks)])
    core.decode(batch)
    pointer = vars(core)["_lib"].llama_get_logits_ith(vars(core)["_context"], len(tokens) - 1)
    return np.ctypeslib.as_array(ctypes.cast(pointer, POINTER(c_float)), (core.n_vocab,)).copy()


if __name__ == "__main__":
    main(*sys.argv[1:])
