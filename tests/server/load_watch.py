"""Who watches `/health` in the load test: in a process of its own, so that no thread beside it delays it.

`python -m server.load_watch URL SECONDS`, in the folder tests. Prints the seconds of each answer as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import httpx

PATIENCE = 300.0


def main() -> None:
    url, ends = sys.argv[1], time.monotonic() + float(sys.argv[2])
    took = []
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        while time.monotonic() < ends:
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            took.append(time.monotonic() - began)
            time.sleep(0.05)
    print(json.dumps(took))


if __name__ == "__main__":
    main()
