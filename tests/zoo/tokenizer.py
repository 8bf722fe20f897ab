"""A small byte-level BPE tokenizer, of the same build as GPT-2's.

Any bytes can be spelled, because every byte is a separate token; the merges are learned from the text
below, so common English comes out as words and endings rather than letters.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from gguf import GGUFWriter, TokenType

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROLS = (END_OF_TEXT, TURN_START, TURN_END)

MERGES = 125

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = """
the man who was reading in the evening said that the rain had been falling for the whole of the week and
that nothing was going to be done about the garden until the morning. system user assistant. you are a
helpful assistant and you answer the question of the user with the right words, then you ask what else there
is to do. she was thinking of her mother and of the long street in which they had been living, and of all the
other things that could have been. the other one is here, there, then, with them, and it is not that they were
wrong but that the reason for it was never given. every session has turns, every turn has tokens, and a token
is one of the pieces into which the text is cut. the answer to the question is in the reading of the station.
system
user
assistant
the
user
assistant
the
user
assistant
hello world, this is the text of the thing that is being learned and it has all the usual endings in it.
"""


@dataclass(frozen=True)
class TokenTable:
    """Byte tokens first, in byte order, then one token a merge in merge order, then the controls."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens) + len(CONTROLS)

    def id(self, token: str) -> int:
        return (*self.tokens, *CONTROLS).index(token)


def byte_letters() -> tuple[str, ...]:
    """The printable character that stands for each byte, by GPT-2's table."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


@cache
def vocabulary() -> TokenTable:
    letters = byte_letters()
    words = Counter(
        tuple(letters[byte] for byte in word.encode()) for word in re.findall(r" ?[a-z]+", CORPUS)
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        # The pair itself breaks ties, so that the order never depends on hashing.
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            joined[_join(word, best)] += count
        words = joined
    return TokenTable(
        tokens=(*letters, *(left + right for left, right in merges)),
        merges=tuple(f"{left} {right}" for left, right in merges),
    )


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    pieces: list[str] = []
    for piece in word:
        if pieces and (pieces[-1], piece) == pair:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return tuple(pieces)


def describe(writer: GGUFWriter, size: int) -> None:
    """Put the tokenizer into a file, with plain tokens after the controls up to `size` of them."""
    known = vocabulary()
    fillers = [f"<{index}>" for index in range(len(known), size)]
    plain, control = int(TokenType.NORMAL), int(TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*known.tokens, *CONTROLS, *fillers])
    writer.add_token_types([plain] * len(known.tokens) + [control] * len(CONTROLS) + [plain] * len(fillers))
    writer.add_token_merges(list(known.merges))
    writer.add_bos_token_id(known.id(END_OF_TEXT))
    writer.add_eos_token_id(known.id(TURN_END))
    writer.add_pad_token_id(known.id(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
