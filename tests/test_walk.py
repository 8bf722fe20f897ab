"""The tasks of docs/internals/walk.md, as three new users do them: in order, in a fresh home."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from homes import new_home
from perdure import models

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "walk.md"
TASK = re.compile(
    r"^### (?P<number>\d+)\. (?P<title>[^\n]+)\n"
    r"```(?P<kind>sh|python)\n(?P<block>.*?)\n```\n(?P<after>.*?)(?=\n#|\Z)",
    re.MULTILINE | re.DOTALL,
)


class Task(NamedTuple):
    number: int
    title: str
    kind: str
    block: str
    says: list[str]
    code: int

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed here."""
        named = (
            re.findall(r"^(?:from|import) (\w+)", self.block, re.MULTILINE) if self.kind == "python" else []
        )
        return [name for name in named if importlib.util.find_spec(name) is None]


def tasks() -> Iterator[Task]:
    for found in TASK.finditer(PAGE.read_text(encoding="utf-8")):
        after = found["after"].strip()
        says, _, ends = after.partition("Ends with ")
        code = int(ends.rstrip(".")) if ends else 0
        yield Task(
            int(found["number"]),
            found["title"],
            found["kind"],
            found["block"],
            re.findall(r"`(.+?)`", says),
            code,
        )


def test_the_page_has_every_task_once() -> None:
    assert [task.number for task in tasks()] == list(range(1, 58))
    assert all(task.says or task.kind == "sh" for task in tasks())


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


@pytest.mark.soak
@pytest.mark.model
def test_the_walk(tmp_path: Path) -> None:
    """Stops at nothing: every task that went wrong is told at the end, and every one that was left out."""
    home = new_home(tmp_path / "home")
    here = models.path()
    (home / "models").mkdir()
    (home / "models" / here.name).symlink_to(here)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "perdure").write_text(f'#!/bin/sh\nexec {sys.executable} -m perdure.cli "$@"\n')
    (commands / "perdure").chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")},
        "PERDURE_HOME": str(home),
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_PROXY": "127.0.0.1",
        "COLUMNS": "200",
    }
    ports = {"8123": free_port(), "8124": free_port()}
    wrong: list[str] = []
    left_out: list[str] = []
    try:
        for task in tasks():
            if task.missing:
                left_out.append(f"{task.number}. {task.title}: {', '.join(task.missing)} is not installed")
                print(left_out[-1])
                continue
            block = task.block
            for written, port in ports.items():
                block = block.replace(written, port)
            command = ["bash", "-c", block] if task.kind == "sh" else [sys.executable, "-c", block]
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            missing = [words for words in task.says if words not in done.stdout]
            print(f"{task.number}. {task.title}: {done.returncode}")
            if missing or done.returncode != task.code or "Traceback" in done.stdout:
                wrong.append(
                    f"{task.number}. {task.title}: {done.returncode}, no {missing} in\n{done.stdout}"
                )
    finally:
        subprocess.run([commands / "perdure", "stop"], env=environment, cwd=folder, check=False)
    assert not wrong, "\n".join(wrong)
    if left_out:
        pytest.skip("; ".join(left_out))


GONE = (
    "cut off at its longest",
    "may not be used like this",
    "A name keeps it",
    "Enter drops it",
    "None of None",
    "String should match pattern",
)
"""What new users did not understand, or what was not true."""


@pytest.mark.parametrize("words", GONE)
def test_a_sentence_that_nobody_understood_is_gone(words: str) -> None:
    """Of the command, the library, the server and the page."""
    root = PAGE.parents[2]
    files = [*root.glob("src/perdure/**/*.py"), *root.glob("web/src/**/*.ts*")]
    assert len(files) > 300
    assert [path.name for path in files if words in path.read_text(encoding="utf-8")] == []
