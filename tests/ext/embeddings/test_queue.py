"""Embeddings beside replies: same bits, no stalls, and an end to everything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from decode.observed import Clock, Turnstile, alone, check_idle, core, open_toy
from inside import core_of, embedder_of, inside
from perdure import (
    BusyError,
    ClosedError,
    ContextOverflow,
    DecodeError,
    InvalidInputError,
    OutOfMemoryError,
    Runtime,
    TokenError,
)
from perdure.engine.contract import Batch, Outcome
from perdure.engine.embedder import CHUNK
from perdure.memory import MEMORY_KINDS, MemorySpec
from perdure.testing.toy import Faults
from perdure.testing.toy.faults import PlannedFault
from zoo import Recipe, attention

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = "word " * 40
TEXTS = ["one", LONG, "three"]


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with open_toy() as rt:
        yield rt


def test_texts_and_tokens_one_or_many(rt: Runtime) -> None:
    tokens = [rt.model.tokenize(text) for text in TEXTS]
    found = rt.embed(TEXTS)
    assert found.vectors.dtype == np.float32
    assert found.vectors.shape == (3, rt.embedding_width)
    assert found.tokens == (3, 200, 5)
    assert len(found) == 3
    for same in (rt.embed(tokens), rt.embed(tuple(TEXTS)), rt.embed([np.array(each) for each in tokens])):
        np.testing.assert_array_equal(same.vectors, found.vectors)
    for at, text in enumerate(TEXTS):
        for one in (rt.embed(text), rt.embed(tokens[at]), rt.embed(np.array(tokens[at]))):
            assert one.vectors.tobytes() == found.vectors[at].tobytes()
            assert one.tokens == (found.tokens[at],)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([], InvalidInputError),
        ("", TokenError),
        (["a", ""], TokenError),
        ([[]], TokenError),
        ([[1], [999]], TokenError),
        ([1.5], TokenError),
        (["a", 1], TokenError),
        (7, InvalidInputError),
        (None, InvalidInputError),
        (np.zeros((0, 4), np.int32), InvalidInputError),
        ("\ud800", InvalidInputError),
        ("x" * 257, ContextOverflow),
    ],
)
def test_what_cannot_be_embedded_is_refused_before_any_work(
    rt: Runtime, bad: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        rt.embed(bad)


def test_an_error_says_which_text_it_is_about(rt: Runtime) -> None:
    with pytest.raises(ContextOverflow, match="text 1 has 257 tokens, 256 fit"):
        rt.embed(["fine", "x" * 257])


def test_bits_depend_on_the_text_alone(zoo_path: Callable[[str], Path]) -> None:
    """Alone, after others, together, while replies run, and in another process."""
    settings: dict[str, Any] = {"n_ctx": 512, "slots": 2, "threads": 1}
    path = zoo_path("llama")
    with perdure.open(path, **settings) as rt:
        quiet = rt.embed(TEXTS).vectors
        assert rt.embed(LONG).vectors.tobytes() == quiet[1].tobytes()
        jobs = [rt.submit(f"number {at}", max_tokens=60, **GREEDY) for at in range(3)]
        np.testing.assert_array_equal(rt.embed(TEXTS[::-1]).vectors[::-1], quiet)
        assert [len(job.reply().tokens) for job in jobs] == [60] * 3
    with perdure.open(path, isolated=True, **settings) as rt:
        np.testing.assert_array_equal(rt.embed(TEXTS).vectors, quiet)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_replies_and_embeddings_do_not_show_in_each_other(kind: type[MemorySpec]) -> None:
    with open_toy(kind) as rt:
        expected = rt.embed(TEXTS).vectors
        job = rt.submit("hello", max_tokens=60, **GREEDY)
        for _ in range(5):
            np.testing.assert_array_equal(rt.embed(TEXTS).vectors, expected)
        assert job.reply().tokens == alone(kind, "hello", max_tokens=60, **GREEDY)[0].tokens
        check_idle(rt)


@pytest.mark.parametrize("chunk_seconds", [0.0, 5.0])
def test_a_reply_waits_for_one_chunk_at_most_and_has_half_of_the_time(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch, chunk_seconds: float
) -> None:
    """However much is to be embedded, every chunk of it is followed by steps of the reply."""
    clock = Clock()
    monkeypatch.setattr("perdure.ext.embeddings.queue.time", clock)
    rt.embed("opens it")
    steps: list[str] = []

    def noting(name: str, native: Any, seconds: float) -> None:
        decode = native.decode

        def noted(batch: Batch) -> Outcome:
            assert batch.size <= CHUNK
            steps.append(name)
            clock.now += seconds
            outcome: Outcome = decode(batch)
            return outcome

        monkeypatch.setattr(native, "decode", noted)

    noting("reply ", core(rt), 1.0)
    noting("text ", core_of(embedder_of(rt)), chunk_seconds)
    held = threading.Event()
    inside(rt).engine_loop.post(held.wait)
    answer = rt.submit_embed([LONG] * 20)
    job = rt.submit("hello", max_tokens=50, **GREEDY)
    held.set()
    job.reply()
    answer.result()
    assert steps.count("text ") == 20 * -(-len(LONG) // CHUNK)
    began, ended = steps.index("reply "), len(steps) - steps[::-1].index("reply ")
    between = "".join(steps[began:ended]).split("text ")
    assert min(each.count("reply") for each in between[1:-1]) >= max(1, int(chunk_seconds))


def test_requests_take_turns_text_by_text() -> None:
    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        many, one = rt.submit_embed([LONG] * 50), rt.submit_embed("short")
        # The first text of the one, all of the other, and not much more.
        gate.admit(len(LONG) + len("short") + 1)
        assert one.result(60).tokens == (5,)
        assert not many.done()
        many.cancel()
        gate.open()


def test_no_more_may_wait_than_the_queue_holds() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, queue=1) as rt:
        first, second = rt.submit_embed("one"), rt.submit_embed("two")
        with pytest.raises(BusyError, match="1 requests for embeddings are waiting, 1 may"):
            rt.embed("three")
        gate.open()
        first.result(60), second.result(60)
        rt.embed("three")


def test_a_cancelled_request_ends_between_two_chunks() -> None:
    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        left = rt.submit_embed([LONG] * 100)
        gate.pass_through(10)
        assert left.cancel()
        # The rest of one chunk, and the other text; nothing else of the hundred.
        stays = rt.submit_embed("stays")
        gate.admit(CHUNK - 10 + 5)
        assert stays.result(60).tokens == (5,)
        with pytest.raises(CancelledError):
            left.result()


def test_closing_ends_what_is_being_embedded() -> None:
    """Also in the middle of a chunk."""
    gate = Turnstile()
    rt = open_toy(gate=gate)
    running, waiting = rt.submit_embed(LONG), rt.submit_embed("waits")
    assert gate.reached.wait(60)
    rt.close()
    for answer in (running, waiting):
        with pytest.raises((ClosedError, DecodeError)):
            answer.result(60)
    with pytest.raises(ClosedError):
        rt.embed("late")


def test_a_failure_costs_one_request() -> None:
    with open_toy(faults=Faults(decodes={2: PlannedFault()})) as rt:
        expected = rt.embed("one").vectors
        with pytest.raises(DecodeError):
            rt.embed("one")
        np.testing.assert_array_equal(rt.embed("one").vectors, expected)


def test_where_there_is_no_memory_for_it_replies_go_on(monkeypatch: pytest.MonkeyPatch, rt: Runtime) -> None:
    model = inside(rt).model
    monkeypatch.setattr(model, "_faults", Faults(no_memory=True))
    with pytest.raises(OutOfMemoryError):
        rt.embed("one")
    assert rt.generate("hello", max_tokens=3, **GREEDY).tokens
    monkeypatch.setattr(model, "_faults", Faults())
    assert len(rt.embed("one")) == 1


def test_a_processor_cannot_wait_for_the_engine_that_waits_for_it(rt: Runtime) -> None:
    def asking(tokens: Any, logits: Any) -> Any:
        rt.embed("one")

    with pytest.raises(InvalidInputError, match="must not call the runtime"):
        rt.generate("hello", max_tokens=2, processors=[asking])
    assert len(rt.embed("one")) == 1


def test_a_model_for_embeddings_alone_can_be_opened(tmp_path: Path) -> None:
    recipe = Recipe(
        name="looks-ahead", architecture="gemma-embedding", memory="sliding", fill=attention.gemma3
    )
    with perdure.open(recipe.write(tmp_path), n_ctx=512, threads=1, store=tmp_path / "store") as rt:
        found = rt.embed(["one", "two " * 100])
        assert found.vectors.shape == (2, rt.embedding_width)
        assert rt.embed("one").vectors.tobytes() == found.vectors[0].tobytes()
        with pytest.raises(InvalidInputError, match="writes none"):
            rt.generate("one", max_tokens=2)
        with pytest.raises(ContextOverflow):
            rt.embed([list(range(256)) * 3])


def test_many_threads_each_get_their_own(rt: Runtime) -> None:
    texts = [f"{at} " * (1 + 5 * at) for at in range(12)]
    expected = [rt.embed(text).vectors.tobytes() for text in texts]
    found: dict[int, bytes] = {}

    def ask(at: int) -> None:
        found[at] = rt.embed(texts[at]).vectors.tobytes()

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(len(texts))] == expected


def test_awaiting_gives_the_same_and_leaves_the_loop_free() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate) as rt:
            waiting = [asyncio.create_task(rt.aembed(text)) for text in TEXTS]
            await asyncio.to_thread(gate.reached.wait)
            assert not any(task.done() for task in waiting)
            gate.open()
            found = [await task for task in waiting]
            np.testing.assert_array_equal(np.concatenate([f.vectors for f in found]), rt.embed(TEXTS).vectors)
            with pytest.raises(TokenError):
                await rt.aembed("")

    asyncio.run(main())


def test_a_cancelled_task_ends_its_request() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate) as rt:
            task = asyncio.create_task(rt.aembed([LONG] * 100))
            await asyncio.to_thread(gate.reached.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.admit(CHUNK + len("next"))
            assert (await rt.aembed("next")).tokens == (4,)

    asyncio.run(main())
