"""A disk tier lives a random life beside a dict; they always agree."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from perdure.cache.block import Block, BlockId
from perdure.cache.tiers.codec import PLAIN, Encryption
from perdure.cache.tiers.disk import DiskTier
from store.chains import SIZE, block, files, root, same
from store.conftest import MEMORY

EACH = block([0] * SIZE).file_size
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)


class Life(RuleBasedStateMachine):
    """`known` is what must be there, with the time of its last use."""

    blocks = Bundle("blocks")
    encryption: Encryption | None = None

    @initialize(room=st.integers(2, 8))
    def open(self, room: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-", dir=MEMORY if MEMORY.is_dir() else None))
        self.budget = room * (EACH + self.more)
        self.open_disk()
        self.known: dict[BlockId, Block] = {}
        self.used: dict[BlockId, int] = {}
        self.clock = 0

    def open_disk(self) -> None:
        self.disk = DiskTier(self.folder, budget=self.budget, encryption=self.encryption)
        for name in "ab":
            # Of one namespace: shares of several are tested elsewhere.
            self.disk.eviction.owns(root(name), "")

    def teardown(self) -> None:
        if hasattr(self, "disk"):
            self.disk.close()
            shutil.rmtree(self.folder)

    @property
    def more(self) -> int:
        """Bytes of a file besides those of its block."""
        return PLAIN.overhead if self.encryption is None else self.encryption.codec().overhead

    def size(self, block: Block) -> int:
        return block.file_size + self.more

    def path(self, block: Block) -> Path:
        return self.disk.files.path(block.id)

    # The dict's side.

    def touch(self, name: BlockId) -> None:
        self.clock += 1
        self.used[name] = self.clock

    def held(self) -> int:
        return sum(self.size(each) for each in self.known.values())

    def expect_put(self, wanted: list[Block]) -> int:
        coming: set[BlockId] = set()
        rooted = []
        for each in wanted:
            if not each.start or each.parent in coming or each.parent in self.known:
                coming.add(each.id)
                rooted.append(each)
        spared = coming | {each.parent for each in rooted}
        growth = 0
        fitting: list[Block] = []
        for each in rooted:
            before = self.known.get(each.id)
            growth += self.size(each) - (self.size(before) if before else 0)
            while self.held() + growth > self.budget:
                parents = {other.parent for other in self.known.values()}
                leaves = [name for name in self.known if name not in parents and name not in spared]
                if not leaves:
                    break
                del self.known[min(leaves, key=lambda name: self.used[name])]
            if self.held() + growth > self.budget:
                break
            fitting.append(each)
        for each in fitting:
            self.known[each.id] = each
            self.touch(each.id)
        return len(fitting)

    def expect_drop(self, name: BlockId) -> None:
        self.known.pop(name, None)
        for child in [each.id for each in self.known.values() if each.parent == name]:
            self.expect_drop(child)

    # Steps.

    @rule(target=blocks, tokens=TOKENS, name=st.sampled_from("ab"), tail_state=st.none() | st.just(40))
    def start(self, tokens: list[int], name: str, tail_state: int | None) -> Block:
        return block(tokens, root(name), tail_state=tail_state)

    @rule(target=blocks, after=blocks, tokens=TOKENS, tail_state=st.none() | st.just(40))
    def follow(self, after: Block, tokens: list[int], tail_state: int | None) -> Block:
        return block(tokens, after, tail_state=tail_state)

    @rule(wanted=st.lists(blocks, min_size=1, max_size=4, unique_by=lambda each: each.id))
    def put(self, wanted: list[Block]) -> None:
        wanted = sorted(wanted, key=lambda each: each.start)
        assert self.disk.store(wanted) == self.expect_put(wanted)

    @rule(wanted=blocks)
    def get(self, wanted: Block) -> None:
        known = self.known.get(wanted.id)
        found = self.disk.load(wanted.id)
        assert (found is None) == (known is None)
        if known is not None:
            assert same(found, known)
            self.touch(wanted.id)

    @rule(wanted=consumes(blocks))
    def drop(self, wanted: Block) -> None:
        self.disk.drop([wanted.id])
        self.expect_drop(wanted.id)

    @rule()
    def clear(self) -> None:
        self.disk.clear()
        self.known.clear()

    @rule(wanted=blocks)
    def damage_and_forget(self, wanted: Block) -> None:
        path = self.path(wanted)
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])
        self.disk.forget([wanted.id])
        self.known.pop(wanted.id, None)

    @rule(wanted=blocks)
    def lose_a_file_and_verify(self, wanted: Block) -> None:
        self.path(wanted).unlink(missing_ok=True)
        assert self.disk.verify().missing == (self.known.pop(wanted.id, None) is not None)

    @rule()
    def reopen(self) -> None:
        self.disk.close()
        self.open_disk()

    @rule()
    def lose_the_index(self) -> None:
        self.disk.close()
        (self.folder / "index.sqlite").unlink()
        self.open_disk()
        # Nobody knows any more what was used when; from here on it counts anew.
        for each in sorted(self.known.values(), key=lambda each: each.id):
            self.disk.load(each.id)
            self.touch(each.id)

    # Always.

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "disk"):
            return
        assert len(self.disk) == len(self.known)
        for each in self.known.values():
            entry = self.disk.lookup(each.id)
            assert entry is not None
            assert entry.tokens.tolist() == each.tokens.tolist()
            assert (entry.has_tail_state, entry.nbytes) == (each.has_tail_state, self.size(each))
            expected = {other.id for other in self.known.values() if other.parent == each.parent}
            assert {child.id for child in self.disk.children(each.parent)} == expected
        assert self.disk.nbytes == self.held() <= self.budget
        assert {path.name for path in files(self.folder)} == {
            self.path(each).name for each in self.known.values()
        }


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
