"""Keys, and that one caller learns nothing of another (H5)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import toy
from perdure import InvalidInputError
from perdure.server.core.keys import Key, Keys, new_key
from perdure.server.http_server import check_address
from server.live_server import hello, live_server, opened

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """Two callers with keys, one for the figures, and one without a key."""
    made = {name: new_key(name) for name in ("alice", "bob", "metrics")}
    keys = Keys([key for _, key in made.values()])
    with opened(toy(), store=tmp_path_factory.mktemp("store")) as rt, live_server(rt, keys=keys) as server:
        clients = {name: server.client(secret) for name, (secret, _) in made.items()}
        clients["nobody"] = server.client()
        try:
            yield clients
        finally:
            for client in clients.values():
                client.close()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/sessions", "/v1/cache", "/metrics", "/nowhere"])
def test_without_a_key_there_is_no_entry(callers: dict[str, httpx.Client], path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic eA=="}):
        response = callers["nobody"].get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


def test_whether_the_server_lives_is_no_secret(callers: dict[str, httpx.Client]) -> None:
    for path in ("/health", "/ready", "/openapi.json"):
        assert callers["nobody"].get(path).status_code == 200


def test_the_figures_have_a_key_of_their_own(callers: dict[str, httpx.Client]) -> None:
    assert callers["metrics"].get("/metrics").status_code == 200
    assert callers["metrics"].get("/v1/models").status_code == 403
    assert callers["alice"].get("/metrics").status_code == 403


def test_sessions_of_one_are_nothing_to_the_other_h5(callers: dict[str, httpx.Client]) -> None:
    """H5: not read, not gone on with, not forked, not woken, not listed."""
    alice, bob = callers["alice"], callers["bob"]
    assert alice.post("/v1/sessions", json={"name": "diary"}).status_code == 201
    say(alice, "diary", "secret")
    memory = alice.post("/v1/sessions/diary/label", json={"label": "here"}).json()
    for method, path, body in every_way_in("diary"):
        response = bob.request(method, path, json=body)
        assert response.status_code == 404, (method, path, response.text)
        assert "secret" not in response.text
    assert bob.get("/v1/sessions").json()["data"] == []
    assert bob.get("/v1/memories", params={"text": "secret"}).json()["data"] == []
    waking = {"name": "stolen", "address": memory["address"]}
    assert bob.post("/v1/memories/wake", json=waking).status_code == 404
    # The same name is theirs to use, and tells them nothing.
    assert bob.post("/v1/sessions", json={"name": "diary"}).status_code == 201
    assert bob.get("/v1/sessions/diary/turns").json()["data"] == []
    assert len(alice.get("/v1/sessions/diary/turns").json()["data"]) == 1
    assert bob.delete("/v1/sessions/diary").status_code == 200
    assert alice.get("/v1/sessions/diary").status_code == 200


def test_prefixes_of_one_are_not_cached_for_the_other_h5(callers: dict[str, httpx.Client]) -> None:
    """H5: probed by cached_tokens, for chats, completions and warmed prefixes."""
    alice, bob = callers["alice"], callers["bob"]
    chat = hello(messages=[{"role": "user", "content": "A long secret that nobody else would begin with"}])
    prompt = {"prompt": "Another long secret text, word for word the same", "max_tokens": 2}
    for path, body in ((CHAT, chat), ("/v1/completions", prompt)):
        before = cached(alice, path, body)
        assert cached(alice, path, body) > before
        assert cached(bob, path, body) == 0
    warmed = "Zoological instructions that only one of them has warmed"
    assert alice.post("/v1/cache/warm", json={"prompt": warmed, "labels": ["l"]}).status_code == 201
    assert cached(bob, "/v1/completions", {"prompt": warmed + "!", "max_tokens": 1}) == 0
    assert cached(alice, "/v1/completions", {"prompt": warmed + "!", "max_tokens": 1}) > 0


def test_the_cache_of_one_is_not_the_others_to_see_or_clear_h5(callers: dict[str, httpx.Client]) -> None:
    """H5."""
    alice, bob = callers["alice"], callers["bob"]
    record = alice.post("/v1/cache/warm", json={"prompt": "Mine alone", "labels": ["x"]}).json()
    assert record["labels"] == ["x"]
    assert bob.get("/v1/cache").json() == {"records": [], "has_more": False, "totals": None}
    assert bob.delete("/v1/cache", params={"label": "x"}).json() == {"deleted": 0}
    assert bob.delete("/v1/cache").json() == {"deleted": 0}
    assert record in alice.get("/v1/cache").json()["records"]
    assert alice.delete("/v1/cache").json()["deleted"] >= 1
    assert alice.get("/v1/cache").json()["records"] == []


def every_way_in(name: str) -> list[tuple[str, str, Any]]:
    base = f"/v1/sessions/{name}"
    return [
        ("GET", base, None),
        ("GET", f"{base}/turns", None),
        ("GET", f"{base}/transcript", None),
        ("GET", f"{base}/plan", None),
        ("GET", f"{base}/export", None),
        ("POST", f"{base}/turns", {"message": "hi"}),
        ("POST", f"{base}/edit", {"turn": 1, "message": "hi"}),
        ("POST", f"{base}/regenerate", {}),
        ("POST", f"{base}/fork", {"name": "copy"}),
        ("POST", f"{base}/rewind", {}),
        ("POST", f"{base}/sleep", {}),
        ("POST", f"{base}/wake", {}),
        ("POST", f"{base}/label", {"label": "x"}),
        ("DELETE", base, None),
    ]


def say(client: httpx.Client, name: str, text: str) -> None:
    response = client.post(f"/v1/sessions/{name}/turns", json={"message": text, "max_tokens": 4})
    assert response.status_code == 200


def cached(client: httpx.Client, path: str, body: dict[str, Any]) -> int:
    usage = client.post(path, json=body).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_key_is_known_by_its_digest_alone() -> None:
    secret, key = new_key("team")
    assert secret not in key.line
    assert key.line == f"team:{hashlib.sha256(secret.encode()).hexdigest()}"
    keys = Keys([key])
    assert keys.namespace(secret) == "team"
    for wrong in (None, "", key.digest, secret + "x", "\ud800"):
        assert keys.namespace(wrong) is None
    assert Keys().namespace(None) == ""


def test_keys_are_read_from_lines_and_from_toml(tmp_path: Path) -> None:
    made = [new_key(name) for name in ("a", "a", "b")]
    lines = tmp_path / "keys"
    lines.write_text("# who\n\n" + "".join(f"{key.line}  # note\n" for _, key in made))
    table = tmp_path / "keys.toml"
    digests = [key.digest for _, key in made]
    table.write_text(f'[keys]\na = ["{digests[0]}", "{digests[1]}"]\nb = "{digests[2]}"\n')
    for path in (lines, table):
        keys = Keys.read(path)
        assert [keys.namespace(secret) for secret, _ in made] == ["a", "a", "b"]


@pytest.mark.parametrize(
    "text", ["", "alice", "alice:abc", ":" + "0" * 64, "a b:" + "0" * 64, "x/y:" + "0" * 64]
)
def test_a_file_that_is_not_understood_opens_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InvalidInputError):
        Keys.read(path)


def test_a_bad_name_for_a_key_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        Key("", "0" * 64)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_come_in_only_with_keys(host: str) -> None:
    with pytest.raises(InvalidInputError, match="--keys"):
        check_address(host, 0)
    check_address(host, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_needs_no_key(host: str) -> None:
    check_address(host, 0)
