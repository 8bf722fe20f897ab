"""Runs a library on toy models, in a process that may die: `python -P probe_child.py JSON MODELS`.

Each line of output names what is about to be done, so that the last one says where it ended.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

STEPS = (1, 2, 3, 17, 64)
TOKENS = [(7 * index * index + 3 * index + 11) % 250 for index in range(sum(STEPS))]
_TEXT = b"the 12345 of 'em, isn't it?"
_ALIKE = 0.99
"""How alike two ways to the same logits must be (their correlation); rounding changes far less."""


def main(job: dict[str, Any], models: Path) -> None:
    from perdure.spi.libraries import EngineLibraryError, Library, LibrarySource, variants

    # Before it aborts, a GPU backend says why in its log.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    folder = Path(job["folder"])
    say("the scores of its CPU variants")
    print(json.dumps({"variants": [name for name, score in variants(folder).items() if score]}), flush=True)
    say("loading")
    source = LibrarySource(kind=job["kind"], folder=folder, version=job["version"])
    try:
        library = Library(
            source,
            variant=job["variant"],
            gpu=job["gpu"],
            extra_buffers=job["extra_buffers"],
            driver=job["driver"],
        )
    except EngineLibraryError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    devices = [device.shown for device in library.device_list if device.offloads]
    print(json.dumps({"devices": devices, "unusable": library.unusable}), flush=True)
    for path in sorted(models.iterdir()):
        run(library, path)
    print(json.dumps({"done": library.variant, "version": library.version}), flush=True)


def run(library: Any, path: Path) -> None:
    """Decode steps of every size on one model, and all of them in one step: the rows must agree."""
    from perdure.spi.libraries import LlamaBatch

    lib = library.functions
    say(f"a {path.stem} model, loading")
    params = lib.llama_model_default_params()
    # With all layers where they will be: a GPU that fails is to fail here.
    params.n_gpu_layers = -1 if library.gpu else 0
    none = (ctypes.c_void_p * 1)()
    if not library.gpu:
        params.devices = none
    params.use_extra_bufts = library.extra_buffers
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit(f"it refused a {path.stem} model")
    vocab = lib.llama_model_get_vocab(model)
    say(f"a {path.stem} model, tokenizing")
    lib.llama_tokenize(vocab, _TEXT, len(_TEXT), (ctypes.c_int32 * 64)(), 64, False, False)
    rows = []
    for steps in (STEPS, (len(TOKENS),)):
        context = lib.llama_init_from_model(model, settings(lib))
        at = 0
        for size in steps:
            say(f"a {path.stem} model, a step of {size} tokens")
            tokens = (ctypes.c_int32 * size)(*TOKENS[at : at + size])
            if lib.llama_decode(context, LlamaBatch.of(tokens)):
                raise SystemExit(f"it could not decode {size} tokens of a {path.stem} model")
            at += size
        rows.append(lib.llama_get_logits_ith(context, -1)[: lib.llama_vocab_n_tokens(vocab)])
        lib.llama_free(context)
    lib.llama_model_free(model)
    alike = correlation(*rows)
    if not alike >= _ALIKE:
        raise SystemExit(f"its logits of a {path.stem} model depend on the steps (correlation {alike:.3f})")


def settings(lib: Any) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    # Threads would only make the toys slower.
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 1
    return params


def correlation(first: list[float], second: list[float]) -> float:
    """1 where the rows are the same up to rounding; not a number where one has no numbers in it."""
    means = [sum(row) / len(row) for row in (first, second)]
    ours, theirs = ([value - mean for value in row] for row, mean in zip((first, second), means, strict=True))
    both = sum(a * b for a, b in zip(ours, theirs, strict=True))
    norms = math.sqrt(sum(a * a for a in ours) * sum(b * b for b in theirs))
    return both / norms if norms else math.nan


def say(what: str) -> None:
    print(json.dumps({"doing": what}), flush=True)


def _without_the_rest() -> None:
    """Make `perdure` a package of nothing but its folder: importing all of it takes a second."""
    package = types.ModuleType("perdure")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["perdure"] = package


if __name__ == "__main__":
    _without_the_rest()
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
