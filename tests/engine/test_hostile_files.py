"""B3, I2: no damaged header of a model file or an adapter ends the process that loads it (class 8).

Each is loaded in a child process. A death is counted with the seed of its file, and the next child goes on
behind it. `python -m engine.hostile_file FILE PLAIN SEED SEED+1 FOLDER`, in the folder tests, has it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Model
from perdure.errors import ModelFileError

TESTS = Path(__file__).parents[1]
MODELS = ["llama", "qwen3", "gemma3", "mamba", "qwen35-mtp", "mimo2-mtp"]
PATIENCE = 100
FILES = [*MODELS, "llama-lora"]


def outcomes(file: Path, plain: Path, count: int, work: Path) -> tuple[Counter[str], list[int]]:
    """How many are loaded and refused, and the seeds of those that a child died of, or did not come back
    from."""
    counts: Counter[str] = Counter()
    deaths: list[int] = []
    first = 0
    while first < count:
        command = [sys.executable, "-m", "engine.hostile_file", *map(str, (file, plain, first, count, work))]
        with subprocess.Popen(
            command,
            cwd=TESTS,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                out, err = child.communicate(timeout=PATIENCE + count)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
        assert child.returncode <= 0, err[-3000:]
        said = [line.split() for line in out.splitlines()]
        counts.update(what for _, what in said if what != "begun")
        first = int(said[-1][0]) + 1
        if child.returncode:
            deaths.append(first - 1)
    return counts, deaths


def check(name: str, count: int, zoo_path: Callable[[str], Path], work: Path) -> None:
    file = zoo_path(name)
    counts, deaths = outcomes(file, file if name in MODELS else zoo_path("llama"), count, work)
    print(f"{name}: {dict(counts)}, {len(deaths)} deaths")
    assert not deaths
    assert counts.total() == count
    assert counts["refused"]
    assert counts["loaded"] or count < 1000


@pytest.mark.parametrize("name", FILES)
def test_no_damaged_header_ends_the_process_b3_i2(
    name: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """B3, I2."""
    check(name, 40, zoo_path, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", FILES)
def test_no_damaged_header_ends_the_process_for_long_b3_i2(
    name: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """B3, I2."""
    check(name, 5000, zoo_path, tmp_path)


@pytest.mark.parametrize(("name", "turned"), [("qwen3", 16), ("qwen3", 0), ("gemma3", 0), ("qwen35-mtp", 0)])
def test_a_head_that_the_library_cannot_rotate_is_refused_b3(
    name: str, turned: int, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """B3: the library aborts over the first, and never comes back from the last."""
    data = bytearray(zoo_path(name).read_bytes())
    key = f"{name.removesuffix('-mtp')}.rope.dimension_count".encode()
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = turned.to_bytes(4, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match="rotates"):
        Model(path)
