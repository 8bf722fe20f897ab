"""Promises of silence: what was not to be stored, was deleted or has expired is in no file any more.

Every file below the home and the store is read as bytes and searched for a planted word, while the server
runs and after it was killed. State is not words: it has token ids, and is looked at in tests of the cache.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure.sessions.info import RESPONSE
from server.live_server import LiveServer, live_server, opened

WORD = "zanzibarquux"
SAID = [{"role": "user", "content": f"Remember {WORD}."}]
NAMES = {"x-session-id": "s1", "x-claude-code-session-id": "s2"}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4, "prompt_cache_key": WORD}),
    "messages": ("/v1/messages", {"model": "toy", "messages": SAID, "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": SAID, "max_output_tokens": 4, "prompt_cache_key": WORD}),
    "ollama": ("/api/chat", {"messages": SAID, "stream": False, "options": {"num_predict": 4}}),
    "generate": ("/api/generate", {"prompt": SAID[0]["content"], "stream": False}),
    "completions": ("/v1/completions", {"prompt": SAID[0]["content"], "max_tokens": 4}),
}


def found(folder: Path) -> list[str]:
    """The files that have the word in them, as text or in UTF-16."""
    forms = [WORD.encode(), WORD.encode("utf-16-le"), WORD.encode().hex().encode()]
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and any(form in path.read_bytes() for form in forms)
    )


def unstored(client: httpx.Client, server: LiveServer, folder: Path) -> None:
    for path, body in ASKED.values():
        client.post(path, json={**body, "store": False}, headers=NAMES).raise_for_status()
    body = {**ASKED["chat"][1], "store": False, "stream": True, "perdure": {"resumable": True}}
    client.post("/v1/chat/completions", json=body, headers=NAMES).raise_for_status()


def deleted(client: httpx.Client, server: LiveServer, folder: Path) -> None:
    """Sessions, turns, memories, responses and conversations, each seen on the disk before."""
    client.post("/v1/sessions", json={"name": "kept", "system": "Be terse."}).raise_for_status()
    client.post("/v1/sessions", json={"name": f"s-{WORD}", "system": WORD}).raise_for_status()
    said = {"message": SAID[0]["content"], "max_tokens": 4}
    for name in ("kept", f"s-{WORD}"):
        client.post(f"/v1/sessions/{name}/turns", json=said).raise_for_status()
    body = {"label": WORD, "note": f"A note of {WORD}.", "turn": 0}
    memory = client.post("/v1/sessions/kept/label", json=body).raise_for_status().json()
    response = client.post("/v1/responses", json=ASKED["responses"][1]).raise_for_status().json()
    body = {"metadata": {"about": WORD}, "items": SAID}
    conversation = client.post("/v1/conversations", json=body).raise_for_status().json()
    for protocol in ("chat", "messages", "ollama"):
        path, body = ASKED[protocol]
        client.post(path, json={**body, "perdure": {"session": f"by-{protocol}"}}).raise_for_status()
    assert found(folder)
    client.post("/v1/sessions/kept/rewind", json={"turns": 1}).raise_for_status()
    client.delete("/v1/memories", params={"address": memory["address"]}).raise_for_status()
    for name in (f"s-{WORD}", "by-chat", "by-messages", "by-ollama"):
        client.delete(f"/v1/sessions/{name}").raise_for_status()
    client.delete(f"/v1/responses/{response['id']}").raise_for_status()
    client.delete(f"/v1/conversations/{conversation['id']}").raise_for_status()


def expired(client: httpx.Client, server: LiveServer, folder: Path) -> None:
    client.post("/v1/responses", json=ASKED["responses"][1]).raise_for_status()
    assert found(folder)
    server.runtime.sessions.expire(RESPONSE, 1e-6)


def without_store(client: httpx.Client, server: LiveServer, folder: Path) -> None:
    for path, body in ASKED.values():
        client.post(path, json=body, headers=NAMES).raise_for_status()


PROMISES: dict[str, Callable[[httpx.Client, LiveServer, Path], None]] = {
    "store: false": unstored,
    "deleted": deleted,
    "expired": expired,
    "no store": without_store,
}


def kept(promise: str, home: Path) -> None:
    """Have a server keep a promise, and look into its files while it runs."""
    store = None if promise == "no store" else home / "store"
    with (
        opened(toy(), n_ctx=1024, store=store) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        PROMISES[promise](client, server, home)
        assert found(home) == [], "while the server runs"
        if "--kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("promise", PROMISES)
def test_what_was_not_to_stay_is_in_no_file(
    promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y3 and the class of it: while the server runs, and after it has stopped."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    kept(promise, tmp_path)
    assert found(tmp_path) == [], "after it has stopped"


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize("promise", PROMISES)
def test_what_was_not_to_stay_is_in_no_file_after_a_kill(promise: str, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PERDURE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *sys.path])
    command = [sys.executable, "-m", "server.test_silence", promise, str(tmp_path), "--kill"]
    ended = run(command, cwd=tests, env=environment, capture_output=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    assert found(tmp_path) == []


if __name__ == "__main__":
    kept(sys.argv[1], Path(sys.argv[2]))
