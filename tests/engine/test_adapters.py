"""Adapters of sequences: each is computed with its own set, and never with what another set computed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from perdure import Context, Model
from perdure.engine.adapters import PLAIN, AdapterSet, AdapterTable, parse_scaled, split_layers
from perdure.engine.context import Feed
from perdure.errors import (
    EngineError,
    IncompatibleStateError,
    InvalidInputError,
    ModelError,
    ModelFileError,
    ModelLoadError,
    ModelNotFoundError,
    SequenceError,
)
from perdure.models.adapter_file import read_adapter
from perdure.testing.toy import ToyModel
from subjects import Subject, check
from zoo.attention import HEAD, HEADS, INVOCATION, LLAMA_LAYERS, WIDTH

Find = Callable[[str], Subject]
Path_ = Callable[[str], Path]
NAMES = ["toy-full", "toy-sliding", "toy-recurrent", "toy-hybrid", "llama"]


@pytest.fixture(params=NAMES)
def adapted(request: pytest.FixtureRequest, find_subject: Find) -> Subject:
    """The models that there are adapters for."""
    return find_subject(request.param)


@pytest.fixture(scope="module")
def llama(zoo_path: Path_) -> Model:
    return Model(zoo_path("llama"))


def loaded(subject: Subject, zoo_path: Path_) -> list[Any]:
    model = subject.model
    if isinstance(model, ToyModel):
        return [model.adapter("one"), model.adapter("two")]
    return [model.adapter(str(zoo_path("llama-lora"))), model.adapter(str(zoo_path("llama-lora2")))]


def activated(subject: Subject, zoo_path: Path_) -> Any:
    if isinstance(subject.model, ToyModel):
        return subject.model.adapter("judge on " + " ".join(map(str, INVOCATION)))
    return subject.model.adapter(str(zoo_path("llama-alora")))


def context(subject: Subject, n_seq: int = 3) -> Context:
    return subject.context(n_ctx=128, n_seq=n_seq, n_batch=3, **subject.narrow.settings)


def cold(subject: Subject, adapters: AdapterSet, tokens: list[int]) -> Any:
    with context(subject, 1) as fresh:
        fresh.adapt(adapters, 0)
        fresh.decode(tokens)
        return fresh.logits().copy()


def test_t1_sequences_of_different_sets_stand_side_by_side(adapted: Subject, zoo_path: Path_) -> None:
    """T1: what each says is what a fresh context with its set says."""
    one, two = loaded(adapted, zoo_path)
    sets = [PLAIN, AdapterSet.of({one: 1.0}), AdapterSet.of({one: 0.5, two: -1.0})]
    dice = random.Random(3)
    with context(adapted) as ctx:
        for seq, chosen in enumerate(sets):
            ctx.adapt(chosen, seq)
        held: list[list[int]] = [[], [], []]
        for turn in range(24):
            seq = dice.randrange(3)
            new = adapted.tokens(dice.randrange(1, 4), turn)
            ctx.decode(new, seq)
            held[seq] += new
            check(ctx.logits().copy(), cold(adapted, sets[seq], held[seq]), adapted.narrow.bound)
            assert ctx.tokens(seq) == held[seq]
            assert ctx.adapters_of(seq) == sets[seq]
        assert len({ctx.identity_of(chosen).digest for chosen in sets}) == 3


def test_a_step_takes_sequences_of_one_set_only(adapted: Subject, zoo_path: Path_) -> None:
    one, _ = loaded(adapted, zoo_path)
    with context(adapted) as ctx:
        ctx.adapt({one: 1.0}, 1)
        for feeds in ([Feed(0, [1]), Feed(1, [2])], [Feed(0, [1, 2]), Feed(1, [2])]):
            with pytest.raises(SequenceError, match="one set of adapters"):
                ctx.step(feeds)
        assert ctx.lengths() == [0, 0, 0]
        ctx.step([Feed(0, [1]), Feed(2, [2])])
        ctx.adapt({one: 1.0}, 2)
        assert ctx.lengths() == [1, 0, 0]
        ctx.step([Feed(1, [1]), Feed(2, [1])])
        check(ctx.logits(seq=1).copy(), ctx.logits(seq=2).copy(), adapted.narrow.bound)


def test_a_set_goes_with_forks_and_is_asked_of_states(adapted: Subject, zoo_path: Path_) -> None:
    """C11: states and checkpoints of one set are refused by every other."""
    one, two = loaded(adapted, zoo_path)
    tokens = adapted.tokens(12)
    expected = cold(adapted, AdapterSet.of({one: 1.0}), [*tokens, 5])
    with context(adapted) as ctx:
        ctx.adapt({one: 1.0}, 0)
        ctx.decode(tokens)
        state, point = ctx.save(0), ctx.checkpoint(0)
        ctx.fork(0, 1)
        assert ctx.adapters_of(1) == ctx.adapters_of(0) != ctx.adapters_of(2)
        ctx.decode([5], 1)
        check(ctx.logits().copy(), expected, adapted.narrow.bound)
        for other in ({}, {one: 0.5}, {two: 1.0}, {one: 1.0, two: 1.0}):
            ctx.adapt(other, 2)
            with pytest.raises(IncompatibleStateError) as refused:
                ctx.load(state, 2)
            assert refused.value.field == "adapters"
            ctx.decode(tokens, 2)
            with pytest.raises(IncompatibleStateError):
                ctx.restore(point, 2)
            assert ctx.tokens(2) == tokens
        ctx.adapt({one: 1.0}, 2)
        assert ctx.length(2) == 0
        ctx.load(state, 2)
        ctx.decode([5], 2)
        check(ctx.logits().copy(), expected, adapted.narrow.bound)


def test_only_another_set_costs_a_sequence_its_tokens(adapted: Subject, zoo_path: Path_) -> None:
    one, two = loaded(adapted, zoo_path)
    with context(adapted) as ctx:
        for seq in range(3):
            ctx.decode([1, 2, 3], seq)
        ctx.adapt({one: 1.0}, 1)
        assert ctx.lengths() == [3, 0, 3]
        ctx.decode([4], 1)
        ctx.adapt({one: 1.0, two: 0.0}, 1)
        assert ctx.lengths() == [3, 1, 3]
        ctx.clear(1)
        assert ctx.adapters_of(1) == AdapterSet.of({one: 1.0})
        ctx.adapt({two: 1.0})
        assert ctx.lengths() == [0, 0, 0]
        assert {ctx.adapters_of(seq) for seq in range(3)} == {AdapterSet.of({two: 1.0})}


def test_an_activated_lora_starts_where_its_tokens_stand(adapted: Subject, zoo_path: Path_) -> None:
    """Before them the state is the model's own: it is taken over from a sequence without the adapter."""
    adapter = activated(adapted, zoo_path)
    before, after = adapted.tokens(7), adapted.tokens(5, 2)
    prompt = [*before, *INVOCATION, *after]
    chosen = AdapterSet.of({adapter: 1.0})
    assert chosen.activated(before) == PLAIN
    assert chosen.activated([*INVOCATION, *prompt]).start == 2 + len(before)
    chosen = chosen.activated(prompt)
    assert (chosen.start, chosen.before) == (len(before), PLAIN)
    with context(adapted) as ctx:
        ctx.decode(before)
        state = ctx.save()
        ctx.adapt(chosen, 0)
        assert ctx.tokens() == before
        ctx.decode([*INVOCATION, *after])
        row = ctx.logits().copy()
        # Once more from a state that was saved without it, and once in one go.
        ctx.adapt(chosen, 1)
        ctx.load(state, 1)
        ctx.decode([*INVOCATION, *after], 1)
        check(ctx.logits().copy(), row, adapted.narrow.bound)
        ctx.adapt(chosen, 2)
        ctx.decode(prompt, 2)
        check(ctx.logits().copy(), row, adapted.narrow.bound)
        ctx.adapt({}, 1)
        foreign = ctx.save(2)
        with pytest.raises(IncompatibleStateError):
            ctx.load(foreign, 1)
    plain = cold(adapted, PLAIN, prompt)
    whole = cold(adapted, AdapterSet.of({adapter: 1.0}), prompt)
    assert np.abs(row - plain).max() > 0.01
    assert np.abs(row - whole).max() > 0.01


def test_a_step_across_an_activation_is_refused(adapted: Subject, zoo_path: Path_) -> None:
    chosen = AdapterSet.of({activated(adapted, zoo_path): 1.0}).activated([1, *INVOCATION])
    with context(adapted) as ctx:
        ctx.adapt(chosen, 0)
        assert ctx.same_adapters(0, 0, 3) == 1
        with pytest.raises(SequenceError, match="changes after 1 of its 3"):
            ctx.step([Feed(0, [1, *INVOCATION])])
        assert ctx.length() == 0
        ctx.step([Feed(0, [1])])
        ctx.step([Feed(0, list(INVOCATION))])


def test_an_engine_that_refuses_a_set_changes_nothing() -> None:
    model = ToyModel()
    with model.context(n_seq=2) as ctx:
        ctx.decode([1, 2])
        with pytest.raises(EngineError, match="refused"):
            ctx.adapt({ToyModel(seed=1).adapter("a"): 1.0}, 0)
        assert ctx.tokens() == [1, 2]
        assert ctx.adapters_of(0) == PLAIN


def test_names_and_files_are_resolved_once_each() -> None:
    model = ToyModel()
    calls: list[str] = []

    def load(path: str, *, layers: tuple[int, int] | None = None) -> Any:
        calls.append(path)
        return model.adapter(path, layers=layers)

    table = AdapterTable(load, names={"pirate": "p.gguf"})
    assert table.resolve({"pirate": 1.0}) == table.resolve({"p.gguf": 1.0}) == table.resolve({"pirate": 1})
    assert calls == ["p.gguf"]
    assert table.resolve({"pirate@1-2": 1.0}) != table.resolve({"pirate": 1.0})
    assert table.resolve({}) == table.resolve({"pirate": 0.0}) == PLAIN
    for wrong in (
        {"pirate": math.nan},
        {"pirate": "1"},
        {3: 1.0},
        ["pirate"],
        {str(n): 1.0 for n in range(65)},
    ):
        with pytest.raises(InvalidInputError):
            table.resolve(wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError):
        table.resolve({"missing": 1.0})


def test_a_scale_and_layers_are_read_off_the_end_of_a_name() -> None:
    assert parse_scaled("a.gguf") == ("a.gguf", 1.0)
    assert parse_scaled("a.gguf:0.5") == ("a.gguf", 0.5)
    assert parse_scaled("C:\\a.gguf") == ("C:\\a.gguf", 1.0)
    assert parse_scaled("C:\\a.gguf:-2") == ("C:\\a.gguf", -2.0)
    assert split_layers("a@b.gguf@3-7") == ("a@b.gguf", (3, 7))
    assert split_layers("a@b.gguf") == ("a@b.gguf", None)
    with pytest.raises(InvalidInputError):
        parse_scaled("a.gguf:nan")


# Control vectors.


def test_a_control_vector_is_added_to_its_layers(llama: Model, zoo_path: Path_) -> None:
    """Its two layers together are the whole vector, each of them is not; twice half is one."""
    path = zoo_path("llama-vector")
    whole, first, last = (llama.adapter(path, layers=layers) for layers in (None, (1, 1), (2, 2)))
    assert len({whole.digest, first.digest, last.digest}) == 3

    def rows(adapters: dict[Any, float]) -> Any:
        with llama.context(n_ctx=64, threads=1) as ctx:
            ctx.adapt(adapters)
            ctx.decode(list(range(20, 40)))
            return ctx.logits().copy()

    plain, steered = rows({}), rows({whole: 1.0})
    assert np.abs(steered - plain).max() > 0.01
    np.testing.assert_allclose(rows({first: 1.0, last: 1.0}), steered, atol=1e-5)
    np.testing.assert_allclose(rows({first: 1.0, whole: 0.0, last: 1.0}), steered, atol=1e-5)
    assert np.abs(rows({first: 1.0}) - steered).max() > 0.01
    lora = llama.adapter(zoo_path("llama-lora"))
    assert np.abs(rows({whole: 1.0, lora: 1.0}) - rows({lora: 1.0})).max() > 0.01
    with llama.context(n_ctx=64, n_seq=2, threads=1) as ctx:
        # Switched on and off between steps of one token each, which have one graph.
        ctx.adapt({whole: 1.0}, 1)
        for token in range(20, 40):
            ctx.decode([token], 0)
            ctx.decode([token], 1)
        steered_last = ctx.logits().copy()
        ctx.decode([40], 0)
        with llama.context(n_ctx=64, threads=1) as fresh:
            for token in range(20, 41):
                fresh.decode([token])
            np.testing.assert_array_equal(ctx.logits().copy(), fresh.logits().copy())
        with llama.context(n_ctx=64, threads=1) as fresh:
            fresh.adapt({whole: 1.0})
            for token in range(20, 40):
                fresh.decode([token])
            np.testing.assert_array_equal(steered_last, fresh.logits().copy())


@pytest.mark.parametrize("layers", [(0, 1), (2, 1), (1, 3), (-1, 2)])
def test_layers_that_a_model_does_not_have_are_refused(
    llama: Model, zoo_path: Path_, layers: tuple[int, int]
) -> None:
    with pytest.raises(InvalidInputError, match="from 1 to 2"):
        llama.adapter(zoo_path("llama-vector"), layers=layers)
    with pytest.raises(InvalidInputError, match="no layers to choose"):
        llama.adapter(zoo_path("llama-lora"), layers=layers)


# Files that are wrong: judged in Python, so none of them can end the process.


def written(
    path: Path, *, architecture: str = "llama", tensors: dict[str, Any] | None = None, **keys: Any
) -> Path:
    """An adapter file with these keys and tensors in place of the usual ones."""
    writer = GGUFWriter(path, architecture)
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": np.float32(8)}
    for key, value in {**usual, **{key.replace("__", "."): value for key, value in keys.items()}}.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, np.ndarray):
            kind = {"u": GGUFValueType.UINT32, "i": GGUFValueType.INT32}[value.dtype.kind]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, kind)
        elif isinstance(value, np.float32):
            writer.add_float32(key, float(value))
        elif isinstance(value, float):
            writer.add_float64(key, value)
        else:
            writer.add_uint32(key, value)
    a, b = np.zeros((4, WIDTH), np.float32), np.zeros((OUT, 4), np.float32)
    usual_pair = {"blk.0.attn_q.weight.lora_a": a, "blk.0.attn_q.weight.lora_b": b}
    for name, tensor in (usual_pair if tensors is None else tensors).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair(name: str, a: tuple[int, ...], b: tuple[int, ...], kind: Any = np.float32) -> dict[str, Any]:
    return {f"{name}.lora_a": np.zeros(a, kind), f"{name}.lora_b": np.zeros(b, kind)}


OUT = HEADS * HEAD
Q = "blk.0.attn_q.weight"
WRONG_FILES: dict[str, dict[str, Any]] = {
    "another architecture": {"architecture": "qwen3"},
    "no adapter": {"general__type": "model"},
    "no type": {"general__type": None},
    "a type that is a number": {"general__type": 7},
    "an unknown kind": {"adapter__type": "dora"},
    "a kind that is a number": {"adapter__type": 7},
    "alpha as an integer": {"adapter__lora__alpha": 8},
    "alpha as a double": {"adapter__lora__alpha": 8.0},
    "alpha as text": {"adapter__lora__alpha": "8"},
    "alpha that is no number": {"adapter__lora__alpha": np.float32("nan")},
    "no tensors": {"tensors": {}},
    "one matrix": {"tensors": {f"{Q}.lora_a": np.zeros((4, WIDTH), np.float32)}},
    "a tensor of a model": {"tensors": {Q: np.zeros((WIDTH, WIDTH), np.float32)}},
    "a name that says lora twice": {"tensors": pair(f"{Q}.lora_a", (4, WIDTH), (OUT, 4))},
    "a weight that is not there": {"tensors": pair("blk.99.attn_q.weight", (4, WIDTH), (OUT, 4))},
    "a wrong width": {"tensors": pair(Q, (4, WIDTH + 1), (OUT, 4))},
    "a wrong height": {"tensors": pair(Q, (4, WIDTH), (OUT + 1, 4))},
    "two ranks": {"tensors": pair(Q, (4, WIDTH), (OUT, 5))},
    "matrices the other way round": {"tensors": pair(Q, (WIDTH, 4), (4, OUT))},
    "experts where there are none": {"tensors": pair(Q, (3, 4, WIDTH), (3, OUT, 4))},
    "one list of experts": {
        "tensors": {
            f"{Q}.lora_a": np.zeros((3, 4, WIDTH), np.float32),
            f"{Q}.lora_b": np.zeros((OUT, 4), np.float32),
        }
    },
    "a norm": {"tensors": pair("blk.0.attn_norm.weight", (4, WIDTH), (1, 4))},
    "integers": {"tensors": pair(Q, (4, WIDTH), (OUT, 4), np.int32)},
    "an embedding of two ranks": {"tensors": pair("token_embd.weight", (300, 4), (WIDTH, 5))},
    "invocation as text": {"adapter__alora__invocation_tokens": ["a", "b"]},
    "invocation as one number": {"adapter__alora__invocation_tokens": 3},
    "invocation of signed numbers": {"adapter__alora__invocation_tokens": np.array([3, 4], np.int32)},
    "invocation out of the vocabulary": {
        "adapter__alora__invocation_tokens": np.array([3, 1 << 20], np.uint32)
    },
    "a vector of another model": {
        "architecture": "controlvector",
        "controlvector__model_hint": "gemma3",
        "tensors": {"direction.1": np.zeros(WIDTH, np.float32)},
    },
    "a vector of another width": {
        "architecture": "controlvector",
        "tensors": {"direction.1": np.zeros(WIDTH + 1, np.float32)},
    },
    "a vector of layer 0": {
        "architecture": "controlvector",
        "tensors": {"direction.0": np.zeros(WIDTH, np.float32)},
    },
    "a vector of a layer too many": {
        "architecture": "controlvector",
        "tensors": {f"direction.{LLAMA_LAYERS}": np.zeros(WIDTH, np.float32)},
    },
    "a vector of halves": {
        "architecture": "controlvector",
        "tensors": {"direction.1": np.zeros(WIDTH, np.float16)},
    },
    "a vector of matrices": {
        "architecture": "controlvector",
        "tensors": {"direction.1": np.zeros((2, WIDTH), np.float32)},
    },
    "a vector without directions": {"architecture": "controlvector", "tensors": {}},
    "a vector that is no number": {
        "architecture": "controlvector",
        "tensors": {"direction.1": np.full(WIDTH, np.nan, np.float32)},
    },
    "a vector with a weight": {
        "architecture": "controlvector",
        "tensors": {"direction.1": np.zeros(WIDTH, np.float32), Q: np.zeros(WIDTH, np.float32)},
    },
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_b3_a_wrong_adapter_file_is_a_typed_error(llama: Model, tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "wrong.gguf", **WRONG_FILES[name])
    with pytest.raises((ModelFileError, ModelLoadError)) as refused:
        llama.adapter(path)
    assert "wrong.gguf" in str(refused.value)


def test_the_usual_file_of_these_tests_is_right(llama: Model, tmp_path: Path) -> None:
    adapter = llama.adapter(written(tmp_path / "right.gguf"))
    with llama.context(n_ctx=16, threads=1) as ctx:
        ctx.adapt({adapter: 1.0})
        ctx.decode([1, 2, 3])


def test_i7_bytes_of_an_adapter_that_turn_never_end_the_process(
    llama: Model, tmp_path: Path, zoo_path: Path_
) -> None:
    """Each is loaded or refused; those that load compute. The header is where a byte can do harm."""
    for name in ("llama-lora", "llama-alora", "llama-vector"):
        data = bytearray(zoo_path(name).read_bytes())
        dice = random.Random(name)
        refused = 0
        for number in range(60):
            wrong = bytearray(data)
            at = dice.randrange(min(len(data), 1600))
            wrong[at] ^= 1 << dice.randrange(8)
            path = tmp_path / f"{name}-{number}.gguf"
            path.write_bytes(wrong)
            try:
                adapter = llama.adapter(path)
            except (ModelError, EngineError):
                refused += 1
                continue
            with llama.context(n_ctx=16, threads=1) as ctx:
                ctx.adapt({adapter: 1.0})
                ctx.decode([1, 2, 3])
        assert refused


def test_what_an_adapter_file_says_of_itself(zoo_path: Path_) -> None:
    lora, alora, vector = map(
        read_adapter, (zoo_path("llama-lora"), zoo_path("llama-alora"), zoo_path("llama-vector"))
    )
    assert (lora.kind, lora.architecture, lora.rank, lora.alpha) == ("LoRA", "llama", 4, 8.0)
    assert (alora.kind, alora.invocation) == ("aLoRA", INVOCATION)
    assert (vector.kind, vector.architecture, sorted(vector.directions)) == (
        "control vector",
        "llama",
        [1, 2],
    )


def test_files_of_adapters_are_found_by_name_alone() -> None:
    """What a kept turn says of adapters may be somebody's text: it names no file."""
    names, default = {"calm": "/a/calm.gguf"}, {"/b.gguf": 2.0}
    table = AdapterTable(ToyModel().adapter, names=names, default=default)
    assert table.files(None) == default
    assert table.files({"calm@1-2": 0.5}) == {"/a/calm.gguf@1-2": 0.5}
    assert table.files({}) == {}
    for source in ("/etc/passwd", "other", "/a/calm.gguf"):
        with pytest.raises(ModelNotFoundError, match="there is no adapter"):
            table.files({source: 1.0})
    with pytest.raises(InvalidInputError, match="finite number"):
        table.files({"calm": float("inf")})
