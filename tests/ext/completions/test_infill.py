"""Filling in the middle of a text, over all routes that ask for it; and HTTP on a Unix socket."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import perdure
from perdure import InvalidInputError, Runtime
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, address, bind_path
from perdure.testing.toy import ToyModel
from server.live_server import LiveServer, live_server

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
GREEDY = {"temperature": 0, "max_tokens": 6, "perdure": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with perdure.open(ToyModel(marks=MARKS), n_ctx=512, slots=2) as rt, live_server(rt) as found:
        yield found


def expected(rt: Runtime, text: str) -> str:
    """The reply to a prompt whose control tokens are written out."""
    tokens = rt.model.tokenize(text, special=True)
    return rt.generate(tokens, temperature=0, max_tokens=6, ignore_eos=True).text


def test_the_three_routes_read_one_prompt(server: LiveServer) -> None:
    right = expected(server.runtime, "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>")
    with server.client() as client:
        body = {"prompt": "def f(", "suffix": "): pass"}
        answer = client.post("/v1/completions", json={**body, **GREEDY}).json()
        assert answer["choices"][0]["text"] == right
        options = {"temperature": 0, "num_predict": 6, "logit_bias": {"258": -100, "256": -100}}
        answer = client.post("/api/generate", json={**body, "stream": False, "options": options}).json()
        assert answer["response"] == right
        asked = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "): pass", "n_predict": 6}
        asked |= {"temperature": 0, "perdure": {"ignore_eos": True}}
        answer = client.post("/infill", json=asked).json()
        assert answer["content"] == right
        assert answer["stop_type"] == "limit"
        with client.stream("POST", "/infill", json={**asked, "stream": True}) as response:
            lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
        assert "".join(line["content"] for line in lines) == right
        assert [line["stop"] for line in lines][-2:] == [False, True]


def test_other_files_come_first(server: LiveServer) -> None:
    right = expected(
        server.runtime,
        "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>y<|fim_suffix|>z<|fim_middle|>",
    )
    asked = {"input_prefix": "y", "input_suffix": "z", "n_predict": 6, "temperature": 0}
    asked |= {"input_extra": [{"filename": "a.py", "text": "x = 1"}], "perdure": {"ignore_eos": True}}
    with server.client() as client:
        assert client.post("/infill", json=asked).json()["content"] == right


def test_text_never_becomes_a_control_token(server: LiveServer) -> None:
    """I6: in none of its fields."""
    tokens = server.runtime.infill_prompt(*["<|fim_middle|>"] * 2, files=[("<|file_sep|>", "<|im_end|>")])
    controls = [token for token in tokens if server.runtime.model.is_control(token)]
    separator, prefix, suffix, middle = (
        server.runtime.model.tokenize(mark, special=True)[0] for mark in (MARKS[3], *MARKS[:3])
    )
    assert controls == [separator, separator, prefix, suffix, middle]


def test_what_cannot_be_filled_in_is_refused(server: LiveServer) -> None:
    with server.client() as client:
        for more in ({"echo": True}, {"prompt": [1, 2]}):
            body = {"prompt": "a", "suffix": "b", **more}
            assert client.post("/v1/completions", json=body).status_code == 400
        refused = client.post("/infill", json={"input_prefix": "a" * 5000})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_model_without_the_tokens_says_so(tmp_path: Path) -> None:
    with perdure.open(ToyModel(), n_ctx=128, slots=1) as rt:
        with pytest.raises(InvalidInputError, match="no tokens for filling in"):
            rt.infill_prompt("a", "b")
        path = tmp_path / "http.sock"
        with unix_server(rt, path) as client:
            for route, body in (
                ("/v1/completions", {"prompt": "a", "suffix": "b"}),
                ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
                ("/api/generate", {"prompt": "a", "suffix": "b"}),
            ):
                answer = client.post(route, json=body)
                assert answer.status_code == 400
                assert "no tokens for filling in" in answer.text
            # A Host of any name: no page of a browser comes this way.
            assert client.get("/v1/models", headers={"host": "anything"}).status_code == 200
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(InvalidInputError, match="cannot listen"):
                bind_path(path)
        bind_path(path).close()
        (tmp_path / "file").write_text("mine")
        with pytest.raises(InvalidInputError, match="cannot listen"):
            bind_path(tmp_path / "file")
        with pytest.raises(InvalidInputError, match="at most 100 bytes"):
            bind_path(tmp_path / ("a" * 200))
        assert (tmp_path / "file").read_text() == "mine"


class unix_server:  # noqa: N801 - used like a function
    """A server on a Unix socket, in a thread."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self._listening = bind_path(path)
        self._listening.listen()
        assert address(self._listening) == f"unix:{path}"
        self._server = HttpServer(ServerState(runtime=runtime, name="toy"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://perdure", timeout=60
        )

    def __enter__(self) -> httpx.Client:
        self._thread.start()
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.stop(now=True)
        self._thread.join(60)
