"""The archive that exports and backups are written in."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from perdure.errors import CorruptStateError
from perdure.ext.upkeep.archive_file import end_archive, read_archive, write_member


def test_other_programs_read_what_is_written(tmp_path: Path) -> None:
    contents = {"a": b"", "blocks/ab": b"x" * 513, "last": b"y" * 1024}
    with (tmp_path / "archive").open("wb") as file:
        for name, data in contents.items():
            write_member(file, name, len(data), [data])
        end_archive(file)
    with tarfile.open(tmp_path / "archive") as archive:
        assert {name: _data(archive, name) for name in archive.getnames()} == contents
    with read_archive(tmp_path / "archive", "thing") as reader:
        read = {}
        while (member := reader.member()) is not None:
            read[member[0]] = reader.take(member[1])
    assert read == contents


def _data(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def test_a_size_above_8_gib_is_written_and_read_in_both_forms(tmp_path: Path) -> None:
    """Earlier versions wrote backups with tarfile, which says such a size in a separate header."""
    size, file = (8 << 30) + 5, io.BytesIO()
    with pytest.raises(CorruptStateError, match="changed while it was written"):
        write_member(file, "sessions.sqlite", size, [])
    member = tarfile.TarInfo("sessions.sqlite")
    member.size = size
    for number, head in enumerate((file.getvalue(), member.tobuf(tarfile.PAX_FORMAT))):
        path = tmp_path / str(number)
        path.write_bytes(head)
        with path.open("r+b") as sparse:
            sparse.truncate(len(head) + size + 507)
        with read_archive(path, "thing") as reader:
            assert reader.member() == ("sessions.sqlite", size)
            reader.skip(size)
            assert reader.member() is None


def test_a_header_before_another_says_a_size_alone(tmp_path: Path) -> None:
    member = tarfile.TarInfo("a")
    member.pax_headers = {"path": "../outside"}
    (tmp_path / "archive").write_bytes(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    with (
        pytest.raises(CorruptStateError, match="no plain file"),
        read_archive(tmp_path / "archive", "thing") as reader,
    ):
        reader.member()


def test_what_is_cut_short_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "archive").open("wb") as file:
        write_member(file, "a", 3 << 20, [bytes(3 << 20)])
    whole = (tmp_path / "archive").read_bytes()
    (tmp_path / "archive").write_bytes(whole[:-1])
    with (
        pytest.raises(CorruptStateError, match="cut short"),
        read_archive(tmp_path / "archive", "thing") as reader,
    ):
        reader.member()
