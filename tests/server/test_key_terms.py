"""What a key allows: until when, how many requests, how many tokens; and that it can be changed in use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from decode.observed import Turnstile, toy
from perdure import InvalidInputError
from perdure.server.core import keys as keys_module
from perdure.server.core import middleware
from perdure.server.core.keys import Key, Keys, KeyUsage, new_key
from perdure.server.core.settings import AllowedHosts, check_origins
from server.live_server import hello, live_server, opened, raw

CHAT = "/v1/chat/completions"
DAY = 86400.0


def test_a_wrong_key_and_an_expired_one_are_told_apart_from_none() -> None:
    secret, key = new_key("old", expires="2020-01-31")
    with opened(toy()) as rt, live_server(rt, keys=Keys([key, new_key("a")[1]])) as server:
        with server.client() as client:
            assert "needs a key" in client.get("/v1/models").json()["error"]["message"]
        with server.client("pk-wrong") as client:
            refused = client.get("/v1/models")
            assert refused.status_code == 401
            assert "does not know that key" in refused.json()["error"]["message"]
        with server.client(secret) as client:
            assert "this key expired on 2020-01-31" in client.get("/v1/models").json()["error"]["message"]


def test_a_key_has_so_many_requests_a_minute_and_so_many_tokens_a_day() -> None:
    (slow, slow_key), (small, small_key) = (
        new_key("slow", requests_per_minute=2),
        new_key("small", tokens_per_day=5),
    )
    with opened(toy()) as rt, live_server(rt, keys=Keys([slow_key, small_key])) as server:
        with server.client(slow) as client:
            count = {"content": "x"}
            assert [client.post("/tokenize", json=count).status_code for _ in range(3)] == [200, 200, 429]
            refused = client.post("/tokenize", json=count)
            # Reading is never limited.
            assert client.get("/v1/sessions").status_code == 200
            assert refused.json()["error"]["message"] == "2 requests a minute are allowed for this key"
            assert 1 <= int(refused.headers["retry-after"]) <= 61
        with server.client(small) as client:
            first = client.post(CHAT, json=hello())
            assert first.status_code == 200
            used = first.json()["usage"]["total_tokens"]
            refused = client.post(CHAT, json=hello())
            assert refused.status_code == 429
            assert f"has used {used} tokens today, 5 are allowed" in refused.json()["error"]["message"]


def test_limits_end_with_their_minute_and_their_day() -> None:
    usage, key = KeyUsage(), Key("a", "0" * 64, requests_per_minute=1, tokens_per_day=10)
    assert usage.admit(key, 0.0, 0.0) is None
    assert usage.admit(key, 59.0, 59.0) is not None
    assert usage.admit(key, 60.5, 60.5) is None
    usage.spend(key, 61.0, prompt=8, completion=2)
    refused = usage.admit(key, 200.0, 200.0)
    assert refused is not None
    assert refused.retry_after == int(DAY - 200) + 1
    assert usage.admit(key, DAY + 1, DAY + 1) is None


@pytest.mark.parametrize("jump", [-30 * DAY, 30 * DAY])
def test_a_minute_is_a_minute_when_the_clock_jumps_x17(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """X17: nobody is locked out until the clock is back where it was, and nobody gets more than the limit."""

    class Jumped:
        """The module `time`, on whose clock somebody has set another day."""

        monotonic = staticmethod(time.monotonic)
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time() -> float:
            return time.time() + jump

    secret, key = new_key("slow", requests_per_minute=2)
    with opened(toy()) as rt, live_server(rt, keys=Keys([key])) as server, server.client(secret) as client:
        text = {"content": "x"}
        assert client.post("/tokenize", json=text).status_code == 200
        for module in (keys_module, middleware):
            monkeypatch.setattr(module, "time", Jumped)
        assert [client.post("/tokenize", json=text).status_code for _ in range(2)] == [200, 429]
        assert int(client.post("/tokenize", json=text).headers["retry-after"]) <= 61


def test_the_last_key_of_a_file_can_be_withdrawn_x10(tmp_path: Path) -> None:
    """X10: then nobody comes in, with a key or without one."""
    path = tmp_path / "keys"
    (secret, key), (other_secret, other) = new_key("a"), new_key("b")
    path.write_text(f"{key.line}\n{other.line}\n")
    keys = Keys.read(path)
    with opened(toy()) as rt, live_server(rt, keys=keys) as server:
        with server.client(secret) as client:
            assert client.get("/v1/models").status_code == 200
            for left in (f"{other.line}\n", "# nobody\n"):
                path.write_text(left)
                server.http_server.reload()
                assert client.get("/v1/models").status_code == 401
        for each in (None, other_secret):
            with server.client(each) as client:
                assert client.get("/v1/models").status_code == 401
                assert client.get("/health").status_code == 200
        path.write_text(f"{other.line}\n")
        server.http_server.reload()
        with server.client(other_secret) as client:
            assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("how", ["withdrawn", "expired"])
def test_a_key_that_ends_ends_over_an_open_websocket_too_x10(how: str, tmp_path: Path) -> None:
    """X10: every request asks the keys that there are now."""
    path = tmp_path / "keys"
    secret, key = new_key("a")
    path.write_text(f"{key.line}\n")
    with opened(toy(), n_ctx=1024) as rt, live_server(rt, keys=Keys.read(path)) as server:
        url = f"ws{server.url.removeprefix('http')}/v1/responses"
        with connect(url, additional_headers={"authorization": f"Bearer {secret}"}) as socket:
            asked = {"type": "response.create", "model": "toy", "input": "Hi", "max_output_tokens": 4}
            socket.send(json.dumps(asked))
            while json.loads(socket.recv(timeout=60))["type"] not in (
                "response.incomplete",
                "response.completed",
            ):
                pass
            path.write_text("# nobody\n" if how == "withdrawn" else f"{key.line} expires=2020-01-31\n")
            server.http_server.reload()
            socket.send(json.dumps(asked))
            event = json.loads(socket.recv(timeout=60))
            assert (event["type"], event["status"]) == ("error", 401)
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=60)


def test_a_key_that_ends_ends_in_the_background_too_x10(tmp_path: Path) -> None:
    """X10."""
    path = tmp_path / "keys"
    (secret, key), (other_secret, other) = new_key("a"), new_key("a")
    path.write_text(f"{key.line}\n{other.line}\n")
    gate = Turnstile()
    with (
        opened(toy(gate=gate), n_ctx=1024) as rt,
        live_server(rt, keys=Keys.read(path)) as server,
        server.client(secret) as client,
        server.client(other_secret) as other_client,
    ):
        body = {"input": "Go", "background": True, "max_output_tokens": 500, "temperature": 0}
        response_id = client.post("/v1/responses", json=body).json()["id"]
        gate.reached.wait()
        path.write_text(f"{other.line}\n")
        server.http_server.reload()
        gate.open()
        assert client.get(f"/v1/responses/{response_id}").status_code == 401
        while (shown := other_client.get(f"/v1/responses/{response_id}").json())["status"] == "in_progress":
            pass
        assert (shown["status"], shown["error"]["code"]) == ("failed", "invalid_api_key")


@pytest.mark.parametrize(
    "words", ["expires=tomorrow", "requests_per_minute=0", "tokens_per_day=x", "colour=red"]
)
def test_terms_that_make_no_sense_are_told_with_their_line(tmp_path: Path, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\na:{'0' * 64} {words}\n")
    with pytest.raises(InvalidInputError, match="line 2: "):
        Keys.read(path)


def test_keys_are_read_again_without_a_request_lost(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first, second = new_key("a", tokens_per_day=1000), new_key("b")
    path.write_text(f"{first[1].line}\n")
    with opened(toy()) as rt, live_server(rt, keys=Keys.read(path)) as server:
        path.write_text(f"{second[1].line}\n")
        with server.client(first[0]) as old, server.client(second[0]) as new:
            assert (old.get("/v1/models").status_code, new.get("/v1/models").status_code) == (200, 401)
            with old.stream("POST", CHAT, json=hello(stream=True, max_tokens=32)) as running:
                server.http_server.reload()
                assert new.get("/v1/models").status_code == 200
                assert list(running.iter_lines())[-2] == "data: [DONE]"
            assert old.get("/v1/models").status_code == 401
            path.write_text("nonsense\n")
            server.http_server.reload()
            assert new.get("/v1/models").status_code == 200


def test_our_own_fields_are_never_taken_for_somebody_elses() -> None:
    """A misspelt `session` returned 200, and the conversation was gone."""
    with opened(toy()) as rt, live_server(rt) as server, server.client() as client:
        refused = client.post(CHAT, json=hello(perdure={"sesion": "a"}))
        assert refused.status_code == 400
        assert "perdure.sesion: no such field; did you mean 'session'?" in refused.json()["error"]["message"]
        refused = client.post("/v1/completions", json={"prompt": "a", "perdure": {"regexp": "a"}})
        assert refused.status_code == 400
        assert "did you mean 'regex'?" in refused.json()["error"]["message"]
        refused = client.post(
            CHAT, content="{}", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert refused.status_code == 415
        assert "curl: -H 'content-type: application/json'" in refused.json()["error"]["message"]


def test_pages_of_another_site_come_in_by_option_alone() -> None:
    """I3: the preflight is answered, and the answer may be read, only for the sites that were named."""
    named, other = "https://chat.example.org", "https://evil.example.org"
    hosts = AllowedHosts(origins=[named])
    with (
        opened(toy()) as rt,
        live_server(rt, hosts=hosts, origins=(named,)) as server,
        server.client() as client,
    ):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        allowed = client.options(CHAT, headers={"origin": named, **asked})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, named)
        answer = client.post(CHAT, json=hello(), headers={"origin": named})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, named)
        refused = client.options(CHAT, headers={"origin": other, **asked})
        assert "access-control-allow-origin" not in refused.headers
        assert client.post(CHAT, json=hello(), headers={"origin": other}).status_code == 403
    assert check_origins(["*"], keys=1) == ("*",)
    for wrong in (["*"], ["chat.example.org"], ["https://a.example.org/path"]):
        with pytest.raises(InvalidInputError, match="--cors"):
            check_origins(wrong, keys=0)


def test_all_prompts_of_a_request_are_paid_for_by_its_key() -> None:
    """And each once, however many samples there are of it."""
    secret, key = new_key("ada", tokens_per_day=5)
    with opened(toy()) as rt, live_server(rt, keys=Keys([key])) as server, server.client(secret) as client:
        body = {"prompt": ["Hello", "Good evening"], "n": 2, "max_tokens": 2}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["total_tokens"]
        refused = client.post(CHAT, json=hello())
    assert refused.status_code == 429
    assert f"has used {used} tokens today, 5 are allowed" in refused.json()["error"]["message"]


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_who_leaves_before_the_end_pays_for_what_was_computed(path: str, streams: bool) -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    gate = Turnstile()
    keys = Keys([key])
    asked = {"prompt": "Hello"} if path != CHAT else {"messages": [{"role": "user", "content": "Hello"}]}
    body = {**asked, "stream": streams, "max_tokens": 900, "logit_bias": {"258": -100}}
    with opened(toy(gate=gate), n_ctx=1024) as rt, live_server(rt, keys=keys) as server:
        gate.admit(60)
        with server.client(secret) as client, pytest.raises(httpx.ReadTimeout):
            client.post(path, json=body, timeout=1.0)
        # A toy's token is a byte, and the gate let so many be computed.
        assert 20 < used_by(key, keys) <= 61
        gate.open()


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_who_leaves_during_the_summary_before_a_reply_pays_for_what_was_computed_x11(streams: bool) -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    gate = Turnstile()
    keys = Keys([key])
    body = {"message": "And?", "max_tokens": 40, "stream": streams, "perdure": {"overflow": "fold"}}
    with opened(toy(gate=gate), n_ctx=1024) as rt, live_server(rt, keys=keys) as server:
        session = rt.session("alice", namespace="ada")
        for number in range(12):
            session.append(f"{number} " + "word " * 16, read_ahead=False)
        gate.admit(700)
        with server.client(secret) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/sessions/alice/turns", json=body, timeout=1.0)
        # Prompts are paid for whole, as far as their state is there: that of the summary, at least in part.
        assert 20 < used_by(key, keys) < 2048
        gate.open()
        # Nothing came of it.
        assert session.turns == 12


def test_who_leaves_a_websocket_pays_for_what_was_computed() -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    gate = Turnstile()
    keys = Keys([key])
    with opened(toy(gate=gate), n_ctx=1024) as rt, live_server(rt, keys=keys) as server:
        gate.admit(60)
        url = f"ws{server.url.removeprefix('http')}/v1/responses"
        headers = {"authorization": f"Bearer {secret}"}
        with connect(url, additional_headers=headers, close_timeout=0.1) as socket:
            socket.send(json.dumps({"type": "response.create", "input": "Hi", "temperature": 0}))
            while json.loads(socket.recv(timeout=60))["type"] != "response.output_text.delta":
                pass
        assert 20 < used_by(key, keys) <= 61
        gate.open()


def used_by(key: Key, keys: Keys) -> int:
    """The tokens that were counted for a key, once they are more than it may use."""
    ends = time.monotonic() + 60
    while (over := keys.usage.admit(key, time.time(), time.monotonic())) is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    found = re.search(r"has used (\d+) tokens today", over.why)
    assert found is not None
    return int(found[1])


def test_work_in_the_background_is_paid_for_by_its_key() -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    keys = Keys([key])
    with (
        opened(toy(), n_ctx=1024) as rt,
        live_server(rt, keys=keys) as server,
        server.client(secret) as client,
    ):
        body = {"input": "Hello", "max_output_tokens": 4, "background": True, "stream": True}
        with client.stream("POST", "/v1/responses", json=body) as response:
            *_, last = (line for line in response.iter_lines() if line.startswith("data: "))
        used = json.loads(last[6:])["response"]["usage"]["total_tokens"]
        refused = client.post(CHAT, json=hello())
        assert refused.status_code == 429
        assert f"has used {used} tokens today, 5 are allowed" in refused.json()["error"]["message"]


def test_each_response_over_a_websocket_is_paid_for_by_its_key() -> None:
    """A connection lasts for up to an hour: it is not let pay at its end."""
    secret, key = new_key("ada", tokens_per_day=5)
    with opened(toy(), n_ctx=1024) as rt, live_server(rt, keys=Keys([key])) as server:
        url = f"ws{server.url.removeprefix('http')}/v1/responses"
        with connect(url, additional_headers={"authorization": f"Bearer {secret}"}) as socket:
            asked = {"type": "response.create", "model": "toy", "input": "Hi", "max_output_tokens": 4}
            # It is drawn, so it may also end by itself.
            for ends in ({"response.incomplete", "response.completed"}, {"error"}):
                socket.send(json.dumps(asked))
                while (event := json.loads(socket.recv(timeout=60)))["type"] not in ends:
                    assert event["type"] not in ("error", "response.completed")
            assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "tokens today, 5 are allowed" in event["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/api/embed"])
def test_who_leaves_before_its_vectors_are_there_pays_for_what_was_read_x11(path: str) -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    gate = Turnstile()
    keys = Keys([key])
    texts = ["word " * 40] * 20
    body = {"query": "word", "documents": texts} if path == "/v1/rerank" else {"input": texts}
    with opened(toy(gate=gate), n_ctx=1024) as rt, live_server(rt, keys=keys) as server:
        # Two texts, and a part of the next.
        gate.admit(450)
        with server.connect() as connection:
            data = json.dumps(body).encode()
            connection.sendall(raw(path, data, authorization=f"Bearer {secret}"))
            assert gate.reached.wait(60)
        assert 200 < used_by(key, keys) <= 450
        gate.open()


def test_a_prefix_that_is_warmed_is_paid_for_x11() -> None:
    secret, key = new_key("ada", tokens_per_day=5)
    keys = Keys([key])
    with (
        opened(toy(), n_ctx=1024) as rt,
        live_server(rt, keys=keys) as server,
        server.client(secret) as client,
    ):
        warmed = client.post("/v1/cache/warm", json={"prompt": "Hello there"})
        assert warmed.status_code == 201
        assert used_by(key, keys) == warmed.json()["tokens"]


def test_vectors_of_a_width_that_the_model_has_not_are_refused_before_they_are_made_x11() -> None:
    """Ollama's route made them first, and nobody paid."""
    with opened(toy(), n_ctx=1024) as rt, live_server(rt) as server, server.client() as client:
        refused = client.post("/api/embed", json={"input": "Hello", "dimensions": 100_000})
        assert refused.status_code == 400
        assert "dimensions" in refused.json()["error"]
        assert 'perdure_tokens_total{kind="embedded"}' not in client.get("/metrics").text


@pytest.mark.extension("upkeep")
def test_who_has_used_up_a_day_still_reads_exports_and_deletes(tmp_path: Path) -> None:
    secret, key = new_key("small", tokens_per_day=5)
    with (
        opened(toy(), store=tmp_path) as rt,
        live_server(rt, keys=Keys([key])) as server,
        server.client(secret) as client,
    ):
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        said = client.post("/v1/sessions/a/turns", json={"message": "Hi", "max_tokens": 8})
        assert said.status_code == 200
        assert client.post("/v1/sessions/a/turns", json={"message": "Hi"}).status_code == 429
        assert client.get("/v1/sessions/a/turns").json()["data"][0]["messages"][0]["content"] == "Hi"
        assert client.get("/v1/sessions/a/export").status_code == 200
        assert client.post("/v1/sessions/a/stop", json={}).status_code == 200
        assert client.delete("/v1/sessions/a").status_code == 200


@pytest.mark.extension("keys")
def test_usage_is_counted_by_key_and_day_told_to_its_owner_and_outlasts_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    secrets, lines = {}, []
    for name in ("ada", "bob", "metrics"):
        secrets[name], key = new_key(name, tokens_per_day=1000 if name == "ada" else None)
        lines.append(key.line)
    path.write_text("\n".join(lines))
    keys = Keys.read(path)
    with opened(toy()) as rt, live_server(rt, keys=keys) as server:
        with server.client(secrets["ada"]) as ada, server.client(secrets["bob"]) as bob:
            used = [ada.post(CHAT, json=hello()).json()["usage"] for _ in range(2)]
            bob.post(CHAT, json=hello()).raise_for_status()
            [own] = ada.get("/v1/usage").json()["data"]
            assert (own["namespace"], own["requests"], own["tokens_per_day"]) == ("ada", 2, 1000)
            assert own["prompt_tokens"] == sum(each["prompt_tokens"] for each in used)
            assert own["completion_tokens"] == sum(each["completion_tokens"] for each in used)
            assert own["cached_tokens"] == sum(
                each["prompt_tokens_details"]["cached_tokens"] for each in used
            )
        with server.client(secrets["metrics"]) as operator:
            assert {each["namespace"] for each in operator.get("/v1/usage").json()["data"]} == {"ada", "bob"}
            told = operator.get("/metrics").text
            assert 'perdure_key_replies_total{namespace="ada"} 2.0' in told
            assert 'perdure_key_tokens_total{kind="prompt",namespace="bob"}' in told
            assert operator.get("/v1/sessions").status_code == 403
    keys.usage.save()
    again = Keys.read(path)
    [ada_key] = [key for key in again if key.namespace == "ada"]
    [day] = again.usage.days(ada_key).values()
    assert (day.requests, day.tokens) == (2, own["prompt_tokens"] + own["completion_tokens"])
    shown = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "keys", "usage", "--keys", str(path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {row["namespace"]: row["requests"] for row in json.loads(shown.stdout)} == {"ada": 2, "bob": 1}
    # What cannot be read keeps no server down.
    path.with_name("keys.usage").write_text("{")
    assert not Keys.read(path).usage.days(ada_key)
