"""S1: what was told to be done survives a kill at any statement to PostgreSQL; nothing is ever half there.

`store/test_crash.py` kills at every write of a file, and at what a power cut needs; that half is PostgreSQL's
own, whose commits are on the disk when they are answered (`synchronous_commit`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer
from store import children

pytestmark = pytest.mark.extension("upkeep")

RUN = "import runpy; runpy.run_module('ext.cluster.crashing', run_name='__main__')"


def test_s1_a_kill_at_a_statement_costs_nothing_that_was_told_to_be_done(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Some of them; all are in `make soak`."""
    assert int(children.run(RUN, postgres.url(tmp_path / "own"), 40)) >= 2


@pytest.mark.soak
def test_s1_a_kill_at_every_single_statement(postgres: PostgresServer, tmp_path: Path) -> None:
    assert int(children.run(RUN, postgres.url(tmp_path / "own"), 1)) > 80


@pytest.mark.soak
def test_s1_a_change_that_is_told_too_early_is_found(postgres: PostgresServer, tmp_path: Path) -> None:
    """Planted: what is told to be done was never committed."""
    with children.start(RUN, postgres.url(tmp_path / "own"), 1, "uncommitted") as child:
        _, err = child.communicate(timeout=300)
    assert child.returncode
    assert "told" in err
