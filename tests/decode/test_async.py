"""Asyncio: twins that await, tasks that are cancelled, loops that come, go, and are closed early."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.observed import Turnstile, alone, check_delivery, check_idle, open_toy, outcome, trouble
from perdure import BusyError, InvalidInputError, Reply, Runtime
from perdure.decode.asyncio_reader import AsyncioListener
from perdure.decode.output_queue import OutputListener, OutputQueue, notify
from perdure.decode.request import Delta, Request
from perdure.decode.stream import Stream, one_request
from perdure.memory import FullAttention

T = TypeVar("T")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


async def _reached(gate: Turnstile) -> None:
    await asyncio.to_thread(gate.reached.wait)


def test_awaiting_gives_what_waiting_gives() -> None:
    async def main() -> None:
        with open_toy() as rt:
            reply = await rt.agenerate("hello", max_tokens=20, **GREEDY)
            assert reply.tokens == alone(FullAttention, "hello", max_tokens=20, **GREEDY)[0].tokens
            job = rt.submit("hello", max_tokens=20, n=2, seed=1)
            deltas = [delta async for delta in job]
            check_delivery(deltas, await job.areplies(), rt.model)
            assert "".join([d.text async for d in rt.astream("hello", max_tokens=20, **GREEDY)]) == reply.text

    run(main())


def test_many_tasks_on_one_loop_each_get_their_own() -> None:
    async def main() -> None:
        with open_toy(slots=3) as rt:
            replies = await asyncio.gather(
                *(rt.agenerate(f"prompt {at}", max_tokens=10, **GREEDY) for at in range(20))
            )
        for at, reply in enumerate(replies):
            assert reply.tokens == alone(FullAttention, f"prompt {at}", max_tokens=10, **GREEDY)[0].tokens

    run(main())


def test_the_loop_goes_on_while_the_engine_works() -> None:
    """The engine is held, and yet other tasks of the loop get their turns."""

    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate) as rt:
            waiting = asyncio.create_task(rt.agenerate("a", max_tokens=3, **GREEDY))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not waiting.done()
            gate.open()
            assert (await waiting).finish_reason == "length"

    run(main())


@pytest.mark.parametrize("way", ["agenerate", "astream"])
@pytest.mark.parametrize("phase", ["reading", "writing"])
def test_cancelling_the_task_cancels_the_request_within_one_step(way: str, phase: str) -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate, slots=1, n_batch=16) as rt:
            prompt = [1 + at % 90 for at in range(200 if phase == "reading" else 5)]

            async def consume() -> None:
                if way == "agenerate":
                    await rt.agenerate(prompt, max_tokens=50, **GREEDY)
                else:
                    async for _ in rt.astream(prompt, max_tokens=50, **GREEDY):
                        pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0)
            await _reached(gate)
            gate.admit(30)
            await _reached(gate)
            steps = trouble(rt).n_decodes
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()
            await rt.agenerate("after", max_tokens=1)
            check_idle(rt)
            # The step in flight was stopped, "after" took one.
            assert trouble(rt).n_decodes - steps <= 2

    run(main())


def test_leaving_an_async_stream_early_cancels_the_rest() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate, slots=1) as rt:
            gate.admit(3)
            stream = rt.astream("a", max_tokens=250, **GREEDY)
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            gate.open()
            await rt.agenerate("b", max_tokens=1)
            check_idle(rt)
            # Three steps or fewer, one that was stopped, and that of "b".
            assert trouble(rt).n_decodes <= 5

    run(main())


def test_a_bad_request_is_refused_where_the_stream_begins() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate, slots=1, queue=0) as rt:
            with pytest.raises(InvalidInputError):
                await anext(aiter(rt.astream("a", max_tokens=0)))
            held = rt.submit("a", max_tokens=2, **GREEDY)
            with pytest.raises(BusyError):
                await anext(aiter(rt.astream("b")))
            gate.open()
            await held.areply()

    run(main())


def test_an_error_of_the_request_is_raised_where_it_is_awaited() -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        return 1 / 0

    async def main() -> None:
        with open_toy() as rt:
            with pytest.raises(ZeroDivisionError):
                await rt.agenerate("a", processors=[broken])
            with pytest.raises(ZeroDivisionError):
                async for _ in rt.astream("a", processors=[broken]):
                    pass

    run(main())


def test_a_wait_with_a_time_limit_gives_up_and_cancels() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate, slots=1) as rt:
            job = rt.submit("a", max_tokens=50, **GREEDY)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(job.areply(), 0.01)
            gate.open()
            assert (await job.areply()).finish_reason == "cancelled"
            check_idle(rt)

    run(main())


def test_two_loops_in_two_threads_share_a_runtime() -> None:
    with open_toy(slots=2) as rt:
        found: dict[int, list[tuple[int, ...]]] = {}

        def serve(at: int) -> None:
            async def main() -> list[tuple[int, ...]]:
                replies = await asyncio.gather(
                    *(rt.agenerate(f"loop {at} task {task}", max_tokens=8, **GREEDY) for task in range(6))
                )
                return [reply.tokens for reply in replies]

            found[at] = run(main())

        threads = [threading.Thread(target=serve, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for at in range(2):
            assert found[at] == [
                alone(FullAttention, f"loop {at} task {task}", max_tokens=8, **GREEDY)[0].tokens
                for task in range(6)
            ]
        check_idle(rt)


def test_one_job_can_be_awaited_in_a_loop_and_waited_for_in_a_thread() -> None:
    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        job = rt.submit("a", max_tokens=5, **GREEDY)
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(job.reply())),
            threading.Thread(target=lambda: found.append(run(job.areply()))),
            threading.Thread(target=lambda: found.append(run(job.areply()))),
        ]
        for thread in threads:
            thread.start()
        gate.open()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert all(reply is found[0] for reply in found)


def test_a_loop_that_is_closed_early_holds_nobody_up() -> None:
    """The request that was awaited there goes on, and its wake-up finds nobody."""
    gate = Turnstile()
    with open_toy(gate=gate, slots=2) as rt:
        job = rt.submit("a", max_tokens=20, **GREEDY)
        loop = asyncio.new_event_loop()
        waiting = job.areply()

        async def begin() -> None:
            # Up to its first wait, as a task would, but nothing of it is left to clean up.
            waiting.send(None)

        loop.run_until_complete(begin())
        loop.close()
        gate.open()
        assert rt.generate("b", max_tokens=5, **GREEDY).finish_reason == "length"
        assert outcome(job)[0].finish_reason == "length"
        waiting.close()
        check_idle(rt)


def test_ending_a_loop_cancels_what_its_tasks_wait_for() -> None:
    gate = Turnstile()
    with open_toy(gate=gate, slots=1) as rt:

        async def main() -> None:
            for at in range(3):
                task = asyncio.create_task(rt.agenerate(f"left {at}", max_tokens=100, **GREEDY))
                tasks.append(task)
            await asyncio.sleep(0)

        tasks: list[asyncio.Task[Any]] = []
        run(main())
        assert all(task.cancelled() for task in tasks)
        gate.open()
        rt.generate("after", max_tokens=1)
        check_idle(rt)
        assert trouble(rt).n_decodes <= 4


def test_a_loop_that_is_gone_is_not_kept_for_its_readers() -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        with open_toy() as rt:
            await rt.agenerate("hello", max_tokens=4, **GREEDY)

    for _ in range(3):
        run(main())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3


def streamed(output: OutputQueue) -> Stream[Delta, Reply]:
    """A stream of what comes into `output`."""
    return Stream(one_request(Request(prompt=[1])), lambda request: output)


def test_one_call_wakes_all_readers_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is told to an event loop once, however many of its tasks wait for it."""
    told: list[int] = []
    notify = AsyncioListener.notify

    def noting(listener: AsyncioListener, waiters: Sequence[Any]) -> None:
        told.append(len(waiters))
        notify(listener, waiters)

    waiting: set[OutputQueue] = set()
    listen = OutputQueue.listen

    def listening(queue: OutputQueue, listener: OutputListener, waiter: Any, *, finish: bool = False) -> None:
        waiting.add(queue)
        listen(queue, listener, waiter, finish=finish)

    monkeypatch.setattr(AsyncioListener, "notify", noting)
    monkeypatch.setattr(OutputQueue, "listen", listening)

    async def read(rt: Runtime, prompt: str) -> None:
        async for _ in rt.astream(prompt, max_tokens=3, **GREEDY):
            pass

    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate, slots=4) as rt:
            tasks = [asyncio.create_task(read(rt, f"prompt {at}")) for at in range(4)]
            await _reached(gate)
            while len(waiting) < len(tasks):
                await asyncio.sleep(0)
            gate.open()
            await asyncio.gather(*tasks)

    run(main())
    assert max(told) > 1


def test_what_is_new_is_taken_in_the_call_that_tells_of_it() -> None:
    """No task of the loop gets a turn between the two."""
    taken: list[Delta] = []

    def take(deltas: Sequence[Delta]) -> bool:
        taken.extend(deltas)
        return True

    async def main() -> None:
        output = OutputQueue()
        job = streamed(output)
        draining = asyncio.create_task(job.consume(take))
        await asyncio.sleep(0)
        for text in "abc":
            if not output.push([Delta(text)]):
                notify([output])
            assert taken[-1].text == text
        output.finish([])
        assert await draining

    run(main())
    assert [delta.text for delta in taken] == ["a", "b", "c"]


def test_what_is_handed_over_in_the_readers_loop_touches_no_queue() -> None:
    taken: list[str] = []

    def take(deltas: Sequence[Delta]) -> bool:
        assert not output.deltas
        taken.extend(delta.text for delta in deltas)
        return True

    async def main() -> None:
        draining = asyncio.create_task(streamed(output).consume(take))
        # Nobody takes it yet.
        assert not output.push([Delta("a")])
        await asyncio.sleep(0)
        assert taken == ["a"]
        assert output.push([Delta("b"), Delta("c")])
        assert taken == ["a", "b", "c"]
        # In another thread it waits for the loop.
        assert not await asyncio.to_thread(output.push, [Delta("d")])
        # And so does what comes behind it.
        assert not output.push([Delta("e")])
        notify([output])
        assert taken == ["a", "b", "c", "d", "e"]
        draining.cancel()
        # It was cancelled, though it has not heard of it yet.
        assert not output.push([Delta("f")])
        await asyncio.wait([draining])
        assert [delta.text for delta in output.deltas] == ["f"]
        assert not output._on_change

    output = OutputQueue()
    run(main())
    assert len(taken) == 5


@given(st.lists(st.sampled_from(["push", "thread", "stop", "tell", "turn"]), max_size=30))
def test_readers_get_every_delta_once_and_in_order_however_it_comes(steps: list[str]) -> None:
    """Pushed in the loop or in a thread, and told of later; read by readers that stop and go on."""
    taken: list[str] = []
    texts = [str(number) for number in range(len(steps))]

    async def main() -> None:
        output, going_on = OutputQueue(), True

        def take(deltas: Sequence[Delta]) -> bool:
            nonlocal going_on
            taken.extend(delta.text for delta in deltas)
            told, going_on = going_on, True
            return told

        async def read() -> None:
            while not await streamed(output).consume(take):
                await asyncio.sleep(0)

        reading = asyncio.create_task(read())
        for step, text in zip(steps, texts, strict=True):
            if step == "push" and not output.push([Delta(text)]):
                notify([output])
            elif step == "thread" and not await asyncio.to_thread(output.push, [Delta(text)]):
                await asyncio.to_thread(notify, [output])
            elif step == "stop":
                going_on = False
            elif step == "tell":
                notify([output])
            elif step == "turn":
                await asyncio.sleep(0)
        output.finish([])
        await reading
        assert not output._on_change

    run(main())
    given_out = [text for step, text in zip(steps, texts, strict=True) if step in ("push", "thread")]
    assert taken == given_out


def test_a_reader_that_takes_all_deltas_by_calls_may_stop_and_go_on() -> None:
    async def main() -> None:
        with open_toy() as rt:
            job = rt.submit("hello", max_tokens=20, n=2, seed=1)
            deltas: list[Delta] = []

            def take(new: Sequence[Delta]) -> bool:
                deltas.extend(new)
                return len(deltas) % 2 == 0

            while not await job.consume(take):
                pass
            check_delivery(deltas, await job.areplies(), rt.model)

    run(main())


def test_a_reader_that_cannot_take_a_delta_is_told_why() -> None:
    def take(deltas: Sequence[Delta]) -> bool:
        raise ValueError("full")

    async def main() -> None:
        with open_toy() as rt, pytest.raises(ValueError, match="full"):
            await rt.submit("hello", max_tokens=3, **GREEDY).consume(take)

    run(main())


def test_a_task_that_is_cancelled_while_it_drains_ends_its_request() -> None:
    async def main() -> None:
        gate = Turnstile()
        with open_toy(gate=gate) as rt:
            job = rt.submit("hello", max_tokens=100, **GREEDY)
            draining = asyncio.create_task(job.consume(lambda deltas: True))
            await _reached(gate)
            draining.cancel()
            await asyncio.wait([draining])
            gate.open()
            assert (await job.areply()).finish_reason == "cancelled"

    run(main())


def test_the_last_token_comes_with_the_reply() -> None:
    """One message to another process less, and one time less that a reader is woken."""
    told: list[tuple[int, bool]] = []

    class Noting:
        def notify(self, waiters: Sequence[OutputQueue]) -> None:
            for output in waiters:
                with output.lock:
                    told.append((len(output.deltas), output.finished))
                    output.deltas.clear()
                    output.listen(self, output)

    gate = Turnstile()
    with open_toy(gate=gate) as rt:
        job = rt.submit("hello", max_tokens=3, **GREEDY)
        with job.output.lock:
            job.output.listen(Noting(), job.output)
        gate.open()
        job.reply()
    assert told == [(1, False), (1, False), (1, True)]


def test_a_subscriber_is_told_of_each_step_once_however_many_samples_it_has() -> None:
    told: list[tuple[int, bool]] = []

    class Noting:
        def notify(self, waiters: Sequence[OutputQueue]) -> None:
            for output in waiters:
                with output.lock:
                    told.append((len(output.deltas), output.finished))
                    output.deltas.clear()

    gate = Turnstile()
    with open_toy(gate=gate, slots=2) as rt:
        job = rt.submit("hello", max_tokens=3, n=2, **GREEDY)
        with job.output.lock:
            job.output.subscribe(Noting(), job.output)
        gate.open()
        job.reply()
        notify([job.output])
    assert told == [(2, False), (2, False), (2, True)]
