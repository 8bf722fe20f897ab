"""A runtime with a store: state outlives the process, and never lies."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cache.kept_prefixes import LABEL_LENGTH
from perdure.cache.slots.cache import SlotCache
from perdure.cache.tiers.disk import DiskTier
from perdure.cache.tiers.write_behind import WriteBehind
from perdure.decode.engine_loop import EngineLoop
from perdure.decode.request import Request
from perdure.decode.stream import Stream, one_request
from perdure.engine.contract import Batch, Outcome
from perdure.engine.llama.core import LlamaCore
from perdure.errors import (
    InvalidInputError,
    StoreDamagedError,
)
from perdure.memory import FullAttention
from perdure.request_options import Sampling
from perdure.testing.toy import ToyModel
from store import children
from store.chains import files
from store.checked_runtime import SETTINGS, kept
from subjects import Subject

LENGTH = 150


def toy_only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("subject", names, indirect=True)


@pytest.mark.extension("embeddings")
def test_the_engine_computes_in_one_thread_whatever_is_done_with_it(
    zoo_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second thread that has computed slows the first down for as long as the process lives."""
    threads: set[int] = set()
    decode = LlamaCore.decode

    def seen(self: LlamaCore, batch: Batch) -> Outcome:
        threads.add(threading.get_ident())
        return decode(self, batch)

    monkeypatch.setattr(LlamaCore, "decode", seen)
    for _ in range(2):
        threads.clear()
        with perdure.open(zoo_path("llama"), n_ctx=256, slots=2, threads=1, store=tmp_path) as rt:
            rt.session("alice").say("Hello", max_tokens=4)
            rt.session("alice").sleep()
            rt.session("alice").wake()
            rt.cache.warm("Hello there")
            rt.generate("Hello", max_tokens=4)
            rt.embed("Hello")
        assert len(threads) == 1
        assert threading.get_ident() not in threads


# Life after a restart.


def test_what_was_said_before_a_restart_comes_from_the_disk(subject: Subject, tmp_path: Path) -> None:
    prompt = subject.tokens(LENGTH)
    with kept(subject, tmp_path) as first:
        answer = first.say(prompt)
        assert answer.tiers == {}
    # The last token that was written was never fed.
    told = len(answer.tokens) - 1
    with kept(subject, tmp_path) as second:
        assert second.say(prompt).tiers == {"disk": LENGTH - 1}
    with kept(subject, tmp_path) as third:
        again = third.say([*answer.tokens, 1, 2, 3])
        assert again.tiers == {"disk": told}
        assert third.cache.stats().reused_tokens == {"disk": told}


def test_many_conversations_on_few_slots_are_all_there_after_a_restart(
    subject: Subject, tmp_path: Path
) -> None:
    prompts = [[*subject.tokens(70), *subject.tokens(20, seed)] for seed in range(1, 6)]
    with kept(subject, tmp_path) as first:
        answers = [first.say(prompt) for prompt in prompts]
    with kept(subject, tmp_path) as second:
        for answer in answers:
            assert second.say([*answer.tokens, 9]).reply.reuse.reused == len(answer.tokens) - 1


def test_namespaces_do_not_meet_on_the_disk(subject: Subject, tmp_path: Path) -> None:
    prompt = subject.tokens(LENGTH)
    with kept(subject, tmp_path) as first:
        first.say(prompt, namespace="mine")
    with kept(subject, tmp_path) as second:
        assert second.say(prompt, namespace="yours").tiers == {}
        assert second.say(prompt).tiers == {}
        assert second.say(prompt, namespace="mine").tiers == {"disk": LENGTH - 1}


def test_labels_on_the_disk_are_of_one_namespace(
    find_subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    """P4: cleared in one, kept in the other, also after a restart."""
    subject = find_subject("toy-full")
    prompt = subject.tokens(LENGTH)
    with kept(subject, tmp_path) as first:
        for name in ("mine", "yours"):
            first.cache.warm(prompt, labels=["x"], namespace=name)
        assert first.cache.clear(["x"], namespace="mine") == 1
    with kept(subject, tmp_path) as second:
        assert second.cache.records(["x"], namespace="mine") == []
        [record] = second.cache.records(["x"], namespace="yours")
        assert (record.namespace, record.kept) == ("yours", LENGTH)


# Damage: P2, S4.

Damage = Callable[[Path], None]


def each_block(change: Callable[[bytearray], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        for path in files(folder):
            path.write_bytes(change(bytearray(path.read_bytes())))

    return damage


def one_block(which: int, change: Callable[[bytearray], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        by_start = sorted(files(folder), key=lambda path: path.read_bytes()[16:24])
        path = by_start[which]
        path.write_bytes(change(bytearray(path.read_bytes())))

    return damage


def flip(place: int) -> Callable[[bytearray], bytes]:
    def change(data: bytearray) -> bytes:
        data[place % len(data)] ^= 4
        return bytes(data)

    return change


def swap(folder: Path) -> None:
    """Every file under the name of the next: whole blocks all, and none where it belongs."""
    paths = files(folder)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def unlink_all(folder: Path) -> None:
    for path in files(folder):
        path.unlink()


def unlink_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def lie_in_the_index(folder: Path) -> None:
    """Entries exchange their tokens, and claim rests that are not there."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        rows = db.execute("SELECT id, tokens FROM block").fetchall()
        for (name, _), (_, tokens) in zip(rows, rows[1:] + rows[:1], strict=True):
            db.execute("UPDATE block SET tokens = ?, has_rest = 1 WHERE id = ?", (tokens, name))
        db.commit()


def claim_rests(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.execute("UPDATE block SET has_rest = 1, start = start + 7")
        db.commit()


DAMAGES: dict[str, Damage] = {
    "a flip in every header": each_block(flip(40)),
    "a flip in every token list": each_block(flip(122)),
    "a flip at every end": each_block(flip(-1)),
    "a flip in the first block": one_block(0, flip(-9)),
    "a flip in a middle block": one_block(1, flip(400)),
    "a flip in the last block": one_block(-1, flip(-100)),
    "every file cut to nothing": each_block(lambda data: b""),
    "every file cut in half": each_block(lambda data: bytes(data[: len(data) // 2])),
    "a middle block cut by a byte": one_block(1, lambda data: bytes(data[:-1])),
    "every file under another name": swap,
    "all files gone": unlink_all,
    "the index gone": unlink_index,
    "the index lies": lie_in_the_index,
    "the index claims too much": claim_rests,
}


@pytest.fixture(scope="session")
def stored(lasting_path: Path) -> Callable[[Subject, Path], list[int]]:
    """Fill a folder with what a conversation leaves, and give the conversation."""
    known: dict[str, tuple[Path, list[int]]] = {}

    def fill(subject: Subject, folder: Path) -> list[int]:
        if subject.name not in known:
            template = lasting_path / subject.name
            with kept(subject, template) as runtime:
                known[subject.name] = template, runtime.say(subject.tokens(LENGTH)).tokens
        template, tokens = known[subject.name]
        shutil.copytree(template, folder)
        return tokens

    return fill


@pytest.mark.parametrize("damage", DAMAGES)
def test_s4_p2_damage_costs_time_and_never_makes_wrong_text(
    subject: Subject, damage: str, tmp_path: Path, stored: Callable[[Subject, Path], list[int]]
) -> None:
    folder = tmp_path / "store"
    tokens = stored(subject, folder)
    DAMAGES[damage](folder)
    with kept(subject, folder) as runtime:
        # Every row of these is compared with a fresh context.
        answer = runtime.say([*tokens, 5, 6])
        if "every" in damage or "all" in damage or damage == "the index lies":
            assert answer.tiers == {}
        runtime.say(tokens[:100])
    if damage == "the index claims too much":
        with closing(DiskTier(folder, budget=1 << 30)) as disk:
            assert disk.verify().mended > 0
    # It has been computed again, and kept: nothing of the damage is left.
    with kept(subject, folder) as runtime:
        assert runtime.say([*answer.tokens, 7]).from_disk == len(answer.tokens) - 1
    with closing(DiskTier(folder, budget=1 << 30)) as disk:
        disk.verify()
        assert disk.verify().sound


def test_s4_the_reply_says_that_what_was_kept_is_damaged(subject: Subject, tmp_path: Path) -> None:
    with kept(subject, tmp_path) as runtime:
        answer = runtime.say(subject.tokens(LENGTH))
    each_block(flip(-1))(tmp_path)
    with kept(subject, tmp_path) as runtime:
        assert "damaged" in runtime.say(answer.tokens).why


@toy_only("toy-full", "llama")
def test_a_garbage_index_is_refused_with_advice_and_nobody_keeps_the_lock(
    subject: Subject, tmp_path: Path, stored: Callable[[Subject, Path], list[int]]
) -> None:
    folder = tmp_path / "store"
    tokens = stored(subject, folder)
    (folder / "index.sqlite").write_bytes(b"garbage" * 4000)
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match="perdure cache verify"), kept(subject, folder):
            pass
    with closing(DiskTier(folder, budget=1 << 30, rebuild=True)) as disk:
        assert disk.verify().rebuilt
    with kept(subject, folder) as runtime:
        assert runtime.say([*tokens, 1]).from_disk == len(tokens) - 1


@toy_only("toy-full", "toy-hybrid", "llama")
def test_s4_an_index_that_breaks_while_it_is_used_costs_time_only(
    subject: Subject, tmp_path: Path, stored: Callable[[Subject, Path], list[int]]
) -> None:
    folder = tmp_path / "store"
    tokens = stored(subject, folder)
    with kept(subject, folder) as runtime:
        for path in folder.glob("index.sqlite*"):
            path.write_bytes(b"\xa5" * path.stat().st_size)
        runtime.say([*tokens, 1])
        runtime.say(subject.tokens(90, 3))
        runtime.say([*tokens, 1, 2])


# What the bytes mean: P7, C11.


def test_p7_another_number_of_slots_changes_nothing_that_lasts_by_token(
    subject: Subject, tmp_path: Path, stored: Callable[[Subject, Path], list[int]]
) -> None:
    tokens = stored(subject, tmp_path / "store")
    for slots in (1, 3):
        with kept(subject, tmp_path / "store", slots=slots) as runtime:
            answer = runtime.say([*tokens, slots])
            if subject.kind is FullAttention:
                assert answer.from_disk >= len(tokens) - 1


@pytest.mark.parametrize("changed", ["k_type", "v_type", "flash"])
@toy_only("llama", "gemma3", "jamba")
def test_c11_another_type_or_way_of_attention_is_a_miss(
    subject: Subject,
    changed: str,
    tmp_path: Path,
    stored: Callable[[Subject, Path], list[int]],
) -> None:
    usual = {"k_type": "f16", "v_type": "f16", "flash": True, **subject.narrow.settings}[changed]
    other: dict[object, object] = {"f16": "f32", "f32": "f16", True: False}
    change: dict[str, Any] = {changed: other[usual]}
    tokens = stored(subject, tmp_path / "store")
    with kept(subject, tmp_path / "store", **change) as runtime:
        first = runtime.say([*tokens, 1])
        assert first.tiers == {}
    with kept(subject, tmp_path / "store", **change) as runtime:
        assert runtime.say([*first.tokens, 1]).from_disk == len(first.tokens) - 1
    with kept(subject, tmp_path / "store") as runtime:
        assert runtime.say([*tokens, 2]).from_disk == len(tokens) - 1


def test_c11_two_models_on_one_store_do_not_meet(
    find_subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    one, other = find_subject("llama"), find_subject("qwen3")
    prompt = one.tokens(LENGTH)
    with kept(one, tmp_path) as runtime:
        runtime.cache.warm(prompt, labels=["one"])
    with kept(other, tmp_path) as runtime:
        assert runtime.say(prompt).tiers == {}
        runtime.cache.warm(prompt, labels=["other"])
        assert {label for each in runtime.cache.records() for label in each.labels} == {"one", "other"}
        # A label can be cleared by whoever sees it, also if the state is another model's.
        assert runtime.cache.clear(["one"]) == 1
    with kept(one, tmp_path) as runtime:
        assert runtime.say(prompt).tiers == {}
    with kept(other, tmp_path) as runtime:
        assert runtime.say(prompt).tiers == {"disk": LENGTH - 1}


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_p7_another_block_size_is_a_miss_not_a_collision(
    subject: Subject, sizes: tuple[int, int], tmp_path: Path
) -> None:
    prompt = [*subject.tokens(8), 1]

    def reused(size: int) -> int:
        context = subject.context(**{**SETTINGS, "n_seq": 1})
        behind = WriteBehind(DiskTier(tmp_path, budget=1 << 30))
        places = SlotCache(context, budget=1 << 24, lower=[behind], block_size=size)
        loop = EngineLoop(subject.model, context, slots=places)
        request = Request(prompt=prompt, max_tokens=2, sampling=Sampling(temperature=0), ignore_eos=True)
        reply = Stream(one_request(request), loop.submit).reply()
        loop.close()
        places.store_all()
        context.close()
        behind.close()
        return reply.reuse.reused

    assert [reused(sizes[0]), reused(sizes[1])] == [0, 0]
    assert [reused(sizes[0]), reused(sizes[1])] == [8, 8]


# Labels: P3, P4.


def test_p3_a_record_comes_back_with_its_labels_after_a_restart(subject: Subject, tmp_path: Path) -> None:
    prompt = subject.tokens(LENGTH)
    with kept(subject, tmp_path) as first:
        before = first.cache.warm(prompt, labels=["tools", "v1"])
        assert before.kept == LENGTH
    with kept(subject, tmp_path) as second:
        assert second.cache.records() == [before]
        again = second.cache.warm(prompt, labels=["v2"])
        assert again.labels == {"tools", "v1", "v2"}
        assert second.cache.stats().computed_tokens == 0
        assert second.say([*prompt, 4]).tiers == {"disk": LENGTH}
    with kept(subject, tmp_path) as third:
        assert [record.labels for record in third.cache.records(["v2"])] == [{"tools", "v1", "v2"}]


def test_p3_labels_can_be_any_text(find_subject: Callable[[str], Subject], tmp_path: Path) -> None:
    subject = find_subject("toy-full")
    labels = ["", "ü 한국 🙂", "a\0b", "'; DROP TABLE label; --", "x" * LABEL_LENGTH]
    with kept(subject, tmp_path) as runtime:
        runtime.cache.warm([1, 2, 3], labels=labels)
        with pytest.raises(InvalidInputError, match="Unicode"):
            runtime.cache.warm([1, 2, 3], labels=["\ud800"])
        with pytest.raises(InvalidInputError, match=f"of {LABEL_LENGTH} characters"):
            runtime.cache.warm([1, 2, 3], labels=["x" * (LABEL_LENGTH + 1)])
    with kept(subject, tmp_path) as runtime:
        assert [record.labels for record in runtime.cache.records()] == [set(labels)]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart"])
def test_p4_clearing_a_label_takes_just_its_own_from_memory_disk_and_slots(
    subject: Subject, restart: bool, tmp_path: Path
) -> None:
    start = subject.tokens(70)
    a, b = [*start, *subject.tokens(50, 1)], [*start, *subject.tokens(50, 2)]
    alone = tmp_path / "alone"
    with kept(subject, alone) as runtime:
        runtime.cache.warm(b, labels=["b"])
    folder = tmp_path / "both"
    with kept(subject, folder) as runtime:
        runtime.cache.warm(b, labels=["b"])
        runtime.cache.warm(a, labels=["a"])
        runtime.say([*a, 1, 2])
        if not restart:
            assert runtime.cache.clear(["a"]) == 1
    with kept(subject, folder) as runtime:
        if restart:
            assert runtime.cache.clear(["a"]) == 1
        assert [record.labels for record in runtime.cache.records()] == [{"b"}]
        assert runtime.say([*a, 1, 2]).reply.reuse.reused <= len(start)
        assert runtime.cache.clear(["nothing"]) == 0
    with kept(subject, folder) as runtime:
        assert runtime.say([*b, 3]).tiers == {"disk": len(b)}


@toy_only("toy-full", "llama")
def test_p4_what_was_cleared_leaves_no_bytes_behind(subject: Subject, tmp_path: Path) -> None:
    a, b = subject.tokens(100, 1), subject.tokens(100, 2)
    with kept(subject, tmp_path) as runtime:
        runtime.cache.warm(b, labels=["b"])
        before = set(files(tmp_path))
        runtime.cache.warm(a, labels=["a"])
        runtime.say([*a, 1, 2, 3])
        assert set(files(tmp_path)) > before
        runtime.cache.clear(["a"])
        assert set(files(tmp_path)) == before
    assert set(files(tmp_path)) == before


def test_p4_clearing_everything_leaves_nothing(subject: Subject, tmp_path: Path) -> None:
    with kept(subject, tmp_path) as runtime:
        runtime.cache.warm(subject.tokens(100), labels=["a"])
        runtime.say(subject.tokens(100, 1))
        assert runtime.cache.clear() == 1
        assert files(tmp_path) == []
        assert runtime.cache.stats().nbytes == 0
    assert files(tmp_path) == []
    with kept(subject, tmp_path) as runtime:
        assert runtime.cache.records() == []
        assert runtime.say(subject.tokens(100)).tiers == {}


# Budgets: P6.


@pytest.mark.parametrize(("swap_slots", "room"), [(0, 4), (2, 2)])
def test_p6_both_tiers_keep_to_their_bytes_under_ten_times_as_much(
    subject: Subject, swap_slots: int, room: int, tmp_path: Path
) -> None:
    """Also where the sequences alone, with those that wait in swap slots, are more than the store has room
    for: what was used last is kept."""
    with kept(subject, tmp_path / "measured") as runtime:
        runtime.say(subject.tokens(70))
        each = runtime.cache.stats().nbytes
    each = max(each, folder_bytes(tmp_path / "measured"))
    memory, disk = 3 * each, room * each
    own = {"slots": 1, "swap_slots": swap_slots, "cache": memory, "store_bytes": disk}
    with kept(subject, tmp_path / "store", **own) as runtime:
        for seed in range(40):
            runtime.say(subject.tokens(70, seed))
            stats = runtime.cache.stats()
            assert stats.nbytes <= stats.budget <= memory
            runtime.flush()
            assert folder_bytes(tmp_path / "store") <= disk
        runtime.say(subject.tokens(70, 39))
    assert disk // 2 < folder_bytes(tmp_path / "store") <= disk
    with kept(subject, tmp_path / "store", **own) as runtime:
        assert runtime.say(subject.tokens(70, 39)).from_disk == 69


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": 0}, "a store needs a cache"),
        ({"cache": -1}, "cache is a number of bytes"),
        ({"store_bytes": -1}, "store_bytes is a number of bytes"),
        ({"store_bytes": True}, "store_bytes is a number of bytes"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"queue": -1}, "queue"),
    ],
)
def test_a_runtime_that_cannot_open_keeps_no_lock(
    find_subject: Callable[[str], Subject], tmp_path: Path, options: dict[str, object], said: str
) -> None:
    subject = find_subject("toy-full")
    with pytest.raises(InvalidInputError, match=said):
        perdure.open(subject.model, store=tmp_path, **{"n_ctx": 64, "slots": 1, **options})  # type: ignore[arg-type]
    with perdure.open(subject.model, store=tmp_path, n_ctx=64, slots=1):
        pass


# Two processes.

WRITE = """
import sys
from perdure.testing.toy import ToyModel
from perdure.errors import StoreLockedError
import perdure
try:
    runtime = perdure.open(ToyModel(), n_ctx=64, slots=1, store=sys.argv[1])
except StoreLockedError as error:
    print(error)
else:
    runtime.cache.warm("from elsewhere", labels=["elsewhere"])
    runtime.close()
    print("done")
"""


def test_a_second_process_uses_the_same_engine_or_is_told_who_has_it(
    find_subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = find_subject("toy-full")
    with perdure.open(subject.model, store=tmp_path, n_ctx=64, slots=1) as runtime:
        assert children.run(WRITE, tmp_path) == "done\n"
        assert [each.labels for each in runtime.cache.records()] == [{"elsewhere"}]
        said = children.run(WRITE.replace("n_ctx=64", "n_ctx=65"), tmp_path)
        assert f"the store {tmp_path} is in use by" in said
        assert "with a context of 64 tokens, and this asks for 65" in said
        runtime.cache.warm("from here", labels=["here"])
        with closing(DiskTier(tmp_path, budget=0, readonly=True)) as reader:
            assert len(reader) == 2
    assert children.run(WRITE, tmp_path) == "done\n"
    with perdure.open(subject.model, store=tmp_path, n_ctx=64, slots=1) as runtime:
        assert {label for each in runtime.cache.records() for label in each.labels} == {"here", "elsewhere"}


def test_a_runtime_may_be_closed_twice_and_by_another_hand(
    find_subject: Callable[[str], Subject], tmp_path: Path
) -> None:
    import threading

    runtime = perdure.open(find_subject("toy-full").model, store=tmp_path, n_ctx=64, slots=1)
    thread = threading.Thread(target=runtime.close)
    thread.start()
    thread.join()
    runtime.close()
    with perdure.open(find_subject("toy-full").model, store=tmp_path, n_ctx=64, slots=1):
        pass


def test_a_wake_counts_as_no_request(tmp_path: Path) -> None:
    """What requests reused and computed is told of requests alone."""
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=tmp_path) as runtime:
        session = runtime.session("ada")
        session.say("A sentence that fills a block or two of state, so that some of it is kept. " * 2)
        session.sleep()
        before = runtime.cache.stats()
        assert session.wake().reused > 0
        after = runtime.cache.stats()
    assert after.reused_tokens == before.reused_tokens
    assert after.computed_tokens == before.computed_tokens
