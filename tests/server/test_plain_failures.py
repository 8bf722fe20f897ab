"""Y11: a client with a key hears that the server failed, and not where: the log has the whole."""

from __future__ import annotations

import contextvars
from pathlib import Path

import pytest

from decode.observed import toy
from perdure.chat.prefetch import PAYER
from perdure.errors import QuotaError, StoreFullError
from perdure.server.core import api_error
from perdure.server.core.api_error import to_api_error
from perdure.server.core.keys import KeyAccount, Keys, new_key
from server.live_server import live_server, opened

SECRETS = "/srv/secret/sessions.sqlite of user postgres at db.internal:5432, schema tenants"
WORDS = ("/srv", "sqlite", "postgres", "db.internal", "tenants")
FAILURES = sorted({known for known, status, _, _ in api_error.BY_CLASS if status >= 500}, key=str)


def made(known: type[Exception]) -> Exception:
    error = known.__new__(known)
    error.args = (SECRETS,)
    return error


@pytest.mark.parametrize("known", FAILURES)
def test_y11_every_failure_of_the_server_is_plain_where_there_are_keys(
    known: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Y11: one rule for every 5xx, by the table of all errors; without keys all is said."""
    error = made(known)
    assert str(to_api_error(error)) == SECRETS
    with_key = contextvars.copy_context()
    with_key.run(PAYER.set, KeyAccount(new_key("ada")[1], Keys()))
    shown = with_key.run(to_api_error, error)
    assert shown.status >= 500
    if known is QuotaError:
        assert str(shown) == SECRETS, "what a key may store is its own affair"
        return
    assert not any(word in str(shown) for word in WORDS)
    assert SECRETS in caplog.text


def test_y11_a_store_that_fails_is_not_described_to_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Y11: in routes, in protocols, in streams, and in a reply whose turn could not be kept."""
    secret, key = new_key("ada")

    def full(*_: object, **__: object) -> None:
        raise StoreFullError(f"the disk is full: {SECRETS}", needed=1)

    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with (
        opened(toy(), store=tmp_path) as rt,
        live_server(rt, keys=Keys([key])) as server,
        server.client(secret) as client,
    ):
        client.post("/v1/sessions", json={"name": "a"}).raise_for_status()
        with monkeypatch.context() as patched:
            patched.setattr(rt.sessions.store, "add", full)
            texts = [
                client.post("/v1/sessions/a/turns", json={"message": "Hi", "max_tokens": 4}).text,
                client.post("/v1/chat/completions", json={**said, "perdure": {"session": "a"}}).text,
                client.post(
                    "/v1/chat/completions", json={**said, "stream": True, "perdure": {"session": "a"}}
                ).text,
                client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4}).text,
                client.post("/v1/sessions/a/append", json={"message": "Hi"}).text,
            ]
            stored = client.post(
                "/v1/responses", json={"input": "Hi", "max_output_tokens": 4, "stream": True}
            )
            texts.append(stored.text)
        assert "cannot use its store" in texts[0]
        assert SECRETS in caplog.text
        # A store that is gone altogether.
        rt.sessions.store.index.close()  # type: ignore[attr-defined]
        for method, path, body in (
            ("GET", "/v1/sessions", None),
            ("POST", "/v1/sessions", {"name": "b"}),
            ("POST", "/v1/chat/completions", {**said, "perdure": {"session": "a"}}),
            ("POST", "/v1/messages", {**said, "model": "toy", "perdure": {"session": "a"}}),
            ("POST", "/api/chat", {**said, "model": "toy", "perdure": {"session": "a"}}),
            ("POST", "/v1/responses", {"input": "Hi"}),
            ("GET", "/v1/responses/resp_" + "0" * 32, None),
            ("GET", "/v1/memories", None),
        ):
            answer = client.request(method, path, json=body)
            texts.append(answer.text)
            assert answer.status_code in (404, 503, 529), answer.text
        assert str(tmp_path) in caplog.text, "the log has the whole"
    for text in texts:
        assert not any(word in text for word in (*WORDS, str(tmp_path))), text
