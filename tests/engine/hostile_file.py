"""Child of `test_hostile_files.py`: loads damaged copies of a file, and says before each which one it is."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from perdure import Model, PerdureError
from perdure.models import Header, read_header

_WORDS = (
    b"\0\0\0\0",
    b"\1\0\0\0",
    b"\3\0\0\0",
    b"\xff\xff\xff\xff",
    b"\0\0\0\x80",
    b"\xff\xff\xff\x7f",
    b"\0\0\x80\x7f",
)
"""Four bytes in one place: nothing, little, the largest of each kind, and what is infinite as a float."""


def places(data: bytes, header: Header) -> list[int]:
    """Where the numbers of a header are: values of metadata, sizes, types and offsets of tensors."""
    values = [data.find(key.encode()) + len(key) + 4 for key in header.metadata]
    behind = [data.find(tensor.name.encode()) + len(tensor.name) for tensor in header.tensors]
    return [*values, *(at + step for at in behind for step in range(0, 32, 4))]


def damaged(data: bytes, at: list[int], end: int, seed: int) -> bytes:
    """A copy with one to three changes before `end`, where the tensors begin, most of them in numbers."""
    draw, made = random.Random(seed), bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        place = draw.choice(at) if draw.randrange(4) else draw.randrange(end - 4)
        word = draw.choice((bytes([made[place] ^ 1 << draw.randrange(8)]), draw.choice(_WORDS)))
        made[place : place + len(word)] = word
    return bytes(made)


def load(path: Path, model: Model | None) -> str:
    try:
        if model is not None:
            model.adapter(str(path))
        else:
            with Model(path) as loaded, loaded.context(n_ctx=64, n_seq=1) as ctx:
                ctx.decode(loaded.tokenize("Hello"))
                ctx.logits().argmax()
    except PerdureError:
        return "refused"
    return "loaded"


def main(file: Path, plain: Path, first: int, last: int, work: Path) -> None:
    data, header = file.read_bytes(), read_header(file)
    at, end = places(data, header), min(tensor.offset for tensor in header.tensors)
    model = Model(plain) if plain != file else None
    for seed in range(first, last):
        path = work / "hostile.gguf"
        path.write_bytes(damaged(data, at, end, seed))
        print(f"{seed} begun", flush=True)
        print(f"{seed} {load(path, model)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
