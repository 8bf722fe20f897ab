"""`curl`, as people paste it into a terminal."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from perdure.server.core.keys import Keys
from server.live_server import LiveServer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

CURL = ("curl", "--silent", "--no-buffer", "--noproxy", "*", "--max-time", "60")
BODY = json.dumps(
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0, "stream": True}
)


def curl(here: LiveServer, key: str, *arguments: str) -> str:
    path, *rest = arguments
    done = subprocess.run(
        [*CURL, "--header", f"Authorization: Bearer {key}", *rest, here.url + path],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_stream_in_a_terminal(here: LiveServer, key: tuple[str, Keys]) -> None:
    out = curl(here, key[0], "/v1/chat/completions", "--json", BODY)
    lines = [line for line in out.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_a_failure_has_its_status(here: LiveServer, key: tuple[str, Keys]) -> None:
    out = curl(here, "wrong", "/v1/models", "--write-out", "%{http_code}", "--output", "/dev/null")
    assert out == "401"
    out = curl(here, key[0], "/v1/chat/completions", "--json", "{", "--write-out", " %{http_code}")
    assert out.endswith(" 400")


def test_figures_and_health(here: LiveServer, key: tuple[str, Keys]) -> None:
    assert json.loads(curl(here, key[0], "/health")) == {"status": "ok"}
    assert json.loads(curl(here, key[0], "/v1/models"))["data"][0]["id"] == "toy"


def test_embeddings_in_a_terminal(here: LiveServer, key: tuple[str, Keys]) -> None:
    found = json.loads(curl(here, key[0], "/v1/embeddings", "--json", '{"input": ["one", "two"]}'))
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert all(abs(sum(x * x for x in each["embedding"]) - 1) < 1e-5 for each in found["data"])
