"""Protocols: what a turn and a token cost over each, and beside llama-server's own Responses and Messages.

A conversation of twenty turns in which every other one is a call of a tool. The first token of the last turn
is held against what the engine takes for the new tokens alone, as it says itself, and against llama-server.
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import httpx

from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch
from bench.processes.servers import N_CTX, SLOTS, THREADS, launched, llama_server_url

TOOL = {
    "name": "lookup",
    "description": "Looks a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"enum": ["tide", "bee", "map"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
RESULT = "The word is an old one; the entry names three books and the shelf by the window."
TONGUES = ("chat", "responses", "messages")


@dataclass
class Turn:
    """What a turn took: seconds to its first event with content, and what the engine says of it."""

    first: float
    last: float
    tokens: int
    prefill: float


class Talk:
    """A conversation over one protocol. Each turn sends what that protocol has to."""

    def __init__(self, url: str, tongue: str, *, ours: bool, number: int = 0) -> None:
        self._client = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self._tongue, self._ours = tongue, ours
        self._said: list[dict[str, Any]] = []
        self._previous: str | None = None
        self._system = f"You are the help desk of a small library by the sea. Number {number}."
        self._calls: list[dict[str, Any]] = []

    def turn(self, at: int, count: int = 12) -> Turn:
        """A question that is answered by a call, or the result of that call."""
        new = self._results() or [
            {"role": "user", "content": f"Question {at}: what do you know of the tides?"}
        ]
        must_call = not any(each.get("role") == "tool" for each in new)
        return getattr(self, f"_{self._tongue}")(new, must_call, count)  # type: ignore[no-any-return]

    def _results(self) -> list[dict[str, Any]]:
        calls, self._calls = self._calls, []
        return [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]

    def _chat(self, new: list[dict[str, Any]], must_call: bool, count: int) -> Turn:
        self._said += new
        body = {
            "messages": [{"role": "system", "content": self._system}, *self._said],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required" if must_call else "auto",
            "parallel_tool_calls": False,
            "max_tokens": 64 if must_call else count,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        events, times = self._stream("/v1/chat/completions", body)
        text = ""
        calls: dict[int, dict[str, str]] = {}
        for event in events:
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    kept = calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                    kept["id"] += call.get("id") or ""
                    kept["name"] += call["function"].get("name") or ""
                    kept["arguments"] += call["function"].get("arguments") or ""
        self._remember(text, list(calls.values()))
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        return self._turn(events, times, usage["completion_tokens"])

    def _remember(self, text: str, calls: list[dict[str, Any]]) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        elif not text:
            message["content"] = " "
        self._calls = calls
        self._said.append(message)

    def _responses(self, new: list[dict[str, Any]], must_call: bool, count: int) -> Turn:
        items = [
            {"type": "function_call_output", "call_id": each["tool_call_id"], "output": each["content"]}
            if each["role"] == "tool"
            else each
            for each in new
        ]
        self._said += items
        body = {
            "model": "default",
            "instructions": self._system,
            "input": items if self._ours else self._said,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required" if must_call else "auto",
            "parallel_tool_calls": False,
            "max_output_tokens": 64 if must_call else count,
            "temperature": 0,
        }
        if self._ours and self._previous is not None:
            body["previous_response_id"] = self._previous
        events, times = self._stream("/v1/responses", body)
        response = events[-1]["response"]
        self._previous = response["id"]
        self._said += response["output"]
        self._calls = [
            {"id": each["call_id"]} for each in response["output"] if each["type"] == "function_call"
        ]
        return self._turn(events, times, response["usage"]["output_tokens"])

    def _messages(self, new: list[dict[str, Any]], must_call: bool, count: int) -> Turn:
        blocks = [
            {"type": "tool_result", "tool_use_id": each["tool_call_id"], "content": each["content"]}
            for each in new
            if each["role"] == "tool"
        ]
        self._said.append({"role": "user", "content": blocks or new[0]["content"]})
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        body = {
            "model": "default",
            "system": self._system,
            "messages": self._said,
            "tools": [tool],
            "tool_choice": {"type": "any" if must_call else "auto", "disable_parallel_tool_use": True},
            "max_tokens": 64 if must_call else count,
            "temperature": 0,
        }
        events, times = self._stream("/v1/messages", body)
        content: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                content[-1]["json"] += delta.get("partial_json", "")
                content[-1]["text"] = content[-1].get("text", "") + delta.get("text", "")
        kept = []
        for block in content:
            if block["type"] == "tool_use":
                kept.append(
                    {
                        "type": "tool_use",
                        "id": block["id"],
                        "name": block["name"],
                        "input": json.loads(block["json"] or "{}"),
                    }
                )
            elif block["type"] == "text" and block["text"]:
                kept.append({"type": "text", "text": block["text"]})
        self._said.append({"role": "assistant", "content": kept or " "})
        self._calls = [{"id": block["id"]} for block in kept if block["type"] == "tool_use"]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        return self._turn(events, times, usage["output_tokens"])

    def _stream(self, path: str, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
        events, times = [], []
        started = time.perf_counter()
        with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{path}: {response.status_code} {response.read().decode()[:500]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    times.append(time.perf_counter() - started)
        return events, times

    def _turn(self, events: list[dict[str, Any]], times: list[float], tokens: int) -> Turn:
        shown = [at for at, event in enumerate(events) if _has_content(event)] or [len(events) - 1]
        found = [event.get("perdure") or event.get("response", {}).get("perdure") for event in events]
        told = next((each for each in reversed(found) if each), None)
        prefill = told["timings"]["prefill"] if told is not None else 0.0
        return Turn(times[shown[0]], times[shown[-1]], tokens, prefill)


def _has_content(event: Mapping[str, Any]) -> bool:
    kind = event.get("type", "")
    if kind:
        return kind.endswith(("_delta", ".delta")) and kind not in ("message_delta",)
    return any(
        choice["delta"].get("content") or choice["delta"].get("tool_calls")
        for choice in event.get("choices", ())
    )


def turns(run: Run) -> Iterator[Figure]:
    """The first token of the last turn: against the new tokens alone, and against llama-server."""
    length, repeats = run.pick((20, 3), (6, 1))
    ours, peer = _servers()
    for tongue in TONGUES:
        whole, alone, theirs = [], [], []
        with Watch() as watch:
            for number in range(repeats):
                talks = [
                    Talk(ours.url, tongue, ours=True, number=number),
                    Talk(peer, tongue, ours=False, number=number),
                ]
                # The last one, of an even number, answers the result of a call: its first token is text.
                for at in range(length):
                    mine, other = (talk.turn(at) for talk in talks)
                whole.append(mine.first * 1e3)
                alone.append(mine.prefill * 1e3)
                theirs.append(other.first * 1e3)
        name = f"first token of turn {length} over {tongue}"
        common: dict[str, Any] = {"unit": "ms", "gauge": Gauge.COST, "machine": watch.machine}
        yield Figure(
            name=name,
            against="the new tokens alone",
            pairs=Pairs(tuple(whole), tuple(alone)),
            target=at_least(1 / 1.05),
            **common,
        )
        yield Figure(
            name=name,
            against="llama-server",
            pairs=Pairs(tuple(whole), tuple(theirs)),
            target=at_least(1.0),
            **common,
        )


def restarts(run: Run) -> Iterator[Figure]:
    """The same turn after the server was started again: what that adds."""
    length = run.pick(20, 6)
    for tongue in TONGUES:
        with tempfile.TemporaryDirectory() as folder, Watch() as watch:
            with ExitStack() as held:
                first = _Ours(held, folder)
                talk = Talk(first.url, tongue, ours=True)
                for at in range(length - 1):
                    talk.turn(at)
                # Both answer the result of a call: their first token is text.
                before = talk.turn(length - 1)
                talk.turn(length)
            with ExitStack() as held:
                second = _Ours(held, folder)
                talk._client = httpx.Client(base_url=second.url, timeout=600, trust_env=False)
                # Somebody else's first request, so that nothing but the conversation is woken.
                Talk(second.url, "chat", ours=True, number=9).turn(0)
                after = talk.turn(length + 1)
        added = (after.first - after.prefill) - (before.first - before.prefill)
        yield Figure(
            name=f"first token after a restart over {tongue}, beyond the new tokens",
            against="before it",
            unit="s",
            gauge=Gauge.COST,
            pairs=Pairs((max(added, 0.0),), (max(before.first - before.prefill, 1e-4),)),
            target=at_most(0.15, "s"),
            machine=watch.machine,
        )


def tokens(run: Run) -> Iterator[Figure]:
    """A token of a reply over each protocol, against chat completions."""
    count, repeats = run.pick((128, 9), (32, 3))
    ours, _ = _servers()

    def step(path: str, body: Mapping[str, Any]) -> float:
        talk = Talk(ours.url, "chat", ours=True)
        events, times = talk._stream(path, body) if not path.startswith("/api") else _lines(talk, path, body)
        shown = [
            at for at, event in zip(times, events, strict=True) if _has_content(event) or _is_line(event)
        ]
        return (shown[-1] - shown[0]) / max(1, len(shown) - 1) * 1e3

    said = [{"role": "user", "content": "Tell me a very long story about the sea, and never stop."}]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": said, "max_tokens": count, "temperature": 0}),
        "responses": ("/v1/responses", {"input": said, "max_output_tokens": count, "temperature": 0}),
        "messages": ("/v1/messages", {"messages": said, "max_tokens": count, "temperature": 0}),
        "ollama": ("/api/chat", {"messages": said, "options": {"num_predict": count, "temperature": 0}}),
    }
    for path, body in bodies.values():
        step(path, body)
    for tongue in ("responses", "messages", "ollama"):
        yield run.compare(
            f"a token over {tongue}",
            ours=functools.partial(step, *bodies[tongue]),
            peer=functools.partial(step, *bodies["chat"]),
            against="chat completions",
            unit="ms",
            gauge=Gauge.COST,
            target=at_least(0.97),
            repeats=repeats,
        )


def _lines(talk: Talk, path: str, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[float]]:
    found, times = [], []
    started = time.perf_counter()
    with talk._client.stream("POST", path, json=body) as response:
        for line in response.iter_lines():
            found.append(json.loads(line))
            times.append(time.perf_counter() - started)
    return found, times


def _is_line(event: Mapping[str, Any]) -> bool:
    return bool(event.get("message", {}).get("content")) if "done" in event else False


class _Ours:
    """`perdure serve` with a store."""

    def __init__(self, held: ExitStack, folder: str) -> None:
        complaints: IO[str] = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        options = ("--store", folder, "--ctx", str(N_CTX), "--slots", str(SLOTS), "--threads", str(THREADS))
        self.url = launched(held, complaints, model_path(), *options)


@functools.cache
def _servers() -> tuple[_Ours, str]:
    """Ours and llama-server, until this process ends."""
    held = ExitStack()
    atexit.register(held.close)
    return _Ours(held, held.enter_context(tempfile.TemporaryDirectory())), llama_server_url(
        held, model_path()
    )


main = Bench("protocols", (tokens, turns, restarts))
