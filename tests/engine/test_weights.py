"""Where weights are: in large pages of the process's own where that pays, else in the file's."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure import Model, system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where memory is")


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("room", ["plenty", "four times the file", "a little less", "untold"])
def test_weights_are_read_only_where_there_is_memory_for_them(
    room: str, zoo_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(zoo_path("llama").read_bytes())
    size = path.stat().st_size
    available = {"plenty": 1 << 40, "four times the file": 4 * size, "a little less": 4 * size - 1}.get(room)
    monkeypatch.setattr(system, "available_memory", lambda: available)
    monkeypatch.setattr(system, "has_large_pages", lambda: True)
    with Model(path, gpu_layers=0):
        assert is_mapped(path) == (room in ("a little less", "untold"))


def test_weights_stay_in_the_file_where_there_are_no_large_pages(
    zoo_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.gguf"
    path.write_bytes(zoo_path("llama").read_bytes())
    monkeypatch.setattr(system, "has_large_pages", lambda: False)
    with Model(path, gpu_layers=0):
        assert is_mapped(path)


def test_a_file_that_is_cut_short_after_loading_harms_nobody(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of weights that are mapped, the system would end the process."""
    path = tmp_path / "toy.gguf"
    path.write_bytes(zoo_path("llama").read_bytes())
    program = """
import os, sys
from perdure import Model, system
system.has_large_pages = lambda: True
with Model(sys.argv[1], gpu_layers=0) as model, model.context(n_ctx=64, threads=1) as context:
    os.truncate(sys.argv[1], 0)
    context.decode([1, 2, 3])
    print(len(context.logits()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not system.has_large_pages(), reason="this system makes no large pages")
def test_large_pages_are_asked_for_before_the_weights_are_there(zoo_path: Callable[[str], Path]) -> None:
    program = """
import sys
from pathlib import Path
from perdure import Model, system
from perdure.engine.llama.native import library
library.load()
asked = []
prefer = system.prefer_large_pages
def noted(address, size):
    asked.append(size)
    prefer(address, size)
system.prefer_large_pages = noted
with Model(sys.argv[1], gpu_layers=0):
    print(max(asked, default=0), Path("/proc/self/smaps").read_text().count(" hg"))
"""
    path = zoo_path("llama")
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    largest, advised = map(int, done.stdout.split())
    weights = path.stat().st_size
    assert largest > weights / 2
    assert advised > 0


# What the system tells.


def test_new_memory_is_told_apart_from_memory_of_files(tmp_path: Path) -> None:
    before = system.own_memory()
    file = tmp_path / "file"
    file.write_bytes(b"x" * (1 << 20))
    with mmap.mmap(-1, 1 << 22, mmap.MAP_PRIVATE) as own, file.open("r+b") as opened:
        with mmap.mmap(opened.fileno(), 0) as mapped:
            assert sum(map(len, system.own_memory())) - sum(map(len, before)) >= 1 << 22
            assert mapped[0] == ord("x")
        assert own[0] == 0


GROUPS = {
    "no limit": ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, None),
    "its own": ("0::/a/b", {"a/b/memory.max": "900", "a/b/memory.current": "500"}, 400),
    "of a group above": (
        "0::/a/b",
        {
            "a/b/memory.max": "max",
            "a/b/memory.current": "100",
            "a/memory.max": "300",
            "a/memory.current": "200",
        },
        100,
    ),
    "files count as free": (
        "0::/",
        {
            "memory.max": "900",
            "memory.current": "800",
            "memory.stat": "anon 1\ninactive_file 250\nactive_file 9",
        },
        350,
    ),
    "used up": ("0::/", {"memory.max": "900", "memory.current": "950"}, 0),
    "of the old kind": (
        "7:cpu:/c\n4:memory:/c",
        {"memory/c/memory.limit_in_bytes": "700", "memory/c/memory.usage_in_bytes": "100"},
        600,
    ),
    "a path of the machine, seen in a container": (
        "0::/docker/1234",
        {"memory.max": "800", "memory.current": "200"},
        600,
    ),
}


@pytest.mark.parametrize("limit", GROUPS)
def test_memory_that_a_group_may_not_take_is_not_available(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, files, left = GROUPS[limit]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    texts = {"meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n", "self/cgroup": told + "\n"}
    monkeypatch.setattr(system, "_proc", texts.__getitem__)
    monkeypatch.setattr(system, "_GROUPS", tmp_path)
    assert system.available_memory() == (5 << 10 if left is None else left)
