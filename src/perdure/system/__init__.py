"""What differs between operating systems. This folder alone asks which one this is.

`processes.py` has what differs for processes: signals, locks, limits and children.

Everything here works wherever Python does: what a system lacks is None, an empty set, or a call that does
nothing, and what cannot do without it raises `UnsupportedSystemError` with one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import functools
import gc
import mmap
import os
import platform
import re
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

POSIX = os.name == "posix"
BINARY: int = getattr(os, "O_BINARY", 0)
"""For `os.open`: without it Windows changes line ends."""
NO_LINKS: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
"""For `os.open`: refuse a link; do not wait for the other end of a pipe."""

try:
    import fcntl
except ImportError:
    _FULL_FSYNC = None
else:
    _FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)

LOCAL_SOCKETS = POSIX and hasattr(socket, "AF_UNIX")
"""Whether processes of one user can find each other by a socket in a folder."""
ADDRESS_BYTES = 100
"""The longest path that such a socket can have everywhere."""

_MADV_COLLAPSE = 25
_LARGEST_HEAP = 64 << 20
"""Bytes of one piece of memory up to which it is Python's and C's small objects."""
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Files in which control groups, of either kind, give the memory that a group may use, and uses."""
_CPU_NAMES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


# Memory


def physical_memory() -> int | None:
    """Bytes of memory of this machine, where the system reports it."""
    pages = _sysconf("SC_PHYS_PAGES")
    if pages is not None:
        return pages * page_size()
    status = _windows_memory()
    return status[0] if status else None


def memory_to_share() -> int:
    """Bytes of memory of this machine; 4 GiB where the system does not report it."""
    return physical_memory() or 4 << 30


def prefer_large_pages(address: int, size: int) -> None:
    """Have memory that is about to be written made of large pages: it is there sooner, and read faster."""
    start = -(-address // page_size()) * page_size()
    if address + size > start:
        _advise(start, address + size - start, getattr(mmap, "MADV_HUGEPAGE", None))


def freeze_memory() -> None:
    """Say that what is there by now stays: the garbage collector does not look through it again and again,
    and it moves into large pages, where it is found sooner after a step has read all weights."""
    gc.freeze()
    for each in own_memory(heap=True) if has_large_pages() else ():
        # What is larger is weights or state, and was asked for in large pages.
        if len(each) <= _LARGEST_HEAP:
            _advise(each.start, len(each), _MADV_COLLAPSE)


def _advise(start: int, size: int, advice: int | None) -> None:
    if advice is not None and (advise := c_function("madvise")) is not None:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice))


def own_memory(*, heap: bool = False) -> set[range]:
    """The addresses of memory that only this process has and no file is behind, also of the C heap if asked
    for; none where the system does not report it."""
    ranges = set()
    for line in _proc("self/maps").splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and (not name or (heap and name == ["[heap]"])):
            start, end = addresses.split("-")
            ranges.add(range(int(start, 16), int(end, 16)))
    return ranges


def holders_of_deleted(path: Path) -> list[int]:
    """Processes of this user that have a deleted file open, where the system reports them."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = (os.readlink(each) for each in (folder / "fd").iterdir())
            if f"{os.path.realpath(path)} (deleted)" in links:
                pids.append(int(folder.name))
    return sorted(pids)


def is_root() -> bool:
    """Whether this process may do everything: files that it makes belong to root."""
    return POSIX and os.geteuid() == 0


def has_large_pages() -> bool:
    """Whether the system makes large pages of memory where it is asked to."""
    setting = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return bool(setting) and "[never]" not in setting


def available_memory() -> int | None:
    """Bytes that this process can still get without swapping, where the system reports it. In a container or
    a service that may be less than the machine has."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _proc("meminfo"), re.MULTILINE)
    if match:
        return min([int(match[1]) << 10, *_left_to_groups()])
    pages = _sysconf("SC_AVPHYS_PAGES")
    if pages is not None:
        return pages * page_size()
    status = _windows_memory()
    return status[1] if status else None


def _left_to_groups() -> Iterator[int]:
    """Bytes that each group of processes that this one is in may still take, where it has a limit."""
    for line in _proc("self/cgroup").splitlines():
        _, kinds, path = line.split(":", maxsplit=2)
        if kinds not in _GROUP_FILES:
            continue
        top = _GROUPS / kinds
        limit, used = _GROUP_FILES[kinds]
        # In a container the path can be that of the machine, which is not there.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            most, taken = _text(folder / limit), _text(folder / used)
            if most.strip().isdigit() and taken.strip().isdigit():
                # What is kept of files that nobody has used lately is given up for it.
                spare = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
                yield max(0, int(most) - int(taken) + (int(spare[1]) if spare else 0))
            if folder == top:
                break


def resident_memory(pid: int) -> int | None:
    """Bytes of memory that a process has, where the system reports it."""
    try:
        return int(_proc(f"{pid}/statm").split()[1]) * page_size()
    except (IndexError, ValueError):
        return None


def page_size() -> int:
    return _sysconf("SC_PAGE_SIZE") or 4096


# Processors


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return max(1, os.cpu_count() or 1)


def core_ids() -> tuple[int, ...]:
    """The cores that this thread may use; none where the system does not report it."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return ()


def use_cores(cores: Iterable[int]) -> None:
    """Have this thread run on those cores alone, where the system can do that."""
    # At every step of an engine: `suppress` would take longer than the call.
    try:  # noqa: SIM105
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError):
        pass


def busy_cores() -> float | None:
    """Cores that were busy over the last minute, where the system reports it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def busy_cores_now(seconds: float) -> float | None:
    """Cores that are busy over the next seconds, where the system counts their time."""

    def idle_and_all() -> tuple[int, int]:
        counts = [int(word) for word in _proc("stat").partition("\n")[0].split()[1:9]]
        return sum(counts[3:5]), sum(counts)

    before = idle_and_all()
    time.sleep(seconds)
    after = idle_and_all()
    if after[1] == before[1]:
        return busy_cores()
    return (1 - (after[0] - before[0]) / (after[1] - before[1])) * (os.cpu_count() or 1)


def cpu_flags() -> frozenset[str]:
    """What the processor can do, in the kernel's words; empty where the system does not report it."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _proc("cpuinfo"), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def gpu_libraries() -> tuple[str, str]:
    """What the libraries of NVIDIA's driver and of the Vulkan loader are called here."""
    if sys.platform == "win32":
        return "nvcuda.dll", "vulkan-1.dll"
    return "libcuda.so.1", "libvulkan.1.dylib" if sys.platform == "darwin" else "libvulkan.so.1"


def nvidia_driver() -> str:
    """What NVIDIA's kernel driver says of itself; empty where there is none."""
    return _proc("driver/nvidia/version")


def architecture() -> str:
    """The processor's family by one name on every system: `x86_64`, `aarch64`, or as the system calls it."""
    name = platform.machine().lower()
    return _CPU_NAMES.get(name, name)


def glibc() -> tuple[int, int] | None:
    """The version of the GNU C library, or None where this is another C library or another system."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", text or "")
    return (int(match[1]), int(match[2])) if match else None


# Files


def sync(handle: int) -> None:
    """Have what was written to a file on the disk when this returns.

    macOS's own fsync only hands the bytes to the drive, which may lose them with the power.
    """
    if _FULL_FSYNC is not None:
        try:
            fcntl.fcntl(handle, _FULL_FSYNC)
            return
        except OSError as error:
            # A network drive has no such command.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(handle)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last. Windows does that by itself and opens no folders."""
    if not POSIX:
        return
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        sync(handle)
    finally:
        os.close(handle)


def make_private(handle: int, mode: int) -> None:
    """Take from others what they may do with an open file of ours; Windows has no such bits."""
    if not POSIX:
        return
    status = os.fstat(handle)
    # Of what another owns, it is his to decide.
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        os.fchmod(handle, mode)


def copy_access(source: Path, handle: int) -> None:
    """Give an open file the owner, group and mode of `source`, as far as there is one and we may."""
    if not POSIX:
        return
    try:
        status = source.stat()
        os.fchown(handle, status.st_uid, status.st_gid)
        os.fchmod(handle, stat.S_IMODE(status.st_mode))
    except (FileNotFoundError, PermissionError):
        # Private is what it is then.
        return


def make_path_private(path: Path, mode: int) -> None:
    """The same for a folder, or for a file that must not be opened here: closing a file drops all locks that
    this process has on it."""
    if not POSIX:
        return
    status = os.stat(path)
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        os.chmod(path, mode)


@functools.cache
def c_function(name: str) -> Any:
    """A function of the C library for use as a callback, or None where it cannot be found."""
    for library in _c_libraries():
        try:
            return getattr(ctypes.CDLL(library), name)
        except (OSError, TypeError, AttributeError):
            continue
    return None


def _c_libraries() -> tuple[str | None, ...]:
    """None is this process with all that it has loaded, which Windows cannot search."""
    if not POSIX:
        return ("ucrtbase", "msvcrt")
    return (None, "libc.so.6", "libSystem.dylib", ctypes.util.find_library("c"))


def _sysconf(name: str) -> int | None:
    try:
        value = os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return None
    return value if value > 0 else None


_TOLD = 16 << 20
"""Bytes that are read of a system file, such as the map of a process."""


def _proc(name: str) -> str:
    return _text(Path("/proc", name))


def _text(path: Path) -> str:
    """The text of a file of the system (`/proc`, `/sys`); nothing where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_TOLD).decode("utf-8", "replace")
    except OSError:
        return ""


def _windows_memory() -> tuple[int, int] | None:
    """Total and available bytes, from Windows."""
    kernel = getattr(getattr(ctypes, "windll", None), "kernel32", None)
    if kernel is None:
        return None
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return status.total, status.available


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        *((f"other_{index}", ctypes.c_uint64) for index in range(5)),
    )
