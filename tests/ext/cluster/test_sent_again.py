"""Requests that are sent again because nobody knows what became of them: a turn is kept once."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from ext.cluster.harness import SETTINGS, replicas
from ext.cluster.servers import PostgresServer


def body(session: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Once?"}]
    return {"model": "toy", "messages": messages, "perdure": {"session": session}, **SETTINGS}


def test_a_request_that_waits_in_a_replica_that_hangs_is_kept_once_if_it_has_a_key(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """What lies in the socket of a replica that hangs is read when that comes back. By then its client has
    sent it again elsewhere: without a key both are kept."""
    keys: dict[str, dict[str, str]] = {"with": {"idempotency-key": "one"}, "without": {}}
    with (
        replicas(postgres.url(tmp_path / "r0", lease=2), tmp_path, 2) as (hangs, other),
        httpx.Client(base_url=f"http://127.0.0.1:{other.port}", trust_env=False, timeout=60) as client,
        ExitStack() as held,
    ):
        held.callback(hangs.process.send_signal, signal.SIGCONT)
        hangs.process.send_signal(signal.SIGSTOP)
        waiting, again = {}, {}
        for session, headers in keys.items():
            waiting[session] = http.client.HTTPConnection("127.0.0.1", hangs.port, timeout=60)
            held.callback(waiting[session].close)
            sent = {"content-type": "application/json", **headers}
            waiting[session].request("POST", "/v1/chat/completions", json.dumps(body(session)), sent)
            again[session] = client.post("/v1/chat/completions", json=body(session), headers=headers)
            assert again[session].status_code == 200, again[session].text
        hangs.process.send_signal(signal.SIGCONT)
        late = {session: each.getresponse() for session, each in waiting.items()}
        told = {session: json.loads(each.read()) for session, each in late.items()}
        turns = {session: client.get(f"/v1/sessions/{session}/turns").json()["data"] for session in keys}
    assert (late["without"].status, len(turns["without"])) == (200, 2)
    assert (late["with"].status, told["with"]["error"]["code"]) == (409, "turn_kept")
    [turn] = turns["with"]
    assert turn["reply"]["content"] == again["with"].json()["choices"][0]["message"]["content"]
