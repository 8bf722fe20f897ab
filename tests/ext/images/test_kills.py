"""A process with images is killed: what it leaves is whole or is not there."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.ext.images.media import MediumDigest
from perdure.ext.images.media_store import MediaStore

from .pictures import picture
from .test_prompts import KINDS

MOST = 40
"""Files that are written for one image, at most."""


def run(model: Path, store: Path, file: Path, where: object = 0) -> tuple[int, list[int]]:
    """How a process ended, and the tokens that it wrote."""
    program = Path(__file__).with_name("dying.py")
    done = subprocess.run(
        [sys.executable, str(program), *map(str, (model, store, file, where))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [int(each) for each in done.stdout.split()]


@pytest.mark.parametrize(
    "kind",
    [
        "qwen35",
        *(pytest.param(each, marks=pytest.mark.full) for each in KINDS if each not in ("qwen35", "qwen2a")),
    ],
)
def test_s1_e1_a_kill_at_any_write_of_an_image_leaves_nothing_half_there(
    kind: str, toy: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """While it is encoded, and at each file that is written or renamed for it. What is there then is whole,
    and the next process answers as one that nothing came before."""
    model, file = toy(kind)[0], tmp_path / "picture"
    file.write_bytes(picture())
    ended, cold = run(model, tmp_path / "cold", file)
    assert ended == 0
    assert len(cold) == 8
    store, kills = tmp_path / "store", 0
    for where in ("encode", *range(1, MOST)):
        # Each into a store where nothing was finished before.
        store = tmp_path / f"store {where}"
        ended, _ = run(model, store, file, where)
        media = MediaStore(store)
        for path in (store / "media" / "rows").glob("??/*"):
            # What was being written has another name.
            if "." not in path.name:
                assert len(media.medium(MediumDigest(bytes.fromhex(path.name))))
        if ended == 0:
            break
        kills += 1
        if where in ("encode", 2):
            assert run(model, store, file) == (0, cold)
    assert kills >= 5
