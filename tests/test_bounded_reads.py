"""Everything read from outside has a bound before it is read (class 4): files, streams, what children print,
what is unpacked. `perdure.atomic` has the ways to do so: `read_file`, `read_text`, `read_stream`,
`read_lines`; `ext/fetching/wheel.py` has `open_tar` and `open_zip`. Or a size is given to `read`."""

from __future__ import annotations

import ast
import gzip
import io
import os
import tarfile
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from perdure.atomic import (
    read_file,
    read_lines,
    read_stream,
    read_table,
    read_text,
)
from perdure.errors import PerdureError, TooLargeError
from perdure.ext.fetching.wheel import open_tar, open_zip

SOURCE = Path(perdure.__file__).parent

UNBOUNDED = frozenset({"read_bytes", "read_text", "readall", "readlines", "get_object"})
"""Calls that read all there is, whatever they are given."""
NEEDS_SIZE = frozenset({"read", "readline"})
LOADERS = frozenset({"json", "tomllib", "pickle"})
FETCHERS = frozenset({"httpx", "requests"})
UNPACKERS = {
    "tarfile": {"open", "TarFile"},
    "zipfile": {"ZipFile"},
    "gzip": {"open", "decompress", "GzipFile"},
    "bz2": {"open", "decompress", "BZ2File", "BZ2Decompressor"},
    "lzma": {"open", "decompress", "LZMAFile", "LZMADecompressor"},
    "zlib": {"decompress", "decompressobj"},
    "shutil": {"unpack_archive"},
    "Image": {"open"},
    "wave": {"open"},
}
"""Calls that unpack, by their module: a small file may become a large one."""
PRINTS = frozenset({"communicate", "check_output", "getoutput", "getstatusoutput"})
"""Calls that collect all that a child prints."""
RECEIVES = frozenset({"read", "readline", "read1", "recv", "recvfrom", "readexactly", "receive"})
PIPES = frozenset({"stdout", "stderr", "stdin", "buffer", "iter_bytes()", "iter_lines()", "makefile()"})

EXEMPT = {
    "chat/template/template.py": ("read_text", "a template of the package itself"),
    "cli/__init__.py": ("read", "the help text of the package itself"),
    "ext/inspection/page.py": ("read_text", "a page of the package itself"),
    "server/api/page.py": ("read_bytes", "the page of the package itself"),
    "ext/cluster/places.py": ("get_object", "its body is read by read_stream, behind its length"),
    "ext/evaluation/evaluate.py": ("read", "Journal.read: a file of our own, line by line"),
    "cli/line_editor.py": ("readline", "a line that a person types"),
    "ext/inspection/child.py": ("readline", "the one line of the process that started it"),
    "server/core/reasoning_cipher.py": ("zlib.decompressobj", "it is given the most that it may unpack to"),
    "ext/images/pixels.py": ("Image.open", "pixels are counted by the header before any is unpacked"),
    "ext/chat_imports/export_file.py": ("zipfile.ZipFile", "what it unpacks is counted over all its files"),
    "ext/fetching/wheel.py": ("extractall", "out of open_zip, which has counted what it unpacks to"),
    "ext/images/child.py": ("wave.open", "samples are counted by the header before any is read"),
}
"""One call in each of these files, and why it needs no bound. It may only become shorter."""
HELPERS = {
    "atomic.py": {"append"},
    "ext/fetching/wheel.py": {"gzip.open", "tarfile.open", "zipfile.ZipFile"},
}
"""What the helpers do themselves, behind a bound."""
MOST_EXEMPT = 13


def unbounded(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The calls of a file that read without a bound: their lines and names."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            yield from ((node.lineno, name) for name in _collected(node))
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)) and _is_pipe(node.iter):
            yield node.iter.lineno, "lines of a pipe"
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
        if name in UNPACKERS.get(of, ()):
            yield node.lineno, f"{of}.{name}"
        if name in PRINTS or (of == "subprocess" and name == "run" and _captures(node)):
            yield node.lineno, name
        if name in ("extract", "extractall"):
            yield node.lineno, name


def _is_pipe(iterated: ast.AST) -> bool:
    """Whether lines are taken from it as they come, however long."""
    return ast.unparse(iterated).rpartition(".")[2] in PIPES and "iter_" not in ast.unparse(iterated)


def _captures(node: ast.Call) -> bool:
    return any(
        each.arg == "capture_output" or (each.arg in ("stdout", "stderr") and "PIPE" in ast.unparse(each))
        for each in node.keywords
    )


def _collected(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[str]:
    """What a loop adds to a list or a text of all that it receives; a loop that counts it compares."""
    received: set[str] = set()
    if not isinstance(loop, ast.While) and ast.unparse(loop.iter).rpartition(".")[2] in PIPES:
        received |= {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, (ast.Assign, ast.NamedExpr)):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            if isinstance(value, ast.Call) and getattr(value.func, "attr", "") in RECEIVES:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                received |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    if not received or any(isinstance(node, ast.Compare) and _counts(node) for node in ast.walk(loop)):
        return
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Name) and node.value.id in received:
            yield "+="
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") in ("append", "extend")
            and any(isinstance(each, ast.Name) and each.id in received for each in ast.walk(node))
        ):
            yield "append"


def _counts(node: ast.Compare) -> bool:
    return any(isinstance(each, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for each in node.ops)


def _is_all(node: ast.Call) -> bool:
    """Whether the size is -1 or None."""
    return any(ast.unparse(each) in ("-1", "None") for each in node.args)


def test_nothing_in_the_source_reads_without_a_bound() -> None:
    found = Counter(
        (file.relative_to(SOURCE).as_posix(), name)
        for file in SOURCE.rglob("*.py")
        for _, name in unbounded(ast.parse(file.read_text("utf-8")))
        if name not in HELPERS.get(file.relative_to(SOURCE).as_posix(), ())
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
        "tarfile.open(path, 'r:gz')",
        "zipfile.ZipFile(path)",
        "gzip.decompress(data)",
        "zlib.decompress(data)",
        "lzma.open(path)",
        "Image.open(path)",
        "package.extractall(folder)",
        "subprocess.run(command, capture_output=True)",
        "subprocess.run(command, stdout=subprocess.PIPE)",
        "child.communicate(timeout=3)",
        "subprocess.check_output(command)",
        "for line in child.stdout: use(line)",
        "[json.loads(line) for line in child.stdout]",
        "for line in sys.stdin.buffer: use(line)",
        "while piece := end.recv(4096): pieces.append(piece)",
        "while piece := await reader.read(4096): whole += piece",
        "for piece in answer.iter_bytes(): pieces.append(piece)",
        "while True:\n line = child.stdout.readline(99)\n lines.append(line)",
    ],
)
def test_the_check_sees_a_read_without_a_bound(line: str) -> None:
    assert list(unbounded(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "file.read(10)",
        "read_file(path, 10)",
        "atomic.read_text(path)",
        "table.get(name)",
        "json.loads(x)",
        "subprocess.run(command, check=False)",
        "for line in read_lines(child.stdout, 99, 'it'): use(line)",
        "while piece := end.recv(4096): file.write(piece)",
        "for piece in answer.iter_bytes():\n pieces.append(piece)\n if sum(map(len, pieces)) > limit: stop()",
    ],
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


def test_lines_are_read_one_by_one_up_to_their_bound() -> None:
    assert list(read_lines(io.BytesIO(b"one\ntwo"), 4, "a pipe")) == [b"one\n", b"two"]
    lines = read_lines(io.BytesIO(b"one\n" + b"x" * 100), 4, "a pipe")
    assert next(lines) == b"one\n"
    with pytest.raises(TooLargeError, match="a line of a pipe has more than 4 bytes"):
        next(lines)
    with open("/dev/zero", "rb") as endless, pytest.raises(TooLargeError):
        next(read_lines(endless, 1 << 16, "a device"))


def test_what_is_unpacked_has_a_bound_however_small_it_is_packed(tmp_path: Path) -> None:
    content = bytes(1 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one", content)
        archive.writestr("two", content)
    with open_zip(tmp_path / "a.zip", 2 << 20) as archive:
        assert archive.read("two", None) == content
    with pytest.raises(TooLargeError), open_zip(tmp_path / "a.zip", (2 << 20) - 1):
        pytest.fail("it is refused before anything is unpacked")


def test_a_packed_tar_has_a_bound_also_in_what_is_no_file_of_it(tmp_path: Path) -> None:
    """The library reads a long name into memory as a whole, whatever its length."""
    member = tarfile.TarInfo("./@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 64 << 20
    with gzip.open(tmp_path / "a.tgz", "wb") as file:
        file.write(member.tobuf())
        file.write(bytes(member.size))
    with (
        pytest.raises(TooLargeError, match="unpacks to more than"),
        open_tar(tmp_path / "a.tgz", 1 << 20) as tar,
    ):
        tar.next()
