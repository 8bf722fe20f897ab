"""Any history of prompts with media, checked by W≡C: every reply has the tokens and log probabilities of a
cold run, to the last bit."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import perdure
from engine.failures import failing_decode
from inside import inside
from perdure import CorruptStateError, Reply, Runtime
from perdure.ext.images.media_store import MediaStore

from .test_prompts import KINDS, Scene, scene_of

N_CTX = 2048
Answer = tuple[Any, Any]


class MediaMachine(RuleBasedStateMachine):
    """`asked` are the prompts so far, with their replies. One runtime has a history, another has none."""

    scene: ClassVar[Scene]
    cold: ClassVar[Runtime]
    known: ClassVar[dict[tuple[int, ...], Answer]]
    folders: ClassVar[Iterator[Path]]

    @initialize(budget=st.sampled_from([1 << 30, 1 << 30, 1 << 20, 1 << 16]))
    def begin(self, budget: int) -> None:
        self.budget = budget
        self.store = self.scene.store(next(self.folders))
        self.asked: list[list[int]] = []
        self.rows_are_there = True
        self.rt = self.opened()

    def opened(self) -> Runtime:
        return opened(self.scene, self.store, cache=self.budget)

    def teardown(self) -> None:
        if hasattr(self, "rt"):
            self.rt.close()

    # What is asked.

    @rule(
        base=st.integers(0, 20),
        keep=st.floats(0, 1),
        parts=st.lists(st.sampled_from(["first", "second", "text", "more"]), max_size=3),
        end=st.integers(300, 303),
    )
    def say(self, base: int, keep: float, parts: list[str], end: int) -> None:
        """Go on from a prompt and its reply, from its end, from a place in it, or from inside of an image."""
        prompt = self.prompt(base, keep, parts, end)
        if prompt is None:
            return
        try:
            reply = written(self.rt, prompt)
        except CorruptStateError:
            # Whatever the state of the prompt was kept for, no rows are guessed.
            assert not self.rows_are_there
            return
        self.judge(prompt, reply)

    @rule(
        bases=st.tuples(st.integers(0, 20), st.integers(0, 20)),
        keep=st.floats(0, 1),
        part=st.sampled_from(["first", "second", "text"]),
    )
    @precondition(lambda self: self.rows_are_there)
    def say_two_at_once(self, bases: tuple[int, int], keep: float, part: str) -> None:
        prompts = [prompt for base in bases if (prompt := self.prompt(base, keep, [part], 310 + base))]
        streams = [self.rt.submit(prompt, **ASK) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            self.judge(prompt, stream.reply())

    @rule(base=st.integers(0, 20), step=st.integers(1, 6), after=st.integers(0, 200))
    @precondition(lambda self: self.rows_are_there)
    def fail(self, base: int, step: int, after: int) -> None:
        """A step ends in its midst: the reply is an error, or was over before."""
        prompt = self.prompt(base, 1.0, ["second", "first"], 305)
        if prompt is None:
            return
        with failing_decode(inside(self.rt).context, step=step, after=after):
            stream = self.rt.submit(prompt, **ASK)
            with suppress(perdure.PerdureError):
                self.judge(prompt, stream.reply())

    @rule()
    def restart(self) -> None:
        self.rt.close()
        self.rt = self.opened()

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.asked)
    def sleep(self, which: int) -> None:
        self.rt.cache.sleep(self.asked[which % len(self.asked)])

    @rule(which=st.integers(0, 20))
    @precondition(lambda self: self.asked)
    def wake(self, which: int) -> None:
        self.rt.cache.wake(self.asked[which % len(self.asked)])

    @rule()
    @precondition(lambda self: self.rows_are_there)
    def lose_rows(self) -> None:
        MediaStore(self.store).forget_rows()
        self.rows_are_there = False

    @rule(damage=st.booleans())
    @precondition(lambda self: not self.rows_are_there)
    def encode_again(self, damage: bool) -> None:
        """Rows come back as an encoder makes them again. Damaged ones are none."""
        shutil.copytree(self.scene.media / "media", self.store / "media", dirs_exist_ok=True)
        self.rows_are_there = not damage
        if damage:
            for path in (self.store / "media" / "rows").glob("??/*"):
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)

    @rule()
    def lose_state(self) -> None:
        """K/V is gone, rows are there."""
        self.rt.cache.clear()

    # Checking.

    def prompt(self, base: int, keep: float, parts: list[str], end: int) -> list[int] | None:
        start = [1, *range(300, 337)]
        if self.asked and base:
            start = self.asked[base % len(self.asked)]
            start = start[: max(1, int(keep * len(start)))]
            while start[-1] < 0:
                # Into an image: it is read whole or not at all.
                start = start[:-1]
        media = {"first": self.scene.first, "second": self.scene.second}
        prompt = list(start)
        for part in parts:
            prompt += media.get(part) or range(310, 330 + 40 * (part == "more"))
        prompt.append(end)
        return prompt if len(prompt) < N_CTX - 40 else None

    def judge(self, prompt: list[int], reply: Reply) -> None:
        if tuple(prompt) not in self.known:
            self.cold.cache.clear()
            cold = written(self.cold, prompt)
            assert cold.reuse.reused == 0
            self.known[tuple(prompt)] = cold.tokens, cold.logprobs
        assert (reply.tokens, reply.logprobs) == self.known[tuple(prompt)]
        self.asked.append([*prompt, *reply.tokens])


ASK: Any = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1}


def written(rt: Runtime, prompt: list[int]) -> Reply:
    return rt.generate(prompt=prompt, **ASK)


def opened(scene: Scene, store: Path, **options: Any) -> Runtime:
    return perdure.open(scene.model, store=store, n_ctx=N_CTX, slots=2, threads=1, exact=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_e2_k2_c1_s4_any_history_with_media_equals_a_cold_run(
    kind: str, toy: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    scene = scene_of(kind, toy, tmp_path / "media")
    with opened(scene, scene.store(tmp_path / "cold")) as cold:

        class Machine(MediaMachine):
            pass

        Machine.scene, Machine.cold, Machine.known = scene, cold, {}
        Machine.folders = (tmp_path / str(number) for number in itertools.count())
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=4,
                stateful_step_count=10,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            ),
        )
