"""Protocols: what a turn and a token cost over each, and beside llama-server's own Responses and Messages.

A conversation of twenty turns in which every other one is a call of a tool. The first token of the last turn
is held against a bare loop that decodes the same number of tokens as deep in the context, and against
llama-server. llama-server writes text instead of a call with the default model, whose template has no tools.
"""

from __future__ import annotations

import atexit
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import IO, Any

import httpx

from bench.child import Child
from bench.engine import PROMPT, TOKENS, model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Part, Run, at_least, at_most
from bench.machine import Watch
from bench.processes.servers import N_CTX, SLOTS, THREADS, launched, llama_server_url
from bench.protocols.conversation import CONVERSATIONS, ChatConversation, Conversation, Stream, Turn


def _tokens(protocol: str, run: Run) -> Iterator[Figure]:
    """A token of a reply over a protocol, against chat completions."""
    count, repeats = run.pick((128, 9), (32, 3))
    client = httpx.Client(base_url=_ours(), timeout=120, trust_env=False)

    def step(protocol: str) -> float:
        path, body, written = _story(protocol, count)
        stream = Stream.read(client, path, body)
        if stream.last(*written) != count:
            raise RuntimeError(f"{path} wrote {stream.last(*written)} tokens instead of {count}")
        shown = [at for at, event in zip(stream.times, stream.events, strict=True) if _has_content(event)]
        return (shown[-1] - shown[0]) / (count - 1) * 1e3

    for each in ("chat", protocol):
        step(each)
    yield run.compare(
        f"a token over {protocol}",
        ours=functools.partial(step, protocol),
        peer=functools.partial(step, "chat"),
        against="chat completions",
        unit="ms",
        gauge=Gauge.COST,
        target=at_least(0.97),
        repeats=repeats,
    )


def _story(protocol: str, count: int) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Where to ask for a reply of so many tokens, how, and where it says how many it has."""
    said = [{"role": "user", "content": "Tell me a very long story about the sea, and never stop."}]
    greedy = {"messages": said, "temperature": 0}
    match protocol:
        case "responses":
            body = {"input": said, "temperature": 0, "max_output_tokens": count}
            return "/v1/responses", body, ("response", "usage", "output_tokens")
        case "messages":
            return "/v1/messages", {**greedy, "max_tokens": count}, ("usage", "output_tokens")
        case "ollama":
            options = {"num_predict": count, "temperature": 0}
            return "/api/chat", {"messages": said, "options": options}, ("eval_count",)
    counted = {"max_tokens": count, "stream_options": {"include_usage": True}}
    return "/v1/chat/completions", {**greedy, **counted}, ("usage", "completion_tokens")


def _has_content(event: Mapping[str, Any]) -> bool:
    if kind := event.get("type", ""):
        return kind in ("content_block_delta", "response.output_text.delta")
    if "message" in event:
        return bool(event["message"]["content"])
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


def _turns(kind: type[Conversation], run: Run) -> Iterator[Figure]:
    """The first token of the last turn: against the new tokens alone, and against llama-server."""
    length, repeats = run.pick((20, 4), (6, 2))
    ours, peer, alone = _ours(), _llama_server(), _Alone()
    whole, bare, theirs = [], [], []
    with Watch() as watch:
        for number in range(repeats):
            mine = _carried_on(kind(ours, ours=True, number=number), length)
            # What is compared is taken right after one another.
            bare.append(alone.seconds(mine) * 1e3)
            whole.append(mine.first * 1e3)
            other = kind(peer, ours=False, number=number)
            for _ in range(length):
                last = other.turn()
            theirs.append(last.first * 1e3)
    for against, values, target in (
        (f"a bare loop over the {mine.computed} new tokens", bare, at_least(1 / 1.05)),
        ("llama-server", theirs, at_least(1.0)),
    ):
        yield Figure(
            name=f"first token of turn {length} over {kind.name}",
            against=against,
            unit="ms",
            gauge=Gauge.COST,
            pairs=Pairs(tuple(whole), tuple(values)),
            target=target,
            machine=watch.machine,
        )


def restarts(run: Run) -> Iterator[Figure]:
    """The same turn right after the server was started again: what that adds."""
    length, repeats = run.pick((20, 3), (6, 1))
    before: dict[str, list[float]] = {kind.name: [] for kind in CONVERSATIONS}
    after: dict[str, list[float]] = {kind.name: [] for kind in CONVERSATIONS}
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        talks: list[Conversation] = []
        for repeat in range(repeats):
            with ExitStack() as held:
                url = _serve(held, folder)
                talks = talks or [kind(url, ours=True) for kind in CONVERSATIONS]
                for talk in talks:
                    talk.connect(url)
                    before[talk.name].append(_carried_on(talk, 2 if repeat else length).first)
                    # A call, whose result is the first that the next server hears of this conversation.
                    talk.turn()
            with ExitStack() as held:
                url = _serve(held, folder)
                # Somebody else's first request, so that nothing but the conversation is woken.
                ChatConversation(url, ours=True, number=900 + repeat).turn()
                for talk in talks:
                    talk.connect(url)
                    assert talk.waits_for_a_result
                    after[talk.name].append(talk.turn().first)
    for name in before:
        added = [max(late - soon, 1e-4) for late, soon in zip(after[name], before[name], strict=True)]
        yield Figure(
            name=f"what a restart adds to the first token of a turn over {name}",
            against="that turn before it",
            unit="s",
            gauge=Gauge.COST,
            pairs=Pairs(tuple(added), tuple(before[name])),
            target=at_most(0.15, "s"),
            machine=watch.machine,
        )


def _carried_on(talk: Conversation, turns: int) -> Turn:
    """The last of so many more turns. It answers the result of a call."""
    for _ in range(turns - 1):
        talk.turn()
    assert talk.waits_for_a_result, "the last turn is to answer a result"
    return talk.turn()


class _Alone:
    """A bare loop of the same library, in a process of its own."""

    def __init__(self) -> None:
        self._child = _loop()

    def seconds(self, turn: Turn) -> float:
        """What the new tokens of a turn take behind as many others."""
        taken = self._child.ask("behind", earlier=turn.cached, tokens=TOKENS[: turn.computed], times=5)
        return float(statistics.median(taken))


# The processes, until this one ends.


@functools.cache
def _held() -> ExitStack:
    held = ExitStack()
    atexit.register(held.close)
    return held


@functools.cache
def _ours() -> str:
    return _serve(_held(), _held().enter_context(tempfile.TemporaryDirectory()))


def _serve(held: ExitStack, folder: str) -> str:
    """Where `perdure serve` with this store listens."""
    captured_errors: IO[str] = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    options = ("--store", folder, "--ctx", str(N_CTX), "--slots", str(SLOTS), "--threads", str(THREADS))
    return launched(held, captured_errors, model_path(), *options)


@functools.cache
def _llama_server() -> str:
    return llama_server_url(_held(), model_path())


@functools.cache
def _loop() -> Child:
    child = _held().enter_context(Child("bench.processes.loops", "bare"))
    child.ask("open", path=model_path(), n_ctx=N_CTX, threads=THREADS, prompt=PROMPT)
    return child


def _turns_over(kind: type[Conversation]) -> Part:
    part: Callable[[Run], Iterator[Figure]] = functools.partial(_turns, kind)
    part.__name__ = f"turns_{kind.name}"
    return part


def _tokens_over(protocol: str) -> Part:
    part: Callable[[Run], Iterator[Figure]] = functools.partial(_tokens, protocol)
    part.__name__ = f"tokens_{protocol}"
    return part


_TOKENS = map(_tokens_over, ("responses", "messages", "ollama"))
main = Bench("protocols", (*map(_turns_over, CONVERSATIONS), restarts, *_TOKENS))
