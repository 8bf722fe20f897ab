"""Processes of tests about images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def differences(
    library: Path, model: Path, projector: Path, file: Path, form: str, change: str = ""
) -> float:
    """How far logits behind an image are from those of libmtmd's own helper (`oracle.py`)."""
    oracle = Path(__file__).with_name("oracle.py")
    done = subprocess.run(
        [sys.executable, str(oracle), str(model), str(projector), str(file), form, change],
        env={**os.environ, "PERDURE_LLAMA": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])
