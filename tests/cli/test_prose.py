"""What docs/chat.md, command.md and sessions.md say is so: snippets run, commands and links exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from cli.pty_user import piped
from homes import new_home
from perdure.cli.slash_commands import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("chat.md", "command.md", "migrate.md", "sessions.md")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


def snippets() -> list[tuple[str, int]]:
    return [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return [line.split(" | ")[-1] for line in lines]


@cache
def help_of(*command: str) -> str:
    done = piped({**os.environ, "COLUMNS": "200"}, None, *command, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("page", "number"), snippets())
def test_a_snippet_runs(page: str, number: int, zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks(page, "python")[number]],
        env={
            **os.environ,
            "PERDURE_MODEL": str(zoo_path("llama")),
            "PERDURE_HOME": str(new_home(tmp_path / "home")),
            "OMP_NUM_THREADS": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.strip()


@pytest.mark.parametrize("command", commands())
def test_a_command_and_its_options_exist(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "perdure"
    deep = {"config": 2, "sessions": 3 if "memories" in words else 2}.get(words[0], 1)
    # What start is given goes to serve.
    shown = help_of(*(["serve"] if words[0] == "start" else words[:deep]))
    for option in (word for word in words if re.fullmatch("--?[a-z-]+", word)):
        assert re.search(rf"{option}\b", shown), f"{command}: no {option}"


def test_the_commands_of_the_migration_page_run(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PERDURE_MODEL": str(zoo_path("llama")),
        "PERDURE_HOME": str(new_home(tmp_path)),
        "PERDURE_MAX_TOKENS": "4",
        "OMP_NUM_THREADS": "1",
    }
    lines = [line for block in blocks("migrate.md", "sh") for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        done = subprocess.run(
            line, shell=True, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr.decode())


def test_options_of_others_in_the_migration_page_are_answered_as_it_says() -> None:
    """What the page calls ours is what the error suggests."""
    from perdure.options import PEERS

    page = read("migrate.md")
    for theirs in ("n_threads", "type_k", "flash_attn", "num_predict", "num_ctx"):
        assert theirs in page
        assert theirs in PEERS


@pytest.mark.parametrize("page", [*PAGES, "install.md"])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", read(page))
    assert all((DOCS / link).exists() for link in links)


def test_the_page_lists_what_can_be_typed() -> None:
    assert set(re.findall(r"^\| `(/\w+)", read("command.md"), re.MULTILINE)) == {
        *(command.name for command in COMMANDS),
        "/quit",
    }
