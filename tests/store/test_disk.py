"""The disk tier: what it keeps, what it lets go, and what it puts right."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from perdure.cache.block import Block, BlockId
from perdure.cache.tiers.disk import DiskTier, Findings
from perdure.errors import (
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
    StoreVersionError,
)
from store import children
from store.chains import SIZE, block, chain, file_of, files, root, same, size

PLENTY = 1 << 30


@contextmanager
def opened(
    folder: Path, budget: int = PLENTY, *, readonly: bool = False, rebuild: bool = False
) -> Iterator[DiskTier]:
    with closing(DiskTier(folder, budget=budget, readonly=readonly, rebuild=rebuild)) as disk:
        yield disk


def kept(disk: DiskTier) -> set[BlockId]:
    return {BlockId(row[0]) for row in disk.index.rows("SELECT id FROM block")}


def names(blocks: list[Block]) -> set[BlockId]:
    return {each.id for each in blocks}


def check(disk: DiskTier, blocks: list[Block]) -> None:
    """These blocks are there, every byte of them, and nothing else is, in the index or as a file."""
    assert kept(disk) == names(blocks)
    assert len(disk) == len(names(blocks))
    for each in blocks:
        assert same(disk.load(each.id), each)
        entry = disk.lookup(each.id)
        assert entry is not None
        assert (entry.parent, entry.start, entry.end) == (each.parent, each.start, each.end)
        assert (entry.has_tail_state, entry.tokens.tolist()) == (each.has_tail_state, each.tokens.tolist())
        assert each.id in {child.id for child in disk.children(each.parent)}
    assert files(disk.folder) == sorted(file_of(disk.folder, each) for each in blocks)
    assert disk.nbytes == size(blocks) == sum(path.stat().st_size for path in files(disk.folder))


def sound(disk: DiskTier, **found: int | bool) -> None:
    """A walk finds what is said, and a second one finds nothing."""
    nothing = Findings(
        blocks=len(disk),
        nbytes=disk.nbytes,
        missing=0,
        adopted=0,
        mended=0,
        quarantined=0,
        leftovers=0,
        rebuilt=False,
    )
    findings = dataclasses.asdict(disk.verify())
    expected = dataclasses.asdict(nothing) | found
    assert {name: findings[name] for name in found} == found
    for name in ("missing", "adopted", "mended", "quarantined", "leftovers", "rebuilt"):
        assert findings[name] == expected[name], name
    again = disk.verify()
    assert again.sound
    assert (again.adopted, again.leftovers) == (0, 0)


# Keeping.


def test_what_was_put_is_there_now_and_after_reopening(tmp_path: Path) -> None:
    one, other = chain(list(range(10))), chain(list(range(50, 57)), "elsewhere", tail_state=30)
    with opened(tmp_path) as disk:
        assert disk.store(one) == len(one)
        assert disk.store(other) == len(other)
        check(disk, one + other)
    with opened(tmp_path) as disk:
        check(disk, one + other)
        sound(disk)
    with opened(tmp_path, readonly=True) as disk:
        check(disk, one + other)


def test_a_block_that_gained_a_rest_takes_the_place_of_the_one_without(tmp_path: Path) -> None:
    bare, full = block([1, 2, 3]), block([1, 2, 3], tail_state=99)
    with opened(tmp_path) as disk:
        disk.store([bare])
        disk.store([full])
        check(disk, [full])


def test_a_block_without_its_parent_is_left_out(tmp_path: Path) -> None:
    first, second, third = chain(list(range(12)))
    with opened(tmp_path) as disk:
        assert disk.store([second, third]) == 0
        assert disk.store([first, third]) == 1
        check(disk, [first])
        assert disk.store([second, third]) == 2
        check(disk, [first, second, third])


def test_nothing_can_be_put_into_a_store_opened_for_reading(tmp_path: Path) -> None:
    blocks = chain(list(range(8)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
    with opened(tmp_path, readonly=True) as disk:
        for change in (
            lambda: disk.store(chain([9])),
            lambda: disk.drop([blocks[0].id]),
            disk.clear,
            disk.verify,
            lambda: disk.forget([blocks[0].id]),
        ):
            with pytest.raises(StoreReadOnlyError, match="reading"):
                change()
        check(disk, blocks)


# Budgets: P6.


def test_p6_the_budget_holds_before_anything_is_written(tmp_path: Path) -> None:
    """The folder is measured at each write of a file: with what is about to come it still fits."""
    each = size(chain([1, 2, 3, 4]))
    budget = 10 * each + each // 2
    with opened(tmp_path, budget) as disk:
        for number in range(100):
            assert disk.store(chain([number] * SIZE, str(number))) == 1
            assert disk.nbytes <= budget
            assert sum(path.stat().st_size for path in files(tmp_path)) == disk.nbytes
        assert len(disk) == 10


def test_a_read_that_is_noted_while_others_are_written_down_is_not_lost(tmp_path: Path) -> None:
    """Readers are other threads: what they note may be written down at any moment, and on another list."""
    [one], [other], [third] = (chain([at], name) for at, name in ((1, "a"), (2, "b"), (3, "c")))

    class Late(dict[BlockId, int]):
        def __setitem__(self, block: BlockId, used: int) -> None:
            # Between finding the list and adding to it.
            if block == one.id:
                disk.store([third])
            super().__setitem__(block, used)

    def used(block: Block) -> int:
        [(found,)] = disk.index.rows("SELECT used FROM block WHERE id = ?", block.id)
        return int(found)

    with opened(tmp_path) as disk:
        disk.store([one])
        disk.store([other])
        disk.table._touched = Late()
        disk.load(other.id)
        disk.load(one.id)
    with opened(tmp_path) as disk:
        assert used(one) > used(other)


def test_p6_leaves_go_first_and_of_them_the_longest_unused(tmp_path: Path) -> None:
    old, middle = chain(list(range(12)), "old"), chain(list(range(12)), "middle")
    with opened(tmp_path, size(old + middle)) as disk:
        disk.store(old)
        disk.store(middle)
        disk.store(chain([1], "new"))
        assert kept(disk) == names(old[:-1] + middle + chain([1], "new"))
        # What was read is not old any more, though nothing has been written since.
        assert disk.load(old[1].id) is not None
        disk.store(chain([2], "newer"))
        assert kept(disk) == names(old[:2] + middle[:-1] + chain([1], "new") + chain([2], "newer"))
        sound(disk)


def test_p6_use_is_remembered_over_a_restart(tmp_path: Path) -> None:
    first, second, third = (chain([number] * SIZE, str(number)) for number in range(3))
    with opened(tmp_path) as disk:
        disk.store(first)
        disk.store(second)
        disk.load(first[0].id)
    with opened(tmp_path, size(first + second)) as disk:
        disk.store(third)
        check(disk, first + third)


def test_p6_what_is_being_put_is_not_evicted_for_itself(tmp_path: Path) -> None:
    long = chain(list(range(10 * SIZE)))
    with opened(tmp_path, size(long[:6])) as disk:
        assert disk.store(long[:2]) == 2
        assert disk.store(long[2:]) == 4
        check(disk, long[:6])


def test_p6_a_block_larger_than_the_budget_costs_the_others_nothing(tmp_path: Path) -> None:
    small, huge = chain(list(range(8))), block([7], row_bytes=10_000)
    with opened(tmp_path, 5_000) as disk:
        disk.store(small)
        assert disk.store([huge]) == 0
        check(disk, small)


def test_p6_putting_again_what_is_there_evicts_nothing(tmp_path: Path) -> None:
    blocks = chain(list(range(20)))
    with opened(tmp_path, size(blocks)) as disk:
        disk.store(blocks)
        assert disk.store(blocks) == len(blocks)
        check(disk, blocks)


def test_p6_what_is_pinned_is_not_evicted(tmp_path: Path) -> None:
    oldest, *others = [chain([number] * SIZE, str(number)) for number in range(6)]
    with opened(tmp_path, size(oldest) * 3) as disk:
        disk.pinned = names(oldest).__contains__
        for each in (oldest, *others):
            disk.store(each)
        check(disk, [*oldest, *others[-2], *others[-1]])
        disk.pinned = lambda block: False
        disk.store(chain([9] * SIZE, "9"))
        assert not names(oldest) & kept(disk)


def test_p6_a_smaller_budget_takes_hold_with_the_next_write(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
    new = chain([99], "new")
    with opened(tmp_path, size(blocks[:3] + new)) as disk:
        assert disk.store(new) == 1
        check(disk, blocks[:3] + new)


# Letting go.


def test_a_dropped_block_takes_along_all_that_follow_it(tmp_path: Path) -> None:
    stem = chain(list(range(8)))
    left, right = block([1, 1], stem[-1]), block([2, 2], stem[-1])
    leaf = block([3], left)
    with opened(tmp_path) as disk:
        disk.store([*stem, left, right, leaf])
        disk.drop([left.id])
        check(disk, [*stem, right])
        disk.drop([left.id, BlockId(bytes(32))])
        check(disk, [*stem, right])
        disk.drop([stem[0].id])
        check(disk, [])


def test_p4_clear_leaves_nothing_whatever_lay_about(tmp_path: Path) -> None:
    blocks = chain(list(range(12)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
        file_of(tmp_path, blocks[0]).unlink()
        disk.forget([blocks[0].id])
        damage(file_of(tmp_path, blocks[1]))
        disk.forget([blocks[1].id])
        (tmp_path / "blocks" / "00").mkdir(exist_ok=True)
        (tmp_path / "blocks" / "00" / "stray").write_bytes(b"x")
        disk.clear()
        check(disk, [])
        assert list((tmp_path / "quarantine").iterdir()) == []


def test_p4_dropping_reaches_a_damaged_file_that_was_moved_aside(tmp_path: Path) -> None:
    blocks = chain(list(range(8)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
        damage(file_of(tmp_path, blocks[1]))
        disk.verify()
        assert (tmp_path / "quarantine" / blocks[1].id.hex()).exists()
        disk.drop(names(blocks))
        assert list((tmp_path / "quarantine").iterdir()) == []


def damage(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_p2_a_damaged_or_missing_file_is_a_miss_and_what_follows_it_waits_for_it(tmp_path: Path) -> None:
    blocks = chain(list(range(16)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
        damage(file_of(tmp_path, blocks[1]))
        file_of(tmp_path, blocks[2]).unlink()
        assert disk.load(blocks[1].id) is None
        assert disk.load(blocks[2].id) is None
        disk.forget(names(blocks))
        assert kept(disk) == names([blocks[0], blocks[3]])
        disk.store(blocks[1:3])
        check(disk, blocks)
        sound(disk)


def test_p2_another_block_under_this_name_is_a_miss(tmp_path: Path) -> None:
    one, other = chain(list(range(4)), "one"), chain(list(range(4)), "other")
    with opened(tmp_path) as disk:
        disk.store(one + other)
        shutil.copy(file_of(tmp_path, other[0]), file_of(tmp_path, one[0]))
        assert disk.load(one[0].id) is None
        assert same(disk.load(other[0].id), other[0])
        sound(disk, quarantined=1, missing=1)
        check(disk, other)


@pytest.mark.parametrize(
    "change",
    [
        "tokens = X'0100000002000000'",
        "tokens = X'01'",
        "tokens = 7",
        "parent = zeroblob(32)",
        "parent = NULL",
        "start = 'x'",
        "nbytes = 'many'",
        "has_rest = 'no'",
    ],
)
def test_p2_an_entry_that_does_not_prove_itself_is_a_miss_and_is_mended(tmp_path: Path, change: str) -> None:
    blocks = chain(list(range(8)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute("PRAGMA writable_schema = 1")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
        db.commit()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute(f"UPDATE block SET {change} WHERE id = ?", (blocks[1].id,))
        db.commit()
    with opened(tmp_path) as disk:
        assert disk.lookup(blocks[1].id) is None
        assert list(disk.children(blocks[0].id)) == []
        assert disk.lookup(blocks[0].id) is not None
        sound(disk, mended=1)
        check(disk, blocks)


@pytest.mark.parametrize("change", ["start = 9", "nbytes = 9", "has_rest = 1"])
def test_an_entry_that_misjudges_its_file_is_mended(tmp_path: Path, change: str) -> None:
    blocks = chain(list(range(8)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
        with disk.index.writing():
            disk.index.run(f"UPDATE block SET {change} WHERE id = ?", blocks[1].id)
        sound(disk, mended=1)
        check(disk, blocks)


# Verify.


def test_verify_finds_each_kind_of_trouble_and_counts_it(tmp_path: Path) -> None:
    blocks = chain(list(range(40)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
        adopted = chain([1, 2, 3], "adopted")
        disk.store(adopted)
        with disk.index.writing():
            disk.index.run("DELETE FROM block WHERE id = ?", adopted[0].id)
        file_of(tmp_path, blocks[9]).unlink()
        damage(file_of(tmp_path, blocks[8]), 40)
        folder = file_of(tmp_path, blocks[0]).parent
        (folder / f"{blocks[0].id.hex()}.123.tmp").write_bytes(b"half")
        (folder / "notes.txt").write_text("not mine")
        shutil.copy(file_of(tmp_path, blocks[7]), folder / blocks[7].id.hex().upper())
        steps: list[tuple[int, int]] = []
        found = disk.verify(lambda done, total: steps.append((done, total)))
        assert not found.sound
        assert (found.missing, found.adopted, found.quarantined, found.leftovers) == (2, 1, 3, 1)
        assert (found.blocks, found.nbytes) == (9, size(blocks[:8] + adopted))
        assert steps == [(number, 13) for number in range(1, 14)]
        check(disk, blocks[:8] + adopted)
        assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == sorted(
            ["notes.txt", blocks[8].id.hex(), blocks[7].id.hex().upper()]
        )
        sound(disk)


def test_a_whole_file_in_the_wrong_folder_is_not_entered(tmp_path: Path) -> None:
    [mine] = chain([1, 2])
    with opened(tmp_path) as disk:
        disk.store([mine])
        wrong = tmp_path / "blocks" / "zz"
        wrong.mkdir()
        file_of(tmp_path, mine).rename(wrong / mine.id.hex())
        sound(disk, missing=1, quarantined=1)
        check(disk, [])


def test_a_folder_where_a_file_should_be_is_moved_aside(tmp_path: Path) -> None:
    [mine] = chain([1, 2])
    with opened(tmp_path) as disk:
        disk.store([mine])
        file_of(tmp_path, mine).unlink()
        file_of(tmp_path, mine).mkdir()
        assert disk.load(mine.id) is None
        sound(disk, missing=1, quarantined=1)


# Losing the index.


@pytest.mark.parametrize("log", [True, False], ids=["with its log", "without its log"])
def test_a_deleted_index_is_made_anew_from_the_files(tmp_path: Path, log: bool) -> None:
    blocks = chain(list(range(20)), tail_state=7)
    with opened(tmp_path) as disk:
        disk.store(blocks)
        if log:
            (tmp_path / "kept-log").write_bytes((tmp_path / "index.sqlite-wal").read_bytes())
    (tmp_path / "index.sqlite").unlink()
    if log:
        (tmp_path / "kept-log").rename(tmp_path / "index.sqlite-wal")
    damage(file_of(tmp_path, blocks[4]))
    with opened(tmp_path) as disk:
        check(disk, blocks[:4])
        sound(disk, rebuilt=True)


GARBAGE: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: b"Dear diary, " * 999,
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "one page": lambda data: data[:4096],
    "end overwritten": lambda data: data[:4096] + b"\xa5" * (len(data) - 4096),
}


def read_entries(folder: Path, blocks: list[Block]) -> None:
    with opened(folder) as disk:
        for each in blocks:
            disk.lookup(each.id)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_damaged_index_is_refused_and_rebuilt_on_request(tmp_path: Path, kind: str) -> None:
    blocks = chain(list(range(400)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
    index = tmp_path / "index.sqlite"
    bad = GARBAGE[kind](index.read_bytes())
    index.write_bytes(bad)
    with pytest.raises(StoreDamagedError, match="perdure cache verify"):
        read_entries(tmp_path, blocks)
    with opened(tmp_path, rebuild=True) as disk:
        assert disk.verify().rebuilt
        check(disk, blocks)
        sound(disk)
    assert (tmp_path / "quarantine" / "index.sqlite").exists()
    with opened(tmp_path) as disk:
        check(disk, blocks)


def test_rebuilding_is_not_for_a_newer_version_nor_for_somebody_elses_database(tmp_path: Path) -> None:
    with opened(tmp_path) as disk, disk.index.writing():
        disk.index.rows("PRAGMA user_version = 99")
    with pytest.raises(StoreVersionError):
        DiskTier(tmp_path, budget=PLENTY, rebuild=True)
    (tmp_path / "index.sqlite").unlink()
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute("CREATE TABLE recipes (soup)")
    with pytest.raises(StoreError, match="not of a perdure store"):
        DiskTier(tmp_path, budget=PLENTY, rebuild=True)
    # Nobody was left holding the lock.
    (tmp_path / "index.sqlite").unlink()
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("seed", range(4))
def test_p2_any_flip_in_the_index_costs_blocks_or_says_so_but_never_lies(tmp_path: Path, seed: int) -> None:
    """Every page of the index, 120 flips in all: what an opened store gives is always the block asked for."""
    blocks = chain(list(range(120)), "a") + chain(list(range(60)), "b", tail_state=9)
    with opened(tmp_path) as disk:
        disk.store(blocks)
    index = tmp_path / "index.sqlite"
    good = index.read_bytes()
    dice = np.random.default_rng(seed)
    wanted = {each.id: each for each in blocks}
    for _ in range(30):
        bad = bytearray(good)
        bad[int(dice.integers(len(bad)))] ^= 1 << int(dice.integers(8))
        index.write_bytes(bad)
        try:
            with opened(tmp_path) as disk:
                for each in blocks:
                    entry = disk.lookup(each.id)
                    assert entry is None or entry.tokens.tolist() == each.tokens.tolist()
                    for child in disk.children(each.id):
                        assert child.tokens.tolist() == wanted[child.id].tokens.tolist()
                        assert wanted[child.id].parent == each.id
                    assert same(disk.load(each.id), each)
        except StoreError:
            pass
        refused = ""
        try:
            with opened(tmp_path, rebuild=True) as disk:
                disk.verify()
                check(disk, blocks)
        except StoreError as error:
            refused = str(error)
        # A flip in the one mark or the one number makes it another's, or a newer one's.
        assert not refused or "not of a perdure store" in refused or "update perdure" in refused
        for path in tmp_path.glob("index.sqlite*"):
            path.unlink()


# One writer, many readers.

OPEN = """
import sys
from pathlib import Path
from perdure.cache.tiers.disk import DiskTier
disk = DiskTier(Path(sys.argv[1]), budget=1 << 30)
print("ready", flush=True)
sys.stdin.readline()
disk.close()
"""


def test_one_process_writes_and_its_death_by_any_means_lets_the_next_one_in(tmp_path: Path) -> None:
    blocks = chain(list(range(8)))
    with opened(tmp_path) as disk:
        disk.store(blocks)
    with children.holding(OPEN, tmp_path) as holder:
        with pytest.raises(StoreLockedError, match="choose another store, or open this one for reading"):
            DiskTier(tmp_path, budget=PLENTY)
        with opened(tmp_path, readonly=True) as reader:
            check(reader, blocks)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with opened(tmp_path) as disk:
            check(disk, blocks)
    with children.holding(OPEN, tmp_path) as holder:
        holder.communicate("\n")
        assert holder.returncode == 0
        with opened(tmp_path):
            pass


def test_the_same_process_cannot_write_twice_either(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StoreLockedError):
        DiskTier(tmp_path, budget=PLENTY)
    with opened(tmp_path):
        pass


def test_a_store_can_be_closed_by_another_thread_than_opened_it(tmp_path: Path) -> None:
    disks: list[DiskTier] = []
    thread = threading.Thread(target=lambda: disks.append(DiskTier(tmp_path, budget=PLENTY)))
    thread.start()
    thread.join()
    disks[0].close()
    disks[0].close()
    with opened(tmp_path):
        pass


READ = """
import select, sys
from pathlib import Path
from perdure.cache.tiers.disk import DiskTier
from store.chains import block, same
disk = DiskTier(Path(sys.argv[1]), budget=0, readonly=True)
rounds = seen = gone = 0
print("ready", flush=True)
over = False
while not over:
    # The last round begins after the writer has ended.
    over = bool(select.select([sys.stdin], [], [], 0)[0])
    rounds += 1
    for (name,) in disk.index.rows("SELECT id FROM block"):
        entry = disk.lookup(name)
        found = disk.load(name)
        if entry is None or found is None:
            gone += 1
            continue
        seen += 1
        assert found.tokens.tolist() == entry.tokens.tolist()
        assert same(found, block(found.tokens, found.parent)) or found.start
print(rounds, seen, gone, len(disk))
"""


def test_readers_in_another_process_see_whole_blocks_while_one_writes(tmp_path: Path) -> None:
    each = size(chain([1] * SIZE))
    with opened(tmp_path, 20 * each) as disk:
        disk.store(chain([0] * SIZE, "first"))
        with children.holding(READ, tmp_path) as reader:
            for number in range(150):
                disk.store(chain([number] * SIZE, str(number)))
            out, err = reader.communicate("\n")
        assert reader.returncode == 0, err
        rounds, seen, _, left = map(int, out.split())
        assert rounds >= 1
        assert seen >= 20
        assert left == 20


# A disk that fails.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted only by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_and_costs_nothing_that_was_kept(small_disk: Path) -> None:
    blocks = chain(list(range(12)))
    huge = [block([number], root(f"huge {number}"), row_bytes=100_000) for number in range(9)]
    with opened(small_disk) as disk:
        disk.store(blocks)
        with pytest.raises(StoreFullError, match="Free some space") as raised:
            disk.store(huge)
        assert raised.value.needed >= 100_000
        check(disk, blocks)
        # Once more, and there is as much room as before: nothing was left lying about.
        with pytest.raises(StoreFullError):
            disk.store(huge)
        assert disk.store(huge[:1]) == 1
        check(disk, blocks + huge[:1])
        sound(disk)
    with opened(small_disk) as disk:
        check(disk, blocks + huge[:1])


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def put_many(disk: DiskTier, added: list[Block]) -> None:
    for number in range(1000):
        added += chain([number], str(number))
        disk.store(added[-1:])


def test_a_disk_too_full_for_the_index_is_told_and_costs_nothing_that_was_kept(small_disk: Path) -> None:
    blocks = chain(list(range(12)))
    with opened(small_disk) as disk:
        disk.store(blocks)
        added: list[Block] = []
        fill(small_disk / "ballast")
        with pytest.raises(StoreFullError):
            put_many(disk, added)
        check(disk, blocks + added[:-1])
        (small_disk / "ballast").unlink()
        disk.store(added[-1:])
        check(disk, blocks + added)
        sound(disk)


LIMITED = """
import resource, sys
from pathlib import Path
from perdure.errors import StoreError, StoreFullError
from perdure.cache.tiers.disk import DiskTier
from store.chains import block, chain
disk = DiskTier(Path(sys.argv[1]), budget=1 << 30)
disk.store(chain(range(8)))
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    disk.store([*chain(range(4), "new"), block([9], row_bytes=60_000)])
except StoreFullError as error:
    print("full", error.needed > 60_000)
added = 0
try:
    for number in range(1000):
        disk.store(chain([number], str(number)))
        added += 1
except StoreError as error:
    print(added)
disk.close()
"""


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    lines = children.run(LIMITED, tmp_path).split("\n")
    assert lines[0] == "full True"
    with opened(tmp_path) as disk:
        sound(disk)
        added = [each for number in range(int(lines[1])) for each in chain([number], str(number))]
        check(disk, chain(list(range(8))) + added)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that anybody can reach."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
        shutil.rmtree(folder)


FORBIDDEN = """
import os, sys
from pathlib import Path
from perdure.errors import PerdureError
from perdure.cache.tiers.disk import DiskTier
from store.chains import chain, same
from store.children import become_nobody
become_nobody()
folder = Path(sys.argv[1]) / "store"
blocks = chain(range(12))
disk = DiskTier(folder, budget=1 << 30)
disk.store(blocks)

def attempt(change):
    try:
        change()
        print("done")
    except PerdureError as error:
        print(type(error).__name__)

def modes(folders, files):
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o755)
    below = [(path, folders if path.is_dir() else files) for path in folder.rglob("*")]
    for path, mode in reversed([(folder, folders), *below]):
        path.chmod(mode)

modes(0o555, 0o444)
attempt(lambda: disk.store(chain(range(50, 54))))
attempt(lambda: disk.drop([blocks[2].id]))
print(len(disk), all(same(disk.load(each.id), each) for each in blocks[:2]))
modes(0o755, 0o644)
disk.store(blocks)
print(disk.verify().sound, len(disk))
disk.close()
modes(0o555, 0o444)
attempt(lambda: DiskTier(folder, budget=1 << 30))
disk = DiskTier(folder, budget=1 << 30, readonly=True)
print(all(same(disk.load(each.id), each) for each in blocks))
disk.close()
modes(0o000, 0o000)
attempt(lambda: DiskTier(folder, budget=1 << 30))
folder.chmod(0o755)
attempt(lambda: DiskTier(folder, budget=1 << 30, readonly=True))
for path in folder.iterdir():
    path.chmod(0o755)
disk = DiskTier(folder, budget=1 << 30)
attempt(disk.verify)
attempt(lambda: disk.forget(each.id for each in blocks))
for path in (folder / "blocks").iterdir():
    path.chmod(0o755)
print(disk.load(blocks[0].id))
attempt(disk.verify)
attempt(lambda: disk.forget(each.id for each in blocks))
modes(0o755, 0o644)
print(disk.verify().sound, all(same(disk.load(each.id), each) for each in blocks))
disk.close()
"""


def test_permissions_that_are_lost_are_told_and_what_may_be_read_is_read(open_folder: Path) -> None:
    assert children.run(FORBIDDEN, open_folder).split("\n")[:-1] == [
        "StoreReadOnlyError",
        "StoreReadOnlyError",
        "2 True",
        "True 3",
        "StoreReadOnlyError",
        "True",
        "StoreReadOnlyError",
        "StoreReadOnlyError",
        "StoreReadOnlyError",
        "StoreReadOnlyError",
        "None",
        "StoreReadOnlyError",
        "StoreReadOnlyError",
        "True True",
    ]


def test_a_path_that_cannot_be_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot be used"):
            DiskTier(path, budget=PLENTY)
