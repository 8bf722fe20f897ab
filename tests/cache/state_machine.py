"""Any history of a whole runtime, checked by W≡C: every row that is drawn from is that of a fresh context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inside import core_of, nodes_of
from perdure import PerdureError, Reply, Stream
from perdure.engine.contract import Outcome
from subjects import NARROW, Row, Subject, check

from .served import EXPERTS, PLENTY, Answer, Served, other_shapes

N_CTX = 160
LONGEST = N_CTX - 8

texts = st.tuples(st.integers(1, 30), st.integers(0, 9))
talks = st.integers(0, 30)
spaces = st.sampled_from(["", "", "b"])


@dataclass
class Talk:
    """A conversation, as its owner has it: all that was said, where the last reply began, and who said it."""

    tokens: list[int]
    space: str
    asked: int = 0
    adapted: int | None = None
    number: int = 0
    """Of its conversation: a branch has the same."""


class RuntimeMachine(RuleBasedStateMachine):
    """`talks` is what the callers know. Whatever was done before, the next answer must be the cold one."""

    subject: ClassVar[Subject]
    swa_full: ClassVar[bool]
    prefix: ClassVar[int] = 0
    """Tokens that every conversation starts with, for a window that is lost only where much came before."""
    adapters: ClassVar[list[Any]]
    names: ClassVar[dict[str, str]]
    known: ClassVar[dict[tuple[object, ...], Row]]

    @initialize(
        slots=st.integers(1, 3),
        swap_slots=st.sampled_from([0, 0, 1, 2]),
        budget=st.sampled_from([PLENTY, PLENTY, 60_000, 8_000, 1]),
        n_batch=st.sampled_from([NARROW, NARROW, 16, 64]),
        shared=st.sampled_from([False, False, True]),
        exact=st.booleans(),
    )
    def open(self, slots: int, swap_slots: int, budget: int, n_batch: int, shared: bool, exact: bool) -> None:
        self.budget = budget
        if self.subject.name in EXPERTS:
            n_batch, shared = NARROW, False
            # Where narrow steps round differently, only equal shapes tell noise from another expert.
            exact = exact or self.subject.narrow.bound > 0
        self.longest = LONGEST + self.prefix
        self.served = Served(
            self.subject,
            slots=slots,
            # In a pool a copy has no cells of its own; and steps are at least as wide as there are sequences.
            swap_slots=0 if shared else max(0, min(swap_slots, n_batch - slots)),
            budget=budget,
            n_ctx=N_CTX + self.prefix,
            n_batch=n_batch,
            shared=shared,
            swa_full=self.swa_full,
            exact=exact,
            names=self.names,
        )
        self.talks: list[Talk] = []
        self.adapted: int | None = None
        self.own: float | None = None
        """The scale at which the request that is judged names the adapter itself."""
        self.seen: dict[str, list[list[int]]] = {"": [], "b": []}

    def teardown(self) -> None:
        if hasattr(self, "served"):
            self.served.close()

    # Checking.

    @invariant()
    def budgets_and_ledgers_are_kept(self) -> None:
        if hasattr(self, "served"):
            served = self.served
            nbytes, ends, lengths = served.engine_loop.call(
                lambda: (
                    served.slot_cache.nbytes,
                    [core_of(served.context).newest(seq) + 1 for seq in range(served.context.n_seq)],
                    [served.context.length(seq) for seq in range(served.context.n_seq)],
                )
            )
            assert nbytes <= self.budget
            assert ends == lengths
            assert served.engine_loop.load == (0, 0)

    def judge(self, prompt: list[int], reply: Reply, rows: list[Row], space: str, rounds: bool) -> Answer:
        """Every row is cold, and the report adds up and tells of nothing that was not there."""
        answer = Answer(prompt, reply, rows)
        said = list(reply.tokens)
        bound = self.loose if rounds else self.served.bound
        for at, row in enumerate(rows):
            check(row, self.cold(prompt, said[:at]), bound)
        assert reply.usage.cached_tokens == answer.reused
        assert answer.reused + reply.reuse.computed == len(prompt)
        shared = max((_common(prompt, text) for text in self.seen[space]), default=0)
        assert answer.reused <= min(shared, len(prompt) - 1)
        self.seen[space].append([*prompt, *said])
        return answer

    @property
    def loose(self) -> float:
        """What another number of rows a step may make of a row."""
        rounds = self.served.exact is not None and not self.subject.toy
        alike = self.subject.narrow.bound == 0 and (self.served.exact or 0) <= NARROW
        return other_shapes(self.subject) if rounds and not alike else self.served.bound

    def cold(self, prompt: list[int], said: list[int]) -> Row:
        served = self.served
        read = len(prompt) if served.exact else len(prompt) + len(said)
        key = (self.adapted, self.own, served.context.n_batch, served.exact, read, *prompt, *said)
        if key not in self.known:
            settings = {**served.settings, "shared": False}
            with self.subject.context(n_seq=1, **settings) as ctx:
                ctx.adapt(served.adapters if self.own is None else {self.adapters[0]: self.own})
                served.read(ctx, [*prompt, *said][:read])
                for token in [*prompt, *said][read:]:
                    ctx.decode([token])
                self.known[key] = ctx.logits().copy()
        return self.known[key]

    def say(self, prompt: list[int], space: str, own: float | None = None, **request: Any) -> Answer:
        rows: list[Row] = []
        self.own = own if self.names else None
        if self.own is not None:
            request["adapters"] = {"own": own}
        reply = self.served.submit(prompt, rows, namespace=space, **request).reply()
        try:
            return self.judge(prompt, reply, rows, space, "prompt_logprobs" in request)
        finally:
            self.own = None

    def text(self, text: tuple[int, int]) -> list[int]:
        return self.subject.tokens(*text)

    def pick(self, talk: int) -> Talk:
        return self.talks[talk % len(self.talks)]

    def have_talks(self) -> bool:
        return bool(getattr(self, "talks", None))

    def go_on(self, talk: Talk, prompt: list[int], **request: Any) -> Answer:
        answer = self.say(prompt, talk.space, conversation=f"talk {talk.number}", **request)
        self.note(talk, answer)
        return answer

    def note(self, talk: Talk, answer: Answer) -> None:
        talk.tokens, talk.asked, talk.adapted = answer.tokens, len(answer.prompt), self.adapted

    # What callers do.

    @rule(system=st.sampled_from([0, 16, 21, 40]), text=texts, space=spaces)
    def create(self, system: int, text: tuple[int, int], space: str) -> None:
        talk = Talk([], space, number=len(self.talks))
        self.go_on(talk, [*self.subject.tokens(self.prefix + system, 99), *self.text(text)])
        self.talks.append(talk)

    @precondition(have_talks)
    @rule(talk=talks, text=texts, count=st.integers(1, 4))
    def extend(self, talk: int, text: tuple[int, int], count: int) -> None:
        found = self.pick(talk)
        prompt = [*found.tokens, *self.text(text)]
        if len(prompt) < self.longest:
            self.go_on(found, prompt, max_tokens=count)

    @precondition(have_talks)
    @rule(talk=talks, at=st.integers(0, LONGEST), text=texts)
    def ask_beside(self, talk: int, at: int, text: tuple[int, int]) -> None:
        """A title, a summary: from the beginning of a conversation or of its own."""
        found = self.pick(talk)
        prompt = [*found.tokens[:at], *self.text(text)][: self.longest]
        self.say(prompt, found.space, side=True)

    @precondition(have_talks)
    @rule(talk=talks, at=st.integers(0, LONGEST), text=texts)
    def branch(self, talk: int, at: int, text: tuple[int, int]) -> None:
        found = self.pick(talk)
        twin = dataclasses.replace(found)
        kept = found.tokens[: self.prefix + at]
        self.go_on(twin, [*kept, *self.text(text)][: self.longest])
        self.talks.append(twin)

    @precondition(have_talks)
    @rule(talk=talks, back=st.one_of(st.integers(0, 9), st.integers(0, 70), st.integers(0, 400)), text=texts)
    def rewind(self, talk: int, back: int, text: tuple[int, int]) -> None:
        found = self.pick(talk)
        kept = found.tokens[: max(0, len(found.tokens) - back)]
        self.go_on(found, [*kept, *self.text(text)][: self.longest])

    @precondition(have_talks)
    @rule(talk=talks)
    def regenerate(self, talk: int) -> None:
        found = self.pick(talk)
        before, same = found.tokens, found.adapted == self.adapted
        answer = self.go_on(found, found.tokens[: found.asked])
        if same and not self.served.bound:
            assert answer.tokens[: len(before)] == before[: len(answer.tokens)]

    @precondition(have_talks)
    @rule(chosen=st.lists(talks, min_size=2, max_size=5, unique=True), text=texts)
    def crowd(self, chosen: list[int], text: tuple[int, int]) -> None:
        """Several at once, more than there are slots."""
        asked = []
        for talk in chosen:
            found = self.pick(talk)
            prompt = [*found.tokens[: self.longest - 30], *self.text(text)]
            rows: list[Row] = []
            asked.append((prompt, rows, found, self.served.submit(prompt, rows, namespace=found.space)))
        for prompt, _, found, _ in asked:
            # Each may find what any other of them computes.
            self.seen[found.space].append(prompt)
        for prompt, rows, found, job in asked:
            answer = self.judge(prompt, job.reply(), rows, found.space, rounds=False)
            self.note(found, answer)

    @precondition(have_talks)
    @rule(talk=talks, text=texts)
    def sample_twice(self, talk: int, text: tuple[int, int]) -> None:
        found = self.pick(talk)
        prompt = [*found.tokens[: self.longest - 30], *self.text(text)]
        rows: list[Row] = []
        first, second = self.served.submit(prompt, rows, namespace=found.space, n=2, max_tokens=1).replies()
        assert first.tokens == second.tokens
        for row in rows:
            check(row, self.cold(prompt, []), self.served.bound)
        self.seen[found.space].append([*prompt, *first.tokens])

    @precondition(have_talks)
    @rule(talk=talks)
    def score(self, talk: int) -> None:
        found = self.pick(talk)
        answer = self.say(found.tokens[: self.longest], found.space, prompt_logprobs=0, max_tokens=1)
        assert answer.reused == 0

    # What goes wrong.

    @precondition(have_talks)
    @rule(talk=talks, text=texts, step=st.integers(1, 8))
    def cancel(self, talk: int, text: tuple[int, int], step: int) -> None:
        """In the midst of a native step: of the prompt, or of the reply."""
        found = self.pick(talk)
        prompt = [*found.tokens[: self.longest - 40], *self.text(text), *self.text((9, 5))]
        self.interrupt(found, prompt, step, lambda job: job.cancel())

    @precondition(have_talks)
    @rule(talk=talks, text=texts, step=st.integers(1, 8))
    def fail(self, talk: int, text: tuple[int, int], step: int) -> None:
        """A native step that says it failed, after it did its work."""
        found = self.pick(talk)
        prompt = [*found.tokens[: self.longest - 40], *self.text(text), *self.text((9, 5))]
        self.interrupt(found, prompt, step, None)

    def interrupt(
        self, talk: Talk, prompt: list[int], step: int, act: Callable[[Stream[Any, Any]], None] | None
    ) -> None:
        rows: list[Row] = []
        submitted: Future[Stream[Any, Any]] = Future()
        with self.disturbed(step, lambda: act(submitted.result()) if act else None, fails=act is None):
            job = self.served.submit(prompt, rows, namespace=talk.space)
            submitted.set_result(job)
            try:
                reply = job.reply()
            except PerdureError:
                reply = None
        if reply is None or reply.finish_reason == "cancelled":
            # What was computed before it ended may be there.
            self.seen[talk.space].append([*prompt, *(reply.tokens if reply else ())])
            for at, row in enumerate(rows):
                said = list(reply.tokens if reply else ())[:at]
                check(row, self.cold(prompt, said), self.served.bound)
                if reply is None:
                    break
        else:
            answer = self.judge(prompt, reply, rows, talk.space, rounds=False)
            self.note(talk, answer)

    @contextmanager
    def disturbed(self, step: int, act: Callable[[], None], *, fails: bool) -> Iterator[None]:
        """Do something at the `step`-th native step within the block."""
        core = core_of(self.served.context)
        decode, steps = core.decode, iter(range(1, 1 << 30))

        def disturb(batch: Any) -> Outcome:
            if next(steps) != step:
                return decode(batch)
            act()
            outcome = decode(batch)
            return Outcome.FAILED if fails else outcome

        core.decode = disturb  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.served.engine_loop.call(lambda: None)
            del core.decode

    @rule(block=st.integers(0, 1000), place=st.integers(0, 1 << 20))
    def damage(self, block: int, place: int) -> None:
        """A bit of what is kept turns."""
        nodes = list(nodes_of(self.served.slot_cache.tier).values())
        if nodes:
            node = nodes[block % len(nodes)]
            name = "tail_state" if node.block.rows is None else "rows"
            part = getattr(node.block, name)
            if part is not None:
                wrong = part.copy()
                wrong.reshape(-1)[place % wrong.size] ^= 1
                change: dict[str, Any] = {name: wrong}
                node.block = dataclasses.replace(node.block, **change)

    @rule(block=st.integers(0, 1000))
    def drop(self, block: int) -> None:
        names = list(nodes_of(self.served.slot_cache.tier))
        if names:
            self.served.engine_loop.call(lambda: self.served.slot_cache.tier.drop(names[block % len(names)]))

    @precondition(have_talks)
    @rule(talk=talks, own=st.sampled_from([0.0, 1.0, 2.0]))
    def ask_with_own_adapters(self, talk: int, own: float) -> None:
        """T1: one turn with separate adapters, in the midst of a conversation."""
        found = self.pick(talk)
        prompt = [*found.tokens, 7][: self.longest]
        self.say(prompt, found.space, own=own)

    # What owners do.

    @rule(which=st.sampled_from([None, 0, 1]))
    def change_identity(self, which: int | None) -> None:
        chosen = {} if which is None or not self.adapters else {self.adapters[0]: 1.0 + which}
        self.served.adapt(chosen)
        self.adapted = which if chosen else None

    @precondition(have_talks)
    @rule(talk=talks, label=st.sampled_from("xy"))
    def warm(self, talk: int, label: str) -> None:
        found = self.pick(talk)
        if found.tokens:
            prefix = found.tokens[: self.longest]
            self.served.cache.warm(prefix, labels=label, namespace=found.space)
            self.seen[found.space].append([*prefix, prefix[-1]])

    @rule(label=st.sampled_from(["x", "y", None]))
    def clear(self, label: str | None) -> None:
        self.served.cache.clear(labels=label)
        if label is None:
            self.seen = {"": [], "b": []}
            assert self.served.cache.stats().blocks == 0


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
