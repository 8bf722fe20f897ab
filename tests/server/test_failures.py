"""Failures are told, slots are freed, nobody waits for ever (H1, H2, H3, H7)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.observed import Clock, Turnstile, open_toy, toy, trouble
from perdure import Runtime
from perdure.decode import engine_loop
from perdure.decode import request as decode_request
from perdure.errors import (
    FetchError,
    ModelError,
    ModelFileError,
    PerdureError,
    PinnedError,
    StaleViewError,
    TooLargeError,
    UnsupportedSystemError,
)
from perdure.server import http_server
from perdure.server.core.api_error import to_api_error
from perdure.server.core.server_state import ServerState
from perdure.testing.toy import Faults
from server.live_server import (
    PATIENCE,
    LiveServer,
    check_freed,
    events,
    hello,
    live_server,
    opened,
    raw,
    streamed,
)
from store.test_faults import leave, leave_a_mount_point

CHAT = "/v1/chat/completions"
ENDLESS = {"logit_bias": {"256": -100, "258": -100}, "max_tokens": 400}
"""The toy's two ends are ruled out."""


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile(is_open=True)


@pytest.fixture
def rt(gate: Turnstile) -> Iterator[Runtime]:
    with open_toy(gate=gate, slots=1, n_ctx=512, queue=1) as runtime:
        yield runtime


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_a_status_h1(
    rt: Runtime, server: LiveServer, stream: bool
) -> None:
    """H1: also for a streaming request."""
    with server.client() as client:
        trouble(rt).fail_decode(ahead=1)
        response = client.post(CHAT, json=hello(stream=stream))
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert client.post(CHAT, json=hello()).status_code == 200


def test_a_failure_in_the_middle_ends_the_stream_with_an_error_h1(rt: Runtime, server: LiveServer) -> None:
    """H1, C7: an error event, an end of every choice, [DONE]; whole replies have a status."""
    with server.client() as client:
        trouble(rt).fail_decode(ahead=5)
        *said, error, last = streamed(client, CHAT, hello(**ENDLESS))
        assert any(chunk["choices"][0]["delta"].get("content") for chunk in said)
        assert error["error"]["code"] == "engine_unavailable"
        assert last["choices"][0]["finish_reason"] == "length"
        trouble(rt).fail_decode(ahead=5)
        assert client.post(CHAT, json=hello(**ENDLESS)).status_code == 503
        assert client.post(CHAT, json=hello()).status_code == 200


def test_every_sample_of_a_broken_stream_ends_once(rt: Runtime, server: LiveServer) -> None:
    with server.client() as client:
        trouble(rt).fail_decode(ahead=5)
        chunks = streamed(client, CHAT, hello(**ENDLESS, n=2))
        ended = [
            choice["index"]
            for chunk in chunks
            for choice in chunk.get("choices", ())
            if choice["finish_reason"]
        ]
        assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_slot_h2(
    rt: Runtime, server: LiveServer, gate: Turnstile, stream: bool
) -> None:
    """H2: the engine is held before the first token, and gets out only because the client left."""
    gate.shut()
    with server.connect() as connection:
        connection.sendall(raw(CHAT, json.dumps(hello(stream=stream, **ENDLESS)).encode()))
        assert gate.reached.wait(60)
    check_freed(rt)
    gate.open()
    with server.client() as client:
        assert client.post(CHAT, json=hello()).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_a_reply_frees_its_slot_h2(
    rt: Runtime, server: LiveServer, gate: Turnstile
) -> None:
    """H2."""
    gate.shut()
    with server.client() as client:
        gate.admit(200)
        with client.stream("POST", CHAT, json=hello(stream=True, **ENDLESS)) as response:
            chunks = events(response)
            said = 0
            while said < 3:
                chunk = next(chunks)
                assert isinstance(chunk, dict)
                said += bool(chunk["choices"][0]["delta"].get("content"))
            # All that it may compute is used up, long before the reply is whole.
            assert gate.reached.wait(60)
    check_freed(rt)
    gate.open()
    with server.client() as client:
        assert client.post(CHAT, json=hello()).status_code == 200
        assert 'status="499"' in client.get("/metrics").text


def test_a_full_queue_is_429_h3(rt: Runtime, server: LiveServer, gate: Turnstile) -> None:
    """H3: with Retry-After, whole or streamed; and once there is room, all is well."""
    gate.shut()
    served = rt.submit("first", max_tokens=1)
    assert gate.reached.wait(60)
    waiting = rt.submit("second", max_tokens=1)
    with server.client() as client:
        for stream in (False, True):
            response = client.post(CHAT, json=hello(stream=stream))
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        gate.open()
        served.replies()
        waiting.replies()
        assert client.post(CHAT, json=hello()).status_code == 200


def test_more_requests_than_allowed_are_429() -> None:
    gate = Turnstile()
    with (
        open_toy(gate=gate, slots=1) as rt,
        live_server(rt, requests=1) as server,
        server.client() as one,
        server.client() as other,
    ):
        answers: list[int] = []
        first = threading.Thread(target=lambda: answers.append(one.post(CHAT, json=hello()).status_code))
        first.start()
        assert gate.reached.wait(60)
        refused = other.post(CHAT, json=hello())
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        gate.open()
        first.join()
        assert answers == [200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_during_prefill_is_504_h7(stream: bool) -> None:
    """H7."""
    with (
        opened(toy(faults=Faults(pace=0.01)), slots=1) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        long = [{"role": "user", "content": "word " * 80}]
        body = hello(messages=long, stream=stream, perdure={"timeout": 0.2})
        response = client.post(CHAT, json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        check_freed(rt)


def test_a_deadline_in_the_middle_of_a_reply_is_told_h7(
    rt: Runtime, server: LiveServer, gate: Turnstile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H7: as 504, or in the stream."""
    clock = Clock()
    for module in (engine_loop, decode_request):
        monkeypatch.setattr(module, "time", clock)
    body = hello(**ENDLESS, perdure={"timeout": 600})

    def run_late() -> None:
        """Once the engine has computed all that it may, in the middle of the reply."""
        assert gate.reached.wait(60)
        clock.now += 601
        gate.open()

    with server.client() as client:
        gate.shut()
        gate.admit(200)
        statuses: list[int] = []
        asking = threading.Thread(target=lambda: statuses.append(client.post(CHAT, json=body).status_code))
        asking.start()
        run_late()
        asking.join()
        assert statuses == [504]
        gate.shut()
        gate.admit(200)
        with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
            assert response.status_code == 200
            run_late()
            *_, error, last, _ = events(response)
        assert isinstance(error, dict)
        assert isinstance(last, dict)
        assert error["error"]["code"] == "deadline_exceeded"
        assert last["choices"][0]["finish_reason"] == "length"
    check_freed(rt)


def test_the_servers_own_limit_of_time_holds_for_everybody() -> None:
    with (
        opened(toy(faults=Faults(pace=0.01)), slots=1) as rt,
        live_server(rt, request_seconds=0.2) as server,
        server.client() as client,
    ):
        body = hello(**ENDLESS, perdure={"timeout": 1000})
        assert client.post(CHAT, json=body).status_code == 504


def test_replies_do_not_depend_on_who_else_is_served_c10() -> None:
    """C10: eight at once, each like alone; none ends another."""
    bodies = [
        hello(messages=[{"role": "user", "content": f"Number {at}"}], max_tokens=40, seed=at, temperature=1)
        for at in range(8)
    ]
    with opened(toy(), slots=3) as rt, live_server(rt) as server:
        alone = [said(server, body) for body in bodies]
        together: list[Any] = [None] * len(bodies)

        def ask(at: int) -> None:
            together[at] = said(server, bodies[at])

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone
    assert {reason for _, reason in alone} <= {"stop", "length"}


def said(server: LiveServer, body: dict[str, Any]) -> tuple[str, str]:
    with server.client() as client:
        choice = client.post(CHAT, json=body).json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def test_a_reply_ends_with_its_true_reason_c7(server: LiveServer) -> None:
    """C7: the others are reached where tools, failures and clients that leave are tested."""
    with server.client() as client:
        stopped = client.post(CHAT, json=hello(perdure={"regex": "yes|no"})).json()["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert stopped["message"]["content"] in ("yes", "no")
        cut = client.post(CHAT, json=hello(**{**ENDLESS, "max_tokens": 3})).json()["choices"][0]
        assert cut["finish_reason"] == "length"


def test_an_unforeseen_failure_is_500_and_says_nothing_of_the_inside() -> None:
    told = to_api_error(RuntimeError("a secret of the house"))
    assert told.status == 500
    assert "secret" not in json.dumps(told.body)
    assert told.body["error"]["type"] == "server_error"


NEVER_ASKED_FOR = (
    StaleViewError,
    PinnedError,
    TooLargeError,
    UnsupportedSystemError,
    ModelFileError,
    FetchError,
)
"""Errors of what no request can do."""


def _any(kind: type[PerdureError]) -> PerdureError:
    """An error of that kind, with the figures that some are told with."""
    error = kind.__new__(kind)
    error.__dict__.update(needed=2, fits=1)
    return error


def test_every_error_of_ours_has_a_status_of_its_own() -> None:
    """By its class: a name in a text goes wrong unseen, and so does an error that is added later."""
    found, waiting = set(), [PerdureError]
    while waiting:
        for each in waiting.pop().__subclasses__():
            if each.__module__ == PerdureError.__module__:
                found.add(each)
                waiting.append(each)
    assert len(found) > 30
    plain = {
        each
        for each in found
        if to_api_error(_any(each)).code == "internal_error" and not issubclass(each, NEVER_ASKED_FOR)
    }
    # The parent of those that concern files; what is added below it needs a separate line.
    assert plain == {ModelError}


def test_answers_carry_an_id_of_the_request(server: LiveServer) -> None:
    with server.client() as client:
        ids = {client.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_connections_that_are_dropped_at_once_leave_nothing(server: LiveServer) -> None:
    for _ in range(50):
        server.connect().close()
    with server.client() as client:
        assert client.get("/ready").status_code == 200


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("mount_point", [False, True])
def test_a_store_whose_folder_vanishes_loses_nothing_that_was_acknowledged(
    mount_point: bool, tmp_path: Path
) -> None:
    """Class 4: a mount that goes away under a server, and comes back."""
    folder = tmp_path / "store"
    acknowledged = []
    with opened(toy(), store=folder) as rt, live_server(rt) as server, server.client() as client:

        def say(text: str) -> None:
            answer = client.post("/v1/sessions/alice/turns", json={"message": text, "max_tokens": 4})
            assert answer.status_code in (200, 503, 507), answer.text
            if answer.status_code == 200 and answer.json()["perdure"]["kept"]:
                acknowledged.append(text)

        assert client.post("/v1/sessions", json={"name": "alice"}).status_code == 201
        say("before")
        come_back = (leave_a_mount_point if mount_point else leave)(folder)
        say("meanwhile")
        assert client.get("/v1/sessions/alice/export").status_code in (200, 503, 507)
        assert client.get("/v1/sessions?text=before").status_code in (200, 503)
        assert client.get("/health").status_code == 200
        assert client.post(CHAT, json=hello()).status_code == 200
        come_back()
        say("after")
        assert acknowledged[0] == "before"
        assert acknowledged[-1] == "after"
    with opened(toy(), store=folder) as rt:
        said = [turn.messages[0].content for turn in rt.session("alice").history()]
        assert said == acknowledged


def test_a_task_beside_the_server_is_begun_again_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[ServerState] = []
    lasts = threading.Event()

    async def task(state: ServerState) -> None:
        begun.append(state)
        if len(begun) < 3:
            raise RuntimeError("planted")
        lasts.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(http_server, "AGAIN", 0.01)
    monkeypatch.setattr(http_server, "brought", lambda kind: iter([task] if kind == "tasks" else []))
    with opened(toy()) as rt, live_server(rt) as server:
        assert lasts.wait(PATIENCE)
        assert begun == [server.state] * 3
    assert [each.exc_info is not None for each in caplog.records if "begins again" in each.message] == [
        True
    ] * 2
