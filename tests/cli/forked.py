"""The command in a process that is forked, not started: importing it takes longer than most commands do.

    done = forked.run(["sessions", "ls"], {**os.environ, "PERDURE_HOME": …})

A process of the tests keeps one that has imported the command and has run nothing. It forks for each call;
the child gets its own variables, folder, pipes and arguments, and ends as any Python process does. Signals,
terminals and what a start loads are tested with `COMMAND` of `pty_user.py`, which starts Python.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "PERDURE_HIDDEN")
"""Variables that Python, the loader or imports have read by the time it forks."""
_HEADER = struct.Struct("!Q")


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    given: bytes | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """`perdure ARGUMENTS` to its end, with `given` on a pipe as its input, or /dev/null."""
    if not hasattr(os, "fork") or _of_start(environment) != _of_start(os.environ):
        command = [sys.executable, "-m", "perdure.cli", *arguments]
        stdin = subprocess.DEVNULL if given is None else None
        return subprocess.run(
            command, env=environment, input=given, stdin=stdin, capture_output=True, cwd=cwd, check=False
        )
    request = json.dumps([list(arguments), dict(environment), str(cwd or Path.cwd())]).encode()
    (output, its_output), (errors, its_errors) = os.pipe(), os.pipe()
    its_input, to_input = os.pipe() if given is not None else (os.open(os.devnull, os.O_RDONLY), None)
    ours, theirs = socket.socketpair()
    read: dict[int, bytes] = {}
    helpers = [threading.Thread(target=_read, args=(end, read)) for end in (output, errors)]
    if to_input is not None:
        helpers.append(threading.Thread(target=_write, args=(to_input, given)))
    with ours:
        with theirs:
            _server().fork(request, [its_input, its_output, its_errors, theirs.fileno()])
        for end in (its_input, its_output, its_errors):
            os.close(end)
        for helper in helpers:
            helper.start()
        for helper in helpers:
            helper.join()
        status = ours.recv(16)
    assert status, "the process that forks has ended"
    return subprocess.CompletedProcess(list(arguments), int(status), read[output], read[errors])


def _of_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _write(end: int, data: bytes) -> None:
    try:
        with open(end, "wb", buffering=0) as pipe:
            left = memoryview(data)
            while left:
                left = left[pipe.write(left) :]
    except BrokenPipeError:
        pass


def _read(end: int, read: dict[int, bytes]) -> None:
    with open(end, "rb") as pipe:
        read[end] = pipe.read()


class _Server:
    """The process that forks, of this process of the tests. It ends with it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            # Threads of a library would not live on in what is forked.
            alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=alone,
            )
        atexit.register(self._end)

    def fork(self, request: bytes, ends: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._socket, [_HEADER.pack(len(request))], ends)
            self._socket.sendall(request)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request. Returns in the child, with its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What has ended is waited for by the process between, and that one by nobody.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        header, ends, _, _ = socket.recv_fds(requests, _HEADER.size, 4)
        if not header:
            os._exit(0)
        (left,) = _HEADER.unpack(header)
        parts = []
        while left:
            parts.append(requests.recv(left))
            left -= len(parts[-1])
        if os.fork():
            for end in ends:
                os.close(end)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *streams, told = ends
        if child := os.fork():
            requests.close()
            for end in streams:
                os.close(end)
            os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os._exit(0)
        return _become(json.loads(b"".join(parts)), streams)


def _become(request: list[object], streams: list[int]) -> list[str]:
    arguments, environment, folder = request
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    assert isinstance(folder, str)
    for number, end in enumerate(streams):
        os.dup2(end, number)
    os.closerange(3, 1 << 12)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    return arguments


if __name__ == "__main__":
    import perdure.cli.app
    import perdure.cli.asking
    import perdure.opening
    import perdure.runtime

    assert threading.active_count() == 1
    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    perdure.cli.main()
