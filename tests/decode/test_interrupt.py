"""Ctrl-C while a reply is waited for, and programs that end in the middle of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def child(module: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", f"decode.{module}", *map(str, args)],
        cwd=TESTS,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("way", ["generate", "stream", "submit"])
def test_ctrl_c_reaches_who_waits_and_the_runtime_can_be_used_again(
    way: str, zoo_path: Callable[[str], Path]
) -> None:
    """H7: the request is cancelled, its sequence is free, and the next answer is right."""
    ended = child("interrupted_reply", zoo_path("llama"), way)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "interrupted": True,
        "cancelled": "cancelled" if way == "submit" else None,
        "idle": True,
        "right": True,
    }


def test_a_program_may_end_in_the_middle_of_replies(zoo_path: Callable[[str], Path]) -> None:
    for _ in range(3):
        ended = child("left_open", zoo_path("llama"))
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
