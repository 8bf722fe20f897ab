"""A server in a process that a test kills: `python -m ext.batches.serving STORE` prints its address."""

from __future__ import annotations

import sys
import threading

from perdure.testing.toy import ToyModel
from server.live_server import live_server, opened

if __name__ == "__main__":
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, slots=4, store=sys.argv[1]) as runtime,
        live_server(runtime, debug=False) as server,
    ):
        print(server.url, flush=True)
        threading.Event().wait()
