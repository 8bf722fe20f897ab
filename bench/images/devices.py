"""The encoder on a GPU beside the same on all cores: a tower as large as SmolVLM-256M's (93M weights, random)
for one image of 512 by 512. It needs libmtmd in the engine's folder, built for that GPU.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bench.harness import Figure, Gauge, Run, at_least

_TOWER: dict[str, Any] = {"wide": 768, "heads": 12, "ff": 3072, "layers": 12, "size": 512, "patch": 16}
_HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1"}


def devices(run: Run, toys: Callable[[], ModuleType]) -> Iterator[Figure]:
    """Seconds for an image, and how far the rows of both are from each other."""
    if not Path("/dev/nvidiactl").exists():
        return
    from perdure.ext.images.encoder import Encoder
    from perdure.ext.images.fetched import engine_folder

    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        model, projector = Path(place) / "model.gguf", Path(place) / "mmproj.gguf"
        toys().text(model, "llama")
        toys().tower(projector, "llava", **_TOWER)
        image, other = _image(0), _image(1)
        encoders = []
        for hidden in ({}, _HIDDEN):
            # The process of an encoder is started with its first image.
            before = dict(os.environ)
            os.environ.update(hidden)
            try:
                encoder = stack.enter_context(Encoder(model, projector, engine=engine_folder()))
                encoders.append((encoder, list(encoder.encode(image).media)))
            finally:
                os.environ.clear()
                os.environ.update(before)
        (ours, rows), (peer, others) = encoders
        apart = max(float(np.abs(a.rows - b.rows).max()) for a, b in zip(rows, others, strict=True))
        size = max(float(np.abs(b.rows).max()) for b in others)
        print(f"rows of the GPU are up to {apart:.2g} from those of the CPU, whose largest is {size:.2g}")

        def seconds(encoder: Encoder) -> float:
            began = time.monotonic()
            encoder.encode(other)
            return time.monotonic() - began

        yield run.compare(
            "seconds for an image, on the GPU",
            ours=functools.partial(seconds, ours),
            peer=functools.partial(seconds, peer),
            against=f"{os.cpu_count()} cores",
            unit="s",
            gauge=Gauge.COST,
            target=at_least(1.0),
            repeats=5,
        )


def _image(seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (512, 512, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
