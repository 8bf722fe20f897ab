"""A replica for tests: a server on the toy engine whose sessions are in PostgreSQL.

PERDURE_TEST_EXACT    it is exact
PERDURE_TEST_DRAIN    its seconds of draining
PERDURE_TEST_TOKENS   the tokens that its engine computes, before it hangs for ever
"""

from __future__ import annotations

import os
import sys

import perdure
from decode.observed import Turnstile, toy
from perdure.server.core.server_state import ServerState
from perdure.server.core.settings import Limits
from perdure.server.http_server import HttpServer, bind


def main() -> None:
    url, port, *blocks = sys.argv[1:]
    listening = bind("127.0.0.1", int(port))
    exact = "PERDURE_TEST_EXACT" in os.environ
    gate = Turnstile(is_open="PERDURE_TEST_TOKENS" not in os.environ)
    gate.admit(int(os.environ.get("PERDURE_TEST_TOKENS", 0)))
    with perdure.open(
        toy(gate=gate), n_ctx=1024, slots=4, store=url, blocks=blocks or None, exact=exact, stall=0
    ) as runtime:
        listening.listen(1024)
        limits = Limits(drain_seconds=float(os.environ.get("PERDURE_TEST_DRAIN", 0)))
        HttpServer(ServerState(runtime=runtime, name="toy", limits=limits)).run(sockets=[listening])


main()
