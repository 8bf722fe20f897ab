"""Parent and child: neither is killed by mistake, and neither outlives the other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ext.workers.engines import isolated, pid

TESTS = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system cannot watch a process")


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "ext.workers.left_alone"],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as started:
        yield started
        started.kill()


def said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def ask(program: subprocess.Popen[str], prompt: str) -> str:
    assert program.stdin is not None
    program.stdin.write(prompt + "\n")
    program.stdin.flush()
    return said(program)


def await_end(watch: int) -> None:
    """Wait until the watched process is gone."""
    assert select.select([watch], [], [], 60)[0], "it is still there"
    os.close(watch)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_parent_that_is_killed_leaves_no_orphan(program: subprocess.Popen[str], how: int) -> None:
    """H4."""
    watch = os.pidfd_open(int(said(program)))
    program.send_signal(how)
    await_end(watch)


def test_a_parent_that_ends_without_close_leaves_no_orphan(program: subprocess.Popen[str]) -> None:
    watch = os.pidfd_open(int(said(program)))
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(60) == 0
    await_end(watch)


def test_ctrl_c_is_for_the_parent(program: subprocess.Popen[str]) -> None:
    """H4: the engine goes on, in the same process."""
    child = said(program)
    first = ask(program, "hello")
    assert first.startswith(child)
    assert program.stdout is not None
    told: Sequence[object] = ()
    while not told:
        # Python may miss one that comes just as it begins to wait for a line.
        os.killpg(program.pid, signal.SIGINT)
        told = select.select([program.stdout], [], [], 5)[0]
    assert said(program) == "interrupted"
    os.kill(int(child), signal.SIGINT)
    answer = ask(program, "hello")
    while answer == "interrupted":
        answer = said(program)
    assert answer == first


def test_a_closed_runtime_has_no_process() -> None:
    rt = isolated("full")
    child = pid(rt)
    watch = os.pidfd_open(child)
    rt.close()
    await_end(watch)
    assert not Path(f"/proc/{child}").exists()


def test_the_child_writes_nothing_to_the_programs_output(program: subprocess.Popen[str]) -> None:
    child = said(program)
    assert ask(program, "one").startswith(child)
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.close()
    assert program.stdout.read() == ""
