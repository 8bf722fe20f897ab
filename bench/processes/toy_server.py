"""The server on the toy engine: what is left of a token's time is the server's own.

`python -m bench.processes.toy_server direct|plain` is the process; plain is without `direct_write.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from unittest import mock

import perdure
from bench.child import serve
from perdure.server import direct_write
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, address, bind
from perdure.testing.toy import ToyModel


class ToyServer:
    """A server in a thread of this process."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def open(self, slots: int) -> str:
        """Where it listens."""
        runtime = self._held.enter_context(perdure.open(ToyModel(), n_ctx=512, slots=slots))
        listening = bind("127.0.0.1", 0)
        listening.listen(1024)
        server = HttpServer(ServerState(runtime=runtime, name="toy"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        self._held.callback(thread.join)
        self._held.callback(server.stop, now=True)
        return address(listening)

    def cpu_seconds(self) -> float:
        """What this process has computed so far."""
        return time.process_time()


if __name__ == "__main__":
    with ExitStack() as held:
        if sys.argv[1] == "plain":
            for name in ("attach", "flush"):
                held.enter_context(mock.patch.object(direct_write, name))
        toy = ToyServer(held)
        serve({"open": toy.open, "cpu_seconds": toy.cpu_seconds})
