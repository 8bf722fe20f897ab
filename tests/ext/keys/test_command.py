"""`perdure keys`, run as people run it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cli.pty_user import piped
from perdure.server.core.keys import Keys, new_key


def test_keys_are_added_listed_and_removed_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def keys(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        home = {**os.environ, "PERDURE_HOME": str(tmp_path / "home")}
        done = piped(home, None, "keys", *words, "--keys", str(path))
        assert done.returncode == code, done.stderr
        return done

    secret = keys("add", "alice", "--expires", "90d", "--requests-per-minute", "60").stdout.strip()
    keys("add", "bob", "--tokens-per-day", "1000")
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    known = Keys.read(path)
    found = known.find(secret)
    assert found is not None
    assert (found.namespace, found.requests_per_minute, found.tokens_per_day) == ("alice", 60, None)
    shown = keys("ls").stdout
    assert f"{found.id}  alice" in shown
    assert "1000 tokens a day" in shown
    assert secret not in shown
    # As somebody has set it for the user that the server runs as.
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 0, 12)
    keys("rm", found.id)
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.getuid() or path.stat().st_gid == 12
    assert Keys.read(path).namespaces == ["bob"]
    assert "no key in" in keys("rm", found.id, code=1).stderr


def test_a_key_is_removed_by_the_name_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\n".join(new_key(name)[1].line for name in ("ada", "bob", "bob")))

    def rm(name: str) -> subprocess.CompletedProcess[str]:
        return piped(os.environ, None, "keys", "rm", name, "--keys", str(path))

    assert rm("ada").returncode == 0
    assert [key.namespace for key in Keys.read(path)] == ["bob", "bob"]
    several = rm("bob")
    assert several.returncode == 1
    assert "'bob' has 2 keys" in several.stderr
