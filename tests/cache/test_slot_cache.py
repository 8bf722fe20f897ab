"""Slots as a working set: who is placed where, from what, and what the reply says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from inside import core_of, nodes_of
from perdure import EngineError, IncompatibleStateError, Model, PerdureError, TokenError
from perdure.cache.block import Block
from perdure.memory import FullAttention, SlidingWindow
from perdure.testing.toy import Faults, Gate, ToyCore, ToyModel
from subjects import NOISE, Subject

from .served import BLOCK, SPACING, Answer, Served

Find = Callable[[str], Subject]


def faults(served: Served) -> Any:
    core = core_of(served.context)
    assert isinstance(core, ToyCore)
    return core.faults


def gated(subject: Subject) -> tuple[Subject, Gate]:
    """The same toy, whose decodes wait at a gate."""
    gate = Gate()
    model = ToyModel(subject.kind, faults=Faults(gate=gate))
    return dataclasses.replace(subject, model=model), gate


def cuts(subject: Subject) -> bool:
    """Whether the slots of this model can be cut anywhere, with its window kept."""
    return subject.model.memory.cuts


# More conversations than slots.


def test_more_conversations_than_slots_lose_nothing(subject: Subject) -> None:
    with Served(subject, slots=2) as served:
        texts = {number: subject.tokens(20, number) for number in range(5)}
        held = dict.fromkeys(texts, 0)
        for turn in range(3):
            for number in texts:
                answer = served.say([*texts[number], *subject.tokens(7, 100 + turn)])
                assert answer.reused == held[number]
                # The last token of a reply is never fed.
                held[number] = len(answer.tokens) - 1
                texts[number] = answer.tokens
                if turn:
                    assert answer.tiers.keys() == {"memory"}


def test_a_conversation_that_stays_in_its_slot_moves_nothing(toy: Subject) -> None:
    with Served(toy, slots=2) as served:
        first, second = toy.tokens(20, 1), toy.tokens(20, 2)
        for _ in range(3):
            first = served.say([*first, 1, 2]).tokens
            second = served.say([*second, 3, 4]).tokens
        assert len(served.slot_cache.tier) == 0
        assert served.say(first).tiers == {"slot": len(first) - 1}


def test_conversations_alternate_on_one_slot(subject: Subject) -> None:
    with Served(subject, slots=1) as served:
        first, second = subject.tokens(30, 1), subject.tokens(11, 2)
        for _ in range(3):
            for text in (first, second):
                before = len(text) - 1
                answer = served.say([*text, 1, 2, 3])
                assert answer.reused in (0, before)
                text[:] = answer.tokens


def test_conversations_wait_in_swap_slots_without_leaving_the_engine(subject: Subject) -> None:
    """Three conversations on one slot: none of them goes through memory, and each is as if it were alone."""
    with Served(subject, slots=1, swap_slots=3) as served:
        assert served.slot_cache.count == 1
        texts = [subject.tokens(30, 1), subject.tokens(11, 2), subject.tokens(23, 3)]
        for number in range(3):
            for text in texts:
                answer = served.say([*text, 1, 2, 3])
                assert answer.tiers == ({"slot": len(text) - 1} if number else {})
                text[:] = answer.tokens
        assert len(served.slot_cache.tier) == 0
        # More than there are places, of which one is for changing places: who has waited longest goes
        # through memory, and comes back.
        served.say(subject.tokens(17, 4))
        served.say(subject.tokens(17, 5))
        assert len(served.slot_cache.tier) > 0
        assert served.say([*texts[0], 1]).reused == len(texts[0]) - 1


def test_a_beginning_is_copied_from_a_swap_slot_and_stays_there(subject: Subject) -> None:
    with Served(subject, slots=1, swap_slots=2) as served:
        first = served.say(subject.tokens(2 * SPACING))
        served.say(subject.tokens(9, 2))
        shared = [*first.prompt, *subject.tokens(5, 3)]
        assert served.say(shared).tiers == {"slot": len(first.prompt)}
        assert served.say([*first.tokens, 1]).tiers == {"slot": len(first.tokens) - 1}


def test_the_same_two_prompts_again_and_again_fill_no_swap_slots_with_copies(toy: Subject) -> None:
    """Each time all but the last token is used again: what waits is then the beginning of what is there."""
    with Served(toy, slots=1, swap_slots=3) as served:
        for number in range(5):
            for text in (toy.tokens(40, 1), toy.tokens(30, 2)):
                assert bool(served.say(text).reused) == bool(number)
        assert len(served.slot_cache.tier) == 0


def test_what_takes_a_swap_slot_is_found_there_though_it_is_as_long_as_what_was(toy: Subject) -> None:
    with Served(toy, slots=1, swap_slots=1) as served:
        texts = [served.say(toy.tokens(30, number)).tokens for number in (1, 2, 3)]
        assert served.say([*texts[1], 1]).tiers == {"slot": len(texts[1]) - 1}


def test_nobody_else_meets_what_waits_in_a_swap_slot(toy: Subject) -> None:
    with Served(toy, slots=1, swap_slots=2) as served:
        text = served.say(toy.tokens(30), namespace="a").tokens
        served.say(toy.tokens(9, 2), namespace="b")
        assert served.say([*text, 1], namespace="b").reused == 0
        assert served.say([*text, 1], namespace="a").reused == len(text) - 1


def test_what_waits_in_a_swap_slot_is_stored_asleep_and_cleared_like_any_other(toy: Subject) -> None:
    with Served(toy, slots=1, swap_slots=2) as served:
        text = served.say(toy.tokens(40)).tokens
        ids = np.array(text, np.int32)
        served.say(toy.tokens(9, 2))
        served.engine_loop.call(lambda: served.slot_cache.swap_out(ids, ""))
        assert len(served.slot_cache.tier) > 0
        assert served.say([*text, 1]).tiers.keys() == {"memory"}
        served.engine_loop.call(served.slot_cache.clear)
        assert served.say([*text, 1]).reused == 0


def test_a_copy_to_a_swap_slot_that_fails_goes_through_memory(toy: Subject) -> None:
    with Served(toy, slots=1, swap_slots=2) as served:
        text = served.say(toy.tokens(40)).tokens
        fork = served.context.fork
        served.context.fork = _no_fork  # type: ignore[method-assign]
        served.say(toy.tokens(9, 2))
        served.context.fork = fork  # type: ignore[method-assign]
        assert served.say([*text, 1]).tiers.keys() == {"memory"}


def _no_fork(src: int, dst: int) -> None:
    raise EngineError("no copy today")


def test_p6_a_tiny_budget_costs_computation_and_never_a_wrong_answer(subject: Subject) -> None:
    for budget in (1, 3_000, 30_000):
        with Served(subject, slots=2, budget=budget) as served:
            texts = [subject.tokens(20, number) for number in range(3)]
            for _ in range(3):
                for text in texts:
                    text[:] = served.say([*text, 5, 6]).tokens
                    assert served.slot_cache.nbytes <= budget
                    assert served.cache.stats().budget == budget


# Whose place.


@pytest.mark.parametrize("slots", [2, 3])
def test_sharing_a_system_prompt_takes_nobodys_place(subject: Subject, slots: int) -> None:
    system = subject.tokens(2 * SPACING)
    with Served(subject, slots=slots) as served:
        first = served.say([*system, *subject.tokens(30, 1)])
        for number in range(2, slots + 1):
            other = served.say([*system, *subject.tokens(9, number)])
            assert other.reused == len(system)
            assert other.tiers == {"slot": len(system)}
        # There was room for all, so the first is where it was.
        again = served.say([*first.tokens, 1, 2])
        assert again.tiers == {"slot": len(first.tokens) - 1}
        # One more than fits: somebody moves out, and nobody loses anything.
        served.say([*system, *subject.tokens(9, 9)])
        last = served.say([*again.tokens, 1, 2])
        assert last.reused == len(again.tokens) - 1


def test_where_nothing_can_be_kept_a_free_slot_is_taken_before_anothers(subject: Subject) -> None:
    system = subject.tokens(2 * SPACING)
    with Served(subject, slots=3, budget=1) as served:
        first = served.say([*system, *subject.tokens(30, 1)])
        served.say([*system, *subject.tokens(9, 2)])
        served.say([*system, *subject.tokens(9, 3)])
        again = served.say([*first.tokens, 1, 2])
        assert again.tiers == {"slot": len(first.tokens) - 1}


def test_p5_two_branches_of_one_conversation_both_start_from_it(subject: Subject) -> None:
    with Served(subject, slots=3) as served:
        trunk = served.say(subject.tokens(40))
        for branch in range(4):
            # None of them goes on as the reply did.
            other = [token for token in subject.tokens(6, 10 + branch) if token != trunk.tokens[40]][:5]
            answer = served.say([*trunk.prompt, *other])
            if cuts(subject):
                assert answer.reused == 40
            else:
                assert answer.reused in (39, 40)
        assert served.say([*trunk.tokens, 1]).reused == len(trunk.tokens) - 1


# Computed once.


def test_identical_prefills_that_arrive_together_are_computed_once(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=4, n_batch=16) as served, served.counting() as count:
        prompt = held.tokens(60)
        jobs = [served.submit(prompt, max_tokens=1) for _ in range(4)]
        gate.reached.wait()
        gate.open()
        replies = [job.reply() for job in jobs]
        assert len({reply.tokens for reply in replies}) == 1
        # All of it once, then for each other its last token.
        assert count() == 60 + 3
        assert sorted(reply.reuse.reused for reply in replies) == [0, 59, 59, 59]


def test_a_shared_beginning_that_is_being_computed_is_waited_for(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=2, n_batch=16) as served, served.counting() as count:
        system = held.tokens(4 * SPACING)
        jobs = [served.submit([*system, number, number + 1], max_tokens=1) for number in range(2)]
        gate.reached.wait()
        gate.open()
        for job in jobs:
            job.reply()
        assert count() == len(system) + 4


def test_a_short_shared_beginning_is_not_worth_waiting_for(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=2) as served:
        first = served.submit([*held.tokens(8), *held.tokens(40, 1)], max_tokens=1)
        gate.reached.wait()
        second = served.submit([*held.tokens(8), *held.tokens(4, 2)], max_tokens=1)
        gate.open()
        assert second.reply().reuse.reused <= 8
        first.reply()


def test_who_waits_for_a_prefill_that_is_cancelled_goes_on_alone(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=2, n_batch=4) as served:
        prompt = held.tokens(60)
        first = served.submit(prompt)
        gate.reached.wait()
        rows: list[Any] = []
        second = served.submit(prompt, rows)
        first.cancel()
        gate.open()
        assert first.reply().finish_reason == "cancelled"
        served.check(Answer(prompt, second.reply(), rows))


def test_saving_waits_for_nobody(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=2, n_batch=16) as served:
        gate.open()
        text = served.say(held.tokens(20)).tokens
        before = served.cache.stats().blocks
        gate.shut()
        job = served.submit(held.tokens(30, 1))
        gate.reached.wait()
        # The engine is held up: whoever waited for it here would wait for ever.
        served.cache.save(text)
        gate.open()
        job.reply()
        assert served.cache.stats().blocks > before


# Going back.


def test_k3_the_same_prompt_four_times_has_one_answer(subject: Subject) -> None:
    with Served(subject, slots=2) as served:
        prompt = subject.tokens(37)
        answers = [served.say(prompt) for _ in range(4)]
        assert len({answer.reply.tokens for answer in answers}) == 1
        assert [answer.reused for answer in answers] == [0, 36, 36, 36]
        assert answers[1].why == "all but the last token, which is always computed"


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("back", [1, 8, "window", "window+1", "all"])
def test_k1_k2_going_back_restores_a_checkpoint_or_computes_and_says_which(
    subject: Subject, back: int | str, swa_full: bool
) -> None:
    window = subject.model.memory.window or 32
    steps = {"window": window, "window+1": window + 1}
    with Served(subject, slots=1, swa_full=swa_full) as served:
        text = subject.tokens(45)
        for turn in range(3):
            text = served.say([*text, *subject.tokens(9, turn)]).tokens
        keep = (
            0 if back == "all" else len(text) - 1 - steps.get(str(back), back if isinstance(back, int) else 0)
        )
        answer = served.say([*text[:keep], *subject.tokens(5, 77)])
        new = answer.prompt[:-1]
        shared = next((at for at, (a, b) in enumerate(zip(new, text, strict=False)) if a != b), len(new))
        if subject.kind is FullAttention:
            assert answer.reused == shared
        else:
            # Never further back than the last place where a checkpoint was taken.
            assert shared - SPACING < answer.reused <= shared or answer.reused == shared == 0
            if answer.reused < shared:
                assert f"no checkpoint at token {shared}: it went back to {answer.reused}" in answer.why
        if answer.reused == shared:
            assert "checkpoint" not in answer.why


def test_k2_without_a_checkpoint_all_is_computed_and_the_reply_says_so(toy: Subject) -> None:
    if toy.kind is FullAttention:
        pytest.skip("can be cut anywhere")
    with Served(toy, slots=1, budget=1, swa_full=False) as served:
        text = served.say(toy.tokens(45)).tokens
        answer = served.say([*text[:20], 1, 2, 3])
        assert answer.reused == 0
        assert answer.why == (
            f"a {toy.kind.name} memory has no checkpoint at token 20: nothing before it is left to go back to"
        )


def test_k2_a_conversation_that_was_swapped_out_can_still_go_back(subject: Subject) -> None:
    with Served(subject, slots=1) as served:
        text = subject.tokens(45)
        for turn in range(3):
            text = served.say([*text, *subject.tokens(9, turn)]).tokens
        served.say(subject.tokens(30, 50))
        answer = served.say([*text[:40], 1, 2, 3])
        assert answer.tiers.keys() == {"memory"}
        assert answer.reused == (40 if subject.kind is FullAttention else 2 * SPACING)
        # And once more, from the slot that it was put back into.
        again = served.say([*text[:35], 1, 2, 3])
        assert again.reused in ({35} if subject.kind is FullAttention else {35, 2 * SPACING})


def test_a_prompt_of_one_token_has_nothing_to_reuse(subject: Subject) -> None:
    with Served(subject) as served:
        assert served.say([5]).reused == 0
        answer = served.say([5])
        assert answer.reused == 0
        assert answer.reply.reuse.computed == 1


def test_a_context_filled_to_the_brim_is_swapped_and_goes_back(subject: Subject) -> None:
    with Served(subject, slots=1, n_ctx=64) as served:
        text = served.say(subject.tokens(62), max_tokens=3).tokens
        assert len(text) == 65
        served.say(subject.tokens(64, 1), max_tokens=1)
        assert served.say(text[:64], max_tokens=1).reused >= 61


# Why not more.


def test_the_first_difference_is_named(subject: Subject) -> None:
    with Served(subject) as served:
        text = served.say(subject.tokens(40)).tokens
        assert served.say([*text, 1, 2]).why == f"the prompt is new from token {len(text) - 1} on"
        other = served.say([*text[: 2 * SPACING], 9, *text[2 * SPACING + 1 :]])
        assert other.reused == 2 * SPACING
        assert other.why == f"the prompt is new from token {2 * SPACING} on"


def test_nothing_alike_is_said_to_be_so(subject: Subject) -> None:
    with Served(subject) as served:
        assert served.say([1, *subject.tokens(20)]).why == "no cached prefix matches"
        assert served.say([2, *subject.tokens(20, 1)]).why == "no cached prefix matches"


def test_an_evicted_block_is_named(subject: Subject) -> None:
    with Served(subject, slots=1) as probe:
        probe.say([1, *subject.tokens(60)])
        probe.say([2, *subject.tokens(60)])
        needed = probe.slot_cache.nbytes
    with Served(subject, slots=1, budget=2 * needed) as served:
        first = served.say([1, *subject.tokens(60)])
        for number in range(2, 9):
            served.say([number, *subject.tokens(60)])
        answer = served.say([*first.tokens, 4])
        assert answer.reused < len(first.tokens) - 1
        assert f"was evicted: the budget is {2 * needed} bytes" in answer.why


def test_c11_another_adapter_reuses_nothing_and_says_why(toy: Subject) -> None:
    assert isinstance(toy.model, ToyModel)
    one, other = toy.model.adapter("one"), toy.model.adapter("other")
    with Served(toy, slots=1) as served:
        prompt = toy.tokens(40)
        plain = served.say(prompt)
        served.cache.warm(prompt)
        seen = {plain.reply.tokens}
        for adapters in ({one: 1.0}, {one: 0.5}, {other: 1.0}, {one: 1.0, other: 1.0}):
            served.adapt(adapters)
            answer = served.say(prompt)
            assert answer.reused == 0
            assert answer.why == "the identity changed in its adapters"
            seen.add(answer.reply.tokens)
        assert len(seen) == 5
        # Back to what was: what was kept then is right again.
        served.adapt({})
        back = served.say(prompt)
        assert back.reply.tokens == plain.reply.tokens
        assert back.tiers == {"memory": 39}


def test_c11_an_adapter_of_a_real_model_reuses_nothing(find_subject: Find, zoo_path: Any) -> None:
    llama = find_subject("llama")
    with Served(llama, slots=1) as served:
        prompt = llama.tokens(40)
        plain = served.say(prompt)
        served.cache.warm(prompt)
        adapter = llama.model.adapter(zoo_path("llama-lora"))
        served.adapt({adapter: 1.0})
        answer = served.say(prompt)
        assert answer.reused == 0
        assert answer.why == "the identity changed in its adapters"
        served.adapt({})
        back = served.say(prompt)
        assert back.tiers == {"memory": 39}
        assert back.reply.tokens == plain.reply.tokens


# Namespaces.


def test_namespaces_never_share(subject: Subject) -> None:
    with Served(subject, slots=3) as served:
        prompt = subject.tokens(40)
        served.say(prompt, namespace="a")
        served.cache.warm(prompt, namespace="a")
        for other in ("b", "", "A", "a "):
            answer = served.say(prompt, namespace=other)
            assert answer.reused == answer.reply.usage.cached_tokens == 0
            assert answer.why == "no cached prefix matches"
        assert served.say(prompt, namespace="a").reused == 39


def test_labels_are_of_one_namespace(subject: Subject) -> None:
    """P4: whoever clears a label of his clears nothing of somebody else's who chose the same."""
    prompt = subject.tokens(40)
    with Served(subject, slots=3) as served:
        for name in ("a", "b", ""):
            served.cache.warm(prompt, labels=["x"], namespace=name)
        assert [record.namespace for record in served.cache.records(["x"], namespace="b")] == ["b"]
        assert served.cache.clear(labels=["x"], namespace="a") == 1
        assert served.cache.clear(labels=["x"]) == 1
        assert served.cache.records(namespace="a") == served.cache.records() == []
        assert served.say([*prompt, 1], namespace="b").reused == 40
        assert served.say([*prompt, 1], namespace="a").reused == 0
        served.cache.warm(prompt, namespace="a")
        assert served.cache.clear(namespace="b") == 1
        assert len(served.cache.records(namespace="a")) == 1
        assert served.cache.clear() == 1
        assert served.cache.records(namespace="a") == []


def test_a_namespace_learns_nothing_of_anothers_evictions_and_identities(toy: Subject) -> None:
    assert isinstance(toy.model, ToyModel)
    with Served(toy, slots=1, budget=9_000) as served:
        prompt = toy.tokens(40)
        for number in range(20):
            served.say([number, *prompt], namespace="a")
        assert served.cache.stats().evicted
        assert served.say([0, *prompt], namespace="b").why == "no cached prefix matches"
        served.adapt({toy.model.adapter("one"): 1.0})
        assert served.say([19, *prompt], namespace="c").why == "no cached prefix matches"


def test_a_prefill_of_another_namespace_is_not_waited_for(toy: Subject) -> None:
    held, gate = gated(toy)
    with Served(held, slots=2, n_batch=16) as served, served.counting() as count:
        jobs = [served.submit(held.tokens(60), max_tokens=1, namespace=name) for name in ("a", "b")]
        gate.reached.wait()
        gate.open()
        assert [job.reply().reuse.reused for job in jobs] == [0, 0]
        assert count() == 120


# Labels.


def test_p4_clearing_a_label_clears_just_that(subject: Subject) -> None:
    with Served(subject, slots=2) as served:
        one, other = [1, *subject.tokens(40, 1)], [2, *subject.tokens(40, 2)]
        served.cache.warm(one, labels=["a", "both"])
        served.cache.warm(other, labels=["b", "both"])
        assert served.say([*one, 3]).reused == 41
        assert [record.labels for record in served.cache.records(["a"])] == [{"a", "both"}]
        assert served.cache.clear(labels=["a"]) == 1
        assert served.say([*one, 3], max_tokens=1).reused == 0
        assert served.say([*other, 3]).reused == 41
        assert len(served.cache.records()) == 1
        assert served.cache.clear(labels="both") == 1
        assert served.cache.clear(labels="both") == 0
        assert served.say([*other, 4]).reused == 0


@pytest.mark.parametrize("common", [3, BLOCK, BLOCK + 3, 2 * SPACING])
def test_p4_shared_beginnings_stay_for_who_still_needs_them(subject: Subject, common: int) -> None:
    with Served(subject, slots=1) as served:
        system = subject.tokens(common)
        one, other = [*system, 1, *subject.tokens(20, 1)], [*system, 2, *subject.tokens(20, 2)]
        served.cache.warm(one, labels="a")
        served.cache.warm(other, labels="b")
        served.cache.clear(labels="a")
        assert served.say([*other, 3]).reused == len(other)
        assert served.say([*one, 3]).reused <= common


@pytest.mark.parametrize("longer", [1, 3, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("clear", ["short", "long"])
def test_p4_a_prefix_of_a_prefix_is_cleared_or_kept_by_itself(
    subject: Subject, longer: int, clear: str
) -> None:
    with Served(subject, slots=2) as served:
        short = subject.tokens(20)
        long = [*short, *subject.tokens(longer, 1)]
        served.cache.warm(short, labels="short")
        served.cache.warm(long, labels="long")
        served.cache.clear(labels=clear)
        if clear == "short":
            # What the longer one needs of it stays with that.
            assert served.say([*long, 3]).reused == len(long)
        else:
            answer = served.say([*long, 3], max_tokens=1)
            assert answer.reused == len(short)


def test_p4_clearing_spares_conversations_that_only_share_a_beginning(subject: Subject) -> None:
    with Served(subject, slots=1) as served:
        system = subject.tokens(2 * SPACING)
        talk = served.say([*system, *subject.tokens(9, 1)])
        served.cache.warm([*system, *subject.tokens(9, 2)], labels="a")
        served.cache.clear(labels="a")
        assert served.say([*talk.tokens, 1]).reused == len(talk.tokens) - 1


def test_p4_clearing_everything_leaves_nothing(subject: Subject) -> None:
    with Served(subject, slots=2) as served:
        for number in range(4):
            served.say([number, *subject.tokens(30, number)])
        served.cache.warm(subject.tokens(30, 9), labels="a")
        assert served.cache.clear() == 1
        stats = served.cache.stats()
        assert (stats.blocks, stats.nbytes, stats.records, stats.computed_tokens) == (0, 0, 0, 0)
        assert stats.reused_tokens == {}
        for number in range(4):
            assert served.say([number, *subject.tokens(30, number)]).reused == 0


def test_p4_what_is_cleared_while_it_is_being_computed_goes_when_that_is_over(toy: Subject) -> None:
    held, gate = gated(toy)
    gate.open()
    with Served(held, slots=2) as served:
        prompt = held.tokens(30)
        served.cache.warm(prompt, labels="a")
        gate.shut()
        job = served.submit([*prompt, 1, 2, 3])
        gate.reached.wait()
        # It is carried out between two steps of the request.
        with ThreadPoolExecutor(1) as pool:
            cleared = pool.submit(served.cache.clear, "a")
            while not served.engine_loop._calls:
                pass
            gate.open()
            assert cleared.result() == 1
        assert job.reply().finish_reason == "length"
        assert served.say([*prompt, 1, 2, 3]).reused == 0


def test_warming_twice_gives_one_record_with_all_labels(subject: Subject) -> None:
    with Served(subject) as served, served.counting() as count:
        prompt = subject.tokens(30)
        first = served.cache.warm(prompt, labels="a")
        computed = count()
        second = served.cache.warm(prompt, labels=["b"])
        assert count() == computed
        assert (first.kept, second.kept) == (30, 30)
        assert second.labels == {"a", "b"}
        assert served.cache.records("a") == served.cache.records(["b"]) == [second]
        assert served.say([*prompt, 4]).reused == 30


def test_what_is_no_prefix_is_refused(toy: Subject) -> None:
    with Served(toy) as served:
        for wrong in ([], [1.5], [-1], [1 << 40], [[1, 2]], ["a"], [4000]):
            with pytest.raises(TokenError):
                served.cache.warm(wrong)  # type: ignore[arg-type]
        assert served.cache.records() == []


# Who does not reuse.


def test_a_scored_prompt_is_computed_whole_and_says_so(subject: Subject) -> None:
    with Served(subject) as served:
        prompt = subject.tokens(20)
        served.say(prompt)
        answer = served.say(prompt, prompt_logprobs=0)
        assert answer.reused == 0
        assert answer.reply.reuse.computed == 20
        assert answer.why == "reuse was not wanted"
        assert len(answer.reply.prompt_logprobs or ()) == 20
        # But what it computed is there for others.
        assert served.say(prompt).reused == 19


@pytest.mark.parametrize("n_batch", [3, 64])
def test_w5_exact_mode_reuses_the_whole_steps_of_a_prompt_bit_for_bit(subject: Subject, n_batch: int) -> None:
    with Served(subject, exact=True, n_batch=n_batch, slots=1) as served:
        step = served.exact or 0
        first = served.say(subject.tokens(45))
        assert first.reused == 0
        # The same again, from its sequence; then with its reply and more, of which only the prompt is reused.
        assert served.say(first.prompt).reused == 44 // step * step
        longer = served.say([*first.tokens, *subject.tokens(20, 1)])
        assert longer.reused == 44 // step * step
        assert "exact mode" in longer.why
        # From memory, after somebody else had the sequence.
        served.say(subject.tokens(30, 2))
        again = served.say(longer.prompt)
        assert again.reused == (len(longer.prompt) - 1) // step * step
        assert again.tiers == {"memory": again.reused}
        assert again.reply.tokens == longer.reply.tokens
        # A part of a step is not the work of a step.
        parted = served.say([*longer.prompt[: 2 * step - 1], *subject.tokens(9, 3)])
        assert parted.reused == (step if subject.kind is FullAttention else 0)


def test_w5_what_was_computed_otherwise_is_not_found_in_exact_mode(toy: Subject) -> None:
    with Served(toy) as plain:
        tokens = plain.say(toy.tokens(40)).tokens
        identity, blocks = plain.cache.pack(tokens)
        roots = plain.slot_cache.blocks.root("")
    with Served(toy, exact=True) as served:
        assert served.slot_cache.blocks.root("") != roots
        with pytest.raises(IncompatibleStateError):
            served.cache.unpack(identity, blocks)
        assert served.say(tokens).reused == 0


def test_w5_what_another_number_of_threads_computed_is_not_found_in_exact_mode(find_subject: Find) -> None:
    subject = find_subject("llama")
    if subject.on_gpu:
        # There one thread is used, whatever is asked for.
        assert isinstance(subject.model, Model)
        subject = Subject("llama", Model(subject.model.path, gpu_layers=0), NOISE["llama"])

    def root(threads: int, *, exact: bool) -> bytes:
        with Served(subject, exact=exact, threads=threads) as served:
            return served.slot_cache.blocks.root("")

    assert root(1, exact=True) == root(1, exact=True) != root(2, exact=True)
    assert root(1, exact=False) == root(2, exact=False)


@pytest.mark.parametrize("settings", [{"shared": True}, {"flash": False}, {"swa_full": False}])
def test_w5_where_cells_could_lie_elsewhere_exact_mode_reuses_nothing_and_says_why(
    settings: dict[str, Any], find_subject: Find
) -> None:
    with Served(find_subject("gemma3"), exact=True, **settings) as served:
        prompt = served.say(served.subject.tokens(40)).prompt
        again = served.say(prompt)
        assert again.reused == 0
        assert again.why.startswith("exact mode reuses nothing")
        assert served.cache.plan(prompt).computed == len(prompt)


# State of another shape.


def wider(block: Block) -> Block:
    """The same block as another context would have made it, under the same name and with a good checksum."""
    rows = None if block.rows is None else np.hstack([block.rows, block.rows[:, :4]])
    return Block.make(block.parent, block.start, block.tokens, rows, block.tail_state)


@pytest.mark.parametrize("name", ["toy-full", "toy-sliding", "llama", "jamba"])
def test_s6_blocks_of_another_row_width_are_refused_before_they_are_kept(
    name: str, find_subject: Find
) -> None:
    subject = find_subject(name)
    with Served(subject) as served:
        text = served.say(subject.tokens(40)).tokens
        identity, blocks = served.cache.pack(text)
    with Served(subject) as served:
        with pytest.raises(IncompatibleStateError) as refused:
            served.cache.unpack(identity, [wider(block) for block in blocks])
        assert refused.value.field == "row width"
        assert served.cache.stats().blocks == 0
        assert served.cache.unpack(identity, blocks) == sum(len(block.tokens) for block in blocks)
        assert served.say([*text, *subject.tokens(3, 1)]).tiers.get("memory", 0) > 0


@pytest.mark.parametrize("name", ["toy-full", "toy-sliding", "llama", "jamba"])
@pytest.mark.parametrize("which", [0, 2])
def test_s6_a_kept_block_of_another_row_width_is_dropped_and_computed(
    name: str, which: int, find_subject: Find
) -> None:
    subject = find_subject(name)
    with Served(subject, slots=1) as served:
        text = served.say(subject.tokens(40)).tokens
        served.say(subject.tokens(30, 1))
        nodes = sorted(nodes_of(served.slot_cache.tier).values(), key=lambda node: node.block.start)
        ours = [
            node for node in nodes if node.block.tokens.tolist() == text[node.block.start : node.block.end]
        ]
        ours[which].block = wider(ours[which].block)
        assert served.say(text).reused <= ours[which].block.start
        assert (
            ours[which].id not in served.slot_cache.tier
            or served.slot_cache.tier.lookup(ours[which].id) is not None
        )
        # It is mended: the next one finds it all.
        served.say(subject.tokens(30, 2))
        assert served.say(text).reused == len(text) - 1


# Faults.


def swapped_out(served: Served, toy: Subject) -> list[int]:
    """A conversation that is in memory and in no slot."""
    text = served.say(toy.tokens(40)).tokens
    served.say(toy.tokens(40, 1))
    return text


def test_a_refused_state_is_computed_instead(toy: Subject) -> None:
    with Served(toy, slots=1) as served:
        text = swapped_out(served, toy)
        faults(served).refuse_write()
        answer = served.say([*text, 1])
        assert answer.reused == 0
        assert "could not be brought in place: the engine refused rows" in answer.why
        served.say(toy.tokens(40, 1))
        assert served.say([*text, 1]).reused == len(text)


def test_a_fork_that_fails_is_computed_instead(toy: Subject) -> None:
    with Served(toy, slots=2) as served:
        text = served.say(toy.tokens(40)).tokens
        # Clearing the new place is a native call, the copy is two more.
        faults(served).fail_call(ahead=3)
        answer = served.say([*text[:39], 200, 201])
        assert answer.reused == 0
        assert "could not be brought in place" in answer.why
        assert served.say([*text, 1]).reused == len(text) - 1


def test_a_short_beginning_is_copied_by_its_rows_and_a_long_one_by_a_fork(subject: Subject) -> None:
    """K4: to fork a sequence moves all its cells, however few of them are wanted. Every row that follows is
    compared with a fresh context's."""
    if subject.model.memory.needs_checkpoint:
        pytest.skip("is always forked: its state has a part that belongs to its end")
    for room, forks in ((256, 1), (1024, 0)):
        with Served(subject, slots=2, n_ctx=room) as served:
            text = served.say(subject.tokens(40)).tokens
            forked: list[int] = []
            fork = served.context.fork

            def counted(src: int, dst: int, fork: Any = fork, forked: list[int] = forked) -> None:
                forked.append(src)
                fork(src, dst)

            served.context.fork = counted  # type: ignore[method-assign]
            on_a_device = served.context.capabilities.asynchronous
            answer = served.say([*text[:39], 200, 201])
            assert answer.tiers == {"slot": 39}
            assert len(forked) == (1 if on_a_device else forks)
            assert served.say([*text, 1]).tiers == {"slot": len(text) - 1}


def test_a_checkpoint_that_fails_costs_going_back_and_nothing_else(toy: Subject) -> None:
    if toy.kind in (FullAttention, SlidingWindow):
        pytest.skip("goes back without")
    with Served(toy, slots=1) as served:
        core = core_of(served.context)
        read = core.read
        core.read = _failing  # type: ignore[method-assign]
        text = served.say([7], max_tokens=30).tokens
        core.read = read  # type: ignore[method-assign]
        answer = served.say([*text[:20], 1, 2])
        assert answer.reused == 0
        assert "nothing before it is left to go back to" in answer.why


def _failing(seq: int, *, partial: bool, room: int = 0) -> Any:
    raise EngineError("no state today")


@pytest.mark.parametrize("ahead", range(1, 40))
def test_any_native_call_may_fail_and_the_answer_is_right_or_an_error(toy: Subject, ahead: int) -> None:
    with Served(toy, slots=2) as served:
        texts = [served.say([number, *toy.tokens(30, number)]).tokens for number in range(3)]
        for text in texts:
            faults(served).fail_call(ahead=ahead)
            with suppress(PerdureError):
                text[:] = served.say([*text, 5]).tokens
            faults(served).forget()
        for text in texts:
            text[:] = served.say([*text, 6]).tokens
            # Whatever happened, every slot can be had again and reuse works again.
            assert served.say([*text, 7]).reused == len(text) - 1


def test_what_cannot_be_moved_out_keeps_nobody_from_moving_in(toy: Subject) -> None:
    with Served(toy, slots=1) as served:
        text = swapped_out(served, toy)
        core = core_of(served.context)
        core.capture = _uncapturable  # type: ignore[method-assign]
        answer = served.say([*text, 1])
        assert answer.tiers == {"memory": len(text) - 1}
        # And nothing counts as in use for ever.
        assert all(not node.pins for node in nodes_of(served.slot_cache.tier).values())


def _uncapturable(seq: int) -> Any:
    raise EngineError("no state today")
