"""What is asked of sessions in PostgreSQL is there whatever kills the program that answers (C12)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ext.cluster.servers import PostgresServer
from sessions.test_pending_kills import ROUNDS, SEED, SURFACES, hunted


@pytest.mark.soak
@pytest.mark.parametrize("surface", [*SURFACES, "page"])
def test_c12_many_kills(
    surface: str, postgres: PostgresServer, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    hunted(surface, -(-ROUNDS // 4), SEED + 1, postgres.url(tmp_path), zoo_path("llama"))
