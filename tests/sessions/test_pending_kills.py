"""Whatever kills a program while it answers, what it was asked is there, and goes on token by token (C12)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
SURFACES = ("library", "command", "session", "chat", "messages", "ollama", "responses")
ROUNDS = int(os.environ.get("PERDURE_KILLS", "150"))
"""Of each surface, in a soak test: more than 1,000 in all."""
SEED = int(os.environ.get("PERDURE_KILLS_SEED", "0"))
"""The first of four seeds; other ones are other moments."""


def hunted(surface: str, rounds: int, seed: int, store: Path | str, model: Path) -> dict[str, Any]:
    """What rounds on one surface have shown (`killing.py`)."""
    asked = {"surface": surface, "rounds": rounds, "seed": seed, "store": str(store)}
    if surface == "command":
        asked["model"] = str(model)
    done = subprocess.run(
        [sys.executable, "-m", f"{'page' if surface == 'page' else 'sessions'}.killing", json.dumps(asked)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    print(surface, {**found, "failures": len(found["failures"])}, *found["failures"], sep="\n    ")
    assert found["failures"] == []
    assert found["rounds"] == rounds
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.parametrize("surface", ["library", "chat"])
def test_c12_a_few_kills(surface: str, zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    hunted(surface, 4, 1, tmp_path, zoo_path("llama"))


@pytest.mark.soak
@pytest.mark.parametrize("surface", SURFACES)
def test_c12_many_kills(surface: str, zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    """`pytest -m soak tests/sessions/test_pending_kills.py -s` prints how many ended how."""
    model = zoo_path("llama")
    with ThreadPoolExecutor(4) as pool:
        halves = [
            pool.submit(hunted, surface, -(-ROUNDS // 4), seed, tmp_path / str(seed), model)
            for seed in range(SEED, SEED + 4)
        ]
        found = [each.result() for each in halves]
    assert sum(each["parts"] for each in found) > ROUNDS // 10
