"""The wall: an extension's folder is hidden, and everything else is green."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.extension import extensions

TESTS = Path(__file__).parent
QUICK = (
    "tests/test_public_names.py",
    "tests/test_option_names.py",
    "tests/chat/test_message.py",
    "tests/decode/test_text.py",
    "tests/sessions/test_session.py",
    "tests/store/test_index.py",
    "tests/server/test_chat.py",
    "tests/server/test_documented_errors.py",
    "tests/cli/test_command_names.py",
)
"""Some of each part."""
_SPARED = ("-p", "no:schemathesis")
"""A plugin that takes longer to load than these tests need."""


def run(hidden: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Pytest in a process that does not find the hidden extensions, nor do its children."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    paths = [str(TESTS / "hiding"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PERDURE_HIDDEN": hidden, "PERDURE_TESTS": "quick", "PYTHONPATH": os.pathsep.join(paths)}
    # One by one on the toy engine alone, where there is a choice: the file knows no extension.
    kinds = "not soak and not model and not full" + (" and not engine" if hidden != "all" else "")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", kinds, "-n", "0", *_SPARED, *arguments],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )


def check_green(hidden: str) -> None:
    ended = run(hidden, *QUICK)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_everything_else_is_green_without_any_extension() -> None:
    check_green("all")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(extensions()))
def test_everything_else_is_green_without(name: str) -> None:
    check_green(name)


def test_a_hidden_extension_is_gone() -> None:
    """Planted: a test that needs what is hidden fails, so that hiding hides something."""
    code = "from perdure.extension import extensions; print(*extensions())"
    environment = {**os.environ, "PERDURE_HIDDEN": "ollama"}
    paths = [str(TESTS / "hiding"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    left = {*extensions()} - {"ollama"}
    assert set(ended.stdout.split()) == left
