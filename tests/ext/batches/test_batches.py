"""Batches: every line is answered once, behind all others, whatever happens meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from decode.observed import Turnstile, open_toy
from perdure import SessionNotFoundError
from perdure.cli.app import app
from perdure.ext.batches import batch as batch_module
from perdure.ext.batches import runner as runner_module
from perdure.ext.batches.batch import BATCH, Batches, read_line
from perdure.ext.batches.files import ANSWER, FILE, PART, answer_name, sweep
from perdure.server.core.api_error import ApiError
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.settings import Limits
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, LiveServer, live_server, opened

CHAT: Final = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 6, "temperature": 0, "store": False},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 6, "temperature": 0},
    "/v1/embeddings": {"input": "Hello"},
}


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    asked = {"custom_id": custom_id, "method": "POST", "url": url, "body": {**BODIES[url], **body}}
    return json.dumps(asked)


def chats(count: int, **body: Any) -> str:
    return "\n".join(
        line(f"line-{n}", messages=[{"role": "user", "content": f"Number {n}?"}], **body)
        for n in range(count)
    )


def upload(client: httpx.Client, text: str | bytes, **fields: str) -> httpx.Response:
    data = text.encode() if isinstance(text, str) else text
    return client.post(
        "/v1/files", files={"file": ("asked.jsonl", data)}, data={"purpose": "batch", **fields}
    )


def begin(client: httpx.Client, text: str, endpoint: str = CHAT, **more: Any) -> dict[str, Any]:
    file_id = upload(client, text).raise_for_status().json()["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **more}
    shown: dict[str, Any] = client.post("/v1/batches", json=body).raise_for_status().json()
    return shown


def until(client: httpx.Client, batch_id: str, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        shown: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
        if true(shown):
            return shown
        time.sleep(0.02)
    raise AssertionError(shown)


def ended(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    over = ("completed", "failed", "expired", "cancelled")
    return until(client, batch_id, lambda shown: shown["status"] in over)


def content(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = client.get(f"/v1/files/{file_id}/content").raise_for_status().text
    return [json.loads(each) for each in text.splitlines()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt, live_server(rt) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


# What comes out.


@pytest.mark.parametrize("endpoint", BODIES)
def test_every_line_is_answered_as_if_it_was_asked_alone(
    endpoint: str, server: LiveServer, client: httpx.Client
) -> None:
    shown = begin(client, "\n".join(line(f"n{n}", endpoint) for n in range(3)) + "\n\n", endpoint)
    assert shown["status"] == "validating"
    done = ended(client, shown["id"])
    assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, done
    assert done["error_file_id"] is None
    answers = content(client, done["output_file_id"])
    assert [each["custom_id"] for each in answers] == ["n0", "n1", "n2"]
    alone = client.post(endpoint, json=BODIES[endpoint]).json()
    for each in answers:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["request_id"].startswith(shown["id"])
        told = {**each["response"]["body"], "service_tier": None}
        assert told.keys() - {"service_tier"} == alone.keys() - {"service_tier"}
        for name in ("choices", "data"):
            if name in alone:
                assert told[name] == alone[name]


def test_what_fails_is_in_the_file_of_errors(client: httpx.Client) -> None:
    text = "\n".join([line("good"), line("bad", temperature="warm"), line("who", model="nobody")])
    done = ended(client, begin(client, text)["id"])
    assert (done["status"], done["request_counts"]["failed"]) == ("completed", 2)
    [good] = content(client, done["output_file_id"])
    assert good["custom_id"] == "good"
    errors = {each["custom_id"]: each["response"] for each in content(client, done["error_file_id"])}
    assert errors["bad"]["status_code"] == 400
    assert errors["who"]["status_code"] == 404
    assert errors["who"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_file"),
        ("\n \n", "empty_file"),
        ("{", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ("[" * 100_000, "nested_too_deeply"),
        (line("a") + "\n" + line("a"), "duplicate_custom_id"),
        (line("a", "/v1/embeddings"), "mismatched_url"),
        (line("a").replace("POST", "GET"), "invalid_method"),
        (line("a", stream=True), "invalid_value"),
        (line(""), "missing_required_parameter"),
    ],
)
def test_a_file_that_is_wrong_is_answered_by_no_line(text: str, code: str, client: httpx.Client) -> None:
    done = ended(client, begin(client, text)["id"])
    assert done["status"] == "failed"
    assert done["errors"]["data"][0]["code"] == code
    assert done["output_file_id"] is None


@given(st.text(max_size=200) | st.dictionaries(st.text(max_size=12), st.none() | st.text()).map(json.dumps))
def test_no_line_is_read_as_what_it_is_not(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_line(text, CHAT, Limits())
    assert refused.value.status in (400, 413)


def test_openai_s_library(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        data = (line("é") + "\n").encode()
        file = sdk.files.create(file=("asked.jsonl", data), purpose="batch")
        assert sdk.files.retrieve(file.id) == file
        assert (file.bytes, file.filename, file.status) == (len(data), "asked.jsonl", "processed")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
        )
        assert batch.metadata == {"for": "a test"}
        while batch.status not in ("completed", "failed"):
            time.sleep(0.05)
            batch = sdk.batches.retrieve(batch.id)
        assert [each.id for each in sdk.batches.list(limit=1)] == [batch.id]
        assert batch.output_file_id is not None
        [answer] = sdk.files.content(batch.output_file_id).text.splitlines()
        assert json.loads(answer)["custom_id"] == "é"
        assert sdk.files.content(file.id).content == data
        assert {each.id for each in sdk.files.list()} == {file.id, batch.output_file_id}
        assert [each.id for each in sdk.files.list(purpose="batch")] == [file.id]
        assert sdk.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError):
            sdk.batches.cancel(batch.id)


# Forms.


def test_a_long_file_comes_back_as_it_was(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ä€🙂" * 300_000
    file = upload(client, text).raise_for_status().json()
    assert file["bytes"] == len(text.encode())
    assert client.get(f"/v1/files/{file['id']}/content").text == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"expires_after[seconds]": "1"}, "expires_after[seconds]"),
        ({"expires_after[seconds]": "²"}, "expires_after[seconds]"),
    ],
)
def test_a_form_that_asks_for_something_else_is_refused(
    fields: dict[str, str], param: str, client: httpx.Client
) -> None:
    refused = upload(client, line("a"), **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert client.get("/v1/files").json()["data"] == []


def test_what_is_no_text_is_refused_and_leaves_nothing(server: LiveServer, client: httpx.Client) -> None:
    refused = upload(client, b"\xff" * 600_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_file")
    later = time.time() + 1
    for kind in (FILE, PART):
        assert server.runtime.sessions.store.expired(later, limit=9, kind=kind) == []


_HEAD = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--x",
        b"no form",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nno file\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; filename="a"\r\n\r\nno name\r\n--x--\r\n',
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"a" * 9000 + b"\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="\xff"; filename="\xff"\r\n\r\n\r\n--x--\r\n',
        b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n" * 99,
    ],
)
def test_what_is_no_form_is_400(body: bytes, client: httpx.Client) -> None:
    answer = client.post("/v1/files", content=body, headers=_HEAD)
    assert answer.status_code == 400, answer.text
    assert client.post("/v1/files", content=body, headers={"content-type": "multipart/form-data"}).is_error
    assert client.post("/v1/files", json={}).status_code == 415


def test_a_line_without_an_end_is_refused_before_it_is_put_together(tmp_path: Path) -> None:
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, body_bytes=300_000) as server,
        server.client() as client,
    ):
        done = ended(client, begin(client, "x" * 3_000_000)["id"])
        assert done["status"] == "failed"
        assert "300000 characters" in done["errors"]["data"][0]["message"]


# Keys.


def test_files_and_batches_of_another_key_are_not_there(tmp_path: Path) -> None:
    ada, bob = new_key("ada", tokens_per_day=100_000), new_key("bob")
    keys = Keys([ada[1], bob[1]])
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=keys) as server,
        server.client(ada[0]) as client,
        server.client(bob[0]) as other,
    ):
        done = ended(client, begin(client, chats(2))["id"])
        for file_id in (done["input_file_id"], done["output_file_id"]):
            assert other.get(f"/v1/files/{file_id}").status_code == 404
            assert other.get(f"/v1/files/{file_id}/content").status_code == 404
            assert other.delete(f"/v1/files/{file_id}").status_code == 404
        assert other.get(f"/v1/batches/{done['id']}").status_code == 404
        assert other.post(f"/v1/batches/{done['id']}/cancel", json={}).status_code == 404
        assert other.get("/v1/batches").json()["data"] == other.get("/v1/files").json()["data"] == []
        body = {"input_file_id": done["input_file_id"], "endpoint": CHAT}
        assert other.post("/v1/batches", json=body).status_code == 404
        # The key of the batch has paid for its tokens.
        answers = content(client, done["output_file_id"])
        paid = sum(each["response"]["body"]["usage"]["total_tokens"] for each in answers)
        assert keys.usage.tokens_left(ada[1], time.time()) == 100_000 - paid


def test_a_key_pays_and_one_that_is_withdrawn_ends_its_batches(tmp_path: Path) -> None:
    secret, key = new_key("ada")
    keys = Keys([key])
    gate = Turnstile()
    with (
        open_toy(gate=gate, n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=keys) as server,
        server.client(secret) as client,
    ):
        begun = begin(client, chats(8, max_tokens=6))
        gate.admit(30)
        until(client, begun["id"], lambda shown: shown["status"] == "in_progress")
        spare, other = new_key("ada")
        keys.replace([other], required=True)
        gate.open()
        with server.client(spare) as again:
            done = ended(again, begun["id"])
            assert done["status"] == "failed"
            assert done["errors"]["data"][0]["code"] == "key_withdrawn"
            assert done["request_counts"]["completed"] + done["request_counts"]["failed"] == 8
            errors = content(again, done["error_file_id"])
            assert {each["error"]["code"] for each in errors} == {"key_withdrawn"}


@pytest.mark.parametrize("limit", [{"tokens_per_day": 100}, {"requests_per_minute": 6}])
def test_a_batch_waits_where_its_key_may_ask_no_more(
    limit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "LONGEST", 0.02)
    secret, key = new_key("ada")
    keys = Keys([replace(key, **limit)])
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=keys) as server,
        server.client(secret) as client,
    ):
        begun = begin(client, chats(12))
        until(client, begun["id"], lambda shown: shown["request_counts"]["completed"] > 0)
        time.sleep(1)
        shown = client.get(f"/v1/batches/{begun['id']}").json()
        assert shown["status"] == "in_progress"
        assert shown["request_counts"]["completed"] < 6
        assert shown["request_counts"]["failed"] == 0
        keys.replace([key], required=True)
        done = ended(client, begun["id"])
        assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


def test_what_a_batch_keeps_counts_by_its_bytes(tmp_path: Path) -> None:
    secret, key = new_key("ada", sessions=1, stored_bytes=20_000)
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt, keys=Keys([key])) as server,
        server.client(secret) as client,
    ):
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        # More records than sessions are allowed: they are none.
        done = ended(client, begin(client, chats(3))["id"])
        assert done["request_counts"]["completed"] == 3
        refused = upload(client, "x" * 30_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        full = ended(client, begin(client, chats(30))["id"])
        assert (full["status"], full["errors"]["data"][0]["code"]) == ("failed", "not_kept")
        # What was answered until then is there.
        kept = content(client, full["output_file_id"])
        assert 0 < len(kept) == full["request_counts"]["completed"] < 30
        for each in client.get("/v1/files").json()["data"]:
            client.delete(f"/v1/files/{each['id']}").raise_for_status()
        assert upload(client, "x" * 2000).status_code == 200


# Ends.


def test_a_batch_is_cancelled(tmp_path: Path) -> None:
    gate = Turnstile()
    with (
        open_toy(gate=gate, n_ctx=1024, store=tmp_path) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        begun = begin(client, chats(9, max_tokens=6))
        gate.admit(40)
        until(client, begun["id"], lambda shown: shown["status"] == "in_progress")
        assert client.delete(f"/v1/files/{begun['input_file_id']}").status_code == 409
        shown = client.post(f"/v1/batches/{begun['id']}/cancel", json={}).raise_for_status().json()
        assert shown["status"] == "cancelling"
        gate.open()
        done = ended(client, begun["id"])
        assert done["status"] == "cancelled"
        errors = content(client, done["error_file_id"])
        answers = content(client, done["output_file_id"])
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert len(errors) + len(answers) == 9
        assert client.delete(f"/v1/files/{begun['input_file_id']}").status_code == 200


def test_one_that_takes_too_long_expires(
    client: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "WINDOW", 0)
    done = ended(client, begin(client, chats(2))["id"])
    assert done["status"] == "expired"
    assert [each["error"]["code"] for each in content(client, done["error_file_id"])] == ["batch_expired"] * 2


def test_files_and_batches_go_when_they_are_old(client: httpx.Client, server: LiveServer) -> None:
    done = ended(client, begin(client, chats(2))["id"])
    store = server.runtime.sessions.store
    later = time.time() + 40 * 86400
    sweep(store, later)
    batch_module.sweep(store, later)
    for kind in (FILE, PART, ANSWER, BATCH):
        assert store.expired(later, limit=9, kind=kind) == []
    assert client.get(f"/v1/batches/{done['id']}").status_code == 404


def test_a_file_whose_deletion_was_cut_short_goes_at_the_next_sweep(
    client: httpx.Client, server: LiveServer
) -> None:
    file_id = upload(client, "x" * 600_000).json()["id"]
    store = server.runtime.sessions.store
    record = store.record("", FILE, file_id)
    store.note(record, {**record.origin, "state": "deleted"})
    store.delete(store.record("", PART, f"{file_id}-000002"))
    assert client.get(f"/v1/files/{file_id}").status_code == 404
    sweep(store, time.time())
    assert store.expired(time.time() + 1, limit=9, kind=FILE) == []
    assert store.expired(time.time() + 1, limit=9, kind=PART) == []


def test_what_a_server_left_the_next_one_goes_on_with(tmp_path: Path) -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=1024, store=tmp_path) as rt, live_server(rt, grace_seconds=0.01) as server:
        with server.client() as client:
            begun = begin(client, chats(10, max_tokens=6))
            gate.admit(60)
            until(client, begun["id"], lambda shown: shown["request_counts"]["completed"] > 0)
        gate.open()
        server.http_server.stop(now=True)
    first = _answers(tmp_path, begun["id"])
    assert len(first) > 0
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as rt,
        live_server(rt) as server,
        server.client() as client,
    ):
        done = ended(client, begun["id"])
        assert done["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        answers = content(client, done["output_file_id"])
        assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{n}" for n in range(10))
        # What had an answer has that one.
        assert first.items() <= {each["custom_id"]: each["id"] for each in answers}.items()


def _answers(folder: Path, batch_id: str) -> dict[str, str]:
    """The ids of the answers that are written down, by the ids of their lines."""
    found = {}
    with opened(ToyModel(), store=folder) as rt:
        for number in range(20):
            try:
                record = rt.sessions.store.record("", ANSWER, answer_name(batch_id, number))
            except SessionNotFoundError:
                continue
            answer = json.loads(record.origin["line"])
            found[answer["custom_id"]] = answer["id"]
    return found


def test_an_answer_is_written_down_once(server: LiveServer, client: httpx.Client) -> None:
    file_id = upload(client, chats(1)).json()["id"]
    batches = Batches(server.runtime.sessions.store, "")
    batch = batches.create(CHAT, file_id, {}, None)
    batches.answer(batch, 0, {"id": "first"}, ok=True)
    batches.answer(batch, 0, {"id": "second"}, ok=False)
    assert batches.has_answer(batch, 0) is True


def test_the_server_s_failures_are_asked_again(
    server: LiveServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "PAUSE", 0.01)
    seen: list[int] = []
    routes = server.state.routes
    broken = [503, 429, 500, 500, 500]

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        if broken:
            seen.append(broken[0])
            await Response("{}", broken.pop(0))(scope, receive, send)
        else:
            await routes(scope, receive, send)

    monkeypatch.setattr(server.state, "routes", failing)
    done = ended(client, begin(client, chats(1))["id"])
    assert seen == [503, 429, 500, 500, 500]
    assert done["request_counts"]["completed"] == 1
    broken += [500] * 4
    done = ended(client, begin(client, chats(1))["id"])
    assert done["request_counts"]["failed"] == 1
    [error] = content(client, done["error_file_id"])
    assert error["response"]["status_code"] == 500


def test_others_are_answered_first(tmp_path: Path) -> None:
    """A batch takes half of the slots and stands behind everybody."""
    with opened(ToyModel(reply_tokens=64), n_ctx=1024, slots=4, store=tmp_path) as rt:
        asked: list[Any] = []
        submit = rt.backend.submit

        def noted(request: Any) -> Any:
            asked.append(request)
            return submit(request)

        rt.backend.submit = noted  # type: ignore[method-assign]
        with live_server(rt) as server, server.client() as client:
            done = ended(client, begin(client, chats(6))["id"])
            assert done["status"] == "completed"
            assert {request.priority for request in asked} == {"background"}


def test_a_list_comes_in_pages(client: httpx.Client) -> None:
    ids = [upload(client, f"{n}").json()["id"] for n in range(5)][::-1]
    found: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = client.get("/v1/files", params=params).raise_for_status().json()
        found += [each["id"] for each in page["data"]]
        assert page["last_id"] == found[-1]
        if not page["has_more"]:
            break
        params["after"] = page["last_id"]
    assert found == ids
    assert client.get("/v1/files", params={"after": "file-nobody"}).status_code == 404


# The command.


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["batch", *args])
    return result.exit_code, result.stdout, f"{result.stderr}{result.exception or ''}"


def test_the_command_writes_answers_and_errors(server: LiveServer, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(chats(2) + "\n" + line("bad", temperature="warm"))
    code, shown, _ = run(str(asked), "--url", server.url)
    assert code == 0
    assert "completed: 2 answered, 1 failed" in shown
    assert len((tmp_path / "asked.jsonl.answers.jsonl").read_text().splitlines()) == 2
    assert "bad" in (tmp_path / "asked.jsonl.answers.errors.jsonl").read_text()
    code, batch_id, _ = run(str(asked), "--url", server.url, "--no-wait")
    out = tmp_path / "out.jsonl"
    code, shown, _ = run(batch_id.strip(), "--url", server.url, "--out", str(out), "--json")
    assert json.loads(shown)["status"] == "completed"
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("text", ["", "{}", "x", '{"url": "/v1/else"}'])
def test_the_command_says_what_a_line_is(text: str, server: LiveServer, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(text)
    code, _, said = run(str(asked), "--url", server.url)
    assert code != 0
    assert "custom_id, method, url and body" in said


def test_the_command_tells_of_a_file_that_is_wrong(server: LiveServer, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text(line("a") + "\n{")
    code, shown, said = run(str(asked), "--url", server.url)
    assert code == 1
    assert shown.startswith("failed: 0 answered")
    assert "line 2: the line is no JSON" in said
