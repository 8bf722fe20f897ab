"""A server in the background, and who has a store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.pty_user import piped
from homes import new_home
from perdure.store.owner import StoreOwner, described, read_owner, write_owner

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> Iterator[dict[str, str]]:
    found = {
        **os.environ,
        "PERDURE_HOME": str(new_home(tmp_path / "home")),
        "PERDURE_MODEL": str(zoo_path("llama")),
        "OMP_NUM_THREADS": "1",
    }
    yield found
    piped(found, "", "stop")


def test_a_server_is_started_shown_and_stopped(environment: dict[str, str]) -> None:
    done = piped(environment, "", "status")
    assert (done.returncode, "`perdure start` starts one" in done.stdout) == (1, True)
    assert piped(environment, "", "stop").stdout == "no server runs in the background\n"
    done = piped(environment, "", "start", "-p", "0", "--ctx", "512", "--gpu-layers", "0")
    assert done.returncode == 0, done.stderr
    facts = json.loads(piped(environment, "", "ps", "--json").stdout)
    address = facts["server"]["address"]
    assert done.stdout.startswith(f"{address} serves llama")
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "perdure": {"session": "a"}}
    assert httpx.post(f"{address}/v1/chat/completions", json=said, timeout=60).status_code == 200
    again = piped(environment, "", "start")
    assert (again.returncode, f"runs already, at {address}" in again.stderr) == (1, True)
    # Who else wants the store goes through the server, and is told so.
    shared = piped(environment, "", "run", "hello", "--session", "a", "-n", "2")
    assert shared.returncode == 0, shared.stderr
    assert f"Through `perdure serve` (process {facts['server']['pid']}, since" in shared.stderr
    told = httpx.get(f"{address}/v1/sessions/a", timeout=60).json()
    assert told["turns"] == 2, told
    # Where that cannot be, who has it is told, and what can be done.
    refused = piped(environment, "", "run", "hello", "--session", "a", "--ctx", "1024")
    assert refused.returncode == 1
    assert f"in use by `perdure serve` (process {facts['server']['pid']}, since" in refused.stderr
    assert "with a context of 512 tokens, and this asks for 1024" in refused.stderr
    assert "choose another store by --store" in refused.stderr
    assert facts["holder"]["pid"] == facts["server"]["pid"]
    assert piped(environment, "", "stop").stdout == f"stopped the server at {address}\n"
    assert piped(environment, "", "status").returncode == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_a_server_that_does_not_start_is_told_with_its_reason(environment: dict[str, str]) -> None:
    done = piped(environment, "", "start", "--host", "0.0.0.0")
    assert done.returncode == 1
    assert "perdure: the server did not start: 0.0.0.0 can be reached from other machines" in done.stderr
    assert piped(environment, "", "status").returncode == 1


def test_a_process_number_that_was_left_behind_is_not_believed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """What is written down about a server that is gone never leads to another process."""
    home = tmp_path / "home"
    (home / "server.lock").touch()
    (home / "server.json").write_text(
        json.dumps({"pid": os.getpid(), "address": "", "model": "", "store": "", "log": "", "since": 0.0})
    )
    assert piped(environment, "", "stop").stdout == "no server runs in the background\n"


def test_the_holder_of_a_store_is_told_without_what_was_said_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert described(tmp_path) == "another process or another runtime of this one"
    monkeypatch.setattr("sys.argv", ["/usr/bin/perdure", "run", "a secret question"])
    write_owner(tmp_path)
    found = read_owner(tmp_path)
    assert found is not None
    assert (found.command, found.own) == ("perdure run", True)
    assert described(tmp_path) == "another runtime of this process"
    assert (tmp_path / "sessions.holder").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("sys.argv", ["/home/me/script.py", "--password", "x"])
    write_owner(tmp_path)
    found = read_owner(tmp_path)
    assert found is not None
    assert found.command == "script.py"
    other = StoreOwner(pid=1, command="perdure chat", since=0.0)
    assert str(other).startswith("`perdure chat` (process 1, since ")
    (tmp_path / "sessions.holder").write_text("{")
    assert read_owner(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell who has a file open")
def test_a_server_whose_folder_was_deleted_is_stopped_all_the_same(environment: dict[str, str]) -> None:
    done = piped(environment, "", "start", "-p", "0", "--ctx", "512", "--gpu-layers", "0", "--no-store")
    assert done.returncode == 0, done.stderr
    facts = json.loads(piped(environment, "", "ps", "--json").stdout)
    for name in ("server.lock", "server.json"):
        (Path(environment["PERDURE_HOME"]) / name).unlink()
    told = piped(environment, "", "stop").stdout
    assert told == f"stopped process {facts['server']['pid']}, a server whose folder was deleted\n"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{facts['server']['address']}/health")
