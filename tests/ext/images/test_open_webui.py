"""Open WebUI itself sends a picture, everything here is killed, and its chat goes on (soak; E1, A1).

It is run where it is installed, as in tests/peers.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from peers.test_open_webui import launched, program
from perdure import Image

from .test_clients import BASE64, LONG, PICTURE, encoded, killed, wait_for_disk

Toy = Callable[[str], tuple[Path, Path]]

pytestmark = pytest.mark.soak

PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Page:
    """A chat, as Open WebUI's page has it."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.number = ""
        self._last: str | None = None

    def say(self, text: str, *files: str) -> str:
        """Send a message with pictures that were uploaded; the reply, once it is kept there."""
        said, reply = str(uuid.uuid4()), str(uuid.uuid4())
        message = {
            "id": said,
            "parentId": self._last,
            "childrenIds": [],
            "role": "user",
            "content": text,
            "files": [{"type": "image", "url": each, "content_type": "image/png"} for each in files],
            "models": ["llava"],
            "timestamp": int(time.time()),
        }
        body: dict[str, Any] = {
            "model": "llava",
            "stream": True,
            "messages": [],
            "params": {"temperature": 0, "max_tokens": 8, "function_calling": "legacy"},
            "user_message": message,
            "parent_id": self._last,
            "id": reply,
            "session_id": "page",
            **({"chat_id": self.number} if self.number else {}),
        }
        answer = self._client.post("/api/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.number = self.number or answer.json()["chat_id"]
        self._last = reply
        ends, kept = time.monotonic() + PATIENCE, dict[str, Any]()
        while not kept.get("done"):
            assert time.monotonic() < ends, kept
            time.sleep(0.2)
            chat = self._client.get(f"/api/v1/chats/{self.number}").json()["chat"]
            kept = chat["history"]["messages"].get(reply, {})
        assert not kept.get("error"), kept
        return str(kept["content"])


def test_a_chat_of_open_webui_with_a_picture_goes_on_after_everything_was_killed(
    toy: Toy, tmp_path: Path
) -> None:
    program()
    model, store, home, port = toy("llava")[0], tmp_path / "store", tmp_path / "home", str(free_port())
    home.mkdir()
    texts = []
    with ExitStack() as servers:
        running = servers.enter_context(killed(model, store, "--port", port))
        with (
            launched(running.url, home) as address,
            httpx.Client(base_url=address, trust_env=False) as client,
        ):
            client.timeout = httpx.Timeout(PATIENCE)
            person = {"name": "Ada", "email": "ada@example.org", "password": "a-Long-Password-1"}
            token = client.post("/api/v1/auths/signup", json=person).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            file = {"file": ("a.png", PICTURE, "image/png")}
            uploaded = client.post("/api/v1/files/", files=file, params={"process": "false"})
            page = Page(client)
            texts.append(page.say(LONG, uploaded.raise_for_status().json()["id"]))
            wait_for_disk(store, 128)
            before = encoded(store)
            assert len(before) == 2
            servers.close()
            servers.enter_context(killed(model, store, "--port", port))
            texts.append(page.say("and then?"))
        assert encoded(store) == before
        url = f"{running.url}/v1/sessions/open-webui:{page.number}/turns"
        turns = httpx.get(url, trust_env=False).raise_for_status().json()["data"]
        assert len(turns) == 2
        [[place, digest]] = turns[0]["messages"][0]["images"]
        assert (place, digest) == (len(LONG), Image(PICTURE).digest)
    # The same from nothing, over perdure's own API.
    with killed(model, tmp_path / "cold") as running:
        url = f"data:image/png;base64,{BASE64}"
        shown = {"type": "image_url", "image_url": {"url": url}}
        said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": LONG}, shown]}]
        for text in texts:
            body = {"messages": said, "temperature": 0, "max_tokens": 8}
            answer = httpx.post(
                f"{running.url}/v1/chat/completions", json=body, trust_env=False, timeout=PATIENCE
            )
            assert answer.json()["choices"][0]["message"]["content"] == text
            said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
