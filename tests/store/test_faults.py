"""Faults of the system under the block store: what is kept, what is said, and how it recovers."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import perdure
from perdure.cache.tiers.disk import DiskTier
from perdure.errors import InvalidInputError, StoreError
from perdure.testing.toy import ToyModel
from store import children
from store.chains import chain, same, size
from store.faults import CONDITIONS

RUN = "import runpy; runpy.run_module('store.faults', run_name='__main__')"


@pytest.mark.parametrize("condition", CONDITIONS)
def test_s1_calls_that_fail_from_any_point_on_cost_nothing_that_was_acknowledged(
    condition: str, shim: Path, tmp_path: Path
) -> None:
    """Disk full, over quota, read-only, failing, gone, no more open files; then well again."""
    step = 5 if condition == "out of files" else 13
    found = json.loads(children.run(RUN, condition, tmp_path, step, environment={"LD_PRELOAD": str(shim)}))
    print(condition, found)
    assert all(each["tried"] >= each["calls"] // step > 0 for each in found.values())
    # Whoever asked is told, by an error of ours that says what it was where SQLite lets us know.
    said = {name for each in found.values() for name in each["errors"]}
    expected = {"full": "StoreFullError", "over quota": "StoreFullError", "read-only": "StoreReadOnlyError"}
    assert expected.get(condition, "StoreError") in said
    assert said <= {"StoreError", "StoreFullError", "StoreReadOnlyError"}


FILES = RUN.replace("store.faults", "store.file_faults")


@pytest.mark.extension("upkeep")
@pytest.mark.parametrize("condition", ["full", "failing"])
def test_files_beside_the_stores_are_whole_or_absent_whichever_write_fails(
    condition: str, shim: Path, tmp_path: Path
) -> None:
    """Class 4: keys, backup, restore, export, the folder of libraries; then there is room again."""
    found = json.loads(children.run(FILES, condition, tmp_path, 1, environment={"LD_PRELOAD": str(shim)}))
    print(condition, found)
    for kind, each in found.items():
        assert each["tried"] > 0, kind
        # Each failure was told.
        assert "" not in each["errors"], (kind, each)


@pytest.mark.extension("upkeep")
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no limits of files")
def test_a_file_of_which_the_last_bytes_do_not_fit_is_an_error(tmp_path: Path) -> None:
    """A write that has room for a part writes that part, and says so to who looks."""
    from perdure.ext.upkeep.moving import write_text

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(InvalidInputError, match="cannot be written"):
            write_text(tmp_path / "transcript", "x" * 6000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.soak
@pytest.mark.parametrize("condition", CONDITIONS)
def test_s1_calls_that_fail_from_every_single_point_on(condition: str, shim: Path, tmp_path: Path) -> None:
    found = json.loads(children.run(RUN, condition, tmp_path, 1, environment={"LD_PRELOAD": str(shim)}))
    assert all(each["tried"] >= 0.9 * each["calls"] for each in found.values())


# A mount that vanishes, and comes back.

PROMPT = "a prompt that is longer than a block of tokens, and then some more of it to be kept. " * 2


def leave(folder: Path) -> Callable[[], None]:
    """Unmounted: nothing is there any more."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    return lambda: _come_back(aside, folder)


def leave_a_mount_point(folder: Path) -> Callable[[], None]:
    """Unmounted: the empty folder below it shows."""
    come_back = leave(folder)
    folder.mkdir()
    return come_back


def _come_back(aside: Path, folder: Path) -> None:
    if folder.exists():
        # What was written meanwhile lies below the mount, unseen.
        folder.rename(folder.with_name("below"))
    aside.rename(folder)


@pytest.mark.parametrize("vanish", [leave, leave_a_mount_point])
def test_s4_a_store_whose_folder_vanishes_costs_time_and_is_used_again_when_it_is_back(
    tmp_path: Path, vanish: Callable[[Path], Callable[[], None]]
) -> None:
    with perdure.open(ToyModel(), n_ctx=512, slots=1, cache=0) as runtime:
        cold = {text: list(_ask(runtime, text).tokens) for text in (PROMPT, "another" + PROMPT)}
    folder = tmp_path / "store"
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=folder) as runtime:
        runtime.cache.warm(PROMPT, labels=["kept"])
        come_back = vanish(folder)
        for _ in range(2):
            for text, tokens in cold.items():
                assert list(_ask(runtime, text).tokens) == tokens
        come_back()
        for text, tokens in cold.items():
            assert list(_ask(runtime, text).tokens) == tokens
    with perdure.open(ToyModel(), n_ctx=512, slots=1, store=folder) as runtime:
        assert [record.kept for record in runtime.cache.records(["kept"])] == [len(PROMPT)]
        reply = _ask(runtime, PROMPT)
        assert list(reply.tokens) == cold[PROMPT]
        assert reply.reuse.tiers == {"disk": len(PROMPT) - 1}


def _ask(runtime: perdure.Runtime, text: str) -> perdure.Reply:
    return runtime.generate(text, max_tokens=8, temperature=0, ignore_eos=True)


def test_s4_what_is_stored_while_the_folder_is_gone_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first, second = chain(list(range(8)), "first"), chain(list(range(8)), "second")
    with closing(DiskTier(folder, budget=1 << 30)) as disk:
        disk.store(first)
        come_back = leave(folder)
        with pytest.raises(StoreError, match="store"):
            disk.store(second)
        assert disk.load(first[0].id) is None
        come_back()
        assert disk.store(second) == len(second)
    with closing(DiskTier(folder, budget=1 << 30)) as disk:
        assert disk.verify().sound
        assert all(same(disk.load(each.id), each) for each in [*first, *second])


# A clock that jumps.


@pytest.mark.parametrize(
    "jump", [-400 * 86400.0, 400 * 86400.0, -time.time()], ids=["back", "ahead", "to 1970"]
)
def test_a_clock_that_jumps_changes_neither_what_is_evicted_nor_how_long_a_prefix_is_kept(
    tmp_path: Path, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [chain([number] * 4, str(number)) for number in range(4)]
    room = size([each for blocks in chains[:3] for each in blocks])
    real = time.time
    with closing(DiskTier(tmp_path, budget=room)) as disk:
        for blocks in chains[:3]:
            disk.store(blocks)
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + jump))
    with closing(DiskTier(tmp_path, budget=room)) as disk:
        # The first was used last, so the second goes.
        assert disk.load(chains[0][0].id) is not None
        disk.store(chains[3])
        there = [disk.lookup(blocks[0].id) is not None for blocks in chains]
        assert there == [True, False, True, True]
    with perdure.open(ToyModel(), n_ctx=512, slots=1) as runtime:
        pin = perdure.KeptPrefix(length=64, seconds=3600)
        runtime.generate(PROMPT, max_tokens=1, pins=[pin])
        held = runtime.backend.slot_cache.kept.held  # type: ignore[attr-defined]
        monkeypatch.setattr(time, "time", lambda: real() + 10 * abs(jump))
        assert len(held) == 1
        runtime.generate(PROMPT, max_tokens=1)
        assert held.nbytes > 0
