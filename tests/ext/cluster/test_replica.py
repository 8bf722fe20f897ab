"""A replica without Ray and without a socket: it answers like a server, and knows what is warm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from perdure.ext.cluster.ray.marks import ask_of
from perdure.ext.cluster.ray.replica import Head, OwnFolder, Replica, ReplicaCall
from perdure.server.core.server_state import ServerState
from perdure.testing.toy import ToyModel


@pytest.fixture
def replica() -> Iterator[Replica]:
    runtime = perdure.open(ToyModel(), n_ctx=256, slots=2)
    found = Replica(ServerState(runtime=runtime, name="toy", hosts=None))
    try:
        yield found
    finally:
        found.close()


def call(path: str, body: object = None, method: str = "POST") -> ReplicaCall:
    data = b"" if body is None else json.dumps(body).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()))
    return ReplicaCall(
        method=method, path=path, query=b"", headers=headers, body=data, ask=ask_of(path, headers, data)
    )


def say(text: str, session: str, **more: object) -> ReplicaCall:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": text}],
        "perdure": {"session": session},
        "max_tokens": 4,
        **more,
    }
    return call("/v1/chat/completions", body)


def answered(replica: Replica, asked: ReplicaCall) -> tuple[Head, bytes]:
    async def read() -> tuple[Head, bytes]:
        pieces = [piece async for piece in replica.answer(asked)]
        head = pieces[0]
        assert isinstance(head, Head)
        return head, b"".join(piece for piece in pieces[1:] if isinstance(piece, bytes))

    return asyncio.run(read())


def test_it_answers_and_tells_what_is_warm(replica: Replica) -> None:
    assert replica.facts().marks == {}
    asked = say("hello", "trip")
    head, body = answered(replica, asked)
    assert head.status == 200
    usage = json.loads(body)["usage"]
    facts = replica.facts()
    assert facts.marks == {asked.ask.marks[0][0]: usage["total_tokens"]}
    assert 0 < facts.full < 1
    again, _ = answered(replica, say("more", "trip"))
    assert again.status == 200
    assert replica.reused > 0
    assert facts.slots == 2
    assert replica.facts().queue == 0


def test_a_refused_request_is_warm_nowhere(replica: Replica) -> None:
    head, body = answered(replica, say("hello", "trip", max_tokens=-1))
    assert head.status == 400
    assert b"max_tokens" in body
    assert replica.facts().marks == {}


def test_a_client_that_leaves_ends_its_reply(replica: Replica) -> None:
    async def leave() -> None:
        pieces = replica.answer(say("hello", "trip", stream=True, max_tokens=200))
        assert isinstance(await anext(pieces), Head)
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    # Its slot is free a moment after it was cancelled: the next reply can only have one then.
    slots = replica.state.models.first.runtime.slots
    for number in range(slots):
        assert answered(replica, say("hello", f"next{number}"))[0].status == 200
    assert replica.facts().queue == 0


def test_one_that_drains_says_so(replica: Replica) -> None:
    assert answered(replica, call("/ready", method="GET"))[0].status == 200
    replica.drain()
    assert answered(replica, call("/ready", method="GET"))[0].status == 503
    assert replica.facts().draining
    assert answered(replica, say("hello", "trip"))[0].status == 200


def test_two_replicas_of_a_machine_have_two_folders_and_the_next_one_takes_over(tmp_path: Path) -> None:
    store = "postgresql://perdure@127.0.0.1/chats?schema=here&lease=5"
    one, two = OwnFolder(store, str(tmp_path)), OwnFolder(store, str(tmp_path))
    assert one.path != two.path
    assert "schema=here" in one.store
    assert "lease=5" in one.store
    one.release()
    three = OwnFolder(store, str(tmp_path))
    assert three.path == one.path
    two.release()
    three.release()
