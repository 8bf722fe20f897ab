"""The figures of a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gguf_bytes as g
import zoo
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.models import Card, read_card
from perdure.models.placement import HYBRID, RECURRENT, SLIDING


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., Card]:
    def make(architecture: str, pairs: Sequence[bytes] = (), layers: int = 4) -> Card:
        tensors = [g.tensor(f"t{i}", [8], 32 * i) for i in range(layers)]
        path = tmp_path / "m.gguf"
        head = [g.text("general.architecture", architecture), g.u32(f"{architecture}.block_count", layers)]
        path.write_bytes(g.file([*head, *pairs], tensors, bytes(32 * layers)))
        return read_card(path)

    return make


def attention(architecture: str, **values: int) -> list[bytes]:
    given = {"head_count": 8, "head_count_kv": 2, **values}
    return [
        g.u32(f"{architecture}.embedding_length", 64),
        *(g.u32(f"{architecture}.attention.{key}", value) for key, value in given.items()),
    ]


def test_a_card_has_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(g.tiny([g.text("tokenizer.chat_template", "{{ messages }}")]))
    tiny = read_card(tmp_path / "tiny.gguf")
    assert (tiny.architecture, tiny.name, tiny.layers, tiny.context_length) == ("llama", "Tiny", 2, 128)
    assert (tiny.heads, tiny.kv_heads, tiny.vocabulary, tiny.parameters) == (4, 2, 3, 64)
    assert tiny.chat_template == "{{ messages }}"
    assert tiny.memory is FullAttention
    assert tiny.quantisation == "F32"
    assert [(share.type, share.tensors, share.bytes) for share in tiny.types] == [("F32", 2, 256)]
    # 2 layers x (K and V) x 2 heads x 4 values x 2 bytes
    assert tiny.kv_bytes_per_token == 64


def test_a_file_that_says_nothing_has_a_card_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(g.file())
    bare = read_card(tmp_path / "m.gguf")
    assert (bare.architecture, bare.layers, bare.quantisation, bare.kv_bytes_per_token) == (None,) * 4
    assert (bare.parameters, bare.types) == (0, ())


def test_values_of_the_wrong_type_are_not_figures(card: Callable[..., Card]) -> None:
    odd = card("llama", [g.text("llama.context_length", "many"), g.number("general.name", g.BOOL, True)])
    assert (odd.context_length, odd.name) == (None, None)


@pytest.mark.parametrize(
    ("architecture", "window", "kind", "effective"),
    [
        ("llama", None, FullAttention, None),
        ("llama", 4096, FullAttention, None),
        ("phi3", 2047, FullAttention, None),
        ("gemma3", 512, SlidingWindow, 512),
        ("gemma3", 0, FullAttention, None),
        ("gemma2", None, SlidingWindow, 4096),
        ("llama4", None, SlidingWindow, 8192),
        ("llama4", 0, FullAttention, None),
        ("gpt-oss", 128, SlidingWindow, 128),
        ("mamba", None, Recurrent, None),
        ("rwkv7", None, Recurrent, None),
        ("jamba", None, Hybrid, None),
        ("lfm2", None, Hybrid, None),
    ],
)
def test_the_kind_of_memory_is_the_engines(
    architecture: str,
    window: int | None,
    kind: type[MemorySpec],
    effective: int | None,
    card: Callable[..., Card],
) -> None:
    pairs = [] if window is None else [g.u32(f"{architecture}.attention.sliding_window", window)]
    made = card(architecture, pairs)
    assert (made.memory, made.window) == (kind, effective)


def test_cells_are_counted_by_the_layers_that_keep_them(card: Callable[..., Card]) -> None:
    plain = card("llama", attention("llama"))
    assert plain.kv_bytes_per_token == 2 * 4 * 2 * (8 + 8)
    assert (
        card("llama", attention("llama", key_length=32, value_length=16)).kv_bytes_per_token == 2 * 4 * 2 * 48
    )
    mla = attention("deepseek2", head_count_kv=1, key_length=40, value_length=32, key_length_mla=24)
    assert card("deepseek2", mla).kv_bytes_per_token == 2 * 4 * 40
    assert card("gemma4", attention("gemma4", shared_kv_layers=3)).kv_bytes_per_token == 2 * 1 * 2 * 16
    assert card("qwen3next", attention("qwen3next")).kv_bytes_per_token == 2 * 1 * 2 * 16
    assert card("mamba").kv_bytes_per_token == 0


def test_layers_may_differ_in_heads(card: Callable[..., Card]) -> None:
    pairs = [
        g.u32("jamba.embedding_length", 64),
        g.u32("jamba.attention.head_count", 8),
        g.numbers("jamba.attention.head_count_kv", g.I32, [0, 2, 0, 4]),
    ]
    jamba = card("jamba", pairs)
    assert (jamba.kv_heads, jamba.kv_bytes_per_token) == (4, 2 * 6 * 16)


@pytest.mark.parametrize("layers", [0, 2**31])
def test_a_lying_number_of_layers_costs_nothing(layers: int, tmp_path: Path) -> None:
    pairs = [g.text("general.architecture", "llama"), g.u32("llama.block_count", layers), *attention("llama")]
    (tmp_path / "m.gguf").write_bytes(g.file(pairs, [g.tensor("a", [8], 0)], bytes(32)))
    assert not read_card(tmp_path / "m.gguf").kv_bytes_per_token


def test_no_architecture_is_of_two_kinds() -> None:
    assert not RECURRENT & HYBRID
    assert not (RECURRENT | HYBRID) & set(SLIDING)
    assert all(re.fullmatch(r"[a-z0-9_.-]+", name) for name in RECURRENT | HYBRID | set(SLIDING))


@pytest.mark.parametrize(
    ("value", "name"), [(0, "F32"), (1, "F16"), (3, "Q4_1"), (15, "Q4_K_M"), (999, "F32"), (None, "F32")]
)
def test_the_quantisation_has_its_usual_name(value: int | None, name: str, card: Callable[..., Card]) -> None:
    pairs = [] if value is None else [g.u32("general.file_type", value)]
    assert card("llama", pairs).quantisation == name


# In a separate process: the engine's log and its threads stay out of this one.
ASK = """
import json, sys
from perdure.engine.llama.native import library
engine = library.loaded().functions
for path in sys.argv[1:]:
    model = engine.llama_model_load_from_file(path.encode(), engine.llama_model_default_params())
    print(json.dumps({
        "recurrent": bool(engine.llama_model_is_recurrent(model)),
        "hybrid": bool(engine.llama_model_is_hybrid(model)),
        "window": engine.llama_model_n_swa(model),
        "parameters": engine.llama_model_n_params(model),
        "bytes": engine.llama_model_size(model),
        "layers": engine.llama_model_n_layer(model),
        "context": engine.llama_model_n_ctx_train(model),
        "vocabulary": engine.llama_vocab_n_tokens(engine.llama_model_get_vocab(model)),
    }))
    engine.llama_model_free(model)
"""


def test_cards_agree_with_the_engine(zoo_path: Callable[[str], Path]) -> None:
    paths = [zoo_path(name) for name in zoo.names()]
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, paths)], stdout=subprocess.PIPE, text=True, check=True
    )
    for path, line in zip(paths, asked.stdout.splitlines(), strict=True):
        made = read_card(path)
        attends = made.memory in (FullAttention, SlidingWindow)
        said = json.loads(line)
        assert said == {
            "recurrent": made.memory is Recurrent,
            "hybrid": made.memory is Hybrid,
            "window": (made.window or 0) if attends else said["window"],
            "parameters": made.parameters,
            "bytes": sum(share.bytes for share in made.types),
            "layers": made.layers,
            "context": made.context_length,
            "vocabulary": made.vocabulary,
        }, path.name
