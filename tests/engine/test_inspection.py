"""Calls that look inside are there without the extension that answers them, and name it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import sys, perdure
with perdure.Model(sys.argv[1], gpu_layers=0) as model, model.context(n_ctx=64, threads=1) as ctx:
    ctx.decode([40, 41, 42])
    rows = ctx.capture().rows.cut(0, 2)
    calls = (ctx.kv, lambda: ctx.kv_of(rows), ctx.trace, lambda: model.trace([40, 41]),
             lambda: model.context(n_ctx=64, trace="hidden"))
    for call in calls:
        try:
            call()
        except perdure.InvalidInputError as error:
            print(error)
    print(ctx.tokens())
"""


def test_without_its_extension_a_call_that_looks_inside_names_it(zoo_path: Callable[[str], Path]) -> None:
    paths = [str(TESTS / "hiding"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PERDURE_HIDDEN": "inspection", "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(zoo_path("llama"))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *errors, tokens = ended.stdout.splitlines()
    missing = "needs perdure's extension 'inspection', which is not installed"
    assert errors == [
        f"{call} {missing}"
        for call in ("ctx.kv", "ctx.kv_of", "ctx.trace", "ctx.trace", "a context with trace")
    ]
    assert tokens == "[40, 41, 42]"
