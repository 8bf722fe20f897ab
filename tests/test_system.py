"""Two modules know what differs between systems; everything else works where something is missing (D5)."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from perdure import system
from perdure.store.index import Index

SOURCE = Path(perdure.__file__).parent

# What other systems lack, taken away before anything of ours is imported; what Python's own asyncio asks this
# system for is there when it is imported.
ABSENT = {
    "os.sysconf": "import asyncio; import os; del os.sysconf",
    "os.getloadavg and os.sched_getaffinity": "import os; del os.getloadavg, os.sched_getaffinity",
    "os.O_DIRECTORY": "import os; del os.O_DIRECTORY",
    "os.confstr": "import os; del os.confstr",
    "os.register_at_fork": "import asyncio, random; import os; del os.register_at_fork",
    "os.pread": "import os; del os.pread",
    "fcntl": "import sys; sys.modules['fcntl'] = None",
    "resource": "import sys; sys.modules['resource'] = None",
    "readline and termios": "import sys; sys.modules['readline'] = sys.modules['termios'] = None",
    "signal.SIGHUP": "import signal; del signal.SIGHUP",
    "select.poll": "import select; del select.poll",
    "/proc": """
import io, os
opened = io.open
def without_proc(file, *arguments, **more):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return opened(file, *arguments, **more)
io.open = without_proc
import builtins; builtins.open = without_proc
""",
    "CDLL(None)": """
import ctypes
class Named(ctypes.CDLL):
    def __init__(self, name, *arguments, **more):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *arguments, **more)
ctypes.CDLL = Named
""",
    "what Windows lacks": """
import os; del os.geteuid, os.O_CLOEXEC
from perdure import system
system.POSIX = False
""",
}

TOY = """
import perdure, tempfile
from perdure.testing.toy import ToyModel
with tempfile.TemporaryDirectory() as folder:
    with perdure.open(ToyModel(), store=folder, n_ctx=512) as rt:
        session = rt.session("a")
        session.say("Hello", max_tokens=4)
        session.sleep()
    with perdure.open(ToyModel(), store=folder, n_ctx=512) as rt:
        reply = rt.session("a").say("And now?", max_tokens=4)
        assert reply.reuse.reused + reply.reuse.computed > reply.usage.completion_tokens
from perdure import system
from perdure.cli import app
from perdure.cli.output import terminal
with terminal.leaving_in_order():
    system.sync_folder(system.Path("."))
from perdure.extension import extensions
if system.glibc() and "builds" in extensions():
    from perdure.ext.builds.machine import installable, read_machine
    assert installable(read_machine())
print(system.physical_memory(), system.available_memory(), system.usable_cores(), system.busy_cores())
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:only soft file lock", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("absent", ABSENT)
def test_the_library_and_the_toy_engine_work_without(absent: str) -> None:
    done = run(ABSENT[absent] + "\n" + TOY)
    assert done.returncode == 0, done.stderr


def test_they_work_without_all_of_them() -> None:
    done = run("\n".join(ABSENT.values()) + "\n" + TOY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["None", "None"]


@pytest.mark.extension("machine")
def test_the_report_about_a_machine_is_written_without_all_of_them() -> None:
    report = "from perdure.ext.machine.problem_report import problem_report; print(problem_report([]))"
    done = run("\n".join(ABSENT.values()) + "\n" + report)
    assert "## GPUs" in done.stdout, done.stderr


def test_llama_answers_without_what_other_systems_lack(zoo_path: Callable[[str], Path]) -> None:
    program = """
import sys, perdure
with perdure.open(sys.argv[1], n_ctx=256) as rt:
    print(rt.generate("Hello", max_tokens=3, temperature=0).usage.completion_tokens)
"""
    absent = [
        ABSENT[name] for name in ("os.sysconf", "fcntl", "resource", "signal.SIGHUP", "/proc", "CDLL(None)")
    ]
    done = run("\n".join(absent) + program, str(zoo_path("llama")))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.extension("workers")
def test_an_engine_in_a_child_is_refused_in_a_sentence_where_it_cannot_be() -> None:
    program = """
import os, perdure
from perdure import system
system.POSIX = False
try:
    perdure.open("model.gguf", isolated=True)
except perdure.UnsupportedSystemError as error:
    print(error)
"""
    done = run(program)
    assert "child process that inherits a socket" in done.stdout, done.stderr
    assert "isolated=False" in done.stdout


def test_nothing_else_asks_the_system() -> None:
    """What the tests above take away is asked for in two modules alone."""
    asks = re.compile(
        r"os\.sysconf|os\.fsync|sched_getaffinity|getloadavg|geteuid|fchmod|O_CLOEXEC|import fcntl"
        r"|import resource|SIGHUP|['\"]/proc"
        r"|CDLL\(None\)|O_DIRECTORY|sys\.platform\b|os\.name\b"
    )
    found = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if asks.search(file.read_text())}
    assert found == {"system/__init__.py", "system/processes.py"}


class TestSync:
    """D5: on macOS a file is on the disk only after F_FULLFSYNC."""

    FULL = 51

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The calls that `sync` makes on a system that has F_FULLFSYNC."""
        seen: list[str] = []
        monkeypatch.setattr(system, "_FULL_FSYNC", self.FULL)
        monkeypatch.setattr(os, "fsync", lambda handle: seen.append("fsync"))
        monkeypatch.setattr(fcntl, "fcntl", lambda handle, command: seen.append(f"fcntl {command}"))
        return seen

    def test_the_drive_is_told_to_write(self, calls: list[str], tmp_path: Path) -> None:
        with open(tmp_path / "a", "wb") as file:
            system.sync(file.fileno())
        assert calls == [f"fcntl {self.FULL}"]

    def test_files_of_a_store_and_their_folder_are(self, calls: list[str], tmp_path: Path) -> None:
        from perdure.atomic import sync_folder, write_file

        write_file(tmp_path / "a", [b"x"])
        sync_folder(tmp_path)
        assert calls == [f"fcntl {self.FULL}"] * 2

    @pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
    def test_a_drive_that_has_no_such_command_is_synced_plainly(
        self, code: int, calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def refuse(handle: int, command: int) -> None:
            raise OSError(code, "no")

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        with open(tmp_path / "a", "wb") as file:
            system.sync(file.fileno())
        assert calls == ["fsync"]

    def test_a_drive_that_fails_is_an_error(
        self, calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def fail(handle: int, command: int) -> None:
            raise OSError(errno.EIO, "the drive is broken")

        monkeypatch.setattr(fcntl, "fcntl", fail)
        with open(tmp_path / "a", "wb") as file, pytest.raises(OSError, match="broken"):
            system.sync(file.fileno())
        assert calls == []

    def test_databases_ask_for_it(self, tmp_path: Path) -> None:
        """SQLite has a separate setting, off by default even on macOS."""
        seen: list[str] = []
        connect = sqlite3.connect

        class Traced(sqlite3.Connection):
            def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
                seen.append(sql)
                return super().execute(sql, *more)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Traced))
            Index(tmp_path / "index.sqlite", readonly=False).close()
        assert {"PRAGMA fullfsync = ON", "PRAGMA checkpoint_fullfsync = ON"} <= set(seen)


def test_memory_that_stays_is_frozen_and_moves_into_large_pages() -> None:
    script = """
import gc, mmap, sys
from perdure import system

def large() -> int:
    with open("/proc/self/smaps_rollup") as told:
        return next(int(line.split()[1]) for line in told if line.startswith("AnonHugePages"))

kept = [[number, [number]] for number in range(100_000)]
if "/proc" in sys.argv:
    system._proc = lambda name: ""
probe = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
probe.write(bytes(8 << 20))
before = large()
try:
    probe.madvise(25)
except OSError:
    pass
possible = system.has_large_pages() and large() > before
before = large()
system.freeze_memory()
print(possible, gc.get_freeze_count() > 100_000, large() - before > 4 << 10)
"""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell what pages a process has")
    run = [sys.executable, "-c", script]
    possible, frozen, moved = subprocess.check_output(run, text=True).split()
    assert frozen == "True"
    if possible != "True":
        pytest.skip("this system moves nothing into large pages")
    assert moved == "True"
    # Where the system does not say what memory there is, none is moved.
    assert subprocess.check_output([*run, "/proc"], text=True).split()[1:] == ["True", "False"]
