"""Every promise holds on another CPU variant too, with bounds measured on it (M4)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.engine.llama.native import library
from perdure.engine.llama.native.backends import BUILT_IN, variants

TESTS = Path(__file__).parents[1]
USED = "from perdure.engine.llama.native import library; print(library.loaded().variant)"

# A toy engine computes in Python, and MLX has no variants.
REAL = "not toy and not mlx"
PROMISES = [
    ("promises/test_decode_promises.py", REAL),
    ("promises/test_reuse_rules.py", REAL),
    ("engine/test_going_back.py", REAL),
    # A model of each kind of memory; those above run on every architecture.
    ("cache/test_state_machine.py", f"{REAL} and not qwen3"),
    pytest.param("cache/test_state_machine.py", "qwen3 and not mlx", marks=pytest.mark.soak),
    pytest.param("promises/test_reuse_promises.py", REAL, marks=pytest.mark.soak),
    pytest.param("store/test_runtime_store.py", REAL, marks=pytest.mark.soak),
]
"""The files whose tests compare what the engine computes, and which of them run on the other variant."""


@pytest.fixture(scope="module")
def other() -> dict[str, str]:
    """The environment of a process on the plainest CPU variant that runs here: the furthest from ours."""
    ours = library.loaded()
    others = [name for name, score in variants(ours.source.folder).items() if score and name != ours.variant]
    if ours.variant == BUILT_IN or not others:
        pytest.skip("this library has one CPU variant that runs here")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return outside | {"PERDURE_LLAMA_VARIANT": others[-1]}


def test_m4_a_named_variant_is_the_one_that_computes(other: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", USED], env=other, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == other["PERDURE_LLAMA_VARIANT"]


@pytest.mark.parametrize(("file", "chosen"), PROMISES)
def test_m4_promises_hold_on_another_cpu_variant(file: str, chosen: str, other: dict[str, str]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not soak and not model",
            "-k",
            chosen,
            file,
        ],
        cwd=TESTS,
        env=other,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
