"""The threads of a context: one a core where it has them all, and the caller's own left as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from perdure import Model, system


def test_opening_and_decoding_leave_the_callers_cores_as_they_were(zoo_path: Callable[[str], Path]) -> None:
    before = system.core_ids()
    if len(before) < 2:
        pytest.skip("this machine has one core to use")
    with Model(zoo_path("llama")) as model:
        with model.context(n_ctx=64, threads=len(before)) as ctx:
            assert system.core_ids() == before
            ctx.decode([40, 41, 42])
            assert system.core_ids() == before
            row = np.array(ctx.logits())
        with model.context(n_ctx=64, threads=1) as alone:
            alone.decode([40, 41, 42])
            np.testing.assert_allclose(np.array(alone.logits()), row, atol=0.05)
    assert system.core_ids() == before
