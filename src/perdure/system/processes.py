"""What differs between operating systems for processes: their signals, locks, limits and children.

As in `perdure.system`, what a system lacks is None, an empty set, or a call that does nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from perdure import system
from perdure.errors import UnsupportedSystemError

try:
    import fcntl
except ImportError:
    _LOCKS = False
else:
    _LOCKS = system.POSIX

_PR_SET_PDEATHSIG = 1


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals by which a process is asked to end, Ctrl-C aside: a plain kill, a closed window."""
    return (signal.SIGTERM, *reload_signals())


def reload_signals() -> tuple[signal.Signals, ...]:
    """The signal by which a server is asked to read its keys again; Windows has none."""
    return (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()


def has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0)))
    except OSError:
        return False
    return True


def lock_with_children(handle: int) -> bool:
    """Lock an open file for this process and those that inherit the handle; False where another has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_file(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False where another has it. `shared` lets others share it too,
    except on Windows, where one has it alone. A system that has no locks keeps nobody out."""
    try:
        if _LOCKS:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            with contextlib.suppress(ImportError):
                import msvcrt

                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True


def lock_byte(handle: int, at: int) -> bool:
    """Lock one byte of an open file, which need not be there, for this process; False where another has it.

    The system drops it with the process, and when this process closes the file, by whatever handle.
    """
    if not _LOCKS:
        # Where no two processes share a store, no two can be at one place of it.
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except OSError:
        return False
    return True


def unlock_byte(handle: int, at: int) -> None:
    if _LOCKS:
        fcntl.lockf(handle, fcntl.LOCK_UN, 1, at)


def is_own_peer(end: socket.socket) -> bool:
    """Whether the process at the other end of a local socket is of the same user as this one."""
    try:
        if (credentials := getattr(socket, "SO_PEERCRED", None)) is not None:
            peer = end.getsockopt(socket.SOL_SOCKET, credentials, 12)
            return bool(struct.unpack("=iII", peer)[1] == os.geteuid())
        # macOS and the BSDs: a version, then the user.
        peer = end.getsockopt(0, 1, 76)
        return bool(struct.unpack_from("=II", peer)[1] == os.geteuid())
    except (OSError, AttributeError, struct.error):
        return False


def pip_config_files() -> tuple[list[Path], list[Path]]:
    """pip's files of settings: those of all users, and those of this one."""
    home = Path.home()
    if not system.POSIX:
        roaming = Path(os.environ.get("APPDATA", home / "AppData" / "Roaming"))
        data = Path(os.environ.get("PROGRAMDATA", "C:/ProgramData"))
        return [data / "pip" / "pip.ini"], [home / "pip" / "pip.ini", roaming / "pip" / "pip.ini"]
    legacy = home / ".pip" / "pip.conf"
    library = Path("Library") / "Application Support" / "pip"
    own = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if sys.platform == "darwin":
        mac = home / library
        return [Path("/") / library / "pip.conf"], [legacy, mac / "pip.conf" if mac.is_dir() else own]
    folders = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    shared = [Path(folder) / "pip" / "pip.conf" for folder in folders if folder]
    return [*shared, Path("/etc/pip.conf")], [legacy, own]


def pip_config_file() -> Path:
    """pip's file of settings of this Python, or of its virtual environment."""
    return Path(sys.prefix) / ("pip.conf" if system.POSIX else "pip.ini")


def npm_prefix() -> Path:
    """Where npm's settings of all users are: below `etc`."""
    if not system.POSIX:
        return Path(os.environ.get("APPDATA", Path.home())) / "npm"
    node = shutil.which("node")
    return Path(node).parent.parent if node else Path("/usr/local")


def isolated_python(*arguments: str) -> list[str]:
    """The command that runs a module with this Python, and nothing out of the current folder."""
    return [sys.executable, "-P", *arguments]


def limit_process(*, more_seconds: int, nbytes: int) -> None:
    """Let this process compute for so long from now on, and have so much address space, where the system can
    hold it to that. It is ended by SIGXCPU where it takes longer."""
    if sys.platform == "win32":
        return
    try:
        import resource
    except ImportError:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + 1 + more_seconds
    for name, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, nbytes),
        (resource.RLIMIT_CORE, 0),
    ):
        # Not every system has each of them.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (most, resource.getrlimit(name)[1]))


def wait_for_input(source: IO[bytes], seconds: float) -> bool:
    """Whether a pipe has something to read, or ended, within `seconds`; True where the system cannot wait."""
    if not system.POSIX:
        return True
    return bool(select.select([source], [], [], seconds)[0])


def require_child_pipes(feature: str) -> None:
    """Refuse what needs a child process that inherits a socket: Windows lacks that."""
    if not system.POSIX:
        raise UnsupportedSystemError(
            f"{feature} needs a child process that inherits a socket, which {platform.system()} lacks: "
            "use isolated=False (`perdure serve --in-process`), or Linux or macOS"
        )


def child_options(handle: int) -> dict[str, Any]:
    """How `subprocess.Popen` starts a child that inherits `handle` and none of the terminal's signals."""
    return {"stdin": subprocess.DEVNULL, "pass_fds": [handle], "process_group": 0}


def die_with_parent() -> None:
    """Be killed when the parent's thread that started this process ends, where the system can do that."""
    if sys.platform == "linux" and (prctl := system.c_function("prctl")) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def yield_to_others() -> None:
    """Have this process get a core after those that started it, and be the first to go where memory runs
    out."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def leave_no_core() -> None:
    """Have no image of this process written when it crashes: gigabytes, with all that was said in them."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@contextlib.contextmanager
def kept_limits() -> Iterator[None]:
    """Have nobody change what this process may use meanwhile."""
    try:
        import resource
    except ImportError:
        yield
        return
    before: Callable[..., None] = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = before
