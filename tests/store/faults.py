"""A store whose calls to the system fail, from any one of them on: run with the shim preloaded."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
from pathlib import Path

from perdure.errors import StoreError
from store.crashing import SCENARIOS, Scenario

WRITES, SYNCS, REMOVES, OPENS_TO_WRITE, OPENS_TO_READ = 1, 2, 4, 8, 16

CONDITIONS = {
    "full": (errno.ENOSPC, WRITES),
    "over quota": (errno.EDQUOT, WRITES),
    "read-only": (errno.EROFS, WRITES | REMOVES | OPENS_TO_WRITE),
    "failing": (errno.EIO, WRITES | SYNCS),
    "gone": (errno.ESTALE, WRITES | SYNCS | REMOVES | OPENS_TO_WRITE | OPENS_TO_READ),
    "out of files": (errno.EMFILE, OPENS_TO_WRITE | OPENS_TO_READ),
}
STORES = ("put", "evict", "drop", "record", "rebuild")
"""The scenarios of the block store that can be run again after they failed."""


class Shim:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_refuse.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.shim_count.restype = ctypes.c_long

    def refuse(self, folder: Path, at: int, condition: str) -> None:
        error, kinds = CONDITIONS[condition]
        self._library.shim_refuse(os.fsencode(folder), at, kinds, error)

    def disarm(self) -> int:
        """How many calls there were."""
        count = int(self._library.shim_count())
        self._library.shim_disarm()
        return count


def fail_at(shim: Shim, scenario: Scenario, folder: Path, at: int, condition: str) -> tuple[int, str]:
    """Run a scenario whose calls fail from the `at`-th on; 0: none. How many there were, what was said."""
    acks: set[str] = set()
    error: Exception | None = None
    shim.refuse(folder, at, condition)
    try:
        scenario.act(folder, acks.add)
    except StoreError as problem:
        error = problem
    finally:
        count = shim.disarm()
    try:
        # What was acknowledged is there, and nothing is half there.
        scenario.check(folder, acks)
        # Once the system is well again all goes on.
        again: set[str] = set()
        scenario.act(folder, again.add)
        scenario.check(folder, again)
    except BaseException:
        print(f"{condition} from call {at} on, told {acks}, said {error!r}", file=sys.stderr)
        raise
    return count, "" if error is None else type(error).__name__


def main() -> None:
    condition, base, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    shim = Shim()
    found = {}
    for name in STORES:
        scenario = SCENARIOS[name]()
        template, folder = base / f"{name} template", base / name
        template.mkdir()
        scenario.prepare(template)
        errors: list[str] = []
        calls, at = 1, 0
        while at <= calls:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(template, folder)
            count, said = fail_at(shim, scenario, folder, at, condition)
            if at:
                errors.append(said)
            else:
                calls = count
            at = at + step if at else 1
        found[name] = {"calls": calls, "tried": len(errors), "errors": sorted(set(errors) - {""})}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
