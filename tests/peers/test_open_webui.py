"""Open WebUI itself, started by `perdure launch` (soak): somebody signs up, sees the models, and talks.

It is run where it is installed, since it is large: `pip install open-webui` into a separate environment,
whose `bin` is on the PATH, or is named by PERDURE_OPEN_WEBUI.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.observed import toy
from server.live_server import live_server, opened

pytestmark = pytest.mark.soak

START = 300.0
"""Seconds that it may take to start: it imports a few hundred megabytes."""
ASKED: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "Hello"}]


def program() -> str:
    found = shutil.which("open-webui", path=os.environ.get("PERDURE_OPEN_WEBUI")) or shutil.which(
        "open-webui"
    )
    if found is None:
        pytest.skip("open-webui is not installed")
    return found


@contextmanager
def launched(url: str, home: Path) -> Iterator[str]:
    """Its address, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{Path(program()).parent}:{os.environ['PATH']}",
        "PERDURE_HOME": str(home),
        "DATA_DIR": str(home / "data"),
        # It would fetch a model for searching documents.
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "perdure.cli", "launch", "openwebui", "--url", url]
    with (home / "log").open("wb") as log:
        running = subprocess.Popen(
            [*command, "--", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address, ends = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not answers(address):
            assert running.poll() is None, (home / "log").read_text()[-2000:]
            assert time.monotonic() < ends
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def streamed(response: httpx.Response) -> str:
    """The text of a stream of OpenAI's chunks."""
    text = ""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    return text


def test_open_webui_lists_the_model_streams_its_reply_and_its_chat_is_a_session(tmp_path: Path) -> None:
    program()
    home = tmp_path / "home"
    home.mkdir()
    with (
        opened(toy(), n_ctx=1 << 18, store=tmp_path / "store") as rt,
        live_server(rt) as server,
        server.client() as direct,
    ):
        said = direct.post("/v1/chat/completions", json={**ASKED, "messages": HELLO}).json()
        with launched(server.url, home) as address, httpx.Client(base_url=address, trust_env=False) as client:
            client.timeout = httpx.Timeout(120)
            person = {"name": "Ada", "email": "ada@example.org", "password": "a-Long-Password-1"}
            token = client.post("/api/v1/auths/signup", json=person).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            assert [model["id"] for model in client.get("/api/models").json()["data"]] == ["toy"]
            body = {**ASKED, "messages": HELLO, "stream": True}
            with client.stream("POST", "/api/chat/completions", json=body) as response:
                assert response.status_code == 200
                assert streamed(response) == said["choices"][0]["message"]["content"]
            # As its page does it: a chat that is kept there, whose reply comes behind the answer.
            chat = {"title": "One", "models": ["toy"], "history": {"messages": {}, "currentId": None}}
            number = client.post("/api/v1/chats/new", json={"chat": chat}).json()["id"]
            reply, name = str(uuid.uuid4()), f"open-webui:{number}"
            body |= {"chat_id": number, "id": reply, "session_id": "page"}
            assert client.post("/api/chat/completions", json=body).status_code == 200
            ends = time.monotonic() + 120
            found: dict[str, Any] = {}
            while not found.get("done"):
                assert time.monotonic() < ends
                time.sleep(0.2)
                kept = client.get(f"/api/v1/chats/{number}").json()["chat"]["history"]["messages"]
                found = kept.get(reply, {})
            assert not found.get("error"), found
            assert found["content"]
            names = {each["name"]: each["turns"] for each in direct.get("/v1/sessions").json()["data"]}
            assert names.get(name) == 1
