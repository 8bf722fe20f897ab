"""K, C5, C11 and P on a whole runtime: what is kept is found, is right, and shows only in the time saved.

Each checker is shown to work: with its mechanism broken on purpose, it fails.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from cache.served import BOUND
from inside import inside, nodes_of
from perdure import LogitsView, Model, Reply, Runtime
from perdure.cache.block import Block, BlockId
from perdure.cache.block_cache import BlockCache
from perdure.cache.slots import cache as slot_cache
from perdure.cache.tiers.memory import MemoryTier
from perdure.cache.tiers.tiered import Tiers
from perdure.engine.llama.core import LlamaCore
from perdure.memory import MEMORY_KINDS, FullAttention, Hybrid, MemorySpec, SlidingWindow
from perdure.testing.toy import ToyCore, ToyModel
from promises.kinds import FULL, KINDS, MLX, WINDOW, Kind, Row, every, positions, prompt
from subjects import NARROW, check, compared

TOYS = {kind.name: kind for kind in MEMORY_KINDS}


@dataclass
class CheckedRuntime:
    """A runtime with someone who checks every row that it draws from against a fresh context."""

    model: Model | ToyModel
    settings: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.0
    slots: int = 2
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        narrow = compared(self.model, **{k: v for k, v in self.settings.items() if k != "shared"})
        self.opened = {**narrow.settings, **self.settings}
        self.bound = self.noise or narrow.bound

    def __enter__(self) -> CheckedRuntime:
        # More sequences would make wider steps, which a GPU rounds otherwise.
        settings = {"n_batch": NARROW, "threads": 1, "swap_slots": 0, **self.opened, **self.more}
        self.rt: Runtime = perdure.open(self.model, n_ctx=640, slots=self.slots, **settings)
        return self

    def __exit__(self, *_: object) -> None:
        self.rt.close()

    def ask(self, tokens: Sequence[int], **request: Any) -> Reply:
        rows: list[Row] = []

        def record(_: Sequence[int], view: LogitsView) -> NDArray[np.float32]:
            rows.append(view.copy())
            return view.copy()

        request = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, **request}
        reply = self.rt.generate(list(tokens), processors=[record], **request)
        for warm, cold in zip(rows, self.cold(tokens, reply.tokens), strict=False):
            check(warm, cold, self.bound)
        assert reply.usage.cached_tokens == reply.reuse.reused
        assert reply.reuse.reused + reply.reuse.computed == len(tokens)
        return reply

    def cold(self, tokens: Sequence[int], said: Sequence[int]) -> list[Row]:
        found: list[Row] = []
        with self.model.context(n_ctx=640, n_seq=1, n_batch=NARROW, threads=1, **self.opened) as ctx:
            ctx.decode(list(tokens))
            found.append(ctx.logits().copy())
            for token in said[:-1]:
                ctx.decode([token])
                found.append(ctx.logits().copy())
        return found

    def text(self, count: int, salt: int = 0) -> list[int]:
        return [token % min(380, self.model.n_vocab) for token in prompt(count, salt)]

    @property
    def tier(self) -> MemoryTier:
        return inside(self.rt).slot_cache.tier

    def raw(self, call: Callable[[], Any]) -> Any:
        """Something done in the engine thread, behind the runtime's back."""
        return inside(self.rt).engine_loop.call(call)


def noise_of(kind: Kind) -> float:
    """In a pool, and in a window that is not kept, other cells round otherwise."""
    elsewhere = kind.settings.get("shared") or not kind.settings.get("swa_full", True)
    return BOUND[kind.name] if elsewhere else 0.0


@pytest.fixture(
    params=every(KINDS) + [pytest.param(kind, id=str(kind), marks=pytest.mark.soak) for kind in MLX]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each way to open a model. Hundreds of narrow steps take MLX long, so that its own are soak tests."""
    assert isinstance(request.param, Kind)
    return request.param


@pytest.fixture
def checked(kind: Kind, model: Model) -> CheckedRuntime:
    return CheckedRuntime(model, dict(kind.settings), noise_of(kind))


@pytest.fixture(params=TOYS)
def toy_runtime(request: pytest.FixtureRequest) -> CheckedRuntime:
    return CheckedRuntime(ToyModel(TOYS[request.param]), {"swa_full": False})


# K. Reuse of the cache.


def patterns(checked: CheckedRuntime) -> None:
    """Ten ways and more in which prompts follow one another."""
    base, other = checked.text(330), checked.text(150, 1)
    first = checked.ask(base)
    said = [*base, *first.tokens]
    checked.ask([*said, *checked.text(9, 2)])  # going on
    checked.ask(base)  # the same again
    checked.ask(base[:-1])  # one token back
    checked.ask([*base[:95], 5, 6])  # to where a part of the window is gone
    checked.ask([*base[:322], 5, 6])  # a few back, and on
    checked.ask([*base[:290], 5, 6])  # further than the window
    checked.ask(other)  # somebody else
    checked.ask([*base[:40], 5, 6])  # almost all the way back
    checked.ask([*said, *checked.text(9, 3)])  # on from where it once was
    checked.ask([9, *base[1:]])  # another first token
    checked.ask([*other, 7])
    checked.ask(base[:1])


def test_k1_ten_reuse_patterns_answer_as_a_fresh_context_would(checked: CheckedRuntime) -> None:
    with checked:
        patterns(checked)


def test_k1_ten_reuse_patterns_on_the_toy_engine(toy_runtime: CheckedRuntime) -> None:
    with toy_runtime:
        patterns(toy_runtime)


@pytest.mark.parametrize("liar", ["memory", "engine"])
def test_k1_the_checker_notices_a_lie_about_the_window(
    liar: str, open_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    if liar == "memory":
        monkeypatch.setattr(SlidingWindow, "can_cut", lambda *_: True)
        monkeypatch.setattr(SlidingWindow, "shortest_cut", lambda *_: 1)
    else:
        monkeypatch.setattr(LlamaCore, "oldest", lambda *_: 0)
        monkeypatch.setattr(ToyCore, "oldest", lambda *_: 0)
    for model in (open_model(WINDOW.name), ToyModel(SlidingWindow)):
        with (
            CheckedRuntime(model, dict(WINDOW.settings), noise_of(WINDOW)) as checked,
            pytest.raises(AssertionError, match="warm is not cold"),
        ):
            patterns(checked)


@pytest.mark.parametrize("back", [1, 8, "window", "window+1", "all"])
def test_k2_going_back_says_what_it_went_back_to_and_why(checked: CheckedRuntime, back: int | str) -> None:
    window = checked.model.memory.window or 32
    steps = {"window": window, "window+1": window + 1, "all": 330}
    with checked:
        base = prompt(330)
        checked.ask(base)
        keep = 330 - steps.get(str(back), back if isinstance(back, int) else 0)
        reply = checked.ask([*base[:keep], 377, 378, 379])
        can_cut = checked.model.memory.kind in (FullAttention, SlidingWindow)
        if can_cut or keep == 0:
            assert reply.reuse.reused == keep
            assert reply.reuse.why == (
                f"the prompt is new from token {keep} on" if keep else "no cached prefix matches"
            )
        else:
            # Checkpoints lie at multiples of 256, and before the last token of a prompt.
            assert reply.reuse.reused == (329 if keep == 329 else 256)
            if keep != 329:
                kind = checked.model.memory.kind.name
                assert (
                    reply.reuse.why
                    == f"a {kind} memory has no checkpoint at token {keep}: it went back to 256"
                )


def test_k2_a_lost_window_is_restored_from_a_checkpoint(open_model: Callable[[str], Model]) -> None:
    with CheckedRuntime(open_model(WINDOW.name), dict(WINDOW.settings), noise_of(WINDOW), slots=1) as checked:
        base = prompt(600)
        checked.ask(base)
        reply = checked.ask([*base[:300], 1, 2])
        assert reply.reuse.reused == 256
        assert reply.reuse.why == "a sliding memory has no checkpoint at token 300: it went back to 256"


def test_k3_the_same_prompt_four_times_has_one_answer(checked: CheckedRuntime) -> None:
    with checked:
        replies = [checked.ask(prompt(100), max_tokens=8) for _ in range(4)]
        assert len({reply.tokens for reply in replies}) == 1
        assert [reply.reuse.reused for reply in replies] == [0, 99, 99, 99]


def test_k4_a_sequence_holds_exactly_what_was_read_and_written(checked: CheckedRuntime) -> None:
    with checked:
        base = prompt(100)
        said = [*base, *checked.ask(base, max_tokens=5).tokens]
        for tokens in ([*said, 1, 2], [*base[:70], 3], prompt(90, 1), [*said, 4]):
            reply = checked.ask(tokens, max_tokens=3)
            context = inside(checked.rt).context
            held = [context.tokens(seq) for seq in range(context.n_seq)]
            # The last token that is written is never fed.
            assert [*tokens, *reply.tokens[:-1]] in held
            assert [positions(context, seq) for seq in range(context.n_seq)] == [len(each) for each in held]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 7, "repeat_penalty": 1.3},
    {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 1.5, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.8, "seed": 7, "regex": "[a-z ]{9}"},
    {"temperature": 0.8, "seed": 7, "logit_bias": {65: 4.0}, "stop": ["A"]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_k5_settings_act_the_same_on_every_way_of_reuse(
    checked: CheckedRuntime, settings: dict[str, Any]
) -> None:
    base = prompt(120)
    request = {"max_tokens": 12, **settings}
    if checked.noise:
        pytest.skip("rounds: a draw may come out differently")
    with CheckedRuntime(checked.model, checked.settings, more={"cache": 0}) as fresh:
        expected = fresh.rt.generate(base, **request)
    with checked:
        ways: dict[str, Callable[[], object]] = {
            "computed": lambda: None,
            "in its slot": lambda: None,
            "went back": lambda: checked.rt.generate([*base, 5, 6], max_tokens=2),
            "swapped out": lambda: [
                checked.rt.generate(prompt(90, salt), max_tokens=2) for salt in (1, 2, 3)
            ],
            "copied": lambda: checked.rt.generate([*base[:-1], 9], max_tokens=30, temperature=0),
        }
        for way, prepare in ways.items():
            prepare()
            reply = checked.rt.generate(base, **request)
            assert (reply.tokens, reply.text) == (expected.tokens, expected.text), way
            assert reply.reuse.reused == (0 if way == "computed" else 119), way


def test_k6_a_cleared_runtime_is_a_new_one(checked: CheckedRuntime) -> None:
    with checked:
        patterns(checked)
        checked.rt.cache.warm(prompt(40), labels="a")
        checked.rt.cache.clear()
        context = inside(checked.rt).context
        assert [context.tokens(seq) for seq in range(context.n_seq)] == [[], []]
        assert [positions(context, seq) for seq in range(context.n_seq)] == [0, 0]
        with CheckedRuntime(checked.model, checked.settings, checked.noise) as new:
            assert checked.rt.cache.stats() == new.rt.cache.stats()
            assert checked.rt.cache.records() == []
            one, other = checked.ask(prompt(200), max_tokens=6), new.ask(prompt(200), max_tokens=6)
            assert (one.tokens, one.reuse) == (other.tokens, other.reuse)
            assert checked.rt.cache.stats() == new.rt.cache.stats()


# C. Conversations.


def test_c5_low_level_calls_cannot_make_a_conversation_wrong(checked: CheckedRuntime) -> None:
    with checked:
        context = inside(checked.rt).context

        def overwrite(seq: int) -> None:
            context.clear(seq)
            context.decode(prompt(290, 4), seq)

        meddling: list[Callable[[int], None]] = [
            lambda seq: context.decode([7, 8, 9], seq),
            lambda seq: context.truncate(0, seq),
            lambda seq: context.clear(),
            lambda seq: context.fork(seq, 1 - seq),
            lambda seq: context.load(context.save(seq), 1 - seq),
            overwrite,
        ]
        said = [*prompt(300)]
        for turn, meddle in enumerate(meddling):
            said = [*said, *checked.ask(said).tokens, turn]
            held = next(seq for seq in (0, 1) if context.tokens(seq) == said[:-2])
            checked.raw(partial(meddle, held))
            checked.ask([*prompt(290, 4)[:280], turn])
        checked.ask(said)


OTHER: dict[str, dict[str, Any]] = {
    "k_type": {"k_type": "q8_0"},
    "v_type": {"v_type": "q8_0"},
    "attention": {"flash": False},
    "rope": {"rope_freq_base": 5000.0},
}


@pytest.mark.parametrize("changed", OTHER)
def test_c11_p1_another_identity_finds_nothing_and_answers_as_if_cold(
    changed: str, llama: Model, tmp_path: Path
) -> None:
    """C11, P1: each field of the identity in turn."""
    base = prompt(150)
    with CheckedRuntime(llama, more={"store": tmp_path / "store"}) as checked:
        checked.ask(base)
    with CheckedRuntime(llama, OTHER[changed], more={"store": tmp_path / "store"}) as checked:
        assert checked.ask(base).reuse.reused == 0
    # The same again finds it, so that what was found before was the identity's doing.
    with CheckedRuntime(llama, more={"store": tmp_path / "store"}) as checked:
        assert checked.ask(base).reuse.reused == 149


def test_c11_other_weights_find_nothing(tmp_path: Path) -> None:
    base = CheckedRuntime(ToyModel()).text(150)
    with CheckedRuntime(ToyModel(), more={"store": tmp_path / "store"}) as checked:
        checked.ask(base)
    with CheckedRuntime(ToyModel(seed=1), more={"store": tmp_path / "store"}) as checked:
        assert checked.ask(base).reuse.reused == 0


def test_c11_an_adapter_is_another_identity(llama: Model, zoo_path: Callable[[str], Path]) -> None:
    base = prompt(150)
    adapter = llama.adapter(zoo_path("llama-lora"))
    with CheckedRuntime(llama) as checked:
        plain = checked.ask(base, max_tokens=6)
        checked.rt.cache.warm(base)
        checked.raw(lambda: inside(checked.rt).context.adapt({adapter: 1.0}))
        adapted = checked.rt.generate(base, max_tokens=6, temperature=0, ignore_eos=True)
        assert adapted.reuse.reused == 0
        assert adapted.reuse.why == "the identity changed in its adapters"
        assert adapted.tokens != plain.tokens
        checked.raw(lambda: inside(checked.rt).context.adapt({}))
        assert checked.ask(base, max_tokens=6).tokens == plain.tokens


# P. The block-prefix cache.


def test_p1_a_namespace_is_part_of_the_name(checked: CheckedRuntime) -> None:
    """P1: whose prompt it is counts as much as what it is computed with."""
    with checked:
        checked.ask(prompt(150), namespace="a")
        assert checked.ask(prompt(150), namespace="b").reuse.reused == 0
        assert checked.ask(prompt(150), namespace="a").reuse.reused == 149


def swap_out(checked: CheckedRuntime, base: list[int]) -> None:
    """Leave `base` in memory and in no slot."""
    checked.ask(base)
    checked.ask([9, 9, 9, *base[3:90]], max_tokens=1)


def damage(checked: CheckedRuntime, number: int, part: str, place: int) -> None:
    """Flip a bit in a part of the `number`-th block of what is kept."""
    nodes = list(nodes_of(checked.tier).values())
    node = nodes[number % len(nodes)]
    change: dict[str, Any] = {part: PARTS[part](node.block, place)}
    node.block = dataclasses.replace(node.block, **change)


def flipped(data: NDArray[Any], place: int) -> NDArray[Any]:
    wrong = data.copy()
    wrong.view(np.uint8).reshape(-1)[place % wrong.nbytes] ^= 1 << (place % 8)
    return wrong


def flipped_bytes(data: bytes, place: int) -> bytes:
    return flipped(np.frombuffer(data, np.uint8), place).tobytes()


PARTS: dict[str, Callable[[Block, int], Any]] = {
    "id": lambda block, place: BlockId(flipped_bytes(block.id, place)),
    "parent": lambda block, place: BlockId(flipped_bytes(block.parent, place)),
    "tokens": lambda block, place: flipped(block.tokens, place & ~3),
    "start": lambda block, place: block.start ^ (1 << (place % 12)),
    "checksum": lambda block, place: flipped_bytes(block.checksum, place),
    "rows": lambda block, place: None if block.rows is None else flipped(block.rows, place),
    "tail_state": lambda block, place: None if block.tail_state is None else flipped(block.tail_state, place),
}


@pytest.mark.parametrize("part", PARTS)
def test_p2_a_flipped_bit_in_any_field_is_refused_and_computed(
    toy_runtime: CheckedRuntime, part: str
) -> None:
    dice = np.random.default_rng(11)
    toy_runtime.slots = 1
    base = toy_runtime.text(200)
    with toy_runtime as checked:
        for _ in range(12):
            swap_out(checked, base)
            place, number = (int(dice.integers(1 << 20)) for _ in range(2))
            damage(checked, number, part, place)
            checked.ask([*base, 5])


def test_p2_two_hundred_flipped_payload_places_give_no_wrong_answer(toy_runtime: CheckedRuntime) -> None:
    dice = np.random.default_rng(12)
    toy_runtime.slots = 1
    base = toy_runtime.text(140)
    refused = 0
    with toy_runtime as checked:
        for _ in range(50):
            swap_out(checked, base)
            place, number = (int(dice.integers(1 << 20)) for _ in range(2))
            for part in ("rows", "tail_state"):
                damage(checked, number, part, place)
            refused += "damaged" in checked.ask([*base, 5]).reuse.why
    assert refused


def test_p2_flipped_payload_places_on_every_kind(checked: CheckedRuntime) -> None:
    dice = np.random.default_rng(13)
    checked.slots = 1
    with checked:
        for _ in range(6):
            swap_out(checked, prompt(140))
            for number in range(len(checked.tier)):
                for part in ("rows", "tail_state"):
                    damage(checked, number, part, int(dice.integers(1 << 20)))
            reply = checked.ask([*prompt(140), 5])
            assert reply.reuse.reused == 0
            assert reply.reuse.why == "what was kept from token 0 on was damaged or is gone"


def test_p2_the_checker_notices_when_nothing_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "verify", lambda self: None)
    with pytest.raises(AssertionError, match="warm is not cold"):
        test_p2_two_hundred_flipped_payload_places_give_no_wrong_answer(CheckedRuntime(ToyModel()))


def test_p2_a_dropped_block_costs_a_computation(checked: CheckedRuntime) -> None:
    checked.slots = 1
    with checked:
        base = prompt(300)
        swap_out(checked, base)
        whole = [
            name
            for name, node in nodes_of(checked.tier).items()
            if node.block.tokens.tolist() == base[64:128]
        ]
        assert len(whole) == 1
        checked.raw(lambda: checked.tier.drop(whole[0]))
        reply = checked.ask([*base, 5])
        assert reply.reuse.reused == (64 if checked.model.memory.kind is FullAttention else 0)


def test_p4_clearing_a_label_clears_just_that(checked: CheckedRuntime) -> None:
    with checked:
        one, other = prompt(150, 1), [1, *prompt(150, 2)]
        checked.rt.cache.warm(one, labels=["one"])
        checked.rt.cache.warm(other, labels=["other"])
        assert checked.rt.cache.clear(labels=["one"]) == 1
        assert [record.labels for record in checked.rt.cache.records()] == [{"other"}]
        assert checked.ask([*one, 5], max_tokens=1).reuse.reused == 0
        assert checked.ask([*other, 5]).reuse.reused == 151


def test_p5_the_longest_prefix_wins_and_stays_for_others(checked: CheckedRuntime) -> None:
    """P5, whoever took it before."""
    checked.slots = 1
    with checked:
        base = prompt(256)
        checked.rt.cache.warm(base[:128])
        checked.rt.cache.warm(base)
        for salt in range(3):
            checked.ask([300 + salt, *prompt(80, 3)])
            reply = checked.ask([*base, *prompt(5, 10 + salt)])
            assert reply.reuse.tiers == {"memory": 256}


def test_p6_ten_times_the_budget_under_load_never_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watched(MemoryTier):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "nbytes":
                seen.append(value)
            super().__setattr__(name, value)

    monkeypatch.setattr(slot_cache, "MemoryTier", Watched)
    base = CheckedRuntime(ToyModel()).text(180)
    with CheckedRuntime(ToyModel(), slots=1) as probe:
        probe.ask(base)
        probe.rt.cache.warm(base)
        needed = probe.rt.cache.stats().nbytes
    seen.clear()
    budget = 2 * needed
    with CheckedRuntime(ToyModel(), slots=2, more={"cache": budget}) as checked:

        def load(salt: int) -> None:
            for turn in range(5):
                checked.rt.generate([salt, turn, *base], max_tokens=2)

        threads = [threading.Thread(target=load, args=(salt,)) for salt in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = checked.rt.cache.stats()
        assert stats.evicted
        assert stats.nbytes <= stats.budget == budget
        checked.ask([0, 0, *base])
    assert max(seen) <= budget


def test_p6_the_checker_notices_a_tier_that_evicts_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTier, "make_room", lambda *_, **__: True)
    with pytest.raises(AssertionError):
        test_p6_ten_times_the_budget_under_load_never_passes_it(monkeypatch)


def test_p7_another_block_size_or_mode_is_a_miss(llama: Model) -> None:
    tier = MemoryTier(1 << 20)
    tokens = np.array(prompt(8), np.int32)
    with FULL.open(llama) as ctx:
        ctx.decode(tokens)
        BlockCache(ctx, Tiers(tier), block_size=4).store(0, "", {}, 8)
        assert BlockCache(ctx, Tiers(tier), block_size=4).lookup(tokens, "").length == 8
        for size in (1, 2, 3, 8, 64):
            assert BlockCache(ctx, Tiers(tier), block_size=size).lookup(tokens, "").length == 0
        assert BlockCache(ctx, Tiers(tier), block_size=4, exact=True).lookup(tokens, "").length == 0
        other = BlockCache(ctx, Tiers(tier), block_size=4)
        other._context = _Seen(ctx, Hybrid())  # type: ignore[assignment]
        assert other.lookup(tokens, "").length == 0


class _Seen:
    """A context as one of another kind of memory would be seen."""

    def __init__(self, ctx: Any, memory: MemorySpec) -> None:
        self.identity = ctx.identity
        self.capabilities = ctx.capabilities
        self.adapters = ctx.adapters
        self.identity_of = ctx.identity_of
        self.memory = memory


def test_every_kind_of_memory_is_among_those_tested() -> None:
    assert {kind.name for kind in KINDS} >= {"llama", "gemma3", "mamba", "jamba", "deepseek2"}
