"""Settled while idle: the next prompt's beginning is read while nobody is served (A3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import perdure
from decode.observed import Turnstile, open_toy
from inside import active_in, inside
from perdure import Runtime
from perdure.decode.request import Request
from perdure.decode.sequence import Rank
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.testing.toy import ToyModel

DROPS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that opens reasoning for the reply alone, and drops that of earlier turns."""
THOUGHT = "Let me think about it for a good while, since that is what one does.</think>The answer is seven."
KINDS = [FullAttention, SlidingWindow, Recurrent, Hybrid]


def template(tmp_path: Path) -> Path:
    path = tmp_path / "drops.jinja"
    path.write_text(DROPS)
    return path


def says(text: str) -> Any:
    """A processor that has the model write `text` and end."""
    return writes([*ToyModel().tokenize(text, special=True), 258])


def writes(script: Sequence[int]) -> Any:
    """A processor that has the model write these tokens, and the last one for ever."""
    import numpy as np

    said = 0

    def processor(tokens: Any, logits: Any) -> Any:
        nonlocal said
        row = np.full(len(logits), -50.0, np.float32)
        row[script[min(said, len(script) - 1)]] = 50.0
        said += 1
        return row

    return processor


def talk(rt: Runtime, settle: int) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Three turns: what each reused, and their tokens."""
    messages: list[dict[str, str]] = []
    reuse, tokens = [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}, of some length: what is it?"})
        reply = rt.chat(messages, settle=settle, temperature=0, max_tokens=200, processors=[says(THOUGHT)])
        rt.chat_format.prefetcher.wait()
        assert reply.finish_reason == "stop"
        messages.append({"role": "assistant", "content": reply.text})
        reuse.append(reply.reuse)
        tokens.append(reply.raw.tokens)
    messages.append({"role": "user", "content": "And now?"})
    tokens.append(rt.chat(messages, temperature=0, max_tokens=20, ignore_eos=True).raw.tokens)
    return reuse, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_settled_or_not_a_reply_has_the_same_tokens(kind: type[MemorySpec], tmp_path: Path) -> None:
    """A3: and settled, a turn computes its own words only."""
    settings: dict[str, Any] = {"n_ctx": 2048, "slots": 2, "template": template(tmp_path)}
    with perdure.open(ToyModel(kind), **settings) as rt:
        settled, tokens = talk(rt, 4096)
    with perdure.open(ToyModel(kind), **settings) as rt:
        plain, same = talk(rt, 0)
    assert tokens == same
    assert all(one.computed < other.computed for one, other in zip(settled[1:], plain[1:], strict=True))
    own = len("<|im_end|>\nuser\nQuestion 1, of some length: what is it?\nassistant\n\n")
    if kind is FullAttention:
        assert max(report.computed for report in settled[1:]) <= own


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_settled_or_not_a_reply_of_llama_cpp_has_the_same_tokens(
    name: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A3, where rounding shows: in exact mode the same bits, whatever was read before."""
    tokens, computed = [], []
    for settle in (4096, 0):
        settings: dict[str, Any] = {"n_ctx": 1024, "slots": 2, "exact": True, "threads": 1}
        with perdure.open(zoo_path(name), template=template(tmp_path), **settings) as rt:
            messages: list[dict[str, str]] = []
            for turn in range(2):
                messages.append({"role": "user", "content": f"Question {turn}, of some length: what is it?"})
                script = [*rt.model.tokenize(THOUGHT + " It is seven." * 20), min(rt.model.ends)]
                reply = rt.chat(
                    messages, settle=settle, temperature=0, max_tokens=300, processors=[writes(script)]
                )
                rt.chat_format.prefetcher.wait()
                messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": "And now?"})
            reply = rt.chat(messages, temperature=0, max_tokens=20, ignore_eos=True)
            tokens.append(reply.raw.tokens)
            computed.append(reply.reuse.computed)
    assert tokens[0] == tokens[1]
    assert computed[0] < computed[1]


def test_the_budget_bounds_what_is_read(tmp_path: Path) -> None:
    with open_toy(n_ctx=2048, slots=1, template=template(tmp_path)) as rt:
        before = inside(rt).slot_cache.computed
        settled, _ = talk(rt, 10)
        assert settled[1].computed > 20
        assert inside(rt).slot_cache.computed > before


def held_settling(gate: Turnstile, rt: Runtime) -> Any:
    """Idle work that the engine is in the middle of."""
    idle = Request(prompt=[40 + at % 90 for at in range(900)], max_tokens=1, idle=True)
    output = inside(rt).engine_loop.submit(idle)
    gate.pass_through(100)
    return output


def test_a_request_waits_for_one_step_of_it_at_most() -> None:
    """A3: the step in flight, and no other."""
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=1, n_batch=128) as rt:
        output = held_settling(gate, rt)
        assert rt.load == (0, 0)
        job = rt.submit([1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True)
        # What is left of the step, then the request: its prompt, and its second token.
        gate.admit(28 + 3 + 1)
        assert len(job.reply().tokens) == 2
        assert not output.finished
        gate.open()
        done = threading.Event()
        while not output.finished:
            done.wait(0.001)
        assert output.replies[0].finish_reason == "length"


def test_it_takes_no_slot_and_no_place_in_the_queue_from_anybody() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=1, queue=0) as rt:
        output = held_settling(gate, rt)
        job = rt.submit([1, 2, 3], max_tokens=2, ignore_eos=True)
        with pytest.raises(perdure.BusyError):
            rt.submit([1, 2, 3], max_tokens=2)
        gate.open()
        assert len(job.reply().tokens) == 2
        output.cancel()


def test_idle_work_can_be_cancelled_wherever_it_is() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, n_ctx=2048, slots=1) as rt:
        outputs = [held_settling(gate, rt)]
        outputs.append(inside(rt).engine_loop.submit(Request(prompt=[1, 2], max_tokens=1, idle=True)))
        for output in outputs:
            output.cancel()
        gate.open()
        assert rt.generate([5], max_tokens=1, ignore_eos=True).tokens
        assert all(output.replies[0].finish_reason == "cancelled" for output in outputs)
        assert not [group for group in active_in(inside(rt).engine_loop) if group.rank == Rank.IDLE]


def test_what_is_appended_is_read_ahead(tmp_path: Path) -> None:
    with open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt:
        session = rt.session("one", system="Be brief.")
        long = "Here is a letter of some length. " * 10
        session.append(long)
        rt.chat_format.prefetcher.wait()
        reply = session.say("What does it say?", max_tokens=3, temperature=0, ignore_eos=True)
        assert reply.reuse.computed < 80
        other = rt.session("other", system="Be  brief.")
        other.append(long, read_ahead=False)
        assert other.say("What does it say?", max_tokens=3, ignore_eos=True).reuse.computed > 300
    with open_toy(n_ctx=2048, slots=2) as rt:
        said = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": long},
            {"role": "user", "content": "What does it say?"},
        ]
        cold = rt.chat(said, max_tokens=3, temperature=0, ignore_eos=True)
    assert cold.raw.tokens == reply.raw.tokens


@pytest.mark.parametrize("name", [None, "folded"])
def test_what_follows_a_fold_is_read_ahead(name: str | None, tmp_path: Path) -> None:
    ask: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    replies = []
    for read_ahead in (True, False):
        with open_toy(n_ctx=2048, slots=2, store=tmp_path / str(read_ahead)) as rt:
            session = rt.session("one", system="Be brief. " * 20)
            for number in range(4):
                session.say(f"Number {number} of several long messages. " * 4, **ask)
            folded = session.fold(name, summary="Much was said. " * 10, keep=1, read_ahead=read_ahead)
            rt.chat_format.prefetcher.wait()
            replies.append(folded.say("And now?", **ask))
    settled, plain = replies
    assert settled.raw.tokens == plain.raw.tokens
    assert settled.reuse.computed < 60 < 200 < plain.reuse.computed


@pytest.mark.extension("responses")
@pytest.mark.parametrize("settle", [4096, 0])
def test_what_follows_a_compaction_is_read_ahead(settle: int) -> None:
    from perdure.server.core.settings import ReplyDefaults
    from server.live_server import live_server
    from server.scripted import steer

    said = [{"role": "user", "content": f"Fact number {number} of several. " * 4} for number in range(4)]
    with open_toy(n_ctx=2048, slots=2) as rt:
        steer(rt, "The facts are many, and here they are all together. " * 3)
        defaults = ReplyDefaults(settle=settle)
        with live_server(rt, defaults=defaults) as server, server.client() as client:
            asked = {"input": said, "instructions": "You are terse."}
            compacted = client.post("/v1/responses/compact", json=asked).json()
            rt.chat_format.prefetcher.wait()
            new = [*compacted["output"], {"role": "user", "content": "And now?"}]
            client.post(
                "/v1/responses", json={**asked, "input": new, "store": False, "max_output_tokens": 4}
            ).raise_for_status()
            latest = client.get("/v1/requests?limit=1").json()["data"][0]
    assert (latest["reuse"]["computed"] < 60) == bool(settle)


def test_a_server_settles_and_appends(tmp_path: Path) -> None:
    """Over HTTP: a turn, what is appended, and the next turn."""
    from perdure.server.core.settings import ReplyDefaults
    from server.live_server import live_server

    long = "Here is a letter of some length. " * 10
    with (
        open_toy(n_ctx=2048, slots=2, store=tmp_path) as rt,
        live_server(rt, defaults=ReplyDefaults(settle=4096)) as server,
        server.client() as client,
    ):
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        said = {"max_tokens": 4, "temperature": 0}
        client.post("/v1/sessions/one/turns", json={"message": "Hi", **said}).raise_for_status()
        assert client.post("/v1/sessions/one/append", json={"message": long}).json()["turns"] == 2
        assert client.post("/v1/sessions/one/append", json={}).status_code == 400
        assert client.post("/v1/sessions/none/append", json={"message": "Hi"}).status_code == 404
        rt.chat_format.prefetcher.wait()
        answer = client.post("/v1/sessions/one/turns", json={"message": "And?", **said}).json()
        assert answer["perdure"]["reuse"]["computed"] < 80
