"""Any history of one context, checked by W≡C: what it says next is what a fresh context says."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from inside import core_of
from perdure import (
    CannotRewindError,
    Checkpoint,
    Context,
    ContextOverflow,
    CorruptStateError,
    DecodeError,
    EngineError,
    Feed,
    IncompatibleStateError,
)
from perdure.engine.contract import Outcome, Rows
from perdure.memory import FullAttention, Recurrent, SlidingWindow
from subjects import NARROW, Row, Subject, check

from .failures import failing_decode, refused_write

N_SEQ = 3
N_CTX = 120


class Fault(NamedTuple):
    """Where a decode breaks, and how: in which of its native steps, and how far into it."""

    step: int
    after: int
    outcome: Outcome


class Saved(NamedTuple):
    """Something to come back to, with the sequence it is of and what that held."""

    what: bytes | Checkpoint
    seq: int
    tokens: list[int]


seqs = st.integers(0, N_SEQ - 1)
lengths = st.sampled_from([45, 70, 12, 0])
texts = st.tuples(st.integers(1, 26), st.integers(0, 9))
short_texts = st.tuples(st.integers(1, 3), st.integers(0, 9))
probes = st.sampled_from([True, False, False])
"""Rarely: decoding settles what the engine puts off. At the end of a history all sequences are probed."""
faults = st.none() | st.builds(
    Fault,
    st.integers(1, 4),
    st.integers(0, 300),
    st.sampled_from([Outcome.ABORTED, Outcome.FAILED, Outcome.FULL, Outcome.REJECTED]),
)


class ContextMachine(RuleBasedStateMachine):
    """`held` is the model: the tokens of each sequence. A probe decodes one more and compares its row."""

    subject: ClassVar[Subject]
    prefix: ClassVar[int] = 0
    """Tokens more that sequence 0 starts with, for memory that shows its limits only when it is long."""
    known: ClassVar[dict[tuple[object, ...], Row]]

    states = Bundle("states")
    points = Bundle("points")

    @initialize(
        shared=st.booleans(),
        swa_full=st.booleans(),
        n_batch=st.sampled_from([NARROW, 8, 24]),
        fine=st.booleans(),
        fill=st.tuples(*[lengths] * N_SEQ),
    )
    def open(self, shared: bool, swa_full: bool, n_batch: int, fine: bool, fill: tuple[int, ...]) -> None:
        # A window that is put back lies in other cells. Flash attention sums over cells in their order,
        # which stays the same until the window wraps around; without it, the places count too.
        moves = not self.subject.toy and self.subject.kind is SlidingWindow and (fine or self.prefix > 0)
        exact = not shared and n_batch == NARROW and not moves
        fine = fine or (self.subject.routes and not exact)
        self.settings: dict[str, Any] = {
            "n_ctx": N_CTX + self.prefix,
            "n_batch": n_batch,
            "swa_full": swa_full and not self.prefix,
            "fine": fine,
            **(self.subject.narrow.settings if exact else {}),
        }
        self.ctx: Context = self.subject.context(n_seq=N_SEQ, shared=shared, **self.settings)
        rounding = self.subject.rounding
        if exact:
            self.bound = self.subject.narrow_bound(fine=fine)
        else:
            self.bound = rounding.fine if fine else rounding.usual
        self.held: dict[int, list[int]] = {seq: [] for seq in range(N_SEQ)}
        for seq, length in enumerate(fill):
            self.fill(seq, length + (self.prefix if seq == 0 else 0))

    def teardown(self) -> None:
        if not hasattr(self, "ctx"):
            return
        with self.ctx as ctx:
            # After a rule that failed the model is behind, and its failure is what counts.
            if all(ctx.tokens(seq) == tokens for seq, tokens in self.held.items()):
                self.probe(*self.held)

    @invariant()
    def the_ledger_is_true(self) -> None:
        for seq, tokens in self.held.items():
            assert self.ctx.tokens(seq) == tokens, f"the ledger of sequence {seq} is wrong"
            newest = core_of(self.ctx).newest(seq)
            assert newest == len(tokens) - 1, f"sequence {seq} ends at {newest}, not {len(tokens) - 1}"

    def fill(self, seq: int, length: int) -> None:
        """Give an empty sequence something to lose."""
        if length:
            self.held[seq] = self.subject.tokens(length, 10 + seq)
            self.ctx.decode(self.held[seq], seq)

    def probe(self, *touched: int) -> None:
        for seq in touched:
            if len(self.held[seq]) < self.ctx.n_ctx:
                self.ctx.decode([65], seq)
                self.held[seq].append(65)
                check(self.ctx.logits().copy(), self.cold(self.held[seq]), self.bound)

    def cold(self, tokens: list[int]) -> Row:
        key = (*self.settings.values(), *tokens)
        if key not in self.known:
            self.known[key] = self.subject.cold([tokens], **self.settings)
        return self.known[key]

    # Decoding.

    @rule(seq=seqs, text=texts, rows=st.sampled_from(["last", "all", "none"]), fault=faults, probe=probes)
    def decode(self, seq: int, text: tuple[int, int], rows: Rows, fault: Fault | None, probe: bool) -> None:
        tokens = self.subject.tokens(*text)
        needed = len(self.held[seq]) + len(tokens)
        if needed > self.ctx.n_ctx:
            with pytest.raises(ContextOverflow, match=f"{needed} tokens"):
                self.ctx.decode(tokens, seq, rows=rows)
            return
        self.append({seq: tokens}, fault, lambda: self.ctx.decode(tokens, seq, rows=rows))
        if probe:
            self.probe(seq)

    @rule(feeds=st.dictionaries(seqs, short_texts, min_size=1), fault=faults, probe=probes)
    def step(self, feeds: dict[int, tuple[int, int]], fault: Fault | None, probe: bool) -> None:
        texts: dict[int, list[int]] = {}
        room = self.ctx.n_batch
        for seq, text in feeds.items():
            if tokens := self.subject.tokens(*text)[: min(room, self.ctx.n_ctx - len(self.held[seq]))]:
                texts[seq] = tokens
                room -= len(tokens)
        if texts:
            once = fault and fault._replace(step=1)
            self.append(texts, once, lambda: self.ctx.step([Feed(*item) for item in texts.items()]))
            if probe:
                self.probe(*texts)

    def append(self, texts: dict[int, list[int]], fault: Fault | None, call: Any) -> None:
        """Append with `call`, all or nothing, and keep the model in step."""
        kept = None
        try:
            if fault is None:
                call()
            else:
                # The toy engine counts tokens where llama.cpp counts nodes. A GPU's nodes ask nobody: there a
                # graph is stopped where the CPU begins it, or not at all.
                after = fault.after % 8 if self.subject.toy else 0 if self.subject.on_gpu else fault.after
                with failing_decode(self.ctx, step=fault.step, after=after, outcome=fault.outcome):
                    call()
        except DecodeError as error:
            kept = error.kept
        except ContextOverflow:
            assert fault is not None
            assert fault.outcome is Outcome.FULL
            return
        if kept is not None:
            self.give_up(texts, kept)
            return
        for seq, tokens in texts.items():
            self.held[seq] += tokens

    def give_up(self, texts: dict[int, list[int]], kept: dict[int, int]) -> None:
        """A failure leaves all as it was; but of states that cannot be cut, it may lose those that were
        not worth a copy for one token, and with them what lay beside them."""
        assert kept.keys() >= texts.keys()
        for seq, length in kept.items():
            if length != len(self.held[seq]):
                assert length == 0, f"sequence {seq} was cut to {length}"
                assert not self.ctx.memory.cuts, f"sequence {seq} was given up"
                assert len(texts[seq]) == 1 if seq in texts else len(texts) > 1, (
                    f"sequence {seq} was given up"
                )
                self.held[seq] = []

    # Going back, copying, clearing.

    @rule(seq=seqs, back=st.one_of(st.integers(1, 3), st.integers(0, 50)), probe=probes)
    def truncate(self, seq: int, back: int, probe: bool) -> None:
        length = max(0, len(self.held[seq]) - back)
        if length and length < self.ctx.shortest_cut(seq):
            assert self.ctx.memory.kind is not FullAttention
            with pytest.raises(CannotRewindError, match=f"can reach {self.ctx.shortest_cut(seq)}"):
                self.ctx.truncate(length, seq)
        else:
            self.ctx.truncate(length, seq)
            del self.held[seq][length:]
        if probe:
            self.probe(seq)

    @rule(target=states, src=seqs, dst=seqs, save=st.booleans(), probe=probes)
    def fork(self, src: int, dst: int, save: bool, probe: bool) -> object:
        if src == dst:
            return multiple()
        self.ctx.fork(src, dst)
        self.held[dst] = [*self.held[src]]
        kept = self.keep(dst) if save else None
        if probe:
            self.probe(src, dst)
        return kept or multiple()

    @rule(seq=seqs, everything=st.booleans(), length=lengths, probe=probes)
    def clear(self, seq: int, everything: bool, length: int, probe: bool) -> None:
        self.ctx.clear(None if everything else seq)
        for each in range(N_SEQ) if everything else [seq]:
            self.held[each] = []
            self.fill(each, length)
        if probe:
            self.probe(seq)

    # Keeping and putting back.

    @rule(target=states, seq=seqs)
    def save(self, seq: int) -> object:
        return self.keep(seq) or multiple()

    def keep(self, seq: int) -> Saved | None:
        return Saved(self.ctx.save(seq), seq, [*self.held[seq]]) if self.held[seq] else None

    @rule(kept=states, seq=seqs, spoil=st.none() | st.integers(0, 1 << 20), probe=probes)
    def load(self, kept: Saved, seq: int, spoil: int | None, probe: bool) -> None:
        assert isinstance(kept.what, bytes)
        if spoil is None:
            self.ctx.load(kept.what, seq)
            self.held[seq] = [*kept.tokens]
        else:
            damaged = bytearray(kept.what)
            damaged[spoil % len(damaged)] ^= 1
            with pytest.raises((CorruptStateError, IncompatibleStateError)):
                self.ctx.load(damaged, seq)
        if probe:
            self.probe(seq)

    @rule(target=points, seq=seqs)
    def checkpoint(self, seq: int) -> object:
        if not self.held[seq]:
            return multiple()
        return Saved(self.ctx.checkpoint(seq), seq, [*self.held[seq]])

    @rule(kept=points, elsewhere=st.sampled_from([0, 0, 1, 2]), probe=probes)
    def restore(self, kept: Saved, elsewhere: int, probe: bool) -> None:
        self.go_back(kept, (kept.seq + elsewhere) % N_SEQ)
        if probe:
            self.probe((kept.seq + elsewhere) % N_SEQ)

    @rule(seq=seqs, text=texts, probe=probes)
    def go_on_and_return(self, seq: int, text: tuple[int, int], probe: bool) -> None:
        """What a turn that is taken back does."""
        if self.held[seq] and len(self.held[seq]) + text[0] <= self.ctx.n_ctx:
            kept = Saved(self.ctx.checkpoint(seq), seq, [*self.held[seq]])
            self.ctx.decode(self.subject.tokens(*text), seq)
            self.held[seq] += self.subject.tokens(*text)
            self.go_back(kept, seq)
            if probe:
                self.probe(seq)

    def go_back(self, kept: Saved, seq: int) -> None:
        assert isinstance(kept.what, Checkpoint)
        starts = self.held[seq][: len(kept.tokens)] == kept.tokens
        if starts or self.ctx.memory.kind is Recurrent:
            self.ctx.restore(kept.what, seq)
            self.held[seq] = [*kept.tokens]
        else:
            with pytest.raises(IncompatibleStateError):
                self.ctx.restore(kept.what, seq)

    @rule(kept=states | points, length=lengths)
    def refuse(self, kept: Saved, length: int) -> None:
        """The engine refuses what it gave itself: the sequence is then empty, and said to be."""
        seq = kept.seq
        with refused_write(self.ctx):
            if isinstance(kept.what, bytes):
                with pytest.raises(EngineError, match="empty"):
                    self.ctx.load(kept.what, seq)
            elif kept.what.state is not None and self.held[seq][: len(kept.tokens)] == kept.tokens:
                with pytest.raises(EngineError, match="empty"):
                    self.ctx.restore(kept.what, seq)
            else:
                return
        self.held[seq] = []
        self.fill(seq, length)
