"""Files that come in and go out: where they lie meanwhile, and what of the machine they may take (S5, S9)."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from decode.observed import toy
from perdure.server.core.middleware import FILE_TYPE
from perdure.sessions.store.sqlite.folder import TRANSFERS
from perdure.sessions.store.sqlite.store import SqliteStore
from server.live_server import LiveServer, live_server, opened, raw

IMPORT = "/v1/sessions/import"
KIND = {"content-type": FILE_TYPE}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with opened(toy(), store=tmp_path / "store") as rt, live_server(rt) as server:
        yield server


def exported(server: LiveServer) -> bytes:
    with server.client() as client:
        assert client.post("/v1/sessions", json={"name": "alice"}).status_code == 201
        said = {"message": "Hello", "max_tokens": 4}
        assert client.post("/v1/sessions/alice/turns", json=said).status_code == 200
        answer = client.get("/v1/sessions/alice/export")
        assert answer.status_code == 200
        return answer.content


def on_their_way(store: Path) -> list[Path]:
    return [path for path in (store / TRANSFERS).rglob("*") if path.is_file()]


def test_s9_a_file_on_its_way_lies_in_the_store_for_its_owner_alone(
    server: LiveServer, tmp_path: Path
) -> None:
    """S9, S5: on a disk, and not where everybody's temporary files lie."""
    store = tmp_path / "store"
    with server.connect() as connection, server.client() as client:
        head = raw(IMPORT, b"words of a conversation", content_length="1000000")
        connection.sendall(head.replace(b"application/json", FILE_TYPE.encode()))
        while not (found := [path for path in on_their_way(store) if path.stat().st_size]):
            # It may not have arrived yet.
            assert client.get("/health").status_code == 200
        [path] = found
        assert path.read_bytes() == b"words of a conversation"
        for each, mode in ((path, 0o600), (path.parent, 0o700), (store / TRANSFERS, 0o700)):
            assert stat.S_IMODE(each.stat().st_mode) == mode
    with server.client() as client:
        while on_their_way(store):
            assert client.get("/health").status_code == 200


@pytest.mark.extension("upkeep")
def test_nothing_of_a_file_is_left_behind(server: LiveServer, tmp_path: Path) -> None:
    data = exported(server)
    with server.client() as client:
        for content, status in ((data, 201), (data[:-2000], 422), (b"no file", 422)):
            answer = client.post(IMPORT, params={"name": "anna"}, content=content, headers=KIND)
            assert answer.status_code == status, answer.text
    assert list((tmp_path / "store" / TRANSFERS).iterdir()) == []


def test_what_a_killed_process_left_goes_when_the_store_is_next_opened(tmp_path: Path) -> None:
    left = tmp_path / TRANSFERS / "session-x"
    left.mkdir(parents=True)
    (left / "session").write_bytes(b"words of a conversation")
    SqliteStore(tmp_path).close()
    assert not left.exists()


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.extension("upkeep")
def test_s5_an_upload_leaves_room_on_the_disk_for_conversations(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: whoever may upload cannot keep the others' turns from being kept."""
    data = exported(server)
    with server.client() as client:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, 1 << 20))
            answer = client.post(IMPORT, params={"name": "anna"}, content=data, headers=KIND)
            assert answer.status_code == 507
            assert answer.json()["error"]["code"] == "store_full"
            assert on_their_way(tmp_path / "store") == []
        answer = client.post(IMPORT, params={"name": "anna"}, content=data, headers=KIND)
        assert answer.status_code == 201
