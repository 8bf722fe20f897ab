"""The next token's distribution: its likeliest tokens, its entropy, and how it is changed before a draw."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import perdure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    parser.add_argument("--prompt", default="The capital of Norway is")
    options = parser.parse_args()
    model = perdure.Model(options.model)
    with model.context(n_ctx=256) as ctx:
        ctx.decode(model.tokenize(options.prompt))
        row = ctx.logits()
        print(f"after {options.prompt!r}: entropy {row.entropy():.2f} nats")
        for candidate in row.top(5):
            print(f"  {candidate.logprob:7.2f}  {model.detokenize([candidate.token])!r}")
        kept = row.copy()
        ctx.decode([int(row.argmax())])
        # A view of an earlier step raises; a copy is yours.
        try:
            row.argmax()
        except perdure.StaleViewError as error:
            print(f"refused: {error}")
        print(f"the copy still has {len(kept)} logits")

    def fewer_repeats(tokens: Sequence[int], logits: perdure.LogitsView) -> np.ndarray:
        changed = logits.copy()
        changed[np.unique(tokens[-32:])] -= 5.0
        return changed

    with perdure.open(options.model, n_ctx=256) as runtime:
        print(runtime.generate("la la la", processors=[fewer_repeats], max_tokens=12).text)


if __name__ == "__main__":
    main()
