"""Everything read from outside has a bound before it is read (class 4): `read_file`, `read_text` and
`read_stream` of `perdure.atomic`, or a size that is given to `read`."""

from __future__ import annotations

import ast
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from perdure.atomic import read_file, read_stream, read_table, read_text
from perdure.errors import PerdureError, TooLargeError

SOURCE = Path(perdure.__file__).parent

UNBOUNDED = frozenset({"read_bytes", "read_text", "readall", "readlines", "get_object"})
"""Calls that read all there is, whatever they are given."""
NEEDS_SIZE = frozenset({"read", "readline"})
LOADERS = frozenset({"json", "tomllib", "pickle"})
FETCHERS = frozenset({"httpx", "requests"})

EXEMPT = {
    "chat/template/template.py": ("read_text", "a template of the package itself"),
    "cli/__init__.py": ("read", "the help text of the package itself"),
    "ext/inspection/page.py": ("read_text", "a page of the package itself"),
    "server/api/page.py": ("read_bytes", "the page of the package itself"),
    "ext/cluster/places.py": ("get_object", "its body is read by read_stream, behind its length"),
    "ext/evaluation/evaluate.py": ("read", "Journal.read: a file of our own, line by line"),
    "cli/line_editor.py": ("readline", "a line that a person types"),
    "ext/inspection/child.py": ("readline", "the one line of the process that started it"),
}
"""One call in each of these files, and why it needs no bound. It may only become shorter."""
MOST_EXEMPT = 8


def unbounded(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The calls of a file that read without a bound: their lines and names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        of = owner.id if isinstance(owner, ast.Name) else ""
        given = bool(node.args or node.keywords)
        if (
            (name in UNBOUNDED and of != "atomic")
            or (name in NEEDS_SIZE and (not given or _is_all(node)))
            or (name == "load" and of in LOADERS)
            or (name in ("get", "post", "request") and of in FETCHERS)
        ):
            yield node.lineno, name


def _is_all(node: ast.Call) -> bool:
    """Whether the size is -1 or None."""
    return any(ast.unparse(each) in ("-1", "None") for each in node.args)


def test_nothing_in_the_source_reads_without_a_bound() -> None:
    found = Counter(
        (file.relative_to(SOURCE).as_posix(), name)
        for file in SOURCE.rglob("*.py")
        for _, name in unbounded(ast.parse(file.read_text("utf-8")))
    )
    # Less is an exemption that is not needed any more: delete it.
    assert found == Counter((file, name) for file, (name, _) in EXEMPT.items())
    assert len(EXEMPT) <= MOST_EXEMPT


@pytest.mark.parametrize(
    "line",
    [
        "file.read()",
        "file.read(-1)",
        "file.read(None)",
        "path.read_bytes()",
        "path.read_text(encoding='utf-8')",
        "client.get_object(Bucket=b)['Body'].read()",
        "json.load(answer)",
        "httpx.get(url)",
        "stream.readlines()",
        "child.stdout.readline()",
    ],
)
def test_the_check_sees_a_read_without_a_bound(line: str) -> None:
    assert list(unbounded(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    ["file.read(10)", "read_file(path, 10)", "atomic.read_text(path)", "table.get(name)", "json.loads(x)"],
)
def test_the_check_lets_other_calls_be(line: str) -> None:
    assert not list(unbounded(ast.parse(line)))


# What the helper does.


def test_a_file_is_read_up_to_its_bound_and_no_further(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 9, 10):
        path.write_bytes(b"x" * size)
        assert read_file(path, 10) == b"x" * size
    path.write_bytes(b"x" * 11)
    with pytest.raises(TooLargeError, match="has 11 bytes, and no more than 10 are read") as error:
        read_file(path, 10)
    assert error.value.limit == 10
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, PerdureError)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLargeError):
        read_file(path, 1 << 30)
    assert read_table(path) == {}
    path.write_bytes("a\r\nb\rc\u20ac".encode())
    assert read_text(path) == "a\nb\nc\u20ac"
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 10)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, 10)


def test_a_file_that_says_no_size_or_grows_has_the_bound_too() -> None:
    """What the system tells in /proc has no size; a pipe has none either."""
    if Path("/proc/self/status").exists():
        assert read_file(Path("/proc/self/status"), 1 << 20).startswith(b"Name:")
        with pytest.raises(TooLargeError):
            read_file(Path("/proc/self/status"), 10)
    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb") as file:

        def write() -> None:
            with file:
                file.write(b"x" * 100_000)

        thread = threading.Thread(target=write)
        thread.start()
        assert read_stream(pipe, 100_000, "a pipe") == b"x" * 100_000
        thread.join()
    with open("/dev/zero", "rb") as endless, pytest.raises(TooLargeError, match="more than the 4096 bytes"):
        read_stream(endless, 4096, "a device")


def test_only_regular_files_are_read_and_links_only_where_they_may_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_file(tmp_path / "pipe", 10)
    with pytest.raises(OSError, match="no regular file"):
        read_file(Path("/dev/zero"), 10)
    assert read_file(Path("/dev/null"), 10, regular=False) == b""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 10) == b"x"
    with pytest.raises(OSError, match="link"):
        read_file(tmp_path / "link", 10, links=False)
