"""Answers one prompt on a store, in a separate process: `python -m engine.kernels MODEL STORE GPU_LAYERS`.

Prints how many tokens were reused and the chosen ones; a library is loaded once a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import perdure
from perdure.engine.llama.native import library

PROMPT = [(7 * index * index + 3 * index + 11) % 380 for index in range(150)]


def main(path: str, store: str, gpu_layers: str) -> None:
    model = perdure.Model(path, gpu_layers=int(gpu_layers))
    with perdure.open(model, store=Path(store) if store else None, n_ctx=512, slots=1, threads=1) as rt:
        reply = rt.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
    logprobs = [token.logprob for token in reply.logprobs or ()]
    said = {"reused": reply.reuse.reused, "tokens": list(reply.tokens), "logprobs": logprobs}
    print(json.dumps(said | {"library": library.build()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
