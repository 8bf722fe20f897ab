"""Says what a package of llama.cpp contains: `python -m tools.engine_contents FILE.tgz|LIBRARY.so …`.

For each GPU backend in it: the shared libraries that it needs of the machine, and for CUDA the machine code
(`sm_…`), the PTX by architecture, and the PTX version, which is that of the toolkit. What it prints goes into
`_CONTENTS` of `src/perdure/ext/builds/package.py`.
"""

from __future__ import annotations

import struct
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FATBIN = struct.pack("<I", 0xBA55ED50)
"""What a container of CUDA code starts with."""
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, size of its header, size, size when compressed, options, minor, major, architecture."""
_PTX, _MACHINE_CODE = 1, 2
_STRINGS, _DYNAMIC, _NEEDED = 3, 6, 1


@dataclass
class Contents:
    """What one library has and needs."""

    needs: list[str] = field(default_factory=list)
    code: set[int] = field(default_factory=set)
    ptx: set[int] = field(default_factory=set)
    toolkit: tuple[int, int] = (0, 0)
    """Of the newest PTX, as PTX counts: 9.1 is CUDA 13.1, 8.4 is 12.4."""


def read(data: bytes) -> Contents:
    """The contents of a shared library for Linux."""
    contents = Contents(needs=sorted(_needed(data)))
    for kind, version, arch in _entries(data):
        if kind == _MACHINE_CODE:
            contents.code.add(arch)
        elif kind == _PTX:
            contents.ptx.add(arch)
            contents.toolkit = max(contents.toolkit, version)
    return contents


def _entries(data: bytes) -> Iterator[tuple[int, tuple[int, int], int]]:
    at = data.find(_FATBIN)
    while at >= 0:
        _, _, header, size = _CONTAINER.unpack_from(data, at)
        place, end = at + header, at + header + size
        while place + _ENTRY.size <= min(end, len(data)):
            kind, _, own, nbytes, _, _, minor, major, arch = _ENTRY.unpack_from(data, place)
            if kind not in (_PTX, _MACHINE_CODE) or own < _ENTRY.size:
                break
            yield kind, (major, minor), arch
            place += own + nbytes
        at = data.find(_FATBIN, max(end, at + 4))


def _needed(data: bytes) -> Iterator[str]:
    """The shared libraries that an ELF file of 64 bits names."""
    if data[:5] != b"\x7fELF\x02":
        return
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    table = [struct.unpack_from("<IIQQQQIIQQ", data, sections + index * size) for index in range(count)]
    for section in table:
        if section[1] == _DYNAMIC:
            strings = table[section[6]][4]
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", data, at)
                if tag == _NEEDED:
                    yield data[strings + value : data.index(b"\0", strings + value)].decode()


def _libraries(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix != ".tgz":
        yield path.name, path.read_bytes()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if "libggml-" in member.name and "-cpu" not in member.name and "-base" not in member.name:
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        for name, data in _libraries(path):
            contents = read(data)
            print(f"{path.name}: {name}, {len(data):,} bytes")
            print(f"    needs={contents.needs}")
            print(f"    code={sorted(contents.code)} ptx={sorted(contents.ptx)} toolkit={contents.toolkit}")


if __name__ == "__main__":
    main(sys.argv[1:])
