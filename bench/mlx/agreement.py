"""Greedy replies of MLX and of llama.cpp on the same f16 weights: how many agree, and where others part.

python -m bench.mlx.agreement [FIRST LAST]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.mlx import folder, plain
from perdure.engine.registry import open_model

_ABOUT = (
    "Tell me about the number {}.",
    "What happened in the year {}?",
    "Write a short story of {} words about a lighthouse.",
    "Give me {} reasons to learn to swim.",
    "Explain to a child of {} years why the sky is blue.",
)
PROMPTS = 100
NEW = 64
_TIE = 0.1
"""Logits apart: what is closer is a near tie, which rounding decides."""


@dataclass(frozen=True, slots=True)
class Differs:
    """Where a greedy reply of MLX would leave llama.cpp's, and how far apart the two tokens are on each."""

    prompt: int
    at: int
    on_mlx: float
    on_llama: float


def differences(numbers: Sequence[int], new: int) -> Iterator[Differs | None]:
    """For each prompt, where the two engines part within `new` tokens; None where they do not.

    MLX reads each reply with its prompt: where every row's best token is the one that llama.cpp chose, its
    own greedy reply is that one.
    """
    ours, theirs = open_model(folder(), {}, cells=0), open_model(str(plain()), {}, cells=512)
    with ours.context(n_ctx=512) as one, theirs.context(n_ctx=512, threads=1) as other:
        for number in numbers:
            prompt = theirs.tokenize(
                f"<|im_start|>user\n{_ABOUT[number % len(_ABOUT)].format(number)}<|im_end|>\n"
                "<|im_start|>assistant\n",
                special=True,
            )
            other.clear()
            other.decode(prompt)
            rows = [other.logits().copy()]
            reply = [int(np.argmax(rows[0]))]
            for _ in range(new - 1):
                other.decode([reply[-1]])
                rows.append(other.logits().copy())
                reply.append(int(np.argmax(rows[-1])))
            one.clear()
            one.decode([*prompt, *reply[:-1]], rows=range(len(prompt) - 1, len(prompt) + new - 1))
            found = None
            for at, (token, there) in enumerate(zip(reply, rows, strict=True)):
                row = one.logits(len(prompt) - 1 + at).copy()
                best = int(np.argmax(row))
                if best != token:
                    found = Differs(
                        number, at, float(row[best] - row[token]), float(there[token] - there[best])
                    )
                    break
            yield found


def main(words: Sequence[str]) -> int:
    first, last = (int(words[0]), int(words[1])) if len(words) == 2 else (0, PROMPTS - 1)
    numbers = range(first, last + 1)
    agreed = near = 0
    for number, found in zip(numbers, differences(numbers, NEW), strict=True):
        if found is None:
            agreed += 1
            continue
        near += max(found.on_mlx, found.on_llama) <= _TIE
        print(
            f"prompt {number} differs at token {found.at}: the two are {found.on_mlx:.4f} apart on MLX, "
            f"{found.on_llama:.4f} on llama.cpp",
            flush=True,
        )
    count = len(numbers)
    good = agreed >= 0.95 * count and agreed + near == count
    print(f"{agreed} of {count} agree for {NEW} tokens (at least 95%), {near} more differ at near ties")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
