"""Random histories of one context, on every model, against W≡C at the level of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from perdure import EngineError
from perdure.engine import state
from perdure.engine.context.ledger import Undo
from perdure.engine.llama.core import LlamaCore
from perdure.memory import MEMORY_KINDS
from perdure.testing.toy import ToyCore
from subjects import MLX, Subject

from .state_machine import ContextMachine
from .test_contract import (
    test_b6_a_failed_step_leaves_each_sequence_before_it_or_says_what_is_left as fail_a_step,
)
from .test_going_back import test_k2_a_checkpoint_brings_back_a_window_that_is_gone as bring_back

Find = Callable[[str], Subject]
Patch = pytest.MonkeyPatch


def run(subject: Subject, *, examples: int, steps: int, prefix: int = 0, **more: Any) -> None:
    """Look for a history after which warm is not cold."""
    machine = type("Machine", (ContextMachine,), {"subject": subject, "prefix": prefix, "known": {}})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            **more,
        ),
    )


def test_no_short_history_makes_warm_differ_from_cold(subject: Subject) -> None:
    run(subject, examples=40 if subject.toy else 3 if subject.name in MLX else 10, steps=25)


def test_no_history_beyond_the_window_makes_warm_differ_from_cold(find_subject: Find) -> None:
    """The engine gives up window cells only past 256, so gemma3 needs a long start."""
    run(find_subject("gemma3"), examples=2, steps=8, prefix=300)


@pytest.mark.soak
def test_no_long_history_makes_warm_differ_from_cold(subject: Subject) -> None:
    run(subject, examples=500, steps=50)


@pytest.mark.soak
def test_no_long_history_beyond_the_window_makes_warm_differ_from_cold(find_subject: Find) -> None:
    run(find_subject("gemma3"), examples=100, steps=50, prefix=300)


# Without the mechanism, the machine must fail: faults planted in the context itself.


def found_in(subject: Subject, message: str) -> None:
    """The machine finds a history that ends with `message`."""
    with pytest.raises((Exception, pytest.fail.Exception), match=message):
        run(
            subject,
            examples=300 if subject.toy else 60,
            steps=30,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        )


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


@on("toy-sliding", "toy-recurrent", "gemma3")
def test_the_checker_notices_a_cut_through_a_lost_window(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    for kind in MEMORY_KINDS:
        monkeypatch.setattr(kind, "can_cut", lambda *_: True)
        monkeypatch.setattr(kind, "shortest_cut", lambda *_: 1)
    found_in(find_subject(name), "warm is not cold|was expected")


@on("toy-sliding", "gemma3")
def test_the_checker_notices_a_checkpoint_that_is_not_written(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    for core in (ToyCore, LlamaCore):
        write = core.write

        def forgetful(self: Any, seq: int, state: Any, *, partial: bool, write: Any = write) -> Any:
            return partial or write(self, seq, state, partial=partial)

        monkeypatch.setattr(core, "write", forgetful)
    with pytest.raises((AssertionError, EngineError), match=r"warm is not cold|refused a checkpoint"):
        bring_back(find_subject(name), 290, False)


@on("toy-full", "toy-hybrid", "llama")
def test_the_checker_notices_a_failure_that_is_not_undone(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    def forget(self: Undo) -> dict[int, int]:
        kept = self.lengths()
        self.marks = {}
        return kept

    monkeypatch.setattr(Undo, "carry_out", forget)
    found_in(find_subject(name), "ends at|the ledger of|failed to decode")


@on("toy-recurrent", "toy-hybrid", "mamba", "jamba")
def test_the_checker_notices_states_that_a_failed_step_mislaid(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    """It takes a certain order of cells, so here the history is not left to chance."""
    monkeypatch.setattr(Undo, "doubt", lambda self, *, others: None)
    with pytest.raises(AssertionError, match="warm is not cold"):
        fail_a_step(find_subject(name), 0)


@on("toy-full", "toy-recurrent")
def test_the_checker_notices_forks_that_are_one(name: str, find_subject: Find, monkeypatch: Patch) -> None:
    def alias(self: ToyCore, src: int, dst: int) -> None:
        self._states[dst] = self._states[src]

    monkeypatch.setattr(ToyCore, "copy", alias)
    found_in(find_subject(name), "ends at|warm is not cold|failed to decode")


@on("llama", "gemma3", "jamba")
def test_the_checker_notices_a_copy_that_is_put_off(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(LlamaCore, "_flush_copy", lambda self, src, dst: None)
    found_in(find_subject(name), "warm is not cold")


@on("toy-full", "llama")
def test_the_checker_notices_damaged_state_that_is_taken(
    name: str, find_subject: Find, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(state, "_checksum", lambda view: bytes(view[state.CHECKSUM]))
    found_in(find_subject(name), "DID NOT RAISE|token ids|refused a verified state")


@on("llama", "gemma3")
def test_the_checker_notices_one_wrong_token(name: str, find_subject: Find, monkeypatch: Patch) -> None:
    """A ledger that is right and a cache that is not: every write has its first token changed."""
    decode = LlamaCore.decode

    def slip(self: LlamaCore, batch: Any) -> Any:
        if batch.positions[0] == 0:
            batch.tokens[0] ^= 1
        return decode(self, batch)

    subject = find_subject(name)
    cold = Subject.cold

    def truly_cold(self: Subject, *args: Any, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LlamaCore, "decode", decode)
            return cold(self, *args, **settings)

    monkeypatch.setattr(LlamaCore, "decode", slip)
    monkeypatch.setattr(Subject, "cold", truly_cold)
    found_in(subject, "warm is not cold")
