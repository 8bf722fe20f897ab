"""Programs that are killed while they answer, and what their sessions have then.

    python -m sessions.killing '{"surface": "chat", "rounds": 20, "seed": 1, "store": "/tmp/s"}'

Each round forks a victim, asks it something, and ends it by SIGKILL or SIGTERM at a random moment. Another
fork then opens the store, compares what is pending with what was sent, and has the reply continued. They are
forked, as a start of Python takes longer than all of that; so this runs in a process without threads.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

import perdure
from perdure import Runtime
from perdure.server.core.server_state import ServerState
from perdure.server.core.settings import Limits
from perdure.server.http_server import HttpServer, bind
from perdure.testing.toy import Faults, Gate, ToyModel

QUESTIONS = ("Tell me of the sea.", "And of 한국 🙂?", "Well")
SEEDS = (5, 6)
BIAS = {256: -100.0, 258: -100.0}
"""Against an early end."""
TOKENS = 250
PATIENCE = 120.0
HTTP = ("session", "chat", "messages", "ollama", "responses")
SURFACES = ("library", "command", *HTTP)


class Slow(Gate):
    """An engine that takes its time, so that a reply is longer than what may be lost of it."""

    def wait(self, stop: threading.Event) -> None:
        stop.wait(0.005)


@dataclass
class Found:
    """What all rounds have shown."""

    rounds: int = 0
    signals: dict[str, int] = field(default_factory=dict)
    unasked: int = 0
    """Ended before the question was accepted."""
    questions: int = 0
    """Pending, with nothing written yet."""
    parts: int = 0
    whole: int = 0
    failures: list[str] = field(default_factory=list)


def open_runtime(
    store: str | None, model: str | None = None, *, slow: bool = False, words: bool = False
) -> Runtime:
    """With `words` its replies are small letters and spaces, which are the same in a page."""
    length = TOKENS if words else None
    source: Any = model or ToyModel(faults=Faults(gate=Slow() if slow else None), reply_tokens=length)
    return perdure.open(source, store=store, n_ctx=512, slots=2, threads=1, exact=True)


def settings(surface: str, seed: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.9, "seed": seed, "speculate": 0}
    return asked if surface in ("ollama", "command") else {**asked, "logit_bias": BIAS}


def forked(work: Callable[[], Any]) -> Any:
    """What `work` gives in a separate child."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            result = pickle.dumps(work())
            with os.fdopen(writing, "wb") as out:
                out.write(result)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as coming:
        data = coming.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a child ended with {status}"
    return pickle.loads(data)


# Victims. Each tells by a pipe what its caller is sent.


def library(store: str, name: str, question: str, seed: int, out: int) -> None:
    rt = open_runtime(store, None, slow=True)
    stream = rt.session(name).submit(question, **settings("library", seed))
    os.write(out, b"\0")
    for delta in stream:
        os.write(out, delta.text.encode())


def server(store: str, listening: socket.socket, *, slow: bool = True, words: bool = False) -> None:
    with open_runtime(store, slow=slow, words=words) as rt:
        state = ServerState(runtime=rt, name="toy", limits=Limits(grace_seconds=0.1))
        HttpServer(state).run(sockets=[listening])


def command(store: str, name: str, question: str, seed: int, model: str, out: int) -> None:
    from perdure.cli import main

    reading, writing = os.pipe()
    os.write(writing, f"{question}\n".encode())
    os.dup2(reading, 0)
    os.dup2(out, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
    options = ["--session", name, "--store", store, "--ctx", "512"]
    options += ["-t", "0.9", "--seed", str(seed), "--max-tokens", str(TOKENS), "--speculate", "0"]
    sys.argv = ["perdure", "chat", model, *options]
    main()


def request(surface: str, name: str, question: str, seed: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Path, body and headers; its session is then called as `session_of` says."""
    messages = [{"role": "user", "content": question}]
    bias = {str(token): value for token, value in BIAS.items()}
    asked = {"max_tokens": TOKENS, "temperature": 0.9, "seed": seed, "logit_bias": bias, "stream": True}
    if surface == "session":
        return f"/v1/sessions/{name}/turns", {"message": question, **asked}, {}
    if surface == "chat":
        return "/v1/chat/completions", {"messages": messages, **asked, "perdure": {"session": name}}, {}
    if surface == "messages":
        return "/v1/messages", {"messages": messages, **asked}, {"x-claude-code-session-id": name}
    if surface == "ollama":
        options = {"num_predict": TOKENS, "temperature": 0.9, "seed": seed}
        body = {"messages": messages, "options": options, "stream": True}
        return "/api/chat", body, {"x-openwebui-chat-id": name}
    body = {"input": question, **asked, "max_output_tokens": TOKENS, "conversation": name}
    del body["max_tokens"]
    return "/v1/responses", body, {}


def session_of(surface: str, name: str) -> str:
    return {"messages": f"claude-code:{name}", "ollama": f"open-webui:{name}"}.get(surface, name)


def text_in(line: str) -> str:
    """The text of a reply in a line of a stream."""
    data = line.removeprefix("data: ")
    if not data.startswith("{"):
        return ""
    event = json.loads(data)
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    if isinstance(event.get("message"), dict):
        return str(event["message"].get("content") or "")
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


# Rounds.


@dataclass
class Hunt:
    """Rounds on one surface and one store."""

    surface: str
    rounds: int
    seed: int
    store: str
    model: str | None = None
    expected: dict[tuple[str, int], str] = field(default_factory=dict)

    def run(self) -> Found:
        drawn, found = random.Random(f"{self.surface} {self.seed}"), Found()
        for question, seed in itertools.product(QUESTIONS, SEEDS):
            if self.surface != "command":
                self.expected[question, seed] = forked(partial(self._undisturbed, question, seed))
        for number in range(self.rounds):
            question, seed = drawn.choice(QUESTIONS), drawn.choice(SEEDS)
            end = drawn.choice((signal.SIGKILL, signal.SIGTERM))
            wait = drawn.uniform(0, 1.6) if drawn.random() < 0.8 else drawn.uniform(0, 0.05)
            name = f"{self.surface}-{self.seed}-{number}"
            try:
                name, accepted, sent = self._victim(name, question, seed, end, wait)
                # What handles SIGTERM keeps all that it has sent.
                orderly = end == signal.SIGTERM and self.surface != "library"
                session = session_of(self.surface, name)
                seen = self._seen(session, sent, question, seed, accepted=accepted, orderly=orderly)
            except AssertionError as error:
                found.failures.append(f"{name}: {error}")
                continue
            found.rounds += 1
            found.signals[end.name] = found.signals.get(end.name, 0) + 1
            kind, problem = seen
            setattr(found, kind, getattr(found, kind) + 1)
            if problem:
                found.failures.append(f"{name} {end.name} after {wait:.3f}: {problem}")
        return found

    def _undisturbed(self, question: str, seed: int) -> str:
        with open_runtime(None, self.model) as rt:
            return rt.session("whole").say(question, **settings(self.surface, seed)).text

    def _victim(
        self, name: str, question: str, seed: int, end: signal.Signals, wait: float
    ) -> tuple[str, bool, str]:
        """Ask, and end what answers: the session's name, whether the question was accepted, what was sent."""
        if self.surface in HTTP:
            return self._served(name, question, seed, end, wait)
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                os.close(reading)
                if self.surface == "library":
                    library(self.store, name, question, seed, writing)
                else:
                    assert self.model is not None
                    command(self.store, name, question, seed, self.model, writing)
            finally:
                os._exit(0)
        os.close(writing)
        # The clock runs from where it begins to answer, or is about to.
        select.select([reading], [], [], PATIENCE if wait > 0.05 else wait)
        if wait > 0.05:
            time.sleep(wait / (1 if self.surface == "library" else 4))
        os.kill(child, end)
        with os.fdopen(reading, "rb") as coming:
            data = coming.read()
        os.waitpid(child, 0)
        if self.surface == "library":
            return name, bool(data), data[1:].decode(errors="ignore")
        return name, bool(data), data.decode(errors="ignore").rstrip("\n\ufffd")

    def _served(
        self, name: str, question: str, seed: int, end: signal.Signals, wait: float
    ) -> tuple[str, bool, str]:
        listening = bind("127.0.0.1", 0)
        listening.listen(64)
        port = listening.getsockname()[1]
        if not (child := os.fork()):
            try:
                server(self.store, listening)
            finally:
                os._exit(0)
        listening.close()
        sent, accepted = "", False
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
            assert client.get("/ready").status_code == 200
            if self.surface == "session":
                assert client.post("/v1/sessions", json={"name": name}).status_code == 201
            if self.surface == "responses":
                name = client.post("/v1/conversations", json={}).json()["id"]
            path, body, headers = request(self.surface, name, question, seed)
            # Whatever it waits for, it is ended then; the client reads what was sent before.
            if not (killer := os.fork()):
                time.sleep(wait)
                os.kill(child, end)
                os._exit(0)
            with (
                suppress(httpx.TransportError),
                client.stream("POST", path, json=body, headers=headers) as response,
            ):
                if response.status_code == 200:
                    accepted = True
                    for line in response.iter_lines():
                        sent += text_in(line)
        os.waitpid(killer, 0)
        os.waitpid(child, 0)
        return name, accepted, sent

    def _seen(
        self, session: str, sent: str, question: str, seed: int, *, accepted: bool, orderly: bool
    ) -> tuple[str, str]:
        """`_look` in another process."""
        return forked(  # type: ignore[no-any-return]
            partial(self._look, session, sent, question, seed, accepted=accepted, orderly=orderly)
        )

    def _look(
        self, session: str, sent: str, question: str, seed: int, *, accepted: bool, orderly: bool
    ) -> tuple[str, str]:
        """What became of a turn, as the field of `Found` that counts it; and what is wrong with that."""
        # The command is not `exact`: its reply goes on from what there is, and may do so differently.
        want = self.expected.get((question, seed))
        with open_runtime(self.store, self.model) as rt:
            try:
                there = rt.sessions.get(session)
            except perdure.SessionNotFoundError:
                return "unasked", "the question is gone" if accepted else ""
            info = there.pending
            if info is None:
                if not there.turns:
                    return "unasked", "the question is gone" if accepted else ""
                [turn] = there.history()
                return "whole", "" if want in (None, turn.text) else f"it has {turn.text!r}"
            kind = "parts" if info.tokens else "questions"
            part = info.text.rstrip("\ufffd")
            if orderly and not part.startswith(sent):
                return kind, f"{sent!r} was sent, and of that {part!r} is there"
            if info.messages[-1].content != question:
                return kind, f"it was asked {info.messages!r}"
            if not (part.startswith(sent) or sent.startswith(part)) or not (want or sent).startswith(sent):
                return kind, f"{sent!r} was sent, {part!r} is there, and it would be {want!r}"
            reply = there.resume()
            if (
                not (reply.text.startswith(part) and want in (None, reply.text))
                or not reply.kept
                or there.pending is not None
            ):
                return kind, f"it goes on to {reply.text!r}"
            return kind, ""


def main() -> None:
    hunt = Hunt(**json.loads(sys.argv[1]))
    print(json.dumps(dataclasses.asdict(hunt.run())))


if __name__ == "__main__":
    main()
