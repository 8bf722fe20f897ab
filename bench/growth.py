"""Growth: what an operation costs when ten and a hundred times as much is there already.

Each operation is timed in CPU seconds of this process, with the toy engine, so that our own work shows. A
line begins with the exponent: 0 is a cost that does not grow, 1 one that grows with what is there.
"""

from __future__ import annotations

import sys

from bench.growing.blocks import memory, records, slots, store
from bench.growing.large import large
from bench.growing.serving import server
from bench.growing.sessions import long_session, requests, sessions, turns
from bench.growing.starting import starting
from bench.harness import Bench

main = Bench(
    "growth",
    (memory, slots, records, store, requests, sessions, turns, long_session, large, server, starting),
    # A cost that grows is an error wherever it is measured.
    check=True,
)

if __name__ == "__main__":
    sys.exit(main())
