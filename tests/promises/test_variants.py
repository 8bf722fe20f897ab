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
# A variant has other kernels and the same ledger: a model with attention and one with recurrent layers have
# them all run. The other architectures, types and lengths follow in `make soak`.
FEW = f"(llama or jamba) and {REAL} and not shared_True and not k_type and not 15 and not 39"
FILES = (
    "promises/test_decode_promises.py",
    "promises/test_reuse_rules.py",
    "engine/test_going_back.py",
    "cache/test_state_machine.py",
)
SOAKED = (*FILES, "promises/test_reuse_promises.py", "store/test_runtime_store.py")
"""The files whose tests compare what the engine computes."""


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


def test_m4_promises_hold_on_another_cpu_variant(other: dict[str, str]) -> None:
    run(other, FEW, *FILES)


@pytest.mark.soak
@pytest.mark.parametrize("file", SOAKED)
def test_m4_promises_of_every_architecture_hold_on_another_cpu_variant(
    file: str, other: dict[str, str]
) -> None:
    run(other, REAL, file)


def run(environment: dict[str, str], chosen: str, *files: str) -> None:
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
            *files,
        ],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
