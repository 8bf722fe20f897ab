"""Conversations with a tool, over one protocol each: what is sent, what comes, and when."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

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
SYSTEM = "You are the help desk of a small library by the sea. Number {number}."
CALL_TOKENS, REPLY_TOKENS = 32, 12
"""Enough for a call; too few for one that nobody asked for, so that a result is always followed by text."""

Body = dict[str, Any]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a turn took: seconds to its first event, which comes with the first token, and what ours says of
    its prompt."""

    first: float
    cached: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """The events of one answer, and the seconds after which each came."""

    events: Sequence[Event]
    times: Sequence[float]

    @classmethod
    def read(cls, client: httpx.Client, path: str, body: Mapping[str, Any]) -> Stream:
        """Ask, and note what comes. It is parsed afterwards: client and server share the cores."""
        came: list[tuple[float, bytes]] = []
        started = time.perf_counter()
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{path}: {response.status_code} {response.read().decode()[:500]}")
            came += [(time.perf_counter() - started, data) for data in response.iter_raw()]
        events, times, rest = [], [], b""
        for at, data in came:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                found = line.removeprefix(b"data: ")
                if found.startswith(b"{"):
                    events.append(json.loads(found))
                    times.append(at)
        if not events:
            raise RuntimeError(f"{path}: no event came")
        return cls(events, times)

    def last(self, *path: str) -> Any:
        """The value at this path in the last event that has one."""
        for event in reversed(self.events):
            value: Any = event
            for name in path:
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None


class Conversation(ABC):
    """Questions that are answered by a call of a tool, and results of these calls, in turns."""

    name: ClassVar[str]
    path: ClassVar[str]

    def __init__(self, url: str, *, ours: bool, number: int = 0) -> None:
        self._ours = ours
        # Another one for each protocol, which would else find what the first has computed.
        self._system = SYSTEM.format(number=f"{number} over {self.name}")
        self._said: list[Any] = []
        self._calls: list[str] = []
        """Ids of the calls that wait for a result."""
        self._turns = 0
        self.connect(url)

    def connect(self, url: str) -> None:
        """Go on at another address."""
        # A connection a turn: llama-server closes one that was quiet for a few seconds.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=120, trust_env=False, limits=limits)

    @property
    def waits_for_a_result(self) -> bool:
        return bool(self._calls)

    def turn(self) -> Turn:
        calls, self._calls = self._calls, []
        self._turns += 1
        question = f"Question {self._turns}: what do you know of the tides?"
        body = self._body([self._result(call) for call in calls] or [self._question(question)])
        if not calls:
            body |= self._must_call()
        stream = Stream.read(self._client, self.path, {**body, "temperature": 0})
        self._take(stream)
        reuse = stream.last("perdure", "reuse") or stream.last("response", "perdure", "reuse")
        if reuse is None:
            return Turn(first=stream.times[0])
        return Turn(first=stream.times[0], cached=sum(reuse["tiers"].values()), computed=reuse["computed"])

    @abstractmethod
    def _question(self, text: str) -> Body: ...

    @abstractmethod
    def _result(self, call: str) -> Body: ...

    @abstractmethod
    def _body(self, new: list[Body]) -> Body:
        """The request for a turn that says this."""

    @abstractmethod
    def _must_call(self) -> Body:
        """What the request says besides when a call is to come."""

    @abstractmethod
    def _take(self, stream: Stream) -> None:
        """Remember what was answered."""


class ChatConversation(Conversation):
    name = "chat"
    path = "/v1/chat/completions"

    def _question(self, text: str) -> Body:
        return {"role": "user", "content": text}

    def _result(self, call: str) -> Body:
        return {"role": "tool", "tool_call_id": call, "content": RESULT}

    def _body(self, new: list[Body]) -> Body:
        self._said += new
        return {
            "messages": [{"role": "system", "content": self._system}, *self._said],
            "tools": [{"type": "function", "function": TOOL}],
            "parallel_tool_calls": False,
            "max_tokens": REPLY_TOKENS,
        }

    def _must_call(self) -> Body:
        return {"tool_choice": "required", "max_tokens": CALL_TOKENS}

    def _take(self, stream: Stream) -> None:
        deltas = [choice["delta"] for event in stream.events for choice in event.get("choices", ())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls: dict[int, Body] = {}
        for delta in deltas:
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.get("id") or ""
                for name in ("name", "arguments"):
                    call[name] += piece["function"].get(name) or ""
        kept = [call for call in calls.values() if is_json(call["arguments"])]
        message: Body = {"role": "assistant", "content": text or (None if kept else " ")}
        if kept:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in kept
            ]
        self._said.append(message)
        self._calls = [call["id"] for call in kept]


class ResponsesConversation(Conversation):
    """Ours goes on from a stored response. llama-server has none, so it is sent everything each time."""

    name = "responses"
    path = "/v1/responses"
    _previous: str | None = None

    def _question(self, text: str) -> Body:
        return {"role": "user", "content": text}

    def _result(self, call: str) -> Body:
        return {"type": "function_call_output", "call_id": call, "output": RESULT}

    def _body(self, new: list[Body]) -> Body:
        self._said += new
        body = {
            "model": "default",
            "instructions": self._system,
            "input": new if self._ours else self._said,
            "tools": [{"type": "function", **TOOL}],
            "parallel_tool_calls": False,
            "max_output_tokens": REPLY_TOKENS,
        }
        return body | ({"previous_response_id": self._previous} if self._ours and self._previous else {})

    def _must_call(self) -> Body:
        return {"tool_choice": "required", "max_output_tokens": CALL_TOKENS}

    def _take(self, stream: Stream) -> None:
        response = stream.events[-1]["response"]
        self._previous = response["id"]
        self._said += response["output"]
        self._calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]


class MessagesConversation(Conversation):
    name = "messages"
    path = "/v1/messages"

    def _question(self, text: str) -> Body:
        return {"type": "text", "text": text}

    def _result(self, call: str) -> Body:
        return {"type": "tool_result", "tool_use_id": call, "content": RESULT}

    def _body(self, new: list[Body]) -> Body:
        self._said.append({"role": "user", "content": new})
        shape = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        return {
            "model": "default",
            "system": self._system,
            "messages": self._said,
            "tools": [shape],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "max_tokens": REPLY_TOKENS,
        }

    def _must_call(self) -> Body:
        return {
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": CALL_TOKENS,
        }

    def _take(self, stream: Stream) -> None:
        blocks: list[Body] = []
        for event in stream.events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                blocks[-1]["json"] += event["delta"].get("partial_json", "")
                blocks[-1]["text"] = blocks[-1].get("text", "") + event["delta"].get("text", "")
        kept: list[Body] = []
        for block in blocks:
            if block["type"] == "tool_use" and is_json(block["json"]):
                call = {name: block[name] for name in ("type", "id", "name")}
                kept.append(call | {"input": json.loads(block["json"])})
            elif block["type"] == "text" and block["text"]:
                kept.append({"type": "text", "text": block["text"]})
        self._said.append({"role": "assistant", "content": kept or " "})
        self._calls = [block["id"] for block in kept if block["type"] == "tool_use"]


CONVERSATIONS: tuple[type[Conversation], ...] = (
    ChatConversation,
    ResponsesConversation,
    MessagesConversation,
)


def is_json(text: str) -> bool:
    """Whether the arguments of a call are whole. A reply that was cut in one has none."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
