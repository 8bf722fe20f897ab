"""Commands over an encrypted store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.pty_user import piped
from ext.upkeep.test_cache import Run, environment, facts, refused, run, store, warmed

__all__ = ["environment", "run", "store", "warmed"]

pytestmark = pytest.mark.extension("upkeep")


def test_an_encrypted_store_is_read_with_its_key_and_can_be_cleared_without(
    run: Run, store: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    environment["PERDURE_ENCRYPT"] = str(key)
    assert run("verify").returncode == 0
    del environment["PERDURE_ENCRYPT"]
    # From now on the store knows where its key is.
    assert len(facts(run("stats", "--json"))["records"]) == 2
    assert facts(run("clear", "-l", "sea", "--json"))["records"] == 1
    key.unlink()
    for command in (["stats"], ["verify"], ["clear", "-l", "ferry"]):
        refused(run(*command), f"the key {key} cannot be read")
    assert facts(run("clear", "--all", "-y", "--json"))["bytes"] > 0
    assert facts(run("stats", "--json"))["blocks"] == 0


def test_a_conversation_in_an_encrypted_store_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    environment["PERDURE_ENCRYPT"] = str(key)
    for _ in range(2):
        done = piped(environment, "the man\n", "chat", "--session", "a", "--ctx", "256", "-n", "4")
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("encrypted.json"))
