"""The tasks of docs/internals/walk.md: a newcomer's path, in order, in a fresh home."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from ext.cluster.servers import postgres_server, program
from homes import new_home
from page.conftest import executable
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
        """Packages and programs that it needs and that are not here."""
        packages = re.findall(r"^(?:from|import) (\w+)", self.block, re.MULTILINE)
        lacking = [
            each
            for each in packages
            if importlib.util.find_spec(each) is None
            and f"--target {each.partition('_')[0]}" not in self.block
        ]
        if "newcomer" in packages and "at_page" in self.block and executable() is None:
            lacking.append("Chromium")
        if "postgresql://" in self.block and program("initdb") is None:
            lacking.append("PostgreSQL")
        return lacking + [
            name
            for name in ("npm", "systemd-analyze")
            if name in self.block.split() and not shutil.which(name)
        ]


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
    assert [task.number for task in tasks()] == list(range(1, 76))
    assert all(task.says for task in tasks())


def free_port() -> str:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return str(place.getsockname()[1])


class Walker:
    """A newcomer with a home, a folder to work in, and the command. What is started ends with the walk."""

    def __init__(self, folder: Path) -> None:
        home = new_home(folder / "home")
        model = models.path()
        (home / "models").mkdir()
        (home / "models" / model.name).symlink_to(model)
        commands = folder / "bin"
        commands.mkdir()
        (commands / "perdure").write_text(f'#!/bin/sh\nexec {sys.executable} -m perdure.cli "$@"\n')
        (commands / "perdure").chmod(0o755)
        self.folder = folder / "work"
        self.folder.mkdir()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")},
            "PERDURE_HOME": str(home),
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parent),
            "CLONE": str(PAGE.parents[2]),
            "MODEL": str(model),
            "NO_PROXY": "127.0.0.1",
            # Beside other tests a second thread waits more than it computes.
            "PERDURE_THREADS": "1",
            "COLUMNS": "200",
        }
        self._ports = {port: free_port() for port in ("8123", "8124", "8131", "8132")}
        self._before = set(psutil.pids())

    def use(self, port: str, instead: int) -> None:
        self._ports[port] = str(instead)

    def do(self, task: Task) -> tuple[int, str]:
        block = task.block
        for written, port in self._ports.items():
            block = block.replace(written, port)
        command = ["bash", "-c", block] if task.kind == "sh" else [sys.executable, "-c", block]
        with (self.folder.parent / "printed").open("w+b") as printed:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=900,
            )
            printed.seek(0)
            return done.returncode, printed.read().decode(errors="replace")

    def end(self) -> None:
        subprocess.run(["perdure", "stop"], env=self._environment, cwd=self.folder, check=False)
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if each.pid not in self._before and str(self.folder.parent) in each.environ().get(
                    "PERDURE_HOME", ""
                ):
                    each.kill()


def chosen(task: Task) -> bool:
    """`PERDURE_WALK=30-40` does these alone; a task may need what an earlier one has made."""
    first, _, last = os.environ.get("PERDURE_WALK", "1-75").partition("-")
    return int(first) <= task.number <= int(last or first)


@pytest.mark.soak
@pytest.mark.model
def test_the_walk(tmp_path: Path) -> None:
    """Stops at nothing: shows what each task prints, and at the end what went wrong or was left out."""
    wrong: list[str] = []
    left_out: list[str] = []
    walker = Walker(tmp_path)
    with ExitStack() as stack:
        stack.callback(walker.end)
        if program("initdb") is not None:
            walker.use("5599", stack.enter_context(postgres_server()).port)
        for task in filter(chosen, tasks()):
            title = f"{task.number}. {task.title}"
            if task.missing:
                left_out.append(f"{title}: {', '.join(task.missing)} is not installed")
                print(left_out[-1])
                continue
            code, printed = walker.do(task)
            print(f"\n== {title}: {code}\n{printed}", flush=True)
            missing = [words for words in task.says if words not in printed]
            if missing or code != task.code or ("Traceback" in printed and "Traceback" not in task.says):
                wrong.append(f"{title}: {code}, no {missing} in\n{printed[-3000:]}")
    assert not wrong, "\n\n".join(wrong)
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
