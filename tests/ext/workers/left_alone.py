"""A program with an isolated runtime: `python -m ext.workers.left_alone`.

It says its child's pid. Every line of its input is a prompt, and answered by the pid that served it and the
text. Ctrl-C is told.
"""

from __future__ import annotations

import sys

from ext.workers.engines import isolated, pid


def main() -> None:
    rt = isolated("slow")
    print(pid(rt), flush=True)
    while True:
        try:
            line = sys.stdin.readline()
            if not line:
                return
            print(pid(rt), repr(rt.generate(line, max_tokens=5, temperature=0).text), flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)


if __name__ == "__main__":
    main()
