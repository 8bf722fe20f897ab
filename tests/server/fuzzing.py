"""Fuzzer of the server: sequences of calls that schemathesis makes up, by two keys and a client that drops.

Run by itself for as long as one likes: `python -m server.fuzzing SECONDS [SEED]`, in the folder tests. A
round that fails tells its seed; one that ever did is added to `SEEDS`.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

import zoo
from decode.observed import toy
from perdure.decode.request import Request
from perdure.server.app import build
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.server_state import ServerState
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened
from server.odd_values import BODIES, odd_body

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
_LAST_EVENTS = frozenset({"error", "response.completed", "response.incomplete", "response.failed"})
FILE = {"content-type": "application/octet-stream"}
NAMES = ("alpha", "beta", "gamma")
"""Of sessions: few, so that calls meet, and the same for both keys."""
MARKS = {"a": "zqxav-one", "b": "zqxbw-two"}
"""What only one of the callers ever says."""
_TEXTS = ("system", "message", "prompt", "note", "content", "input")
CONVERSING = (CHAT, "/v1/messages", "/v1/responses", "/api/chat")
NAMED = ("", "prompt_cache_key", "x-claude-code-session-id", "x-session-affinity")
"""How a client names its conversations: not at all, both alike, or each by a header."""
HABITS = ("kept", "dropped", "doubled")
"""What becomes of an earlier message's reminder."""
WORDS = ("zqmarzipan", "zqtulip")
"""In the reminders of one conversation and of the other."""


@dataclass
class Counts:
    """What came of a run."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    dropped: int = 0
    prompts: int = 0
    """Of interleaved conversations, read as the model reads them."""
    sequences: int = 0

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{sum(self.statuses.values())} requests in {self.sequences} sequences over {len(self.calls)} "
            f"operations, {self.dropped} more that were dropped, {self.prompts} prompts of interleaved "
            f"conversations: {statuses}"
        )


@dataclass(frozen=True)
class Call:
    """One step of a sequence."""

    caller: str
    case: Any
    name: str
    other: str
    drop_after: int | None
    """Bytes of the answer after which a client goes away; None for one that stays."""


class Fuzzer:
    """Makes calls to a server with two keys, and watches what comes back."""

    def __init__(self, server: LiveServer, secrets: dict[str, str]) -> None:
        self.counts = Counts()
        self._server = server
        self._secrets = secrets
        with opened(toy()) as rt:
            document = build(ServerState(runtime=rt, name="toy", keys=server.state.keys)).openapi()
        operations = [found.ok() for found in _operations(document)]
        self._cases = st.one_of([operation.as_strategy() for operation in operations])
        self._clients = {caller: server.client(secret) for caller, secret in secrets.items()}

    def run(self, sequences: int, start: int) -> None:
        """As many sequences, made up anew for each `start`."""
        call = st.builds(
            Call,
            caller=st.sampled_from(sorted(MARKS)),
            case=self._cases,
            name=st.sampled_from(NAMES),
            other=st.sampled_from(NAMES),
            drop_after=st.sampled_from([None, None, None, None, 0, 200]),
        )

        @seed(start)
        @settings(
            max_examples=sequences,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(call, min_size=4, max_size=12))
        def one(calls: list[Call]) -> None:
            self.counts.sequences += 1
            for each in calls:
                self._make(each)
            self._odd_bodies(calls[0].caller, random.Random(f"{start} {self.counts.sequences}"))
            self._reimport(calls[0].caller, calls[0].name)
            self.interleave(random.Random(f"{start} {self.counts.sequences} interleaved"))

        one()

    def finish(self) -> None:
        """Whatever happened, everything that is listed can be read and deleted, and both are served."""
        for caller, client in self._clients.items():
            for listed in client.get("/v1/sessions").json()["data"]:
                path = f"/v1/sessions/{quote(listed['name'], safe='')}"
                for suffix in ("", "/turns", "/transcript", "/plan"):
                    self._check(caller, ("GET", f"name{suffix}"), client.get(path + suffix), {200})
                self._check(caller, ("DELETE", "name"), client.delete(path), {200})
            self._check(caller, ("POST", CHAT), client.post(CHAT, json=hello()), {200})

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def interleave(self, chance: random.Random) -> None:
        """C13: two conversations that begin with the same words, of one caller or of two, in turn. Each has
        reminders that the other has not, and no prompt has words of both."""
        protocol, named, habit = chance.choice(CONVERSING), chance.choice(NAMED), chance.choice(HABITS)
        callers = chance.choice((("a", "a"), ("a", "b"), ("b", "b")))
        app = f"app-{chance.getrandbits(60)}"
        talks: list[list[dict[str, str]]] = [[], []]
        prompts: list[str] = []
        with self._prompts_seen(prompts):
            for turn in range(3):
                for which in chance.sample((0, 1), 2):
                    caller, talk = callers[which], talks[which]
                    reminder = f"\n<system-reminder>{MARKS[caller]} {WORDS[which]}{turn}</system-reminder>"
                    messages = [*talk, {"role": "user", "content": f"Part {turn}?{reminder}"}]
                    answer = self._clients[caller].post(
                        protocol,
                        json=conversation_body(
                            protocol, messages, app if named == "prompt_cache_key" else ""
                        ),
                        headers={named: f"{app}-{which}"} if "-" in named else {},
                    )
                    self._check(caller, ("POST", f"{protocol} interleaved"), answer)
                    reply = conversation_reply(answer.json()) if answer.status_code == 200 else ""
                    shown = {"kept": reminder, "dropped": "", "doubled": reminder * 2}[habit]
                    talk.append({"role": "user", "content": f"Part {turn}?{shown}"})
                    talk.append({"role": "assistant", "content": reply or "OK"})
        for prompt in prompts:
            self.counts.prompts += 1
            assert not all(word in prompt for word in WORDS), f"{protocol}, {named}, {habit}: {prompt}"

    @contextmanager
    def _prompts_seen(self, prompts: list[str]) -> Iterator[None]:
        runtime = self._server.runtime
        submit = runtime.backend.submit

        def seen(request: Request) -> Any:
            read = b"".join(runtime.model.piece(token, special=True) for token in request.prompt)
            prompts.append(read.decode("utf-8", "replace"))
            return submit(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime.backend, "submit", seen)
            yield

    def _make(self, call: Call) -> None:
        case = call.case
        self._tame(call)
        headers = {"authorization": f"Bearer {self._secrets[call.caller]}"}
        try:
            kwargs = case.as_transport_kwargs(base_url=self._server.url)
            prepared = requests.Request(
                **{**kwargs, "headers": {**kwargs["headers"], **headers}, "cookies": None}
            ).prepare()
        except (ValueError, UnicodeError):
            # What HTTP cannot say is never sent.
            return
        body = prepared.body or b""
        content = body.encode("utf-8", "replace") if isinstance(body, str) else body
        assert isinstance(content, bytes)
        operation = (case.method, case.path)
        if call.drop_after is not None:
            self._drop(prepared, content, call.drop_after)
            return
        answer = self._clients[call.caller].request(
            case.method,
            prepared.url or "",
            headers=_sendable(prepared.headers),
            content=content,
        )
        self._check(call.caller, operation, answer)

    def _tame(self, call: Call) -> None:
        """Short replies, few names, and texts by which it can be told whose they are."""
        case, mark = call.case, MARKS[call.caller]
        for name in case.path_parameters or {}:
            if name == "name":
                case.path_parameters[name] = call.name
        if not isinstance(case.body, dict):
            return
        body = case.body
        for name in ("max_tokens", "max_completion_tokens"):
            if name in body or name == "max_tokens":
                body[name] = body[name] if body.get(name) in (1, 2, "x") else 4
        for name in ("n", "best_of"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 2)
        for name in _TEXTS:
            if isinstance(body.get(name), str):
                body[name] = f"{mark} {body[name][:40]}"
        for message in body.get("messages") or () if isinstance(body.get("messages"), list) else ():
            if isinstance(message, dict) and isinstance(message.get("content"), str):
                message["content"] = f"{mark} {message['content'][:40]}"
        if isinstance(body.get("name"), str) and "{name}" in case.path:
            body["name"] = call.other
        elif isinstance(body.get("name"), str) and body["name"]:
            body["name"] = call.name

    def _drop(self, prepared: requests.PreparedRequest, content: bytes, after: int) -> None:
        """Ask, and go away: at once, or in the middle of the answer."""
        lines = [f"{prepared.method} {prepared.path_url} HTTP/1.1", f"host: 127.0.0.1:{self._server.port}"]
        kept = _sendable(prepared.headers)
        lines += [f"{name}: {value}" for name, value in kept.items() if name.lower() != "content-length"]
        lines += [f"content-length: {len(content)}", "", ""]
        with suppress(ConnectionError), self._server.connect() as connection:
            connection.sendall("\r\n".join(lines).encode("latin-1", "replace") + content)
            if after:
                connection.settimeout(PATIENCE)
                connection.recv(after)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.counts.dropped += 1

    def _odd_bodies(self, caller: str, chance: random.Random) -> None:
        """Bodies with something odd in one place: one for any protocol, and some over one WebSocket."""
        protocol = chance.choice(sorted(BODIES))
        answer = self._clients[caller].post(protocol, content=odd_body(protocol, chance), headers=JSON)
        self._check(caller, ("POST", protocol), answer)
        headers = {"authorization": f"Bearer {self._secrets[caller]}"}
        url = f"ws{self._server.url.removeprefix('http')}/v1/responses"
        with connect(url, additional_headers=headers, close_timeout=1) as socket:
            for _ in range(2):
                asked = odd_body("/v1/responses", chance).decode()
                socket.send('{"type": "response.create", ' + asked[1:])
                event: dict[str, Any] = {"type": ""}
                while event["type"] not in _LAST_EVENTS:
                    text = str(socket.recv(timeout=PATIENCE))
                    event = json.loads(text)
                    for other, mark in MARKS.items():
                        assert other == caller or mark not in text, f"a WebSocket shows a text of {other}"
                status = event.get("status", 200)
                self.counts.calls["WEBSOCKET", "/v1/responses"] += 1
                self.counts.statuses[status if isinstance(status, int) else 200] += 1
                assert not isinstance(status, int) or status < 500 or status == 504, event

    def _reimport(self, caller: str, name: str) -> None:
        """A session of one's own, exported, damaged and taken in again."""
        client = self._clients[caller]
        exported = client.get(f"/v1/sessions/{name}/export")
        self._check(caller, ("GET", "export"), exported)
        if exported.status_code != 200:
            return
        chance = random.Random(self.counts.sequences)
        data = bytearray(exported.content)
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        taken = client.post(
            "/v1/sessions/import", params={"name": "taken"}, content=bytes(data), headers=FILE
        )
        self._check(caller, ("POST", "import"), taken)
        if taken.status_code == 201:
            said = client.post("/v1/sessions/taken/turns", json={"message": MARKS[caller], "max_tokens": 2})
            self._check(caller, ("POST", "turns"), said)
            self._check(caller, ("DELETE", "taken"), client.delete("/v1/sessions/taken"), {200})

    def _check(
        self,
        caller: str,
        operation: tuple[str, str],
        answer: httpx.Response,
        expected: set[int] | None = None,
    ) -> None:
        self.counts.calls[operation] += 1
        self.counts.statuses[answer.status_code] += 1
        where = f"{operation} by {caller}: {answer.status_code} {answer.text[:500]}"
        # Where a summary is drawn, its first token may be the end.
        empty = answer.status_code == 500 and '"code":"empty"' in answer.text.replace(" ", "")
        assert answer.status_code < 500 or answer.status_code == 504 or empty, where
        assert expected is None or answer.status_code in expected, where
        for other, mark in MARKS.items():
            if other != caller:
                assert mark not in answer.text, f"{where}: it shows a text of {other}"


def conversation_body(protocol: str, messages: Sequence[dict[str, str]], cache_key: str) -> dict[str, Any]:
    """The same conversation in the words of each protocol. All replies are alike."""
    system = "You are terse.\nToday is 2026-11-18."
    more: dict[str, Any] = {"perdure": {"regex": "OK"}}
    if cache_key and protocol in (CHAT, "/v1/responses"):
        more["prompt_cache_key"] = cache_key
    if protocol == "/v1/messages":
        return {"system": system, "messages": messages, "max_tokens": 8, **more}
    if protocol == "/v1/responses":
        return {"instructions": system, "input": messages, "max_output_tokens": 8, **more}
    said = [{"role": "system", "content": system}, *messages]
    if protocol == "/api/chat":
        return {"model": "toy", "messages": said, "stream": False, "options": {"num_predict": 8}, **more}
    return {"messages": said, "max_tokens": 8, **more}


def conversation_reply(answer: dict[str, Any]) -> str:
    """What the model said, in whichever protocol."""
    if "choices" in answer:
        return answer["choices"][0]["message"].get("content") or ""
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
    elif "content" in answer:
        parts = answer["content"]
    else:
        return str(answer["message"]["content"])
    return "".join(part.get("text", "") for part in parts)


def _operations(document: dict[str, Any]) -> list[Any]:
    return list(schemathesis.openapi.from_dict(document).get_all_operations())


def _sendable(headers: Any) -> dict[str, str]:
    """Headers as a client can send them."""
    found = {str(name): str(value) for name, value in dict(headers).items()}
    return {
        name: value
        for name, value in found.items()
        if name.isascii() and value.isascii() and value.isprintable() and name.lower() != "host"
    }


@contextmanager
def checked_prompts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERDURE_CHECK_PROMPTS", "1")
        yield


@contextmanager
def fuzzed(model: Any, store: Path, **settings: Any) -> Iterator[Fuzzer]:
    """A fuzzer on its own server, which traces every word of a prompt to its source (C13). At the end nobody
    is served and the engine never died."""
    made = {caller: new_key(f"caller-{caller}") for caller in MARKS}
    keys = Keys([key for _, key in made.values()])
    with (
        checked_prompts(),
        opened(model, slots=4, store=store, **settings) as rt,
        live_server(rt, keys=keys, hosts=None) as server,
    ):
        fuzzer = Fuzzer(server, {caller: secret for caller, (secret, _) in made.items()})
        with closing(fuzzer):
            yield fuzzer
            fuzzer.finish()
        assert server.state.models.first.engine() == ("ready", 0)


SEEDS: tuple[int, ...] = ()
"""Rounds that have failed once: each run begins with them."""


def fuzz(
    fuzzer: Fuzzer, *, seconds: float, first: int | None = None, told: Callable[[str], object] = print
) -> None:
    """Sequences until the time is up, and how many there were. `first` is the seed of the first round."""
    until = time.monotonic() + seconds
    start = random.SystemRandom().randrange(1 << 30) if first is None else first
    for rounds, number in enumerate(chain(SEEDS if first is None else (), count(start)), 1):
        try:
            fuzzer.run(20, number)
        except BaseException:
            told(f"seed {number} ended it: `python -m server.fuzzing 1 {number}` begins with that one")
            raise
        if time.monotonic() >= until:
            break
        if rounds % 10 == 0:
            told(str(fuzzer.counts))
    told(f"{rounds} rounds in {seconds:g} s from seed {start}: {fuzzer.counts}")


def main(seconds: float, first: int | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = zoo.write("llama", Path(folder))
        with fuzzed(path, Path(folder) / "store", threads=1, isolated=True) as fuzzer:
            try:
                fuzz(fuzzer, seconds=seconds, first=first, told=lambda line: print(line, flush=True))
            except BaseException:
                print(f"ended after {fuzzer.counts}", flush=True)
                raise
        print(json.dumps({str(status): count for status, count in sorted(fuzzer.counts.statuses.items())}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
