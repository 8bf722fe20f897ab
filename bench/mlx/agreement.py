"""Greedy replies of MLX and of llama.cpp on the same f16 weights: how many agree, and where others part.

python -m bench.mlx.agreement [FIRST LAST]

Where a prompt's replies part, the two likeliest tokens of each engine are shown, and how far apart they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
class Favourites:
    """The two likeliest tokens of a row of logits, and how far the second is behind the first."""

    first: int
    second: int
    apart: float

    @classmethod
    def of(cls, row: NDArray[np.float32]) -> Favourites:
        second, first = np.argsort(row)[-2:]
        return cls(int(first), int(second), float(row[first] - row[second]))


@dataclass(frozen=True, slots=True)
class Differs:
    """Where a greedy reply of MLX would leave llama.cpp's, and what each engine has there."""

    prompt: int
    at: int
    on_mlx: Favourites
    on_llama: Favourites
    texts: dict[int, str]
    """Of the tokens named."""

    @property
    def is_near_tie(self) -> bool:
        """Both engines have the same two tokens, and hardly tell one from the other."""
        one, other = self.on_mlx, self.on_llama
        return {one.first, one.second} == {other.first, other.second} and max(one.apart, other.apart) <= _TIE

    def __str__(self) -> str:
        return f"prompt {self.prompt} differs at token {self.at}: " + "; ".join(
            f"{engine} {self.texts[found.first]!r} before {self.texts[found.second]!r} by {found.apart:.4f}"
            for engine, found in (("MLX", self.on_mlx), ("llama.cpp", self.on_llama))
        )


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
                if int(np.argmax(row)) != token:
                    here, there_too = Favourites.of(row), Favourites.of(there)
                    named = {here.first, here.second, there_too.first, there_too.second}
                    texts = {each: theirs.detokenize([each]) for each in named}
                    found = Differs(number, at, here, there_too, texts)
                    break
            yield found


def main(words: Sequence[str]) -> int:
    first, last = (int(words[0]), int(words[1])) if len(words) == 2 else (0, PROMPTS - 1)
    numbers = range(first, last + 1)
    agreed = near = 0
    for found in differences(numbers, NEW):
        if found is None:
            agreed += 1
            continue
        near += found.is_near_tie
        print(found, flush=True)
    count = len(numbers)
    good = agreed >= 0.95 * count and agreed + near == count
    print(f"{agreed} of {count} agree for {NEW} tokens (at least 95%), {near} more differ at near ties")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
