"""X1: beside SQLite, nothing in a process opens a database file that the process has open."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import children

# An audit hook cannot be taken back, so it lives in a separate process.
AUDITED = """
import sys
from pathlib import Path

import perdure
from perdure.testing.toy import ToyModel
from perdure.ext.upkeep.backup import back_up, restore
from perdure.sessions.store.sqlite.store import SqliteStore
from perdure.ext.upkeep.repair import verify

folder, opened = Path(sys.argv[1]), []


def hook(event, arguments):
    if event == "open" and ".sqlite" in str(arguments[0]) and str(folder) in str(arguments[0]):
        opened.append(arguments[0])


def runtime():
    return perdure.open(ToyModel(), store=folder / "store", n_ctx=256, threads=1)


runtime().close()
sys.addaudithook(hook)
with runtime() as rt:
    session = rt.session("alice")
    session.say("Hello", max_tokens=2, temperature=0)
    session.label("here")
    # As often as somebody may: a second runtime of the process, readers, and what works on a whole store.
    SqliteStore(folder / "store").close()
    SqliteStore(folder / "store", readonly=True).close()
    rt.session("bob").append("Hi")
    session.export(folder / "alice.perdure", state=False)
    before = len(opened)
    back_up(folder / "store", folder / "backup.tar")
    # Its own copy, which it has closed by then, it reads.
    assert all(".sqlite.tmp" in str(path) for path in opened[before:]), opened
    del opened[before:]
    assert not verify(folder / "store", lambda done, total: None).damaged
    assert rt.session("alice").turns == 1
assert not opened, opened
"""


@pytest.mark.extension("upkeep")
def test_x1_nothing_opens_a_database_file_beside_sqlite(tmp_path: Path) -> None:
    children.run(AUDITED, tmp_path)
