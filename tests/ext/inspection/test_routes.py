"""`/v1/sessions/NAME/turns/N/analysis`: a reply looked into, beside all others (C8, I5)."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from decode.observed import toy
from perdure import ContextOverflow, EngineError
from perdure.backend import SecondOpening
from perdure.events.background import FAILURES
from perdure.ext.inspection.analysis import ReplyFigures
from perdure.ext.inspection.process import AnalysisJob, AnalysisPage, AnalysisProcess, AnalysisProgress
from perdure.server.core.keys import Keys, new_key
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened

ZooPath = Callable[[str], Path]
FIRST = "/v1/sessions/talk/turns/1/analysis"


class Place(NamedTuple):
    """A server with a conversation of alice's, and two who ask it."""

    server: LiveServer
    alice: httpx.Client
    bob: httpx.Client
    model: Path


@pytest.fixture(scope="module")
def place(zoo_path: ZooPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("analysis")
    model = folder / "llama.gguf"
    shutil.copy(zoo_path("llama"), model)
    made = [new_key(name) for name in ("alice", "bob")]
    with (
        # The engine in a separate process, as `perdure serve` has it.
        opened(model, store=folder / "store", threads=1, isolated=True) as rt,
        live_server(rt, keys=Keys([key for _, key in made])) as server,
        server.client(made[0][0]) as alice,
        server.client(made[1][0]) as bob,
    ):
        assert alice.post("/v1/sessions", json={"name": "talk"}).status_code == 201
        said = {"message": "hello there " * 12, "max_tokens": 8, "temperature": 0}
        assert alice.post("/v1/sessions/talk/turns", json=said).status_code == 200
        assert alice.post("/v1/sessions/talk/sleep", json={}).status_code == 200
        yield Place(server, alice, bob, model)


def events(client: httpx.Client, path: str) -> Generator[dict[str, Any], None, None]:
    with client.stream("POST", path, json={"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def test_a_reply_of_a_sleeping_session_is_shown_as_the_command_shows_it(place: Place) -> None:
    before = place.alice.get("/v1/usage").json()["data"][0]["prompt_tokens"]
    *progress, answer = events(place.alice, FIRST)
    stages = list(dict.fromkeys(each["stage"] for each in progress))
    assert stages == ["model", "reading", "keys and values", "layers", "logit lens", "page"]
    assert all(each["type"] == "progress" for each in progress)
    turn = place.alice.get("/v1/sessions/talk/turns").json()["data"][0]
    assert answer["type"] == "analysis"
    assert (answer["session"], answer["turn"]) == ("talk", 1)
    assert answer["tokens"] - answer["reply_tokens"] == turn["usage"]["prompt_tokens"]
    page = answer["html"]
    assert page.startswith("<!doctype html>")
    for part in (
        "Surprise",
        "Attention by head",
        "Keys and values",
        "Logit lens",
        "Where the state came from",
    ):
        assert f"<h2>{part}" in page
    assert f"{turn['usage']['prompt_tokens']} tokens in " in page
    # It was computed for alice, and she pays for it.
    after = place.alice.get("/v1/usage").json()["data"][0]["prompt_tokens"]
    assert after - before == answer["tokens"]
    # Nothing of the session was woken for it.
    assert not place.alice.get("/v1/sessions/talk/state").json()["awake"]


def test_what_cannot_be_looked_into_is_a_plain_error(place: Place) -> None:
    """I5: of another key's session nothing is told, not even that it is there."""
    alice, bob = place.alice, place.bob

    def refused(client: httpx.Client, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        response = client.post(path, json=body or {})
        return response.status_code, response.json()["error"]["code"]

    assert refused(bob, FIRST) == (404, "session_not_found")
    with place.server.client() as nobody:
        assert refused(nobody, FIRST) == (401, "invalid_api_key")
    assert refused(alice, "/v1/sessions/none/turns/1/analysis") == (404, "session_not_found")
    assert refused(alice, "/v1/sessions/talk/turns/7/analysis") == (404, "turn_not_found")
    assert refused(alice, "/v1/sessions/talk/turns/0/analysis") == (400, "invalid_value")
    assert refused(alice, "/v1/sessions/talk/turns/x/analysis") == (400, "invalid_value")
    assert refused(alice, FIRST, {"stream": 3}) == (400, "invalid_value")
    alice.post("/v1/sessions", json={"name": "unanswered"})
    alice.post("/v1/sessions/unanswered/append", json={"message": "hello", "read_ahead": False})
    assert refused(alice, "/v1/sessions/unanswered/turns/1/analysis") == (409, "nothing_to_analyse")


def test_one_at_a_time_and_it_ends_with_its_client_c8(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: others are answered meanwhile, and whoever leaves makes room for the next."""
    told: list[object] = []
    run, cancel = AnalysisProcess.run, AnalysisProcess.cancel
    began, cancelled = threading.Event(), threading.Event()

    def watched(process: AnalysisProcess) -> Iterator[AnalysisProgress | AnalysisPage]:
        for each in run(process):
            told.append(each)
            began.set()
            yield each
            # However fast it is: it goes on when its client has left.
            assert cancelled.wait(PATIENCE)

    def cancelling(process: AnalysisProcess) -> None:
        cancel(process)
        cancelled.set()

    monkeypatch.setattr(AnalysisProcess, "run", watched)
    monkeypatch.setattr(AnalysisProcess, "cancel", cancelling)
    running = events(place.alice, FIRST)
    assert next(running)["stage"] == "model"
    with place.server.client(place.bob.headers["authorization"].removeprefix("Bearer ")) as bob:
        bob.post("/v1/sessions", json={"name": "own"})
        bob.post("/v1/sessions/own/turns", json={"message": "hi", "max_tokens": 2})
        refused = bob.post("/v1/sessions/own/turns/1/analysis", json={})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "analysis_running"
        assert int(refused.headers["retry-after"]) > 0
        assert bob.post("/v1/chat/completions", json=hello()).status_code == 200
        # The client leaves: its process ends with it. What it read so far may be signs of life alone.
        assert began.wait(PATIENCE)
        running.close()
        end = time.monotonic() + PATIENCE
        while place.server.state.analysis is not None:
            assert time.monotonic() < end, "the analysis goes on for nobody"
            time.sleep(0.01)
        assert told
        assert not any(isinstance(each, AnalysisPage) for each in told)


def test_an_analysis_that_exits_ends_for_its_client(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its thread raises is an error for one client, and nothing for the event loop of all."""

    def exits(process: AnalysisProcess) -> Iterator[AnalysisProgress | AnalysisPage]:
        raise SystemExit(1)

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    before = FAILURES["perdure-analysis"]
    with monkeypatch.context() as patched:
        patched.setattr(AnalysisProcess, "run", exits)
        for stream in (False, True):
            assert place.alice.post(FIRST, json={"stream": stream}).status_code == 503
    assert FAILURES["perdure-analysis"] == before + 2
    FAILURES["perdure-analysis"] = before
    assert place.alice.get("/health").status_code == 200


def test_a_model_whose_file_is_gone_is_an_error_and_replies_go_on(place: Place) -> None:
    away = place.model.rename(place.model.with_suffix(".away"))
    try:
        response = place.alice.post(FIRST, json={})
    finally:
        away.rename(place.model)
    assert response.status_code in (404, 503), response.text
    assert "llama.gguf" in response.json()["error"]["message"]
    assert place.alice.post("/v1/chat/completions", json=hello()).status_code == 200


def test_an_engine_that_tells_nothing_of_layers_says_so(tmp_path: Path) -> None:
    with opened(toy(), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        client.post("/v1/sessions", json={"name": "talk"})
        client.post("/v1/sessions/talk/turns", json={"message": "hello", "max_tokens": 2})
        response = client.post(FIRST, json={})
        assert response.status_code == 400
        assert "cannot be looked into" in response.json()["error"]["message"]


def job(path: Path, tokens: list[int]) -> AnalysisJob:
    return AnalysisJob(
        opening=SecondOpening(path=str(path), adapters={}, rope=(0.0, 0.0)),
        tokens=tokens,
        prompt=1,
        title="t",
        figures=ReplyFigures(),
    )


def test_a_long_conversation_and_one_that_was_cancelled_start_no_process(zoo_path: ZooPath) -> None:
    with pytest.raises(ContextOverflow, match="at most 4096 tokens"):
        job(zoo_path("llama"), [5] * 5000)
    process = AnalysisProcess(job(zoo_path("llama"), [5] * 10))
    process.cancel()
    with pytest.raises(EngineError, match="cancelled"):
        next(process.run())
